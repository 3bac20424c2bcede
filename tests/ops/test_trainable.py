"""Gradients of key and distance logits against Eq. (S.17) in float64, and logits of any height."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import saf.ops.toeplitz as module
from saf.errors import InputError, UnsupportedError
from saf.ops import BACKENDS, FrozenHeads, choose_backend, frozen_attention, mixed_attention
from saf.ops.tensors import take_heads
from saf.ops.toeplitz import compact_tables, level_logits
from saf.patterns import CompactPattern, DensePattern, TrainablePattern
from tests.ops.hard_patterns import random_pattern
from tests.ops.kernels.logits import NAMES, Case, dense_gradients, drawn, errors
from tests.ops.layers import relative

TRAINABLE = ["toeplitz", "reference"]
BUDGET = {torch.float64: 1e-12, torch.float32: 2.0**-20, torch.bfloat16: 3 * 2.0**-8}
"""Relative L2 errors: 16 roundings of float32, three of bfloat16, and of float64 logits of a hundred nats."""


def trained(pattern: CompactPattern, dtype: torch.dtype = torch.float32) -> list[TrainablePattern]:
    return [TrainablePattern.of(pattern[head], dtype=dtype) for head in range(len(pattern))]


def weights(alpha: Tensor, rho: Tensor) -> Tensor:
    """P of Eq. (3), `[F, T, T]` float64, from logits `[F, T]`."""
    position = torch.arange(alpha.shape[1])
    lag = position[:, None] - position
    scores = alpha.double()[:, None] + rho.double()[:, lag.clamp(min=0)]
    return scores.masked_fill(lag < 0, -torch.inf).softmax(-1)


def dense(patterns: list[TrainablePattern], length: int) -> Tensor:
    return weights(*(torch.stack([getattr(one, name).detach()[:length] for one in patterns]) for name in NAMES[1:]))


def logit_gradients(weights: Tensor, value: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """The first form of Eq. (S.17), entry by entry."""
    pairs = torch.einsum("bfid,bfjd->fij", upstream.double(), value.double())
    slope = weights * (pairs - (weights * pairs).sum(-1, keepdim=True))
    lags = range(weights.shape[-1])
    return slope.sum(1), torch.stack([slope.diagonal(-lag, 1, 2).sum(-1) for lag in lags], 1)


def gradients(patterns: list[TrainablePattern]) -> list[Tensor]:
    return [torch.stack([getattr(one, name).grad for one in patterns]) for name in NAMES[1:]]


@pytest.mark.parametrize("backend", TRAINABLE)
@pytest.mark.parametrize("length", [1, 19])
def test_finite_differences_agree_with_grouped_values(backend, length, generator, monkeypatch):
    """Several blocks; two value heads for three frozen ones, a prefix of longer patterns."""
    monkeypatch.setattr(module, "BLOCK", 16)
    logits = torch.randn(2, 3, length + 2, generator=generator, dtype=torch.float64)
    value = torch.randn(1, 2, length, 2, generator=generator, dtype=torch.float64)

    def mix(value, alpha, rho):
        return BACKENDS[backend].forward_trainable(take_heads(value, (0, 1, 1)), alpha, rho)

    arguments = [x.clone().requires_grad_() for x in (value, *logits)]
    assert torch.autograd.gradcheck(mix, arguments, atol=1e-8)


@pytest.mark.parametrize("backend", TRAINABLE)
@pytest.mark.parametrize("dtype", BUDGET, ids=str)
def test_output_and_gradients_match_the_dense_form(backend, dtype, generator):
    """Three roundings of operands in bfloat16, as in Eq. (S.16); sums of up to T in float32."""
    patterns = trained(random_pattern(3, 300, generator), torch.promote_types(dtype, torch.float32))
    frozen = FrozenHeads.from_patterns(patterns, backend=backend, dtype=dtype)
    draw = torch.randn(2, 2, 3, 300, 16, generator=generator, dtype=torch.float64).to(dtype)
    value, upstream = draw[0].requires_grad_(), draw[1]
    output = frozen_attention(value, frozen)
    output.backward(upstream)
    exact = dense(patterns, 300)
    assert output.dtype == dtype
    actual = [output, value.grad, *gradients(patterns)]
    expected = [exact @ value.detach().double(), exact.mT @ upstream.double()]
    expected += logit_gradients(exact, value.detach(), upstream)
    assert max(map(relative, actual, expected)) <= BUDGET[dtype]


@pytest.mark.parametrize("common", [0.0, 3.0])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("spread", [0.5, 8.0])
def test_logits_of_every_spread_have_at_most_twice_the_error_of_autograd(dtype, spread, common):
    """On a CPU, of values with and without a part that cancels."""
    case = Case(spread, dtype=dtype, common=common, length=150, heads=2)
    value, upstream, alpha, rho = drawn(case, "cpu")
    expected = dense_gradients(value.double(), upstream.double(), alpha.double(), rho.double())
    plain = errors(dense_gradients(value, upstream, alpha, rho), expected)
    inputs = [x.requires_grad_() for x in (value, alpha, rho)]
    output = BACKENDS["toeplitz"].forward_trainable(*inputs)
    actual = errors(torch.autograd.grad(output, inputs, upstream), expected)
    for name in NAMES:
        assert actual[name] <= 2 * plain[name], (name, actual, plain)


@pytest.mark.parametrize("backend", TRAINABLE)
def test_left_padding_gives_the_gradient_of_the_unpadded_rows(backend, generator):
    pattern, start = random_pattern(2, 60, generator), torch.tensor([0, 7, 31])
    query, key, value = (torch.randn(3, heads, 50, 8, generator=generator) for heads in (1, 1, 3))
    padded, alone = trained(pattern), trained(pattern)
    frozen = FrozenHeads.from_patterns(padded, backend=backend)
    mixed_attention(query, key, value, frozen, left_pad=start).square().sum().backward()
    frozen = FrozenHeads.from_patterns(alone, backend=backend)
    for row, first in enumerate(start.tolist()):
        frozen_attention(value[row : row + 1, 1:, first:], frozen).square().sum().backward()
    for actual, expected in zip(gradients(padded), gradients(alone), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", TRAINABLE)
def test_fixed_and_trainable_heads_share_a_layer(backend, generator):
    """Fixed ones never get a gradient; of the others each gets its own."""
    pattern, length = random_pattern(3, 50, generator), 40
    stored = torch.rand(50, 50, generator=generator, dtype=torch.float64).tril() + 1e-3 * torch.eye(50)
    stored = DensePattern(stored / stored.sum(-1, keepdim=True))
    one, two = trained(pattern[1:], torch.float64)
    frozen = FrozenHeads.from_patterns([one, pattern[0], stored, two], backend=backend, dtype=torch.float64)
    assert (frozen.groups[backend], frozen.trainable, frozen.num_frozen) == ((1, 2), (0, 3), 4)
    assert {name for name, _ in frozen.named_parameters()} == {f"pattern_{n}.{x}" for n in (0, 3) for x in NAMES[1:]}
    draw = torch.randn(2, 2, 4, length, 8, generator=generator, dtype=torch.float64)
    value, upstream = draw[0].requires_grad_(), draw[1]
    output = frozen_attention(value, frozen)
    output.backward(upstream)
    fixed = torch.stack([pattern.dense()[0], stored.weights])[:, :length, :length]
    every = torch.cat([dense([one], length), fixed, dense([two], length)])
    assert relative(output, every @ value.detach()) <= 1e-14
    assert relative(value.grad, every.mT @ upstream) <= 1e-14
    expected = logit_gradients(every[[0, 3]], value.detach()[:, [0, 3]], upstream[:, [0, 3]])
    for actual, exact in zip(gradients([one, two]), expected, strict=True):
        assert relative(actual[:, :length], exact) <= 1e-14
        assert not actual[:, length:].any()


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_no_tensor_of_every_pair_of_positions_is_made(generator):
    length = 2048
    alpha, rho = (x.requires_grad_() for x in torch.randn(2, 1, length, generator=generator))
    value = torch.randn(1, 1, length, 4, generator=generator)
    with Largest() as largest:
        BACKENDS["toeplitz"].forward_trainable(value, alpha, rho).sum().backward()
    assert 0 < largest.elements <= length * 2 * module.BLOCK < length * length / 7


def test_what_cannot_be_trained_is_refused(generator):
    pattern = trained(random_pattern(1, 30, generator))
    with pytest.raises(UnsupportedError, match=r"backend 'fused' cannot run: it has no gradients for key and distance"):
        FrozenHeads.from_patterns(pattern, backend="fused")
    with pytest.raises(UnsupportedError, match="float16 has too little range"):
        FrozenHeads.from_patterns(pattern, dtype=torch.float16)
    options = {"device": torch.device("cpu"), "dtypes": [torch.float32]}
    assert choose_backend("auto", **options, trainable=True) == "toeplitz"
    for logits in ((torch.zeros(4).half(), torch.zeros(4).half()), (torch.zeros(4), torch.zeros(5))):
        with pytest.raises(InputError, match=r"float32 or float64|must share one shape"):
            TrainablePattern(*logits)


# --- logits of any height

HELD = ["far distances", "sloped", "steep", "bump"]
NOT_HELD = ["early keys", "near distances", "sloped step", "first distance", "steep bump"]


def logits(name: str, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return alpha and rho `[1, length]` float64 whose exponentials at unit height float32 cannot hold."""
    noise = torch.randn(2, 1, length, generator=generator, dtype=torch.float64)
    at = torch.arange(length, dtype=torch.float64)
    alpha, rho = noise[0], noise[1] - 0.5 * torch.log1p(at)
    rise = torch.minimum(at, length - at)
    return {
        "early keys": (alpha.masked_fill(at < 10, -110), rho),
        "near distances": (alpha, rho.masked_fill(at < 10, -110)),
        "far distances": (alpha, rho - 300 * (at > length // 2)),
        "sloped": (alpha + 3 * at - 70, rho + 3 * at + 900),
        "steep": (alpha - 40 * at, rho - 40 * at),
        "sloped step": (alpha.masked_fill(at < 10, -110) + 3 * at, rho + 3 * at),
        "bump": (alpha, rho + 150 * rise / length),
        "first distance": (alpha, rho - 200 * (at == 0)),
        "steep bump": (alpha, rho + 900 * rise / length),
    }[name]


@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize("name", HELD)
def test_tables_hold_logits_in_any_gauge(name, dtype, generator):
    """Of every prefix too, which has tables of its own; gradients over the sizes of what cancels in a sharp row."""
    own = [x.to(torch.promote_types(dtype, torch.float32)) for x in logits(name, 300, generator)]
    value, upstream = torch.randn(2, 2, 1, 300, 8, generator=generator).to(dtype)
    for length in (1, 64, 300):
        inputs = [x.detach().clone().requires_grad_() for x in (value[:, :, :length], *own)]
        output, slope = BACKENDS["toeplitz"].forward_trainable(*inputs), upstream[:, :, :length]
        actual = torch.autograd.grad(output, inputs, slope)
        exact = weights(*(x[:, :length] for x in own))
        assert relative(output, exact @ value[:, :, :length].double()) <= BUDGET[dtype]
        assert relative(actual[0], exact.mT @ slope.double()) <= BUDGET[dtype]
        pairs = (slope.double() @ value[:, :, :length].double().mT).abs().sum((0, 1))
        sizes = exact[0] * (pairs + (exact[0] * pairs).sum(-1, keepdim=True))
        size = sizes.sum(0).norm(), torch.stack([sizes.diagonal(-lag).sum() for lag in range(length)]).norm()
        expected = logit_gradients(exact, value[:, :, :length], slope)
        for one, other, most in zip(actual[1:], expected, size, strict=True):
            assert (one[:, :length] - other).norm() <= BUDGET[dtype] * most


@pytest.mark.parametrize("name", NOT_HELD)
def test_what_tables_cannot_hold_is_never_silent(name, generator):
    """Refused when prepared, stored entry by entry when fixed; drifting there is an error on a CPU, NaN elsewhere."""
    alpha, rho = (x.float() for x in logits(name, 400, generator))
    with pytest.raises(UnsupportedError, match=r"cannot hold a pattern as exp\(rho\) times exp\(alpha\).*'reference'"):
        FrozenHeads.from_patterns(TrainablePattern(alpha[0], rho[0]), backend="toeplitz")
    value, exact = torch.randn(1, 1, 400, 4, generator=generator), weights(alpha, rho)
    fixed = FrozenHeads.from_patterns(CompactPattern.from_parameters(alpha, rho))
    assert fixed.tables(torch.float32)["stored"] == (0,)
    assert relative(frozen_attention(value, fixed), exact @ value.double()) <= 1e-6
    drifting = TrainablePattern(torch.zeros(400), torch.zeros(400))
    frozen = FrozenHeads.from_patterns(drifting)
    with torch.no_grad():
        drifting.alpha.copy_(alpha[0])
        drifting.rho.copy_(rho[0])
    with pytest.raises(UnsupportedError, match=r"cannot hold a trained pattern.*drifted.*backend='reference'"):
        frozen_attention(value, frozen)
    both = torch.cat([alpha, 0 * alpha, torch.full_like(alpha, torch.nan)]), torch.cat([rho, 0 * rho, 0 * rho])
    row_scale = compact_tables(*level_logits(*both), torch.float32)[2]
    assert row_scale.isnan().all(1).tolist() == [True, False, True]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rows_of_the_rounded_tables_sum_to_one(dtype, generator):
    """To a rounding of float32, whatever rounding exp(rho) to 16 bits took from them."""
    alpha, rho = logits("bump", 200, generator)
    distance, key_scale, row_scale = (x[0].double() for x in compact_tables(*level_logits(alpha, rho / 9), dtype))
    lag = torch.arange(200)[:, None] - torch.arange(200)
    executed = torch.where(lag >= 0, distance[lag.clamp(min=0)], 0) @ key_scale
    torch.testing.assert_close(executed * row_scale, torch.ones(200).double(), rtol=0, atol=2.0**-22)
