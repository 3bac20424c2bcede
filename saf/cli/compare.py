"""`saf compare`: an ordinary and a frozen run of the same text, or two evaluations."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from saf.cli.output import show
from saf.errors import InputError
from saf.evaluate import perplexity, zero_shot
from saf.evaluate.compare import compare_evaluations, compare_runs, speed_caveat, was_busy
from saf.evaluate.evaluated import both_have, nothing_to_compare, pair_words
from saf.evaluate.paired import RESAMPLES
from saf.evaluate.side_by_side import JUDGED, Comparison, arm_names, arms_table
from saf.evaluate.zero_shot import compare_zero_shot, zero_shot_comparison_tables
from saf.hf.card import folder_hash, record_cost_
from saf.records.events import heads_in_words
from saf.records.files import write_json
from saf.records.paths import Kind, expect, kind_of
from saf.records.quantities import change_percent, signed
from saf.records.run import RecordedRun
from saf.records.table import Part, Table

Record = dict[str, Any]


@dataclass(kw_only=True)
class Command:
    """Show what freezing cost in perplexity, with its interval, and what it saved in time and memory.

    Runs of a task are compared question by question. Runs that differ in more than the freezing are refused. Hugging
    Face models and zero-shot tasks are compared by the folders that `saf evaluate --out` wrote.
    """

    ordinary: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="ORDINARY")]
    """Folder of the finished run without frozen heads, or of its evaluation."""
    frozen: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FROZEN")]
    """Folder of the finished run with frozen heads, or of its evaluation."""
    out: Path | None = None
    """Write compare.json into this folder; by default into the frozen run's, and for evaluations nowhere."""
    allow_differences: bool = False
    """Compare runs that differ in more than the freezing, and list the differences. Held-out windows, questions and
    precision must still be equal."""
    card: Path | None = None
    """Write the change of perplexity into the model card (README.md) of this folder, which holds the frozen model."""
    resamples: int = RESAMPLES
    """Number of bootstrap draws of windows."""
    seed: int = 0
    """Random seed for the draws."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> Record:
        """Compare, write compare.json, show and return it."""
        kinds = {kind_of(path) for path in (self.ordinary, self.frozen)}
        if kinds & {Kind.EVALUATION, Kind.TRANSFORMERS}:
            for path in (self.ordinary, self.frozen):
                expect(path, Kind.EVALUATION)
            return self._evaluations()
        if self.card is not None:
            raise InputError("--card is for evaluations of models of transformers; runs have no model card")
        runs = ordinary, frozen = RecordedRun.open(self.ordinary), RecordedRun.open(self.frozen)
        options: Record = {"out": self.out or self.frozen, "allow_differences": self.allow_differences}
        for task in JUDGED.values():
            if any(map(task.has, runs)):
                record = task.compare(ordinary, frozen, **options)
                show(record, *task.tables(record), as_json=self.json)
                return record
        record = compare_runs(ordinary, frozen, **options, resamples=self.resamples, seed=self.seed)
        names = arm_names(runs)
        table = arms_table(runs, names, [Comparison(names[1], ordinary, frozen, record)], brief=True)
        show(record, _verdict(record), table, as_json=self.json)
        return record

    def _evaluations(self) -> Record:
        """Compare the perplexities and zero-shot tasks that both evaluations have."""
        record: Record = {}
        parts: list[Part] = []
        pair = self.ordinary, self.frozen
        if both_have(pair, perplexity.WRITTEN[0]):
            draws = {"resamples": self.resamples, "seed": self.seed}
            record = compare_evaluations(*pair, allow_differences=self.allow_differences, **draws)
            parts += [_verdict(record), self._perplexities(record)]
        if self.card is not None:
            self._write_card(self.card, record)
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

    def _perplexities(self, record: Mapping[str, Any]) -> Table:
        before, after = (heads_in_words(each) if any(each.values()) else "ordinary" for each in record["heads_by_kind"])
        rows = {
            "perplexity before": f"{record['ppl_ordinary']:.4f} ({before})",
            "perplexity after": f"{record['ppl_frozen']:.4f} ({after})",
            "change": _change(record),
            "windows": f"{record['windows']:,}",
        }
        return Table.facts(f"{self.frozen} against {self.ordinary}", rows, notes=pair_words(record))

    def _write_card(self, folder: Path, record: Mapping[str, Any]) -> None:
        """Write what freezing cost into a folder's model card; InputError where the record is not of this model."""
        if not record:
            raise InputError("--card needs a change of perplexity; give evaluations made with --data")
        measured = record["provenance"]["checkpoints"].get("frozen")
        if kind_of(folder) is not Kind.TRANSFORMERS or folder_hash(folder) != measured:
            raise InputError(
                f"{self.frozen} is not an evaluation of {folder} as it is; evaluate it again (`saf evaluate {folder}`)"
            )
        before = record["heads_by_kind"][0]
        beside = f" with {heads_in_words(before)}" if any(before.values()) else ""
        record_cost_(
            folder,
            f"perplexity {record['ppl_ordinary']:.4f} before{beside}, {record['ppl_frozen']:.4f} after, a change of "
            f"{_change(record)}, on {record['windows']:,} windows of {record['length']:,} tokens, in "
            f"{record['precision']}",
        )


def _change(record: Mapping[str, Any]) -> str:
    low, high = record["ci95"]
    change = signed(record["delta_ppl_percent"], 3)
    return f"{change} (95% interval {signed(low, 3, '')} to {signed(high, 3, '')})"


def _verdict(record: Mapping[str, Any]) -> str:
    """Return in one line each what freezing cost, and how speed and memory changed."""
    lines = [f"Cost: perplexity {_change(record)}."]
    saved = []
    if ratio := record.get("update_time_ratio"):
        within = ", within the spread of both arms" if speed_caveat(record) else ""
        saved.append(
            "update times unclear: the machine was busy"
            if was_busy(record)
            else f"updates {ratio:.3f}× as fast{within}"
        )
    memory = change_percent(record.get("peak_memory_ordinary"), record.get("peak_memory_frozen"))
    saved += [f"peak memory {signed(memory)}"] * (memory is not None)
    return "\n".join([*lines, *([f"Speed: {', '.join(saved)}."] if saved else [])])
