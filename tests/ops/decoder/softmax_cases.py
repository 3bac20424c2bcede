"""Cases of the loss kernel; `run` compares one with float64."""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

IGNORED = -100


@dataclass(frozen=True)
class Case:
    """One problem: vocabularies below, at and beyond a block of columns."""

    vocab: int
    dtype: str = "float32"


CASES = {f"{vocab}-{dtype}": Case(vocab, dtype) for vocab in (50, 4096, 9001) for dtype in ("float32", "bfloat16")}


def run(case: Case, device: str) -> dict:
    """Return the errors of losses (largest) and gradients (relative), and whether other labels do no harm."""
    from saf.ops.decoder.loss_kernel import softmax_gradient

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
    outside = [softmax_gradient(other[1:2], torch.tensor([n], device=device), torch.tensor(1), ignored=IGNORED)
               for n in (-1, case.vocab)]  # fmt: skip
    return {
        "outside": all(loss.isnan().item() for loss in outside) and not other.any().item(),
        "loss": (losses - expected).abs().max().item(),
        "gradient": ((logits - wide.grad).norm() / wide.grad.norm()).item(),
        "ignored": not losses[2].item() and not logits[2].any().item(),
    }
