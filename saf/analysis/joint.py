"""What two head sets cost when each is frozen as a whole, before any further training (paper, appendix A.3)."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from saf.adapters import adapter_for
from saf.analysis.costs import CostMeter
from saf.calibration.capture import Batch, check_heads, read_batches
from saf.evaluate.paired import paired_delta_ppl
from saf.freezing.config import FreezeConfig
from saf.freezing.recipe import make_patterns
from saf.heads import HeadSet
from saf.machine.stopwatch import Stopwatch
from saf.statistics import AttentionStatistics


@dataclass(frozen=True, kw_only=True)
class JointCost:
    """Records of `paired_delta_ppl` (percent, with 95% intervals over windows), and how many heads the sets share."""

    first: dict[str, Any]
    second: dict[str, Any]
    difference: dict[str, Any]
    """The second set's perplexity relative to the first's."""
    overlap: int


def joint_cost(
    model: nn.Module,
    batches: Iterable[Batch],
    statistics: AttentionStatistics,
    windows: Tensor,
    first: HeadSet,
    second: HeadSet,
    *,
    config: FreezeConfig | None = None,
    batch_size: int = 8,
) -> JointCost:
    """Freeze each set in a copy of the model and measure the same held-out windows `[W, T + 1]`.

    `batches` and `statistics` are those of the calibration; `config` says which pattern, storage, fitter and backend.
    Heads count whatever their fit KL: the sets are taken as given. Raises InputError for heads that are not live.
    """
    config = config or FreezeConfig()
    check_heads(adapter_for(model), first | second)
    made = make_patterns(model, read_batches(batches), statistics, first | second, config, Stopwatch())
    patterns = {head: each.pattern for head, each in made.items()}
    meter = CostMeter(model, windows, batch_size=batch_size)
    one, other = (meter.log_probs(heads, patterns, backend=config.backend) for heads in (first, second))
    return JointCost(
        first=paired_delta_ppl(meter.baseline, one),
        second=paired_delta_ppl(meter.baseline, other),
        difference=paired_delta_ppl(one, other),
        overlap=len(first & second),
    )
