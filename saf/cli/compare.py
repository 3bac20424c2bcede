"""`saf compare`: an ordinary and a frozen run of the same text."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from saf.adapters.transformers.folder import folder_hash, tell_cost_
from saf.cli.output import show
from saf.errors import InputError
from saf.evaluate import perplexity, zero_shot
from saf.evaluate.compare import compare_evaluations, compare_runs
from saf.evaluate.evaluated import both_have, nothing_to_compare, pair_words
from saf.evaluate.paired import RESAMPLES
from saf.evaluate.side_by_side import JUDGED, Comparison, arm_names, arms_table
from saf.evaluate.zero_shot import compare_zero_shot, zero_shot_comparison_tables
from saf.records.events import heads_in_words
from saf.records.files import write_json
from saf.records.paths import Kind, expect, kind_of
from saf.records.quantities import signed
from saf.records.run import RecordedRun
from saf.records.table import Part, Table


@dataclass(kw_only=True)
class Command:
    """Tell what freezing cost in perplexity, with its interval, and what it saved in time and memory.

    Of two finetuned runs it tells what they answer differently, paired by question, of two runs of recall paired by
    example. Refuses runs that differ in more than the freezing. Of models that no run trained, such as those of
    transformers, and of zero-shot tasks it takes what `saf evaluate --out` wrote of each, and refuses models of another
    shape or origin.
    """

    ordinary: Annotated[Path, tyro.conf.Positional]
    """Folder of the finished run without frozen heads, or of an evaluation."""
    frozen: Annotated[Path, tyro.conf.Positional]
    """Folder of the finished run with frozen heads, or of an evaluation."""
    out: Path | None = None
    """Folder for compare.json; the frozen run's if not given, none for evaluations."""
    allow_differences: bool = False
    """Compare all the same, listing what differs; held-out windows, questions and queries must still be the same, of
    evaluations also the precision."""
    card: Path | None = None
    """Folder of the frozen model of transformers, whose model card (README.md) is told the change of perplexity."""
    resamples: int = RESAMPLES
    """Bootstrap draws of windows."""
    seed: int = 0
    """Seed of the draws."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> dict[str, Any]:
        """Compare, write compare.json, show and return it."""
        kinds = {path: kind_of(path) for path in (self.ordinary, self.frozen)}
        if set(kinds.values()) == {Kind.EVALUATION}:
            return self._evaluations()
        if {Kind.EVALUATION, Kind.TRANSFORMERS} & set(kinds.values()):
            # A model of transformers is compared by its evaluations, and an evaluation with nothing else.
            for path in kinds:
                expect(path, Kind.EVALUATION)
        if self.card is not None:
            raise InputError("--card is of evaluations of models of transformers; runs have no model card")
        runs = ordinary, frozen = RecordedRun.open(self.ordinary), RecordedRun.open(self.frozen)
        given = {"out": self.out or self.frozen, "allow_differences": self.allow_differences}
        for judged in JUDGED.values():
            if any(map(judged.has, runs)):
                record = judged.compare(ordinary, frozen, **given)
                show(record, *judged.tables(record), as_json=self.json)
                return record
        record = compare_runs(ordinary, frozen, **given, resamples=self.resamples, seed=self.seed)
        names = arm_names(runs)
        table = arms_table(runs, names, [Comparison(names[1], ordinary, frozen, record)], brief=True)
        show(record, table, as_json=self.json)
        return record

    def _evaluations(self) -> dict[str, Any]:
        """Compare what both evaluations have; raise InputError for nothing to compare."""
        record: dict[str, Any] = {}
        parts: list[Part] = []
        pair = self.ordinary, self.frozen
        if both_have(pair, perplexity.WRITTEN[0]):
            draws = {"resamples": self.resamples, "seed": self.seed}
            record = compare_evaluations(*pair, allow_differences=self.allow_differences, **draws)
            parts.append(self._perplexities(record))
        if self.card is not None:
            self._tell_card(self.card, record)
        if both_have(pair, zero_shot.WRITTEN[0]):
            changes = compare_zero_shot(*pair, allow_differences=self.allow_differences)
            record = {**record, "zero_shot": changes} if record else changes
            parts += zero_shot_comparison_tables(changes)
        if not parts:
            raise nothing_to_compare(pair)
        if self.out is not None:
            write_json(self.out / "compare.json", record)
        show(record, *parts, as_json=self.json)
        return record

    def _tell_card(self, folder: Path, record: Mapping[str, Any]) -> None:
        """Tell a folder's model card what freezing cost; raise InputError where that was not measured of this model."""
        if not record:
            raise InputError("--card tells a change of perplexity; give evaluations that have one, made with --data")
        if kind_of(folder) is not Kind.TRANSFORMERS or (
            folder_hash(folder) != record["provenance"]["checkpoints"].get("frozen")
        ):
            raise InputError(
                f"{self.frozen} is not an evaluation of {folder} as it is; give --card the folder of the frozen model, "
                f"and evaluate it again (`saf evaluate {folder}`)"
            )
        low, high = record["ci95"]
        before = record["heads_by_kind"][0]
        beside = f" with {heads_in_words(before)}" if any(before.values()) else ""
        tell_cost_(
            folder,
            f"perplexity {record['ppl_ordinary']:.4f} before{beside}, {record['ppl_frozen']:.4f} after, a change of "
            f"{signed(record['delta_ppl_percent'], 3)} (95% interval {signed(low, 3, '')} to {signed(high, 3, '')}), "
            f"on {record['windows']:,} windows of {record['length']:,} tokens, in {record['precision']}",
        )

    def _perplexities(self, record: Mapping[str, Any]) -> Table:
        """Return the table of two perplexities."""
        low, high = record["ci95"]
        counts = record["heads_by_kind"]
        first, second = (heads_in_words(count) if any(count.values()) else "ordinary" for count in counts)
        rows = {
            "perplexity before": f"{record['ppl_ordinary']:.4f} ({first})",
            "perplexity after": f"{record['ppl_frozen']:.4f} ({second})",
            "change": f"{signed(record['delta_ppl_percent'], 3)} (95% interval {signed(low, 3, '')} to "
            f"{signed(high, 3, '')})",
            "windows": f"{record['windows']:,}",
        }
        return Table.facts(f"{self.frozen} against {self.ordinary}", rows, notes=pair_words(record))
