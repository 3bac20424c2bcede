"""How heads are ranked for freezing: one score a file, lowest frozen first."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from saf.errors import InputError, did_you_mean, shown
from saf.scores.forward_kl import forward_kl
from saf.scores.gate_taylor import gate_taylor
from saf.scores.gradient_veto import gradient_veto
from saf.scores.output_magnitude import output_magnitude
from saf.scores.outputs import HeadOutputs
from saf.scores.qk_gradient import qk_gradient
from saf.scores.random import random
from saf.scores.rank_sum import rank_sum
from saf.scores.redundancy import redundancy
from saf.scores.relative_output_change import relative_output_change
from saf.scores.residual_cosine import residual_cosine
from saf.scores.variance import variance
from saf.statistics import AttentionStatistics

Score = Callable[..., Tensor]
"""`(statistics, **needed)` to a tensor `[L, H]`."""

SCORES: dict[str, Score] = {
    "variance": variance,
    "forward_kl": forward_kl,
    "qk_gradient": qk_gradient,
    "rank_sum": rank_sum,
    "gradient_veto": gradient_veto,
    "output_magnitude": output_magnitude,
    "redundancy": redundancy,
    "residual_cosine": residual_cosine,
    "relative_output_change": relative_output_change,
    "gate_taylor": gate_taylor,
    "random": random,
}

HOW_TO_COLLECT = {
    "gradient": "call saf.calibration.QKGradient(model).update() after every backward pass, then give its .scores()",
    "outputs": (
        "call calibrate(..., collect=('mean_rows',)), then saf.calibration.head_outputs(model, heldout, statistics); "
        "or give freeze_ heldout="
    ),
    "gates": "call saf.calibration.gate_gradients(model, batches)",
}

__all__ = ["HOW_TO_COLLECT", "SCORES", "HeadOutputs", "Score", "needed_by", "score", "score_name"]


def score(statistics: AttentionStatistics, name: str | Score = "variance", **needed: Any) -> Tensor:
    """Return the score `[L, H]` by which heads are frozen in ascending order; NaN for heads already frozen.

    `name` is one of `SCORES`, or a function of the statistics. `needed` is what the score reads beside them:
    `gradient`, `outputs`, `gates`, or `seed` of `random` (a number or a `torch.Generator`). Raises InputError for an
    unknown name, and saying how to collect what is missing.
    """
    function = _function(name)
    parameters = _needed(function)
    missing = [key for key, required in parameters.items() if required and needed.get(key) is None]
    if missing:
        advice = "; ".join(HOW_TO_COLLECT.get(key, f"give {key}=") for key in missing)
        raise InputError(f"score {score_name(name)!r} needs {', '.join(missing)}: {advice}")
    if isinstance(name, str) and (unknown := set(needed) - set(parameters)):
        raise InputError(f"score {name!r} takes {sorted(parameters) or 'the statistics alone'}; got {sorted(unknown)}")
    values = function(statistics, **needed)
    shape = list(statistics.variance.shape)
    if not isinstance(values, Tensor) or list(values.shape) != shape:
        raise InputError(f"score {score_name(name)!r} must be one number a head, a Tensor {shape}; got {shown(values)}")
    values = torch.where(statistics.measured, values.double().cpu(), torch.nan)
    lacking = (values.isnan() & statistics.measured).nonzero().tolist()
    if lacking and isinstance(name, str):
        raise InputError(f"score {name!r} has no value for live heads {lacking[:4]}; measure what it needs for all")
    return values


def needed_by(name: str | Score) -> tuple[str, ...]:
    """Return the names of what a score cannot do without, beside the statistics."""
    return tuple(key for key, required in _needed(_function(name)).items() if required)


def score_name(name: str | Score) -> str:
    """Return the name under which reports show a score."""
    return name if isinstance(name, str) else getattr(name, "__name__", type(name).__name__)


def _function(name: str | Score) -> Score:
    """Return a score's function; raise InputError for an unknown name."""
    if callable(name):
        return name
    if name not in SCORES:
        expected = f"expected one of {sorted(SCORES)}, or a function of the statistics"
        raise InputError(f"unknown score {name!r}; {expected}{did_you_mean(name, SCORES)}")
    return SCORES[name]


def _needed(function: Score) -> Mapping[str, bool]:
    """Return each keyword-only argument, and whether it has no default."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default is p.empty for p in parameters if p.kind is p.KEYWORD_ONLY}
