"""When few queries take the flash-decoding launch, and what is refused where it is named."""

import pytest
import torch
from torch.autograd import forward_ad

from saf.bench.models import synthetic_patterns
from saf.errors import InputError, UnsupportedError
from saf.ops import FrozenHeads, live_attention, mixed_attention
from saf.ops.decode import op


def layer(query_heads: int = 2, rows: int = 1, dtype: torch.dtype = torch.float16) -> dict:
    """Return two live heads and one frozen one of 40 positions, with the maps that a GPU's tables have."""
    heads = {"query": (query_heads, rows), "key": (2, 40), "value": (3, 40)}
    tensors = {name: torch.randn(1, count, length, 16).to(dtype) for name, (count, length) in heads.items()}
    pattern = synthetic_patterns(1, 40, torch.Generator())
    frozen = FrozenHeads.from_patterns(pattern, dtype=dtype, kv_head=(0, 1, 2))
    frozen._add_tables(dtype, "toeplitz", frozen.tables(dtype) | op.decode_tables((0, 1, 2), 1, torch.device("cpu")))
    return {**tensors, "frozen": frozen}


@pytest.fixture
def launches(monkeypatch) -> list[int]:
    """Pretend that the kernel runs here, and count the passes that take it."""
    taken: list[int] = []
    monkeypatch.setattr(op, "uses_triton", lambda device, dtype: True)
    monkeypatch.setattr("saf.ops.attention.flash_decode", lambda query, *_: taken.append(1) or query)
    return taken


def test_layers_with_frozen_heads_take_it_by_themselves_where_it_can_run(launches):
    """Ordinary layers, kernels named otherwise, float32 and passes that need a gradient stay as they are."""
    own = layer()
    ordinary = {"frozen": None, "value": own["value"][:, :2]}
    for changes, count in (
        ({}, 1),
        (ordinary | {"kernel": "flash_decode"}, 1),
        (ordinary, 0),
        ({"kernel": "math"}, 0),
        ({"value": own["value"].clone().requires_grad_()}, 0),
        ({"query": torch.randn(1, 2, 17, 16).half()}, 0),
        (layer(dtype=torch.float32), 0),
        ({"query": torch.randn(1, 2, 40, 16).half(), "kernel": "flash_decode"}, 0),
    ):
        launches.clear()
        mixed_attention(**own | changes)
        assert len(launches) == count, changes.keys()


def test_where_it_is_named_and_cannot_run_it_is_refused(launches, monkeypatch):
    own, many = layer(), torch.randn(1, 40, 1, 16).half()
    patterns = synthetic_patterns(1, 40, torch.Generator())
    reference = FrozenHeads.from_patterns(patterns, backend="reference", dtype=torch.float16, kv_head=(0, 1, 2))
    with torch.no_grad(), forward_ad.dual_level():
        moved = forward_ad.make_dual(own["value"][:, :2], torch.ones_like(own["value"][:, :2]))
        with pytest.raises(UnsupportedError, match="no derivatives in forward mode"):
            mixed_attention(own["query"], own["key"], moved, None, kernel="flash_decode")
    for changes, message in (
        ({"query": own["query"].clone().requires_grad_()}, "gives no gradients"),
        ({"frozen": reference}, "takes fixed patterns"),
        ({"query": many, "frozen": None, "value": own["key"]}, "at most 16 query heads of a KV head, got 20"),
        (layer(dtype=torch.float32), "needs a CUDA device and values of 16 bits"),
    ):
        with pytest.raises(UnsupportedError, match=rf"kernel 'flash_decode' .*{message}.*or take 'auto'"):
            mixed_attention(**own | changes, kernel="flash_decode")
    with pytest.raises(InputError, match=r"got 'flash_decoded'.*did you mean 'flash_decode'"):
        live_attention(own["query"], own["key"], own["key"], kernel="flash_decoded")
