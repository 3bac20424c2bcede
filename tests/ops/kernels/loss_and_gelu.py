"""Cases of the kernels around a decoder's layers, GELU and the loss; `run` compares one with float64."""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from tests.ops.layers import relative

IGNORED = -100


@dataclass(frozen=True)
class Gelu:
    """Values of a scale, and how many; counts below, at and beyond a program's block."""

    count: int
    dtype: str = "float16"
    scale: float = 3.0


@dataclass(frozen=True)
class Loss:
    """Rows of logits: vocabularies below, at and beyond a block of columns."""

    vocab: int
    dtype: str = "float32"


CASES: dict[str, Gelu | Loss] = {
    "few": Gelu(7),
    "beyond": Gelu(5000),
    "tails": Gelu(4096, scale=30.0),
    "bfloat16": Gelu(5000, dtype="bfloat16"),
    **{
        f"{vocab}-{dtype}": Loss(vocab, dtype)
        for vocab, dtype in ((50, "float32"), (4096, "bfloat16"), (9001, "float32"))
    },
}


def run(case: Gelu | Loss, device: str) -> list[str]:
    """Return which limits break; the interpreter truncates to bfloat16."""
    checks = _gelu(case, device) if isinstance(case, Gelu) else _loss(case, device)
    return [name for name, holds in checks.items() if not holds]


def _gelu(case: Gelu, device: str) -> dict[str, bool]:
    """Errors are those of rounding the exact result once."""
    from saf.ops.loss_and_gelu_kernels import gelu, gelu_backward

    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, case.dtype)
    x = (case.scale * torch.randn(case.count, generator=generator, device=device)).to(dtype)
    gradient = torch.randn(case.count, generator=generator, device=device).to(dtype)
    wide = x.double().requires_grad_()
    expected = F.gelu(wide)
    expected.backward(gradient.double())
    slope = gradient.clone()
    value, again = gelu(x), gelu_backward(x, slope)
    checks = {"the value of the backward pass differs": torch.equal(value, again)}
    for name, actual, exact in (("value", value, expected.detach()), ("gradient", slope, wide.grad)):
        limit = 6e-3 if case.dtype == "bfloat16" else 1.1 * relative(exact.to(dtype), exact) + 1e-5
        checks[f"{name} {relative(actual, exact):.2e}"] = relative(actual, exact) < limit
    return checks


def _loss(case: Loss, device: str) -> dict[str, bool]:
    """Losses to float32's rounding, gradients to their dtype's."""
    from saf.ops.loss_and_gelu_kernels import softmax_gradient

    generator = torch.Generator(device).manual_seed(0)
    logits = (4 * torch.randn(5, case.vocab, generator=generator, device=device)).to(getattr(torch, case.dtype))
    labels = torch.tensor([0, case.vocab - 1, IGNORED, 17, 17], device=device)
    wide = logits.double().requires_grad_()
    expected = F.cross_entropy(wide, labels, reduction="none")
    (expected.sum() / 4).backward()
    strided = torch.stack([labels, labels + 1], dim=1)[:, 0]
    losses = softmax_gradient(logits, strided, torch.tensor(4, device=device), ignored=IGNORED)
    # Labels that are no columns: the row before and the row after stay as they are.
    other = torch.zeros(3, case.vocab, device=device, dtype=logits.dtype)
    outside = [
        softmax_gradient(other[1:2], torch.tensor([n], device=device), torch.tensor(1, device=device), ignored=IGNORED)
        for n in (-1, case.vocab)
    ]
    return {
        "labels outside": all(loss.isnan().item() for loss in outside) and not other.any().item(),
        "loss": (losses - expected).abs().max().item() < 1e-5,
        "gradient": relative(logits, wide.grad) < (6e-3 if case.dtype == "bfloat16" else 1e-6),
        "ignored": not losses[2].item() and not logits[2].any().item(),
    }
