"""`saf analyze one-head`: what freezing each head alone costs under either fit, and which scores foretell it."""

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from saf.analysis.fit_costs import fit_difference
from saf.analysis.one_head import OneHeadCosts, available_scores, one_head_costs, score_quality
from saf.calibration import calibrate
from saf.cli.analyze_base import OnModel, Opened, Waiting, say
from saf.fit import CONSTANT_AFTER, fit_variants
from saf.freezing.config import FreezeConfig
from saf.records.files import write_json
from saf.records.table import Table
from saf.selection import budget, ranking
from saf.tasks.text import heldout_batches
from saf.train.events import recorded_gradient


@dataclass(kw_only=True)
class OneHead(OnModel):
    """Freeze each head alone: its immediate cost on held-out windows, and which scores foretell it.

    With --out, what is there is written every few seconds as a partial record, in case the command is cut off.
    """

    windows: int = 16
    """Windows of the controller partition to measure on: its first ones."""
    heldout_sequences: int = 16
    """Sequences that output-aware scores read: its last ones; 0 leaves these scores out."""
    max_fit_kl: float = 0.2
    """Heads with a larger fit KL, in nats, do not count."""
    structured_after: int | None = CONSTANT_AFTER
    """Measure the structured fit too: alpha is constant from this key on; None leaves it out."""
    rates: tuple[float, ...] = (0.25, 0.5)
    """Shares of all heads whose mean cost is told."""

    def run(self) -> dict[str, Any]:
        """Measure, show, write and return the record."""
        opened = self.open()
        variants = fit_variants(opened.length, constant_after=self.structured_after)
        windows = opened.windows(self.windows)
        costs: dict[str, OneHeadCosts] = {}
        with opened.autocast:
            statistics, scores, ids = self._scores(opened)
            waiting = Waiting("heads", int(statistics.measured.sum()) * len(variants))
            for number, (name, options) in enumerate(variants.items()):
                config = FreezeConfig(max_fit_kl=self.max_fit_kl, fitter_options=options)

                def progress(done: int, heads: int, so_far: Any, *, name: str = name, before: int = number) -> None:
                    def save() -> None:
                        self._save(opened, {**costs, name: so_far()}, scores)

                    waiting(before * heads + done, save)

                costs[name] = one_head_costs(
                    opened.model, ids, statistics, windows, config=config, batch_size=self.batch_size, progress=progress
                )
        record = self.record("one-head", opened, self._values(costs, scores))
        quality = score_quality(costs["free"], scores, rates=self.rates)
        record["quality"] = {name: asdict(each) for name, each in quality.items()}
        tables = [_quality_table(record, int(statistics.measured.sum()))]
        if "structured" in costs:
            record["fit_difference"] = self._differences(costs, scores["variance"])
            tables.append(_fit_table(record))
        return self.finish(record, *tables)

    def _scores(self, opened: Opened) -> tuple[Any, dict[str, Tensor], list[Tensor]]:
        ids, count = self.calibration(opened), self.heldout_sequences
        heldout, collect = None, ()
        if count:
            heldout = heldout_batches(opened.data, length=opened.length, count=count, batch_size=self.batch_size)
            collect = ("mean_rows",)
        gradient = recorded_gradient(opened.model, opened.source.state)
        needed = {"gradient": gradient.scores()} if gradient else {}
        say(f"calibrating on {sum(map(len, ids))} sequences")
        statistics = calibrate(opened.model, ids, collect=collect)
        say("measuring what scores read")
        return statistics, available_scores(opened.model, ids, statistics, heldout=heldout, needed=needed), ids

    def _values(self, costs: dict[str, OneHeadCosts], scores: dict[str, Tensor]) -> dict[str, Any]:
        free = costs["free"]
        values = {"windows": free.by_window.shape[-1], "baseline": free.baseline, **_measured(free)}
        if "structured" in costs:
            values["structured"] = {"alpha_constant_after": self.structured_after, **_measured(costs["structured"])}
        return values | {"scores": scores}

    def _save(self, opened: Opened, costs: dict[str, OneHeadCosts], scores: dict[str, Tensor]) -> None:
        """Write what is measured so far, under a schema of its own; the whole record replaces it."""
        if self.out is not None:
            write_json(self.out, self.record("one-head-partial", opened, self._values(costs, scores)))

    def _differences(self, costs: dict[str, OneHeadCosts], variance: Tensor) -> dict[str, Any]:
        order = ranking(variance, only=costs["free"].eligible)
        groups = {"all": order} | {f"{rate:g}": order[: budget(rate, variance.numel())] for rate in self.rates}
        both = costs["free"].eligible & costs["structured"].eligible
        return {
            name: asdict(fit_difference(costs["free"], costs["structured"], heads))
            for name, heads in groups.items()
            if any(head in both for head in heads)
        }


def _measured(costs: OneHeadCosts) -> dict[str, Any]:
    return {
        "nll_change": costs.change,
        "nll_change_by_window": costs.by_window,
        "fit_kl": costs.fit_kl,
        "eligible": costs.eligible.to_list(),
    }


def _quality_table(record: dict[str, Any], measured: int) -> Any:
    quality = record["quality"]
    rates = next(iter(quality.values()))["mean_cost"]
    rows = [
        [name, f"{each['spearman']:.3f}", *(f"{cost:.4f}%" for cost in each["mean_cost"].values())]
        for name, each in sorted(quality.items(), key=lambda item: -item[1]["spearman"])
    ]
    title = f"cost of single heads on {record['windows']} windows: {len(record['eligible'])} of {measured} heads fit"
    return Table.of(title, ["score", "Spearman", *(f"mean cost, lowest {rate:.0%}" for rate in rates)], rows)


def _fit_table(record: dict[str, Any]) -> Any:
    rows = [
        [
            "all accepted" if name == "all" else f"lowest {float(name):.0%} by variance",
            each["heads"],
            *(f"{1e3 * each[key]:+.3g}" for key in ("first", "second", "difference")),
            "{:+.3g} to {:+.3g}".format(*(1e3 * end for end in each["ci95"])),
        ]
        for name, each in record["fit_difference"].items()
    ]
    after = record["structured"]["alpha_constant_after"]
    title = f"mean loss change of single heads, thousandths of a nat; structured: alpha constant from key {after} on"
    return Table.of(title, ["heads", "fits", "free", "structured", "difference", "95% interval"], rows)
