"""`score` scores heads for freezing, lowest first, by one of the functions in `SCORES`, with the paper's equations.

A new score is one function of the statistics under `@head_score`. Its further inputs are keyword-only arguments
without a default: tensors `[L, H, ...]` that calibration collects, by their names in `saf.calibration.COLLECTIONS`, or
names of `HOW_TO_MEASURE`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from saf.errors import InputError, check_name, shown
from saf.statistics import AttentionStatistics, required_keywords

Score = Callable[..., Tensor]  # `(statistics, **inputs)` to one number a head, `[L, H]`
SCORES: dict[str, Score] = {}  # by name, in the order of the paper
# Inputs of scores that calibration does not measure, and how to get them.
HOW_TO_MEASURE = {
    "gradient": "call saf.QKGradient(model).update() after every backward pass, then pass its .scores()",
    "outputs": (
        "call calibrate(..., collect=('mean_rows',)), then saf.head_outputs(model, heldout, statistics); "
        "or pass heldout= to freeze_"
    ),
    "gates": "call saf.gate_gradients(model, batches)",
}


def head_score(function: Score) -> Score:
    """Add a score to `SCORES` by the name of its function; the first line of its docstring describes it.

    A function replaces one of the same module, as where a notebook runs a cell again. Raises InputError where the name
    is another module's.
    """
    name = function.__name__
    if name in SCORES and SCORES[name].__module__ != function.__module__:
        raise InputError(f"score {name!r} exists in {SCORES[name].__module__}: rename the function")
    SCORES[name] = function
    return function


def score(statistics: AttentionStatistics, name: str | Score = "variance", **inputs: Any) -> Tensor:
    """Score heads, `[L, H]`: heads are frozen in ascending order; NaN for heads that are frozen already.

    `name` is one of `SCORES`, or a function of the statistics. `inputs` are the score's further inputs: `gradient`,
    `outputs`, `gates`, or `seed` of `random`; tensors that calibration collected are read from the statistics. Raises
    InputError for an unknown name, missing inputs, and live heads without a value.
    """
    function, label, required = _function(name), score_name(name), required_inputs(name)
    inputs = {key: value for key, value in inputs.items() if value is not None}
    for key in required:
        if key in statistics.collected:
            inputs.setdefault(key, statistics.by_head(key))
    if missing := [key for key in required if key not in inputs]:
        raise InputError(f"score {label!r} needs {', '.join(missing)}: {_how_to_measure(missing)}")
    values, shape = function(statistics, **inputs), statistics.variance.shape
    # Checked, as a number a layer, [L, 1], would broadcast: every head of a layer would score the same.
    if not isinstance(values, Tensor) or values.shape != shape:
        raise InputError(f"score {label!r} must be one number a head, a Tensor {list(shape)}; got {shown(values)}")
    values = torch.where(statistics.measured, values.double().cpu(), torch.nan)
    # A function of the user's own may leave heads out by NaN; of a named score an input was measured for fewer heads.
    without = (values.isnan() & statistics.measured).nonzero().tolist()
    if without and isinstance(name, str):
        remedy = _how_to_measure(required) or "its function must return numbers, got NaN"
        raise InputError(f"score {name!r} has no value for live heads {without[:4]}: {remedy}")
    return values


def required_inputs(name: str | Score) -> tuple[str, ...]:
    """Return the names of what a score reads beyond the statistics; raise InputError where they are positional."""
    function = _function(name)
    further = [*signature(function).parameters.values()][1:]
    if wrong := [
        each.name for each in further if each.kind is each.POSITIONAL_OR_KEYWORD and each.default is each.empty
    ]:
        raise InputError(f"score {score_name(name)!r} must take {', '.join(wrong)} by keyword: put *, before them")
    return required_keywords(function)


def score_name(name: str | Score) -> str:
    """Return the name of a score in reports."""
    return name if isinstance(name, str) else getattr(name, "__name__", type(name).__name__)


def _function(name: str | Score) -> Score:
    if callable(name):
        return name
    check_name("score", name, SCORES)
    return SCORES[name]


def _how_to_measure(inputs: Iterable[str]) -> str:
    collected = "pass it, or call calibrate(..., collect=({!r},)) for a name in saf.calibration.COLLECTIONS"
    return "; ".join(HOW_TO_MEASURE.get(key, collected.format(key)) for key in inputs)


# --- the scores


@dataclass(frozen=True, kw_only=True)
class HeadOutputs:
    """Outputs of heads on held-out sequences, from `saf.head_outputs`; float64, NaN for frozen heads.

    The S samples are pairs of a sequence and a query position. C `[S, d]` is a head's contribution to the residual
    stream, D its change where the mean pattern replaces its own, O the layer's output and Y the stream after it.
    """

    gram: Tensor  # `[L, H, H]` inner products of the C of two heads of a layer, summed over samples and channels
    change: Tensor  # `[L, H, S]` norm of D
    residual_change: Tensor  # `[L, H, S]` inner product of Y and D
    residual: Tensor  # `[L, S]` norm of Y
    output: Tensor  # `[L, S]` norm of O
    hidden_size: int  # d, channels of the residual stream


@head_score
def variance(statistics: AttentionStatistics) -> Tensor:
    """Squared error per entry of the best fixed pattern."""
    return statistics.variance  # Eq. (1)


@head_score
def forward_kl(statistics: AttentionStatistics) -> Tensor:
    """Row-averaged KL from each sequence's pattern to the mean pattern, nats."""
    return statistics.forward_kl  # Eq. (2)


@head_score
def qk_gradient(statistics: AttentionStatistics, *, gradient: Tensor) -> Tensor:
    """Running average of relative query and key gradient norms, `QKGradient.scores()`."""
    return _live(statistics, gradient)  # Eqs. (8) and (9)


@head_score
def rank_sum(statistics: AttentionStatistics, *, gradient: Tensor) -> Tensor:
    """Sum of the ranks by variance and by Q/K gradient (appendix A.3)."""
    return ranks(statistics.variance) + ranks(_live(statistics, gradient))


@head_score
def gradient_veto(statistics: AttentionStatistics, *, gradient: Tensor) -> Tensor:
    """Rank by variance; heads whose Q/K gradient exceeds the median go last (appendix A.3)."""
    gradient = _live(statistics, gradient)
    veto = (gradient > gradient.nanquantile(0.5)).double().masked_fill(gradient.isnan(), torch.nan)
    # L H is above every rank: vetoed heads go behind all others, and stay in the order of their variance.
    return ranks(statistics.variance) + gradient.numel() * veto


@head_score
def output_magnitude(statistics: AttentionStatistics, *, outputs: HeadOutputs) -> Tensor:
    """Root mean square of the entries of each head's contribution to the residual stream (appendix A.3)."""
    squares = outputs.gram.diagonal(dim1=-2, dim2=-1)
    num_samples = outputs.residual.shape[-1]
    return (squares / (num_samples * outputs.hidden_size)).sqrt()  # |c|, over the root of its entries


@head_score
def redundancy(statistics: AttentionStatistics, *, outputs: HeadOutputs) -> Tensor:
    """Minus the largest cosine between a head's contribution and another live head's of its layer.

    A head without output has cosine 0 to all; a layer's only live head scores 1, as if opposed to all.
    """
    norm = outputs.gram.diagonal(dim1=-2, dim2=-1).sqrt()
    product = norm[..., :, None] * norm[..., None, :]
    cosine = torch.where(product == 0, 0.0, outputs.gram / product).clamp(-1, 1)
    # -1 takes a head itself, and frozen ones, out of the maximum.
    same = torch.eye(cosine.shape[-1], dtype=torch.bool)
    largest = cosine.masked_fill(same | cosine.isnan(), -1).amax(-1)
    return torch.where(norm.isnan(), torch.nan, -largest)  # Eq. (10)


@head_score
def residual_cosine(statistics: AttentionStatistics, *, outputs: HeadOutputs) -> Tensor:
    """Mean over samples of 1 - cos(Y, Y + D); a residual stream of norm 0 counts as unchanged."""
    before, change, inner = outputs.residual[:, None], outputs.change, outputs.residual_change
    after = (before.square() + 2 * inner + change.square()).clamp(min=0).sqrt()
    product, aligned = before * after, before.square() + inner
    turned = ((before * change).square() - inner.square()).clamp(min=0)
    # (|Y|²|D|² - <Y,D>²) / (p (p + <Y,Y+D>)) with p = |Y||Y+D|: unlike 1 - cos it loses no digits where D is small.
    # For opposed vectors its denominator vanishes, and the direct form loses nothing.
    value = torch.where(aligned > 0, turned / (product * (product + aligned)), 1 - aligned / product)
    return torch.where(product == 0, 0.0, value).mean(-1)  # Eq. (11)


@head_score
def relative_output_change(statistics: AttentionStatistics, *, outputs: HeadOutputs) -> Tensor:
    """Mean over samples of the norm of a head's change over that of its layer's attention output."""
    return (outputs.change / outputs.output[:, None].clamp(min=1e-8)).mean(-1)  # Eq. (12)


@head_score
def gate_taylor(statistics: AttentionStatistics, *, gates: Tensor) -> Tensor:
    """Importance of a gate on the head's output, from `gate_gradients`, over the norm of its layer; 0 for norm 0."""
    gates = _per_head(statistics, "gates", gates)
    norm = gates.nan_to_num(0.0).norm(dim=1, keepdim=True)
    return torch.where(norm == 0, gates * 0, gates / norm)  # Eq. (19)


@head_score
def random(statistics: AttentionStatistics, *, seed: int = 0) -> Tensor:
    """Uniform random numbers, the control; `select(..., match=...)` takes as many from each layer as another set."""
    # Frozen heads draw too, so that a head's number does not depend on earlier events.
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(statistics.variance.shape, generator=generator, dtype=torch.float64)


def ranks(values: Tensor) -> Tensor:
    """Rank heads over the whole model, from 0 in ascending order, ties by layer and head; NaN stays NaN."""
    flat = values.double().flatten()
    rank = flat.argsort(stable=True).argsort().double()  # NaN sorts last, so ranks of the others have no gaps
    return rank.masked_fill_(flat.isnan(), torch.nan).view(values.shape)


def _per_head(statistics: AttentionStatistics, name: str, values: Tensor) -> Tensor:
    """Return an input in float64 on the CPU; raise InputError for another shape, which might broadcast."""
    if values.shape != (shape := statistics.variance.shape):
        raise InputError(f"{name} must be one number a head, {list(shape)}; got {list(values.shape)}")
    return values.double().cpu()


def _live(statistics: AttentionStatistics, gradient: Tensor) -> Tensor:
    """Return the Q/K gradient of measured heads, NaN elsewhere: ranks and medians are over these heads alone."""
    return _per_head(statistics, "gradient", gradient).masked_fill(~statistics.measured, torch.nan)
