"""Cases of prompts and steps through the recurrent state, and the float64 answer they are held against."""

import dataclasses
import itertools

import torch

from saf.ops import linear as op
from saf.ops.linear import RecurrentState, exact_tables, fill_state, linear_tables, step_state
from tests.ops.exponential_patterns import exponential_patterns

TOLERANCE = {"float32": 1e-6, "bfloat16": 4.5e-3}


@dataclasses.dataclass(frozen=True)
class Case:
    """A prompt, then steps of some rows each; at last some rows are taken back and computed again."""

    prompt: int = 200
    steps: tuple[int, ...] = (1, 3, 16, 1)
    back: int = 0
    band: int = 64
    dim: int = 16
    heads: int = 2
    padded: bool = False
    moves: bool = False
    dtype: str = "float32"
    poles: int = 6


CASES = {
    "three-tiles": Case(band=128, prompt=300),
    "one-tile": Case(band=1, prompt=70),
    "from-nothing": Case(prompt=0, steps=(1, 2, 16, 16, 16, 16)),
    "one-token": Case(prompt=1, steps=(1, 1)),
    "chunk-end": Case(prompt=191, steps=(1, 1, 1, 1), moves=True),
    "whole-chunks": Case(prompt=192, steps=(1, 1)),
    "padded": Case(prompt=150, padded=True, moves=True, band=128),
    "padded-short": Case(prompt=40, padded=True, steps=(3, 1)),
    "three-heads": Case(heads=3, prompt=130, steps=(3, 1)),
    "taken-back-padded": Case(prompt=250, steps=(16, 16), back=31, band=128, padded=True),
    "many-rows": Case(prompt=150, steps=(100, 1, 70)),
    "D60": Case(dim=60, prompt=129, steps=(2, 1)),
    "poles-32": Case(poles=20, prompt=260, steps=(1,)),
    "many-stretches": Case(prompt=900, steps=(1,), dim=64),
    "bfloat": Case(dtype="bfloat16", dim=64, prompt=300, band=128),
}


def run(case: Case, device: str, *, plain: bool = False) -> list[str] | None:
    """Return the rows whose error is above the limit; on a CPU the kernels run, with `plain` what runs there else."""
    if device == "cpu" and not plain:
        return None if case.dtype == "bfloat16" else _interpreted(case)
    dtype, slots, total = getattr(torch, case.dtype), case.heads, case.prompt + sum(case.steps)
    pattern = exponential_patterns(slots, max(total, case.band) + 3, band=case.band, poles=case.poles)
    tables, keys, rows = linear_tables(exact_tables(pattern.singles(), torch.device(device)), dtype)
    x = torch.randn(2, total, slots, case.dim, generator=torch.Generator().manual_seed(0))
    x = x.to(device, dtype).transpose(1, 2)
    pad = torch.tensor([0, 11], device=device) if case.padded else None
    rest = tables, keys
    want = exact(pattern, x.double().cpu(), 11 * case.padded)
    state = RecurrentState.empty(x, (slots, tables[0].shape[1], 64, tables[1].shape[1]))[:2]
    if case.prompt:
        for part in state:
            part.fill_(3.0)  # what an earlier sequence left
        fill_state(x[:, :, : case.prompt], *rest, pad, *state)
    wrong, ends = [], [*itertools.accumulate(case.steps, initial=case.prompt)]
    spans = [*map(slice, ends, ends[1:]), *([slice(total - case.back, total)] if case.back else [])]
    for span in spans:
        first = torch.tensor(span.start, device=device) if case.moves else None
        result = step_state(x[:, :, span], *rest, rows, first, span.start, pad, *state).double().cpu()
        error = ((result - want[:, :, span]).norm() / want[:, :, span].norm()).item()
        wrong += [f"error {error:.2e} in {span}"] * (not error <= TOLERANCE[case.dtype])
    return wrong


def exact(pattern, x: torch.Tensor, pad: int) -> torch.Tensor:
    """Return P V of two sequences, the second padded."""
    total, want = x.shape[2], torch.zeros_like(x)
    for row, first in enumerate((0, pad)):
        want[row, :, first:] = pattern.dense()[:, : total - first, : total - first] @ x[row, :, first:]
    return want


def _interpreted(case: Case) -> list[str]:
    """Run the kernels themselves: on a CPU the operators take plain PyTorch."""
    before = op.uses_triton
    op.uses_triton = lambda device, dtype: True
    try:
        return run(case, "cpu", plain=True) or []
    finally:
        op.uses_triton = before
