"""What two head sets cost when each is frozen as a whole, before any further training (paper, appendix A.3)."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from torch import Tensor, nn

from saf.adapters import adapter_for
from saf.analysis.costs import CostMeter
from saf.analysis.model import SILENT, ModelSettings, Record, Watch
from saf.arguments import at_least
from saf.calibration import calibrate
from saf.calibration.capture import Batch, check_heads, read_batches
from saf.evaluate.paired import paired_delta_ppl
from saf.freezing.config import FreezeConfig
from saf.freezing.recipe import make_patterns
from saf.heads import Head, HeadSet
from saf.machine.stopwatch import Stopwatch
from saf.records import paper
from saf.records.quantities import MISSING, signed
from saf.records.table import Part, Table
from saf.settings import documented
from saf.statistics import AttentionStatistics


@documented
@dataclass(frozen=True, kw_only=True)
class JointCost(ModelSettings):
    """Freeze two head sets, each as a whole: their immediate costs on the same windows, and their overlap."""

    first: tuple[Head, ...]
    """Heads; on the command line 0:3 1:11 or a file: JSON pairs, or events.jsonl."""
    second: tuple[Head, ...]
    """The other set, written the same way."""
    windows: Annotated[int, at_least(1)] = 16
    """Windows of the controller partition to measure on."""


def measure(settings: JointCost, watch: Watch = SILENT) -> dict[str, Any]:
    """Measure, and return the record."""
    opened = settings.open()
    first, second = HeadSet(settings.first), HeadSet(settings.second)
    check_heads(adapter_for(opened.model), first | second)
    ids, windows = opened.calibration(), opened.windows(settings.windows)
    with opened.autocast:
        statistics = calibrate(opened.model, ids)
        found = joint_cost(opened.model, ids, statistics, windows, first, second, batch_size=settings.batch_size)
    return opened.record("joint-cost", {"heads": [first.to_list(), second.to_list()], **asdict(found)})


def tables(record: Record) -> list[Part]:
    """Return what two head sets cost as wholes."""
    sizes: dict[str, int] = dict(zip(("first", "second"), map(len, record["heads"]), strict=True))
    rows = []
    for name in ("first", "second", "difference"):
        low, high = record[name]["ci95"]
        change = signed(record[name]["delta_ppl_percent"], 3)
        rows.append([name, sizes.get(name, MISSING), change, f"{signed(low, 3)} to {signed(high, 3)}"])
    beside = paper.JOINT_COST
    return [
        f"Immediate cost of two head sets: {record['overlap']} heads in common, windows of {record['length']:,} "
        f"tokens. Paper: sets by residual cosine {beside['residual_cosine']}, by variance {beside['variance']}, "
        f"{beside['overlap']} in common.",
        Table.of("", ["set", "heads", "perplexity", "95% interval"], rows, notes=paper.notes(paper.SELECTION_TEXT)),
    ]


@dataclass(frozen=True, kw_only=True)
class JointCosts:
    """Hold records of `paired_delta_ppl` (percent, 95% intervals over windows), and how many heads the sets share."""

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
) -> JointCosts:
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
    return JointCosts(
        first=paired_delta_ppl(meter.baseline, one),
        second=paired_delta_ppl(meter.baseline, other),
        difference=paired_delta_ppl(one, other),
        overlap=len(first & second),
    )
