"""Timing the fit of all heads of a model, of a calibration or of a file."""

import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from saf.bench.freezing.intervention import spread
from saf.bench.harness.timing import Budget, wait_for
from saf.errors import InputError
from saf.fit import fit_kl, fit_with_certificate
from saf.statistics import AttentionStatistics

BAR_SECONDS = 1.0
"""That all 144 heads of a 124M model at 4,096 tokens may take on a GPU."""
BAR_EXCESS = 0.002
"""Nats per row by which a fit may miss the file's reference."""
_ARRAYS = ("eta_abs", "eta_rel", "mean_row_entropy", "reference_fit_kl")


class Goals(NamedTuple):
    """Hold what heads are fitted to: marginals `[F, T]`, row entropy `[F]`; the KL of another fitter, or None."""

    eta_abs: Tensor
    eta_rel: Tensor
    row_entropy: Tensor
    reference: Tensor | None

    def to(self, device: torch.device) -> "Goals":
        """Move to a device, in float64."""
        eta_abs, eta_rel, entropy = (part.to(device, torch.float64) for part in self[:3])
        return Goals(eta_abs, eta_rel, entropy, None if self.reference is None else self.reference.to(eta_abs))

    @classmethod
    def of(cls, statistics: AttentionStatistics) -> "Goals":
        """Take every measured head."""
        live = statistics.measured
        return cls(statistics.eta_abs[live], statistics.eta_rel[live], statistics.row_entropy[live], None)


def read_goals(path: Path) -> Goals:
    """Read a file of statistics; raise InputError when it holds none."""
    if not path.is_file():
        raise InputError(
            f"--statistics: {path} {'is a folder' if path.is_dir() else 'does not exist'}; expected a file that "
            "AttentionStatistics.save wrote, or an .npz"
        )
    if path.suffix != ".npz":
        return Goals.of(AttentionStatistics.load(path))
    with np.load(path, allow_pickle=False) as arrays:
        if missing := [name for name in _ARRAYS[:3] if name not in arrays]:
            raise InputError(f"--statistics: {path} lacks the arrays {', '.join(missing)}")
        length = arrays["eta_abs"].shape[-1]
        found = {name: torch.from_numpy(arrays[name]) for name in _ARRAYS if name in arrays}
    reference = found.get("reference_fit_kl")
    return Goals(
        found["eta_abs"].reshape(-1, length),
        found["eta_rel"].reshape(-1, length),
        found["mean_row_entropy"].flatten(),
        None if reference is None else reference.flatten(),
    )


def measure_fits(goals: Goals, *, repeats: int, device: torch.device, budget: Budget) -> dict[str, Any] | None:
    """Return a row's fields: seconds of fitting all heads and taking their KL, and how good the fits are.

    Stops early when another repetition would not end in time; None when there were none but the first.
    """
    goals = goals.to(device)
    times: list[float] = []
    kl = certificate = None
    while len(times) <= repeats and budget.fits(times[-1] if times else 0):
        wait_for(device)
        began = time.perf_counter()
        pattern, certificate = fit_with_certificate(goals.eta_abs, goals.eta_rel)
        kl = fit_kl(pattern, *goals[:3])
        wait_for(device)
        times.append(time.perf_counter() - began)
    if len(times) < 2 or kl is None or certificate is None:
        return None
    warm = spread(times[1:])
    excess = None if goals.reference is None else (kl - goals.reference).max().item()
    return {
        "heads": len(kl),
        "length": goals.eta_abs.shape[-1],
        "repeats": len(times) - 1,
        "seconds": warm["median"],
        "spread": warm,
        "first_use_seconds": times[0] - warm["median"],
        "sweeps": {"mean": certificate.sweeps.double().mean().item(), "max": int(certificate.sweeps.max())},
        "not_converged": int((~certificate.converged).sum()),
        "worst_kl": kl.max().item(),
        "excess_kl": excess,
        "bar_seconds": BAR_SECONDS if _is_the_bars(kl, goals.eta_abs) else None,
        "bar_excess_kl": None if excess is None else BAR_EXCESS,
    }


def _is_the_bars(kl: Tensor, eta: Tensor) -> bool:
    return (len(kl), eta.shape[-1]) == (144, 4096) and eta.device.type == "cuda"
