"""A printed layer says which of its heads are stored as T x T matrices, and why."""

import torch

from saf.ops.frozen_heads import FrozenHeads
from saf.patterns import CompactPattern, DensePattern, TrainablePattern

LENGTH = 64
SOFT = CompactPattern.from_parameters(torch.zeros(LENGTH), -0.1 * torch.arange(LENGTH))
DEEP = CompactPattern.from_parameters(
    *(torch.where(torch.arange(LENGTH) == 0, 0.0, depth).float() for depth in (-25.0, -50.0))
)
"""exp(-25) is nothing in float16, whose smallest number is exp(-16.6), and plain in bfloat16."""


def test_stored_heads_are_told_by_dtype_and_reason():
    patterns = [TrainablePattern(SOFT.alpha, SOFT.rho), DEEP, DensePattern(SOFT.dense()), SOFT]
    frozen = FrozenHeads.from_patterns(patterns, backend="toeplitz", dtype=torch.bfloat16)
    shown = f"num_frozen=4, max_length={LENGTH}, backend='toeplitz', stored as T x T for bfloat16: 1 dense"
    assert frozen.extra_repr() == shown
    assert frozen.tables(torch.bfloat16)["weights"].shape[0] == 1
    half = FrozenHeads.from_patterns(patterns[1:], backend="toeplitz", dtype=(torch.float16, torch.bfloat16))
    assert half.extra_repr().endswith(
        "stored as T x T for float16: 1 dense, 1 it cannot hold as tables, stored as T x T for bfloat16: 1 dense"
    )
    assert half.tables(torch.float16)["weights"].shape[0] == 2
    assert "stored as T x T for float16" in repr(half)


def test_nothing_is_added_where_nothing_is_stored():
    for backend in ("toeplitz", "reference"):
        frozen = FrozenHeads.from_patterns([SOFT, SOFT], backend=backend)
        assert frozen.extra_repr() == f"num_frozen=2, max_length={LENGTH}, backend={backend!r}"
