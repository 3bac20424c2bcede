"""The cost of two head sets when each is frozen as a whole, before any further training (paper, appendix A.3)."""

from dataclasses import dataclass
from typing import Any

from experiments import paper
from experiments.analyses.common import CostMeter, ModelSettings, Record, head_set
from saf.calibration import calibrate
from saf.calibration.capture import measurable_heads
from saf.freeze_config import FreezeConfig
from saf.freezing import fit_heads
from saf.machine import Stopwatch
from saf.models.adapter import adapter_for
from saf.paired import delta_of_windows
from saf.records.table import Part, Table, signed


@dataclass(frozen=True, kw_only=True)
class Settings(ModelSettings):
    """Freeze two head sets, each as a whole: their immediate costs on the same windows, and their overlap."""

    first: tuple[str, ...]
    """Heads as LAYER:HEAD, or a file or run that lists them."""
    second: tuple[str, ...]
    """The other set."""
    windows: int = 16
    """Windows of the controller partition to measure on."""
    skip: int = 0
    """Windows at the beginning of the partition to leave out, which another analysis measured on."""


def measure(settings: Settings) -> dict[str, Any]:
    """Return the record; `difference` is the second set's perplexity relative to the first's.

    Heads count whatever their fit KL is: the sets are frozen as they are.
    """
    opened = settings.open()
    first, second = head_set(settings.first), head_set(settings.second)
    measurable_heads(adapter_for(opened.model), first | second)
    ids, config = opened.calibration(), FreezeConfig()
    with opened.autocast:
        statistics = calibrate(opened.model, ids)
        fits = fit_heads(opened.model, ids, statistics, first | second, config, Stopwatch())
        meter = CostMeter(
            opened.model,
            opened.windows(settings.skip + settings.windows)[settings.skip :],
            batch_size=settings.batch_size,
        )
        patterns = {head: each.pattern for head, each in fits.items() if each.pattern is not None}
        one, other = (meter.losses(heads, patterns) for heads in (first, second))
    values = {
        "heads": [first.to_list(), second.to_list()],
        "first": delta_of_windows(meter.baseline, one),
        "second": delta_of_windows(meter.baseline, other),
        "difference": delta_of_windows(one, other),
        "overlap": len(first & second),
    }
    return opened.record("joint-cost", values)


def tables(record: Record) -> list[Part]:
    """Return the change in perplexity of each set."""
    rows = []
    for name, heads in zip(("first", "second", "difference"), (*map(len, record["heads"]), None), strict=True):
        change, low, high = (signed(value, 3) for value in (record[name]["delta_ppl_percent"], *record[name]["ci95"]))
        rows.append([name, heads, change, f"{low} to {high}"])
    beside = paper.JOINT_COST
    return [
        f"Immediate cost of two head sets: {record['overlap']} heads in common, windows of {record['length']:,} "
        f"tokens. Paper: sets by residual cosine {beside['residual_cosine']}, by variance {beside['variance']}, "
        f"{beside['overlap']} in common.",
        Table.of("", ["set", "heads", "perplexity", "95% interval"], rows, paper.notes(paper.SELECTION_TEXT)),
    ]
