"""When few queries take the flash-decoding launch, and what is refused where it is named."""

import pytest
import torch
from torch.autograd import forward_ad

from saf.errors import UnsupportedError
from saf.ops import FrozenHeads, mixed_attention
from saf.ops import flash_decode as op
from saf.synthetic import synthetic_patterns


def layer(query_heads: int = 2, rows: int = 1, dtype: torch.dtype = torch.float16) -> dict:
    """Return two live heads and one frozen one of 40 positions, with the maps that a GPU's tables have."""
    heads = {"query": (query_heads, rows), "key": (2, 40), "value": (3, 40)}
    tensors = {name: torch.randn(1, count, length, 16).to(dtype) for name, (count, length) in heads.items()}
    pattern = synthetic_patterns(1, 40, torch.Generator())
    frozen = FrozenHeads.from_patterns(pattern, dtype=dtype, kv_head=(0, 1, 2))
    frozen._add_tables(dtype, "toeplitz", frozen.tables(dtype) | op.decode_maps((0, 1, 2), 1, torch.device("cpu")))
    return {**tensors, "frozen": frozen}


OWN = layer()
ORDINARY = {"frozen": None, "value": OWN["value"][:, :2]}


@pytest.fixture
def launches(monkeypatch) -> list[torch.Tensor]:
    """Pretend that the kernel runs here, and collect the keys of the passes that take it."""
    keys: list[torch.Tensor] = []
    monkeypatch.setattr(op, "uses_triton", lambda device, dtype: True)
    monkeypatch.setattr("saf.ops.attention.flash_decode", lambda query, key, *_, **__: keys.append(key) or query)
    return keys


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 1),
        (ORDINARY | {"kernel": "flash_decode"}, 1),
        (ORDINARY, 0),
        ({"kernel": "math"}, 0),
        ({"value": OWN["value"].clone().requires_grad_()}, 0),
        ({"query": torch.randn(1, 2, 17, 16).half()}, 0),
        (layer(dtype=torch.float32), 0),
        ({"query": torch.randn(1, 2, 40, 16).half(), "kernel": "flash_decode"}, 0),
    ],
)
def test_layers_with_frozen_heads_take_it_by_themselves_where_it_can_run(launches, changes, count):
    mixed_attention(**OWN | changes)
    assert len(launches) == count


def test_where_it_is_named_and_cannot_run_it_is_refused(launches):
    patterns = synthetic_patterns(1, 40, torch.Generator())
    reference = FrozenHeads.from_patterns(patterns, backend="reference", dtype=torch.float16, kv_head=(0, 1, 2))
    with forward_ad.dual_level():
        tangent = forward_ad.make_dual(ORDINARY["value"], torch.ones_like(ORDINARY["value"]))
        for changes, message in (
            (ORDINARY | {"value": tangent}, "no derivatives in forward mode"),
            ({"query": OWN["query"].clone().requires_grad_()}, "gives no gradients"),
            ({"frozen": reference}, "takes fixed patterns"),
            ({"frozen": FrozenHeads.from_patterns(patterns, dtype=torch.float16)}, "kv_head in from_patterns"),
            (ORDINARY | {"query": torch.randn(1, 40, 1, 16).half()}, "at most 16 query heads of a KV head, got 20"),
            (layer(dtype=torch.float32), "needs a CUDA device and values of 16 bits"),
        ):
            with pytest.raises(UnsupportedError, match=rf"kernel 'flash_decode' .*{message}.*or take 'auto'"):
                mixed_attention(**OWN | changes, kernel="flash_decode")
