"""Logits of any height: tables hold every pattern that their type can, and what they cannot hold is never silent."""

import pytest
import torch
from torch import Tensor

from saf.errors import UnsupportedError
from saf.ops import BACKENDS, FrozenHeads, TrainablePattern, frozen_attention
from saf.ops.toeplitz.tables import balance, compact_tables
from saf.patterns import CompactPattern

BUDGET = {torch.float64: 1e-12, torch.float32: 2.0**-20, torch.bfloat16: 3 * 2.0**-8}
"""Relative L2 errors: 16 roundings of float32, three of bfloat16, and of float64 logits of a hundred nats."""
HELD = ["far distances", "sloped", "steep", "bump"]
NOT_HELD = ["early keys", "near distances", "sloped step", "first key", "first distance", "steep bump"]


def logits(name: str, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return alpha and rho `[length]` float64 whose exponentials at unit height float32 cannot hold."""
    noise = torch.randn(2, length, generator=generator, dtype=torch.float64)
    at = torch.arange(length, dtype=torch.float64)
    alpha, rho = noise[0], noise[1] - 0.5 * torch.log1p(at)
    rise = torch.minimum(at, length - at)
    return {
        "early keys": (alpha.masked_fill(at < 10, -110), rho),
        "first half": (alpha - 110 * (at < length // 2), rho),
        "near distances": (alpha, rho.masked_fill(at < 10, -110)),
        "far distances": (alpha, rho - 300 * (at > length // 2)),
        "both": (alpha - 60 * (at < 5), rho - 60 * (at < 5)),
        "sloped": (alpha + 3 * at - 70, rho + 3 * at + 900),
        "steep": (alpha - 40 * at, rho - 40 * at),
        "sloped step": (alpha.masked_fill(at < 10, -110) + 3 * at, rho + 3 * at),
        "bump": (alpha, rho + 150 * rise / length),
        "first key": (alpha - 200 * (at == 0), rho),
        "first distance": (alpha, rho - 200 * (at == 0)),
        "steep bump": (alpha, rho + 900 * rise / length),
    }[name]


def weights(alpha: Tensor, rho: Tensor) -> Tensor:
    """P of Eq. (3), `[T, T]`, row by row."""
    length = len(alpha)
    rows = [(alpha[: i + 1] + rho[: i + 1].flip(0)).softmax(0) for i in range(length)]
    return torch.stack([torch.nn.functional.pad(row, (0, length - len(row))) for row in rows])


def summed_sizes(value: Tensor, alpha: Tensor, rho: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of Eq. (S.17), its first form, over the sizes of their terms, which cancel in a sharp row."""
    pairs = (upstream.double() @ value.mT).abs().sum((0, 1))
    shares = weights(alpha, rho)
    sizes = shares * (pairs + (shares * pairs).sum(-1, keepdim=True))
    return sizes.sum(0), torch.stack([sizes.diagonal(-lag).sum() for lag in range(len(alpha))])


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize("length", [60, 300])
@pytest.mark.parametrize("name", HELD)
def test_outputs_and_gradients_match_the_dense_form(name, length, dtype, generator):
    wide = torch.promote_types(dtype, torch.float32)
    drawn = [x.to(wide) for x in logits(name, length, generator)]
    value, upstream = torch.randn(2, 2, 1, length, 8, generator=generator).to(dtype)
    found = [value.requires_grad_(), *(x[None].requires_grad_() for x in drawn)]
    output = BACKENDS["toeplitz"].forward_trainable(*found)
    output.backward(upstream)
    exact = [x.detach().double().requires_grad_() for x in (value, *drawn)]
    expected = weights(*exact[1:]) @ exact[0]
    expected.backward(upstream.double())
    assert relative(output, expected) <= BUDGET[dtype]
    assert relative(value.grad, exact[0].grad) <= BUDGET[dtype]
    for one, other, size in zip(
        found[1:], exact[1:], summed_sizes(*(x.detach() for x in exact), upstream), strict=True
    ):
        assert (one.grad[0] - other.grad).norm() <= BUDGET[dtype] * size.norm()


@pytest.mark.parametrize("name", ["far distances", "sloped"])
def test_finite_differences_agree(name, generator):
    drawn = logits(name, 20, generator)
    value = torch.randn(1, 1, 20, 2, generator=generator, dtype=torch.float64)
    arguments = [x.requires_grad_() for x in (value, *(x[None] for x in drawn))]
    # Logits of a hundred nats are known to 1e-14: a step of 1e-5 keeps that from showing.
    assert torch.autograd.gradcheck(
        lambda *x: BACKENDS["toeplitz"].forward_trainable(*x), arguments, eps=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("name", HELD)
def test_every_prefix_is_executed(name, generator):
    """Shorter inputs have tables of their own."""
    alpha, rho = (x.float() for x in logits(name, 129, generator))
    value = torch.randn(1, 1, 129, 4, generator=generator)
    exact = weights(alpha.double(), rho.double()) @ value.double()
    for length in (1, 2, 9, 11, 64):
        found = BACKENDS["toeplitz"].forward_trainable(value[:, :, :length], alpha[None], rho[None])
        assert relative(found, exact[:, :, :length]) <= BUDGET[torch.float32]


@pytest.mark.parametrize("name", HELD)
def test_fixed_patterns_are_convolved(name, generator):
    alpha, rho = logits(name, 200, generator)
    frozen = FrozenHeads.from_patterns(CompactPattern.from_parameters(alpha, rho)[None], backend="toeplitz")
    assert frozen.tables(torch.float32)["stored"] == ()
    value = torch.randn(2, 1, 200, 8, generator=generator)
    exact = weights(alpha, rho)
    assert relative(frozen_attention(value, frozen), exact @ value.double()) <= 1e-6
    assert relative(frozen_attention(value, frozen, rows=3), (exact @ value.double())[:, :, -3:]) <= 1e-6


@pytest.mark.parametrize("name", NOT_HELD)
def test_what_tables_cannot_hold_is_never_silent(name, generator):
    """Refused when prepared; when it drifts there, an error on a CPU, and NaN in the tables of that head alone."""
    alpha, rho = (x.float() for x in logits(name, 400, generator))
    with pytest.raises(UnsupportedError, match="cannot hold a pattern"):
        FrozenHeads.from_patterns(TrainablePattern(alpha, rho), backend="toeplitz")
    drifting = TrainablePattern(torch.zeros(400), torch.zeros(400))
    frozen = FrozenHeads.from_patterns(drifting, backend="toeplitz")
    value = torch.randn(1, 1, 400, 4, generator=generator)
    frozen_attention(value, frozen)
    with torch.no_grad():
        drifting.alpha.copy_(alpha)
        drifting.rho.copy_(rho)
    with pytest.raises(UnsupportedError, match=r"cannot hold a trained pattern.*drifted.*backend='reference'"):
        frozen_attention(value, frozen)
    row_scale = compact_tables(
        *balance(torch.stack([alpha, rho]), torch.stack([rho, torch.zeros(400)])), torch.float32
    )[2]
    assert row_scale[0].isnan().all()
    exact = [x.double()[None] for x in (alpha, rho)]
    found = BACKENDS["toeplitz"].forward_trainable(value.double(), *exact)
    assert relative(found, weights(exact[0][0], exact[1][0]) @ value.double()) <= BUDGET[torch.float64]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rows_of_the_rounded_tables_sum_to_one(dtype, generator):
    """To a rounding of float32, whatever rounding exp(rho) to 16 bits took from them."""
    alpha, rho = logits("bump", 200, generator)
    distance, key_scale, row_scale = (
        x[0].double() for x in compact_tables(*balance(alpha[None], rho[None] / 9), dtype)
    )
    lag = torch.arange(200)[:, None] - torch.arange(200)
    executed = torch.where(lag >= 0, distance[lag.clamp(min=0)], 0) @ key_scale
    torch.testing.assert_close(executed * row_scale, torch.ones(200).double(), rtol=0, atol=2.0**-22)


def test_patterns_that_a_dtype_cannot_hold_are_stored_entry_by_entry():
    """exp(-25) is nothing in float16, whose smallest number is exp(-16.6)."""
    soft = CompactPattern.from_parameters(torch.zeros(64), -0.1 * torch.arange(64))
    first = torch.arange(64) == 0
    deep = CompactPattern.from_parameters(*(torch.where(first, 0.0, depth) for depth in (-25.0, -50.0)))
    frozen = FrozenHeads.from_patterns([soft, deep], backend="toeplitz", dtype=(torch.float16, torch.bfloat16))
    assert [frozen.tables(dtype)["stored"] for dtype in (torch.float16, torch.bfloat16)] == [(1,), ()]
    assert "stored as T x T for float16" in repr(frozen)


def test_logits_that_are_not_finite_are_not_held(generator):
    alpha = torch.zeros(2, 30)
    alpha[0, 4] = torch.nan
    row_scale = compact_tables(*balance(alpha, torch.zeros(2, 30)), torch.float32)[2]
    assert row_scale.isnan().all(1).tolist() == [True, False]
