"""The seam against a float64 dense computation: values, gradients, positions, head maps, bad input."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saf.errors import InputError, UnsupportedError
from saf.ops import FrozenHeads, attention_products, frozen_attention, live_attention, mixed_attention
from saf.patterns import CompactPattern, DensePattern, TrainablePattern

LENGTHS = [1, 2, 63, 64, 129, 300]


def random_pattern(heads: int, length: int, generator: torch.Generator, scale: float = 1.0) -> CompactPattern:
    alpha, rho = (scale * torch.randn(heads, length, generator=generator, dtype=torch.float64) for _ in range(2))
    return CompactPattern.from_parameters(alpha, rho)


def dense_output(pattern: CompactPattern, value: torch.Tensor) -> torch.Tensor:
    length = value.shape[-2]
    return pattern.dense()[:, :length, :length] @ value.double()


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@pytest.mark.parametrize("backend", ["toeplitz", "reference"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("dtype", "budget"), [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 4.5e-3)])
def test_output_and_gradient_match_the_dense_pattern(backend, length, dtype, budget, generator):
    pattern = random_pattern(3, length, generator)
    value = torch.randn(2, 3, length, 20, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    exact = value.detach().double().requires_grad_()
    upstream = torch.randn(2, 3, length, 20, generator=generator, dtype=torch.float64).to(dtype)
    output = frozen_attention(value, FrozenHeads.from_patterns(pattern, backend=backend, dtype=dtype))
    expected = dense_output(pattern, exact)
    output.backward(upstream)
    expected.backward(upstream.double())
    assert output.dtype == dtype
    assert relative(output, expected) <= budget
    assert relative(value.grad, exact.grad) <= budget


@settings(max_examples=25, deadline=None)
@given(length=st.integers(2, 150), change=st.integers(1, 149), seed=st.integers(0, 99))
def test_later_values_never_change_earlier_outputs(length, change, seed):
    change = min(change, length - 1)
    generator = torch.Generator().manual_seed(seed)
    frozen = FrozenHeads.from_patterns(random_pattern(2, length, generator))
    value = torch.randn(1, 2, length, 4, generator=generator)
    other = value.clone()
    other[:, :, change:] = torch.randn(1, 2, length - change, 4, generator=generator)
    before, after = frozen_attention(value, frozen), frozen_attention(other, frozen)
    assert torch.equal(before[:, :, :change], after[:, :, :change])


def test_shorter_inputs_use_a_prefix_and_longer_ones_raise(generator):
    pattern = random_pattern(2, 192, generator)
    frozen = FrozenHeads.from_patterns(pattern)
    value = torch.randn(1, 2, 129, 8, generator=generator)
    assert relative(frozen_attention(value, frozen), dense_output(pattern, value)) <= 1e-6
    with pytest.raises(InputError, match=r"input has 193 positions.*cover 192"):
        frozen_attention(torch.randn(1, 2, 193, 8), frozen)


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_the_last_rows_alone_equal_those_of_the_whole(rows, generator):
    pattern = random_pattern(2, 100, generator)
    frozen = FrozenHeads.from_patterns(pattern)
    query, key, value = (torch.randn(2, heads, 90, 8, generator=generator) for heads in (1, 1, 3))
    whole = mixed_attention(query, key, value, frozen)
    last = mixed_attention(query[:, :, -rows:], key, value, frozen)
    torch.testing.assert_close(last, whole[:, :, -rows:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["toeplitz", "reference"])
def test_left_padding_gives_the_unpadded_output(backend, generator):
    frozen = FrozenHeads.from_patterns(random_pattern(2, 60, generator), backend=backend)
    start = torch.tensor([0, 7, 31])
    query, key, value = (torch.randn(3, heads, 50, 8, generator=generator) for heads in (2, 2, 4))
    padded = mixed_attention(query, key, value, frozen, left_pad=start)
    for row, first in enumerate(start.tolist()):
        alone = mixed_attention(*(x[row : row + 1, :, first:] for x in (query, key, value)), frozen)
        torch.testing.assert_close(padded[row : row + 1, :, first:], alone, rtol=1e-5, atol=1e-6)
        assert not padded[row, :, :first].any()


@pytest.mark.parametrize("kv_head", [(0, 0, 1, 1, 2, 2), (0, 1, 0, 1, 2, 2), (0, 1, 1, 0, 2, 2)], ids=str)
def test_grouped_queries_read_their_own_value_head(kv_head, generator):
    pattern = random_pattern(2, 40, generator)
    frozen = FrozenHeads.from_patterns(pattern, kv_head=kv_head)
    query, key, value = (torch.randn(2, heads, 40, 8, generator=generator) for heads in (4, 2, 3))
    output = mixed_attention(query, key, value, frozen)
    for slot, head in enumerate(kv_head[:4]):
        used = sorted(set(kv_head[:4]))
        alone = torch.nn.functional.scaled_dot_product_attention(
            query[:, slot], key[:, used.index(head)], value[:, head], is_causal=True
        )
        torch.testing.assert_close(output[:, slot], alone, rtol=1e-5, atol=1e-6)
    expected = dense_output(pattern, value[:, [2, 2]])
    assert relative(output[:, 4:], expected) <= 1e-6
    assert relative(frozen_attention(value, frozen), expected) <= 1e-6


def test_live_slots_may_read_value_heads_in_any_order(generator):
    order = (2, 0, 1)
    frozen = FrozenHeads.from_patterns(random_pattern(1, 40, generator), kv_head=(*order, 3))
    query, key, value = (torch.randn(2, heads, 40, 8, generator=generator) for heads in (3, 3, 4))
    output = mixed_attention(query, key, value, frozen)
    expected = live_attention(query, key[:, order], value[:, order])
    torch.testing.assert_close(output[:, :3], expected, rtol=1e-5, atol=1e-6)


def test_dense_and_compact_patterns_mix_in_one_layer(generator):
    compact = random_pattern(2, 50, generator)
    weights = torch.rand(50, 50, generator=generator, dtype=torch.float64).tril() + 1e-3 * torch.eye(50)
    dense = DensePattern(weights / weights.sum(-1, keepdim=True))
    frozen = FrozenHeads.from_patterns([compact[0], dense, compact[1]], dtype=torch.float64)
    value = torch.randn(2, 3, 50, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    expected = torch.stack([compact.dense()[0], dense.weights, compact.dense()[1]])
    output = frozen_attention(value, frozen)
    assert relative(output, expected @ value) <= 1e-13
    (gradient,) = torch.autograd.grad(output.sum(), value)
    assert relative(gradient, expected.mT.sum(-1, keepdim=True).expand_as(value)) <= 1e-13


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_values_and_gradients(dtype, generator):
    frozen = FrozenHeads.from_patterns(random_pattern(3, 70, generator), dtype=dtype)
    packed = torch.randn(2, 70, 5 * 16, generator=generator).to(dtype).requires_grad_()
    value = packed.unflatten(-1, (5, 16)).transpose(1, 2)[:, 2:]
    (gradient,) = torch.autograd.grad(frozen_attention(value, frozen).square().sum(), packed)
    copied = value.detach().contiguous().requires_grad_()
    (expected,) = torch.autograd.grad(frozen_attention(copied, frozen).square().sum(), copied)
    assert torch.equal(gradient.unflatten(-1, (5, 16)).transpose(1, 2)[:, 2:], expected)


def test_no_frozen_heads_is_ordinary_attention(generator):
    query, key, value = (torch.randn(2, 3, 30, 8, generator=generator) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert torch.equal(mixed_attention(query, key, value, None), expected)


def test_with_every_head_frozen_queries_and_keys_do_not_matter(generator):
    frozen = FrozenHeads.from_patterns(random_pattern(3, 30, generator))
    value = torch.randn(2, 3, 30, 8, generator=generator)
    empty = torch.empty(2, 0, 30, 8)
    assert torch.equal(mixed_attention(empty, empty, value, frozen), frozen_attention(value, frozen))


def test_tables_keep_their_dtype_when_the_model_is_cast(generator):
    frozen = FrozenHeads.from_patterns(random_pattern(2, 30, generator), dtype=(torch.float32, torch.bfloat16))
    before = {name: buffer.clone() for name, buffer in frozen.named_buffers()}
    frozen.to(torch.bfloat16)
    assert before
    for name, buffer in frozen.named_buffers():
        assert buffer.dtype == before[name].dtype
        assert torch.equal(buffer, before[name])


def test_bad_input_says_what_was_expected(generator):
    pattern = random_pattern(2, 30, generator)
    frozen = FrozenHeads.from_patterns(pattern)
    value = torch.randn(1, 2, 30, 8)
    with pytest.raises(InputError, match="prepared for backend 'toeplitz', not 'reference'"):
        frozen_attention(value, frozen, backend="reference")
    with pytest.raises(InputError, match="unknown backend 'fast'"):
        FrozenHeads.from_patterns(pattern, backend="fast")
    with pytest.raises(UnsupportedError, match=r"backend 'fused' cannot run: it needs a CUDA device"):
        FrozenHeads.from_patterns(pattern, backend="fused")
    with pytest.raises(InputError, match="prepared for"):
        frozen_attention(value.half(), frozen)
    with pytest.raises(InputError, match="patterns of one length"):
        FrozenHeads.from_patterns([pattern[0], pattern[1].prefix(20)])
    with pytest.raises(InputError, match="key must hold the 1 KV heads"):
        mixed_attention(torch.randn(1, 1, 30, 8), torch.randn(1, 2, 30, 8), torch.randn(1, 3, 30, 8), frozen)
    with pytest.raises(InputError, match="need kv_head"):
        mixed_attention(torch.randn(1, 1, 30, 8), torch.randn(1, 1, 30, 8), value, frozen)
    with pytest.raises(InputError, match=r"kv_head names value heads from 0; got \(0, -1\)"):
        FrozenHeads.from_patterns(pattern, kv_head=(0, -1))
    with pytest.raises(InputError, match="rows must be 0 to 30"):
        frozen_attention(value, frozen, rows=31)


@pytest.mark.parametrize("trainable", [False, True])
def test_tables_elsewhere_than_the_values_are_refused(trainable, generator):
    pattern = random_pattern(1, 30, generator)[0]
    frozen = FrozenHeads.from_patterns(TrainablePattern.of(pattern) if trainable else pattern)
    meta = torch.empty(1, 1, 30, 8, device="meta")
    with pytest.raises(InputError, match="values are on meta, the frozen heads' tables on cpu; move the model as a"):
        frozen_attention(meta, frozen)
    if not trainable:
        with pytest.raises(InputError, match="values are on cpu, the frozen heads' tables on meta"):
            frozen_attention(torch.randn(1, 1, 30, 8), frozen.to("meta"))
        assert frozen_attention(meta, frozen).shape == meta.shape


@pytest.mark.parametrize("backend", ["toeplitz", "reference"])
@pytest.mark.parametrize("start", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize(("batch", "rows"), [(0, 30), (0, 1), (2, 0), (0, 0)])
def test_no_sequences_and_no_queries_make_no_outputs(backend, start, batch, rows, generator):
    frozen = FrozenHeads.from_patterns(random_pattern(2, 30, generator), backend=backend, kv_head=(0, 0, 1, 1))
    query, key, value = torch.randn(batch, 2, rows, 8), torch.randn(batch, 1, 30, 8), torch.randn(batch, 2, 30, 8)
    value.requires_grad_()
    first = torch.zeros(batch, dtype=torch.int64) if start else None
    output = mixed_attention(query, key, value, frozen, left_pad=first)
    assert output.shape == (batch, 4, rows, 8)
    output.sum().backward()
    assert torch.equal(value.grad, torch.zeros_like(value))
    assert frozen_attention(value, frozen, left_pad=first, rows=rows).shape == (batch, 2, rows, 8)
    assert live_attention(query, key, key, left_pad=first).shape == (batch, 2, rows, 8)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # of PyTorch's own code for forward mode
def test_derivatives_in_forward_mode_are_right_or_refused(generator):
    pattern = random_pattern(2, 30, generator)
    query, value, tangent = (torch.randn(1, heads, 30, 8, generator=generator) for heads in (1, 3, 3))
    exact = FrozenHeads.from_patterns(pattern, backend="reference")
    found = torch.func.jvp(lambda x: frozen_attention(x, exact), (value[:, :2],), (tangent[:, :2],))[1]
    assert relative(found, dense_output(pattern, tangent[:, :2])) <= 1e-6
    fast = FrozenHeads.from_patterns(pattern, backend="toeplitz")
    for calls, which in (
        (lambda x: frozen_attention(x, fast), value[:, :2]),
        (lambda x: mixed_attention(query, query, x, fast), value),
        (lambda x: mixed_attention(x, query, value, fast), query),
    ):
        with pytest.raises(UnsupportedError, match="no derivatives in forward mode"):
            torch.func.jvp(calls, (which,), (torch.ones_like(which),))


LIVE, ALL = (2, 1, 30, 8), (2, 3, 30, 8)


@pytest.mark.parametrize(
    ("query", "key", "value", "options", "message"),
    [
        ((2, 1, 30), LIVE, ALL, {}, r"must be \[batch, heads, positions, head_dim\], got \(2, 1, 30\)"),
        ((1, 1, 30, 8), LIVE, ALL, {}, "the same batch and head_dim"),
        ((2, 1, 30, 4), LIVE, ALL, {}, "the same batch and head_dim"),
        (LIVE, (2, 1, 29, 8), ALL, {}, "need the same positions"),
        ((2, 1, 31, 8), LIVE, ALL, {}, "queries the last of them"),
        ((2, 0, 31, 8), (2, 0, 30, 8), (2, 2, 30, 8), {}, "queries the last of them"),
        (LIVE, (2, 2, 30, 8), ALL, {}, "key must hold the 1 KV heads that live heads use, got 2"),
        (LIVE, LIVE, ALL, {"left_pad": torch.tensor([0, 30])}, "left padding must be positions 0 to 29"),
        (LIVE, LIVE, ALL, {"left_pad": torch.tensor([0])}, r"left padding must be integers \[2\]"),
        (
            LIVE,
            LIVE,
            ALL,
            {"left_pad": torch.tensor([True, False])},
            r"left padding must be integers \[2\].* got torch.bool",
        ),
        (
            LIVE,
            LIVE,
            ALL,
            {"left_pad": torch.zeros(2, dtype=torch.uint8)},
            r"left padding must be integers \[2\].* torch.uint8",
        ),
        ((2, 1, 0, 8), (2, 1, 0, 8), (2, 3, 0, 8), {}, r"with one position at least; got shape \(2, 3, 0, 8\)"),
        (LIVE, LIVE, ALL, {"kernel": "fast"}, "unknown attention kernel 'fast'"),
        ((2, 0, 30, 8), (2, 0, 30, 8), (2, 2, 30, 8), {"kernel": "fast"}, "unknown attention kernel 'fast'"),
        (LIVE, LIVE, ALL, {"kernel": "cudnn"}, "'cudnn' needs a CUDA device, got cpu"),
    ],
)
def test_shapes_and_settings_that_do_not_fit_are_told(generator, query, key, value, options, message):
    frozen = FrozenHeads.from_patterns(random_pattern(2, 30, generator))
    with pytest.raises((InputError, UnsupportedError), match=message):
        mixed_attention(torch.randn(query), torch.randn(key), torch.randn(value), frozen, **options)


def test_a_backend_where_no_head_is_frozen_is_refused():
    query = torch.randn(LIVE)
    with pytest.raises(InputError, match="'reference' would execute frozen heads, and there are none"):
        mixed_attention(query, query, query, None, backend="reference")
    with pytest.raises(InputError, match="the same dtype"):
        mixed_attention(query.double(), query, query, None)
    with pytest.raises(InputError, match="the same positions, at least one"):
        mixed_attention(*[query[:, :, :0]] * 3, None)
    with torch.autocast("cpu", torch.bfloat16):
        assert mixed_attention(query.bfloat16(), query, query, None).dtype == torch.bfloat16


def test_layers_without_heads_and_projections_of_another_width_are_refused(generator):
    query, value = torch.randn(1, 2, 40, 16), torch.randn(1, 3, 40, 16)
    frozen = FrozenHeads.from_patterns(random_pattern(1, 40, generator), kv_head=(0, 1, 2))
    with pytest.raises(InputError, match=r"projection must be \[C, 48\], columns slot by slot; got \[8, 32\]"):
        attention_products(query, query, value, frozen, torch.randn(8, 32))
    with pytest.raises(InputError, match="query has no heads, and none is frozen"):
        mixed_attention(query[:, :0], query[:, :0], query[:, :0], None)


PRECISIONS = {
    "": "ieee",
    "torch.set_float32_matmul_precision('high')": "tf32",
    "torch.backends.cuda.matmul.allow_tf32 = True": "tf32",
    "torch.backends.fp32_precision = 'tf32'": "tf32",
    "torch.backends.fp32_precision = 'tf32'; torch.backends.cuda.matmul.fp32_precision = 'ieee'": "ieee",
}
FORKS = """
import os, sys, torch
for setting in sys.argv[1:]:
    if not (child := os.fork()):
        exec(setting)
        from saf.ops.operator import product_precision
        print(product_precision(torch.float32), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, setting
"""


@pytest.fixture(scope="module")
def precisions() -> dict[str, str]:
    """What each setting leads to, in a process of its own: some refuse to be read once others were set.

    The processes are forked off one that has imported PyTorch and nothing else.
    """
    words = [sys.executable, "-c", FORKS, *PRECISIONS]
    run = subprocess.run(words, capture_output=True, text=True, check=True)
    return dict(zip(PRECISIONS, run.stdout.split(), strict=True))


@pytest.mark.parametrize(("setting", "expected"), PRECISIONS.items())
def test_tf32_is_used_only_where_pytorch_may(precisions, setting, expected):
    """Every switch of PyTorch counts."""
    assert precisions[setting] == expected


def test_heads_are_joined_by_position_and_part_again_in_the_backward_pass(generator, monkeypatch):
    from saf.ops import attention

    seen = []

    def watched(*args, **kwargs):
        output = live_attention(*args, **kwargs)
        output.register_hook(lambda gradient: seen.append(gradient))
        return output

    monkeypatch.setattr(attention, "live_attention", watched)
    frozen = FrozenHeads.from_patterns(random_pattern(2, 30, generator))
    query, key, value = (torch.randn(2, heads, 30, 8, requires_grad=True) for heads in (3, 3, 5))
    output = mixed_attention(query, key, value, frozen)
    assert output.transpose(1, 2).is_contiguous()
    upstream = torch.randn(2, 5, 30, 8)
    output.backward(upstream)
    assert torch.equal(seen[0], upstream[:, :3])
    assert seen[0].transpose(1, 2).is_contiguous()
    torch.testing.assert_close(value.grad[:, 3:], frozen_gradient(value[:, 3:], frozen, upstream[:, 3:]))


def frozen_gradient(value, frozen, upstream):
    value = value.detach().requires_grad_()
    return torch.autograd.grad(frozen_attention(value, frozen), value, upstream)[0]
