"""Gradients of key and distance logits against Eq. (S.17) in float64, and what must hold while they are trained."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import saf.ops.toeplitz.tables as convolution
from saf.errors import InputError, UnsupportedError
from saf.ops import BACKENDS, FrozenHeads, frozen_attention, mixed_attention
from saf.ops.backends import choose_backend
from saf.ops.heads import take_heads
from saf.patterns import CompactPattern, DensePattern, TrainablePattern
from tests.ops.kernels.logits import NAMES, SPREADS, Case, dense_gradients, drawn, errors

TRAINABLE = ["toeplitz", "reference"]
UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


def compact(heads: int, length: int, generator: torch.Generator) -> CompactPattern:
    alpha, rho = torch.randn(2, heads, length, generator=generator, dtype=torch.float64)
    return CompactPattern.from_parameters(alpha, rho)


def trained(pattern: CompactPattern, dtype: torch.dtype = torch.float32) -> list[TrainablePattern]:
    return [TrainablePattern.of(pattern[head], dtype=dtype) for head in range(len(pattern))]


def dense(patterns: list[TrainablePattern], length: int) -> torch.Tensor:
    """P of Eq. (3), `[F, length, length]` float64, straight from the parameters."""
    alpha, rho = (torch.stack([getattr(one, name).detach().double() for one in patterns]) for name in ("alpha", "rho"))
    weights = torch.zeros(len(patterns), length, length, dtype=torch.float64)
    for query in range(length):
        weights[:, query, : query + 1] = (alpha[:, : query + 1] + rho[:, : query + 1].flip(1)).softmax(1)
    return weights


def logit_gradients(weights: torch.Tensor, value: torch.Tensor, upstream: torch.Tensor) -> tuple:
    """The first form of Eq. (S.17), entry by entry."""
    pairs = torch.einsum("bfid,bfjd->fij", upstream.double(), value.double())
    slope = weights * (pairs - (weights * pairs).sum(-1, keepdim=True))
    lags = range(weights.shape[-1])
    return slope.sum(1), torch.stack([slope.diagonal(-lag, 1, 2).sum(-1) for lag in lags], 1)


def gradients(patterns: list[TrainablePattern]) -> list[torch.Tensor]:
    return [torch.stack([getattr(one, name).grad for one in patterns]) for name in ("alpha", "rho")]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks, and several groups of offsets, at lengths that finite differences can afford."""
    monkeypatch.setattr(convolution, "BLOCK", 16)


@pytest.mark.parametrize("backend", TRAINABLE)
@pytest.mark.parametrize("length", [1, 5, 19])
def test_finite_differences_agree_with_grouped_values(backend, length, generator, small_blocks):
    """Two value heads for three frozen ones, a prefix of longer patterns."""
    logits = torch.randn(2, 3, length + 2, generator=generator, dtype=torch.float64)
    value = torch.randn(2, 2, length, 2, generator=generator, dtype=torch.float64)

    def mix(value, alpha, rho):
        return BACKENDS[backend].forward_trainable(take_heads(value, (0, 1, 1)), alpha, rho)

    arguments = [x.clone().requires_grad_() for x in (value, *logits)]
    assert torch.autograd.gradcheck(mix, arguments, atol=1e-8)


@pytest.mark.parametrize("backend", TRAINABLE)
@pytest.mark.parametrize("length", [63, 129, 300])
@pytest.mark.parametrize("dtype", UNIT)
def test_output_and_gradients_match_the_dense_form(backend, length, dtype, generator):
    """Three roundings of operands in bfloat16, as in Eq. (S.16); sums of up to T in float32."""
    patterns = trained(compact(3, length, generator), torch.promote_types(dtype, torch.float32))
    frozen = FrozenHeads.from_patterns(patterns, backend=backend, dtype=dtype)
    draw = torch.randn(2, 2, 3, length, 16, generator=generator, dtype=torch.float64).to(dtype)
    value, upstream = draw[0].requires_grad_(), draw[1]
    output = frozen_attention(value, frozen)
    output.backward(upstream)
    weights = dense(patterns, length)
    budget = 3 * UNIT[dtype] if dtype == torch.bfloat16 else 16 * UNIT[dtype]
    assert output.dtype == dtype
    assert relative(output, weights @ value.detach().double()) <= budget
    assert relative(value.grad, weights.mT @ upstream.double()) <= budget
    for found, expected in zip(gradients(patterns), logit_gradients(weights, value.detach(), upstream), strict=True):
        assert relative(found, expected) <= budget


@pytest.mark.parametrize("backend", TRAINABLE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_gauge_has_no_gradient(backend, dtype, generator):
    """Moving along (S.6) changes nothing, so the gradient is orthogonal to its three directions."""
    length = 200
    patterns = trained(compact(2, length, generator), dtype)
    frozen = FrozenHeads.from_patterns(patterns, backend=backend, dtype=dtype)
    frozen_attention(torch.randn(2, 2, length, 8, generator=generator, dtype=dtype), frozen).square().sum().backward()
    alpha, rho = (gradient.double() for gradient in gradients(patterns))
    position = torch.arange(length, dtype=torch.float64)
    scale = alpha.abs() + rho.abs()
    assert (alpha.sum(1).abs() <= 64 * UNIT[dtype] * scale.sum(1)).all()
    assert (rho.sum(1).abs() <= 64 * UNIT[dtype] * scale.sum(1)).all()
    assert (((alpha + rho) @ position).abs() <= 64 * UNIT[dtype] * (scale @ position)).all()


def test_real_patterns_match_float64(real_heads, generator):
    from saf.fit import fit_compact

    eta = [real_heads[name][6:9].double() for name in ("eta_abs", "eta_rel")]
    patterns, length = trained(fit_compact(*eta, max_sweeps=8)), 700
    draw = torch.randn(2, 1, 3, length, 64, generator=generator)
    frozen = FrozenHeads.from_patterns(patterns)
    frozen_attention(draw[0], frozen).backward(draw[1])
    expected = logit_gradients(dense(patterns, length), *draw)
    for found, exact in zip(gradients(patterns), expected, strict=True):
        assert relative(found[:, :length], exact) <= 2e-6
        assert not found[:, length:].any()


@pytest.mark.parametrize("backend", TRAINABLE)
def test_left_padding_gives_the_gradient_of_the_unpadded_rows(backend, generator):
    pattern, start = compact(2, 60, generator), torch.tensor([0, 7, 31])
    query, key, value = (torch.randn(3, heads, 50, 8, generator=generator) for heads in (1, 1, 3))
    padded, alone = trained(pattern), trained(pattern)
    mixed_attention(
        query, key, value, FrozenHeads.from_patterns(padded, backend=backend), left_pad=start
    ).square().sum().backward()
    frozen = FrozenHeads.from_patterns(alone, backend=backend)
    for row, first in enumerate(start.tolist()):
        frozen_attention(value[row : row + 1, 1:, first:], frozen).square().sum().backward()
    for found, expected in zip(gradients(padded), gradients(alone), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", TRAINABLE)
def test_fixed_and_trainable_heads_share_a_layer(backend, generator):
    """Fixed ones never get a gradient; of the others each gets its own."""
    pattern, length = compact(3, 50, generator), 40
    weights = torch.rand(50, 50, generator=generator, dtype=torch.float64).tril() + 1e-3 * torch.eye(50)
    stored = DensePattern(weights / weights.sum(-1, keepdim=True))
    one, two = trained(pattern[1:], torch.float64)
    frozen = FrozenHeads.from_patterns([one, pattern[0], stored, two], backend=backend, dtype=torch.float64)
    assert (frozen.fixed, frozen.trainable, frozen.num_frozen) == ((1, 2), (0, 3), 4)
    assert {name for name, _ in frozen.named_parameters()} == {
        f"pattern_{n}.{x}" for n in (0, 3) for x in ("alpha", "rho")
    }
    before = [pattern.alpha.clone(), pattern.rho.clone(), stored.weights.clone()]
    draw = torch.randn(2, 2, 4, length, 8, generator=generator, dtype=torch.float64)
    value, upstream = draw[0].requires_grad_(), draw[1]
    output = frozen_attention(value, frozen)
    output.backward(upstream)
    fixed = torch.stack([pattern.dense()[0], stored.weights])[:, :length, :length]
    all_weights = torch.cat([dense([one], length), fixed, dense([two], length)])
    assert relative(output, all_weights @ value.detach()) <= 1e-14
    assert relative(value.grad, all_weights.mT @ upstream) <= 1e-14
    expected = logit_gradients(all_weights[[0, 3]], value.detach()[:, [0, 3]], upstream[:, [0, 3]])
    for found, exact in zip(gradients([one, two]), expected, strict=True):
        assert relative(found[:, :length], exact) <= 1e-14
    assert not any(buffer.requires_grad for buffer in frozen.buffers())
    after = [pattern.alpha, pattern.rho, stored.weights]
    assert all(torch.equal(x, y) and x.grad is None and not x.requires_grad for x, y in zip(after, before, strict=True))


@pytest.mark.parametrize("backend", TRAINABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_lowers_a_loss_and_normalisers_follow(backend, dtype, generator):
    """Towards another head's output; after every step the rows of what is executed sum to one."""
    length = 70
    patterns = trained(compact(2, length, generator))
    frozen = FrozenHeads.from_patterns(patterns, backend=backend, dtype=dtype)
    value = torch.randn(4, 2, length, 8, generator=generator).to(dtype)
    goal = (compact(2, length, generator).dense() @ value.double()).float()
    optimizer = torch.optim.AdamW(frozen.parameters(), lr=0.05, betas=(0.9, 0.95), weight_decay=0.0)
    losses, rounding = [], 2 * UNIT[dtype] + length**0.5 * UNIT[torch.float32]
    for _ in range(12):
        loss = (frozen_attention(value, frozen).float() - goal).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rows = frozen_attention(torch.ones(1, 2, length, 1, dtype=dtype), frozen)
        assert (rows.double() - 1).abs().max() <= rounding
        output = frozen_attention(value, frozen)
        assert relative(output, dense(patterns, length) @ value.double()) <= 3 * UNIT[torch.bfloat16]
    assert losses[-1] < 0.7 * losses[0]
    torch.testing.assert_close(torch.stack([one.compact().dense() for one in patterns]), dense(patterns, length))


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_no_tensor_of_every_pair_of_positions_is_made(generator):
    length, heads = 2048, 1
    alpha, rho = (x.requires_grad_() for x in torch.randn(2, heads, length, generator=generator))
    value = torch.randn(1, heads, length, 4, generator=generator)
    with Largest() as largest:
        output = BACKENDS["toeplitz"].forward_trainable(value, alpha, rho)
        output.sum().backward()
    assert 0 < largest.elements <= length * 2 * convolution.BLOCK < length * length / 7


@pytest.mark.parametrize("backend", TRAINABLE)
@pytest.mark.parametrize("mixed", [False, True])
def test_compiles_whole_and_reads_the_parameters_anew(backend, mixed, generator):
    pattern = compact(3, 40, generator)
    patterns = trained(pattern[1:] if mixed else pattern)
    frozen = FrozenHeads.from_patterns([*([pattern[0]] if mixed else []), *patterns], backend=backend)
    value = torch.randn(2, 3, 40, 8, generator=generator)
    compiled = torch.compile(lambda v: frozen_attention(v, frozen), fullgraph=True, backend="aot_eager")
    for _ in range(2):
        found = []
        for call in (compiled, lambda v: frozen_attention(v, frozen)):
            frozen.zero_grad()
            output = call(value)
            output.square().sum().backward()
            found.append([output, *gradients(patterns)])
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
        with torch.no_grad():
            for parameter in frozen.parameters():
                parameter += torch.randn(parameter.shape, generator=generator)


def test_what_cannot_be_trained_is_refused(generator):
    pattern = trained(compact(1, 30, generator))
    with pytest.raises(UnsupportedError, match=r"backend 'fused' cannot run: it has no gradients for key and distance"):
        FrozenHeads.from_patterns(pattern, backend="fused")
    with pytest.raises(UnsupportedError, match="float16 has too little range"):
        FrozenHeads.from_patterns(pattern, dtype=torch.float16)
    position = torch.arange(300.0)
    bump = TrainablePattern(torch.zeros(300), 4 * torch.where(position < 150, position, 300 - position))
    with pytest.raises(UnsupportedError, match=r"cannot hold a pattern as exp\(rho\) times exp\(alpha\).*'reference'"):
        FrozenHeads.from_patterns(bump, backend="toeplitz")
    frozen = FrozenHeads.from_patterns(bump, backend="reference")
    value = torch.randn(1, 1, 300, 4, generator=generator)
    assert relative(frozen_attention(value, frozen), dense([bump], 300) @ value.double()) <= 1e-6
    options = {"device": torch.device("cpu"), "dtypes": [torch.float32]}
    assert choose_backend("auto", **options, trainable=True) == "toeplitz"
    with pytest.raises(InputError, match="float32 or float64"):
        TrainablePattern(torch.zeros(4).half(), torch.zeros(4).half())
    with pytest.raises(InputError, match=r"must share one shape"):
        TrainablePattern(torch.zeros(4), torch.zeros(5))
    with pytest.raises(InputError, match=r"executed by saf\.frozen_attention"):
        pattern[0](value)


SHAPES = {"short": {"length": 16, "batch": 1}, "blocks": {"length": 150, "heads": 2}}
KINDS = list(itertools.product(("bfloat16", "float32"), SHAPES, SPREADS))


@pytest.mark.parametrize("common", [0.0, 3.0])
@pytest.mark.parametrize(("dtype", "shape", "spread"), KINDS)
def test_logits_of_every_spread_have_at_most_twice_the_error_of_autograd(dtype, shape, spread, common):
    """On a CPU, of values with and without a part that cancels."""
    case = Case(spread, dtype=dtype, common=common, **SHAPES[shape])
    value, upstream, alpha, rho = drawn(case, "cpu")
    expected = dense_gradients(value.double(), upstream.double(), alpha.double(), rho.double())
    plain = errors(dense_gradients(value, upstream, alpha, rho), expected)
    inputs = [x.requires_grad_() for x in (value, alpha, rho)]
    output = BACKENDS["toeplitz"].forward_trainable(*inputs)
    found = errors(torch.autograd.grad(output, inputs, upstream), expected)
    for name in NAMES:
        assert found[name] <= 2 * plain[name], (name, found, plain)
