"""What a score reads beside the statistics, gathered for the whole recipe."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from saf.calibration.capture import Batch
from saf.calibration.gates import gate_gradients
from saf.calibration.gradients import QKGradient
from saf.calibration.outputs import head_outputs
from saf.scores import Score, needed_by
from saf.statistics import AttentionStatistics


def collect_for_score(name: str | Score, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what `calibrate(collect=...)` must keep for a score, unless what it serves is given already."""
    return ("mean_rows",) if "outputs" in needed_by(name) and "outputs" not in given else ()


def gather(
    model: nn.Module,
    ids: list[Tensor],
    statistics: AttentionStatistics,
    name: str | Score,
    *,
    given: Mapping[str, Any],
    heldout: Iterable[Batch] | None,
) -> dict[str, Any]:
    """Return what a score needs: from `given`, or measured here where sequences suffice.

    `gates` are taken on the calibration sequences (paper, appendix C), `outputs` on `heldout` ones. What only training
    can measure, and `outputs` without held-out sequences, is left to `score` to miss.
    """
    found: dict[str, Any] = {}
    for key in needed_by(name):
        if key in given:
            found[key] = given[key].scores() if isinstance(given[key], QKGradient) else given[key]
        elif key == "gates":
            found[key] = gate_gradients(model, ids)
        elif key == "outputs" and heldout is not None:
            found[key] = head_outputs(model, heldout, statistics)
    return found
