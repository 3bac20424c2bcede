"""Few tokens without gradients take one launch; everything else is computed as before."""

import os
import subprocess
import sys

import pytest
import torch

from saf.errors import InputError
from saf.heads import HeadSet
from saf.models import GPT, GPTConfig
from saf.ops import FrozenHeads, mixed_attention
from saf.ops.backends import toeplitz
from saf.ops.inference import one_launch
from saf.patterns import CompactPattern, DensePattern
from saf.surgery import install_
from tests.ops.hard_patterns import hard_patterns

HALF = torch.bfloat16


@pytest.fixture
def launches(monkeypatch):
    """Pretend that the launch runs here, and answer it with zeros."""
    pytest.importorskip("triton", reason="Triton is not installed")
    seen = []

    def launch(query, key, value, maps, patterns, *, scale):
        seen.append(tuple(value.shape))
        assert {query.dtype, key.dtype, value.dtype} == {patterns.dense.dtype}
        assert scale == pytest.approx(value.shape[-1] ** -0.5)
        return value.new_zeros(value.shape[0], value.shape[2], sum(maps.counts), value.shape[3]).transpose(1, 2), None

    monkeypatch.setattr(one_launch, "fused_obstacle", lambda device, dtype: None)
    monkeypatch.setattr(toeplitz.Toeplitz, "can_infer", lambda self, device, dtype, tables: not tables["stored"])
    monkeypatch.setattr(one_launch, "_launcher", lambda: launch)
    return seen


def prepare(length: int = 64, dtype: torch.dtype = HALF) -> FrozenHeads:
    return FrozenHeads.from_patterns(hard_patterns(["decay", "ripple"], length), dtype=dtype, kv_head=range(4))


def operands(length: int = 40, dim: int = 8, batch: int = 2, dtype: torch.dtype = HALF) -> list[torch.Tensor]:
    return [torch.randn(batch, count, length, dim, dtype=dtype) for count in (2, 2, 4)]


def test_one_launch_computes_all_heads_of_few_tokens(launches):
    frozen, heads = prepare(), operands()
    with torch.no_grad():
        assert mixed_attention(*heads, frozen).shape == (2, 4, 40, 8)
    assert launches == [(2, 4, 40, 8)]


@pytest.mark.parametrize(
    "change",
    [
        {"grad": True},
        {"start": torch.tensor([0, 3])},
        {"kernel": "math"},
        {"rows": 5},
        {"dim": one_launch.DIM + 8},
        {"dtype": torch.float32},
    ],
    ids=lambda change: next(iter(change)),
)
def test_not_otherwise(launches, change):
    dtype = change.get("dtype", HALF)
    query, key, value = operands(dtype=dtype, dim=change.get("dim", 8))
    query = query[:, :, -change.get("rows", query.shape[2]) :]
    options = {name: change[name] for name in ("start", "kernel") if name in change}
    with torch.set_grad_enabled("grad" in change):
        mixed_attention(query, key, value, prepare(dtype=dtype), **options)
    assert launches == []


def test_what_few_means():
    def few(batch: int, heads: int, length: int, dim: int = 64, *, replayed: bool = True) -> bool:
        return one_launch.are_few(torch.empty(batch, heads, length, dim, device="meta"), heads, replayed=replayed)

    # The device sets the pace: where one launch was faster than two on an H200.
    assert few(2, 12, 1024)
    assert few(1, 20, 1024, 128)
    assert few(8, 12, 512)
    assert few(16, 12, 256)
    assert few(48, 12, 256)
    assert few(96, 12, 128)
    assert not few(2048, 12, 16)
    assert not few(4, 12, 1024)
    assert not few(64, 12, 512)
    assert not few(1, 12, 1025)
    assert not few(1, 12, 512, 129)
    # The host does: layers up to two sequences of 4,096 tokens of the 124M model.
    assert few(1, 12, 4096, replayed=False)
    assert few(2, 12, 4096, replayed=False)
    assert few(4, 12, 2048, replayed=False)
    assert not few(3, 12, 4096, replayed=False)
    assert not few(2, 12, 4096)
    assert not few(1, 20, 4096, replayed=False)
    assert not few(1, 1, 4097, replayed=False)


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
    longer = one_launch.LENGTH + 100
    pattern = CompactPattern.from_parameters(torch.zeros(2, longer), torch.zeros(2, longer))
    tables = FrozenHeads.from_patterns(pattern, dtype=HALF, kv_head=range(4)).tables(HALF)
    assert tables["few_alpha"].shape[-1] == one_launch.LENGTH
    assert tables["row_scale"].shape[-1] == longer
    assert "few_alpha" not in prepare(dtype=torch.float32).tables(torch.float32)


def test_queries_and_keys_that_autocast_left_wider_take_the_values_dtype(launches):
    """Rotated ones of transformers models are float32 beside bfloat16 values."""
    query, key, value = operands()
    with torch.no_grad(), torch.autocast("cpu", HALF):
        frozen = prepare()
        for _ in range(3):
            mixed_attention(query.float(), key.float(), value, frozen)
    assert len(launches) == 3
    with torch.no_grad(), pytest.raises(InputError, match="same dtype"):
        mixed_attention(query.float(), key.float(), value, prepare())


def test_a_model_takes_it_in_every_layer_with_both_kinds_of_heads(launches):
    model = GPT(GPTConfig(vocab_size=64, num_layers=2, num_heads=4, hidden_size=32, max_length=64)).to(HALF)
    install_(model, HeadSet([(0, 1), (0, 3)]), hard_patterns(["decay", "ripple"], 64))
    tokens = torch.randint(0, 64, (2, 40))
    with torch.no_grad():
        model(tokens)
    assert launches == [(2, 4, 40, 8)]


def test_on_this_machine_it_is_left_to_the_device():
    assert "few_alpha" not in prepare().tables(HALF)


PROGRAM = """
import tests.quick_interpreter
import torch
from saf.ops import FrozenHeads, mixed_attention
from tests.ops.projected import projected_attention
from saf.ops.inference import one_launch
from saf.ops.backends import toeplitz
from saf.patterns import CompactPattern

one_launch.fused_obstacle = lambda device, dtype: None  # the interpreter stands in for a device
toeplitz.Toeplitz.can_infer = lambda *_: True
generator = torch.Generator().manual_seed(0)
pattern = CompactPattern.from_parameters(*torch.randn(2, 2, 160, generator=generator, dtype=torch.float64))
launched = []
original = one_launch._launcher()
one_launch._launcher = lambda: lambda *a, **o: launched.append(1) or original(*a, **o)
for kv_head in ((0, 1, 2, 3), (0, 0, 1, 1)):
    counts = (2, len(set(kv_head[:2])), max(kv_head) + 1)
    inputs = [torch.randn(2, 150, count, 16, generator=generator).half().transpose(1, 2) for count in counts]
    weight = torch.randn(8, 64, generator=generator) / 8
    found = []
    for backend, dtype in (("toeplitz", torch.float16), ("reference", torch.float16), ("reference", torch.float64)):
        frozen = FrozenHeads.from_patterns(pattern, backend=backend, dtype=dtype, kv_head=kv_head)
        with torch.no_grad():
            heads = [x.to(dtype) for x in inputs]
            found.append((mixed_attention(*heads, frozen), projected_attention(*heads, frozen, weight.to(dtype))))
    for ours, theirs, exact in zip(*found):
        values = ours.double(), theirs.double(), exact.half().double()
        error, sdpa, rounding = ((x - exact).norm() / exact.norm() for x in values)
        assert error <= 2 * sdpa + rounding, (kv_head, error, sdpa)
assert len(launched) == 4
print("agreed")
"""


def test_the_launch_equals_the_reference():
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "agreed", done.stderr[-2000:]
