"""Few tokens without gradients take one launch; everything else is computed as before."""

import os
import subprocess
import sys

import pytest
import torch

from saf.errors import InputError
from saf.heads import HeadSet
from saf.models import GPT, GPTConfig
from saf.ops import FrozenHeads, few_tokens, in_one_launch, mixed_attention, split_attention, toeplitz
from saf.pattern import DensePattern
from saf.surgery import install_
from tests.ops.hard_patterns import hard_patterns

HALF = torch.bfloat16


@pytest.fixture
def launches(monkeypatch):
    """Pretend that the launch runs here, and answer it with the reference."""
    pytest.importorskip("triton", reason="Triton is not installed")
    seen = []

    def launch(query, key, value, tables, layout, scale, *, prefix):
        assert prefix + "alpha" in tables
        seen.append((layout, tuple(value.shape)))
        return value.new_zeros(value.shape[0], query.shape[1] + 2, *value.shape[2:])

    monkeypatch.setattr(few_tokens, "fused_obstacle", lambda device, dtype: None)
    monkeypatch.setattr(few_tokens, "launch_fused", launch)
    return seen


def prepare(length: int = 64, dtype: torch.dtype = HALF) -> FrozenHeads:
    return FrozenHeads.from_patterns(hard_patterns(["decay", "ripple"], length), dtype=dtype, kv_head=range(4))


def operands(length: int = 40, dim: int = 8, batch: int = 2, dtype: torch.dtype = HALF) -> list[torch.Tensor]:
    return [torch.randn(batch, count, length, dim, dtype=dtype) for count in (2, 2, 4)]


def test_one_launch_computes_all_heads_of_few_tokens(launches):
    frozen, heads = prepare(), operands()
    with torch.no_grad():
        assert mixed_attention(*heads, frozen).shape == (2, 4, 40, 8)
        live, mixed = split_attention(*heads, frozen, projection=torch.randn(5, 32, dtype=HALF))
    assert launches == [("mixed", (2, 4, 40, 8))] * 2
    assert live is not None
    assert mixed is not None
    assert (live.shape, mixed.shape) == ((2, 2, 40, 8), (2, 40, 5))


@pytest.mark.parametrize(
    "change",
    [
        {"grad": True},
        {"start": torch.tensor([0, 3])},
        {"kernel": "math"},
        {"rows": 5},
        {"dim": few_tokens.DIM + 8},
        {"batch": few_tokens.ROWS // (4 * 40) + 1},
        {"length": few_tokens.LENGTH + 1, "batch": 1},
        {"dtype": torch.float32},
    ],
    ids=lambda change: next(iter(change)),
)
def test_not_otherwise(launches, change):
    dtype = change.get("dtype", HALF)
    frozen = prepare(max(64, change.get("length", 0)), dtype)
    sizes = {name: change[name] for name in ("length", "dim", "batch") if name in change}
    query, key, value = operands(dtype=dtype, **sizes)
    query = query[:, :, -change.get("rows", query.shape[2]) :]
    options = {name: change[name] for name in ("start", "kernel") if name in change}
    with torch.set_grad_enabled("grad" in change):
        assert not in_one_launch(query, value, frozen, **options)
        mixed_attention(query, key, value, frozen, **options)
    assert launches == []


def test_not_for_stored_patterns_nor_where_heads_are_unknown(launches):
    patterns = hard_patterns(["decay", "ripple"], 64)
    dense = patterns.dense()
    with torch.no_grad():
        mixed_attention(*operands(), FrozenHeads.from_patterns(DensePattern(dense), dtype=HALF, kv_head=range(4)))
    query, key, value = operands()
    with torch.no_grad():
        mixed_attention(query, key, value, FrozenHeads.from_patterns(patterns, dtype=HALF))
    assert launches == []


def test_tables_cover_the_lengths_that_use_them(launches):
    tables = prepare(few_tokens.LENGTH + 100).tables(HALF)
    assert tables["few_alpha"].shape[-1] == few_tokens.LENGTH
    assert tables["row_scale"].shape[-1] == few_tokens.LENGTH + 100
    assert "few_alpha" not in prepare(dtype=torch.float32).tables(torch.float32)


def test_queries_and_keys_that_autocast_left_wider_take_the_values_dtype(launches, monkeypatch):
    """Rotated ones of transformers models are float32 beside bfloat16 values."""
    seen = []
    monkeypatch.setattr(
        few_tokens, "launch_fused", lambda q, k, v, *_, **__: seen.append((q.dtype, k.dtype)) or v.new_zeros(v.shape)
    )
    query, key, value = operands()
    with torch.no_grad(), torch.autocast("cpu", HALF):
        mixed_attention(query.float(), key.float(), value, prepare())
    assert seen == [(HALF, HALF)]
    with torch.no_grad(), pytest.raises(InputError, match="same dtype"):
        mixed_attention(query.float(), key.float(), value, prepare())


def test_a_model_projects_all_heads_of_one_launch_together(launches, monkeypatch):
    model = GPT(GPTConfig(vocab_size=64, num_layers=1, num_heads=4, hidden_size=32, max_length=64)).to(HALF)
    install_(model, HeadSet([(0, 1), (0, 3)]), hard_patterns(["decay", "ripple"], 64))
    tokens = torch.randint(0, 64, (2, 40))
    monkeypatch.setattr("saf.models.attention.split_attention", None)
    with torch.no_grad():
        model(tokens)
    assert launches == [("mixed", (2, 4, 40, 8))]


def test_on_this_machine_it_is_left_to_the_device():
    assert "few_alpha" not in prepare().tables(HALF)
    assert toeplitz.mixes is few_tokens.mixes


PROGRAM = """
import torch
from saf.ops import FrozenHeads, few_tokens, mixed_attention
from saf.pattern import CompactPattern

few_tokens.fused_obstacle = lambda device, dtype: None  # the interpreter stands in for a device
generator = torch.Generator().manual_seed(0)
pattern = CompactPattern.from_parameters(*torch.randn(2, 2, 160, generator=generator, dtype=torch.float64))
launched = []
original = few_tokens.launch_fused
few_tokens.launch_fused = lambda *a, **o: launched.append(1) or original(*a, **o)
for kv_head in ((0, 1, 2, 3), (0, 0, 1, 1)):
    counts = (2, len(set(kv_head[:2])), max(kv_head) + 1)
    inputs = [torch.randn(2, 150, count, 16, generator=generator).half().transpose(1, 2) for count in counts]
    found = []
    for backend, dtype in (("toeplitz", torch.float16), ("reference", torch.float16), ("reference", torch.float64)):
        frozen = FrozenHeads.from_patterns(pattern, backend=backend, dtype=dtype, kv_head=kv_head)
        with torch.no_grad():
            found.append(mixed_attention(*(x.to(dtype) for x in inputs), frozen).double())
    ours, theirs, exact = found
    error, sdpa, rounding = ((x - exact).norm() / exact.norm() for x in (ours, theirs, exact.half().double()))
    assert error <= 2 * sdpa + rounding, (kv_head, error, sdpa)
assert len(launched) == 2
print("agreed")
"""


def test_the_launch_equals_the_reference():
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "agreed", done.stderr[-2000:]
