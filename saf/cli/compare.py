"""`saf compare` shows what freezing cost and saved, from an ordinary and a frozen run or evaluations of two models."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from saf.cli.output import show
from saf.cli.parsing import parse
from saf.compare import compare_folders, compare_runs, pair_tables, perplexity_change, verdict
from saf.errors import InputError
from saf.opening import folder_hash
from saf.records.files import write_json
from saf.records.run import Kind, RecordedRun, expect, heads_in_words, kind_of


@dataclass(kw_only=True)
class Command:
    """Show what freezing cost in perplexity, with its 95% interval, and what it saved in time and memory.

    Compare two finished runs, the ordinary one first. They may differ in the freezing alone:

      $ saf compare runs/ordinary runs/frozen

    Compare a Hugging Face model before and after, by the folders that `saf evaluate --out` wrote. Zero-shot tasks that
    both answered are compared question by question:

      $ saf evaluate MODEL --data text.txt --length 1024 --out before
      $ saf evaluate frozen --data text.txt --length 1024 --out after
      $ saf compare before after
    """

    ordinary: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="ORDINARY")]
    """The baseline: the finished run, or evaluation, of the model without frozen heads."""
    frozen: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FROZEN")]
    """The finished run, or evaluation, of the model with frozen heads."""
    out: Path | None = None
    """Write compare.json into this folder; by default into the frozen run's, and for evaluations nowhere."""
    allow_differences: bool = False
    """Compare runs that differ in more than the freezing, and list the differences. Held-out windows, questions and
    precision must still be equal."""
    card: Path | None = None
    """Write the change of perplexity into the model card (README.md) of this folder, which holds the frozen model."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> dict[str, Any]:
        pair = self.ordinary, self.frozen
        if {kind_of(path) for path in pair} & {Kind.EVALUATION, Kind.TRANSFORMERS}:
            for path in pair:  # both must be evaluations; a model or a run is refused with what to do
                expect(path, Kind.EVALUATION)
            return self._compare_evaluations()
        if self.card is not None:
            raise InputError("--card is for evaluations of Hugging Face models; runs have no model card")
        ordinary, frozen = map(RecordedRun.open, pair)
        record = compare_runs(ordinary, frozen, out=self.out or self.frozen, allow_differences=self.allow_differences)
        show(record, verdict(record), *pair_tables(record, ordinary, frozen), as_json=self.json)
        return record

    def _compare_evaluations(self) -> dict[str, Any]:
        perplexity, tasks = compare_folders(self.ordinary, self.frozen, allow_differences=self.allow_differences)
        if self.card is not None:
            self._write_card(self.card, perplexity)
        parts = [part for part in (perplexity, tasks) if part]  # one of them at least
        record = dict(parts[0])
        if perplexity and tasks:
            record["zero_shot"] = tasks
        if self.out is not None:
            write_json(self.out / "compare.json", record)
        tables = [table for part in parts for table in pair_tables(part)]
        show(record, *map(verdict, parts), *tables, as_json=self.json)
        return record

    def _write_card(self, folder: Path, record: dict[str, Any] | None) -> None:
        """Write what freezing cost into a folder's model card; raise InputError unless the record is of its model."""
        if record is None:
            raise InputError("--card needs a change of perplexity; evaluate both models with --data")
        # By hash: a card with the cost of a model that was edited since would be wrong and look right.
        evaluated_hash = record["provenance"]["checkpoints"].get("frozen")
        if kind_of(folder) is not Kind.TRANSFORMERS or folder_hash(folder) != evaluated_hash:
            raise InputError(
                f"{self.frozen} is not an evaluation of {folder} as it is now; run `saf evaluate {folder}`"
            )
        from saf.hf.model_card import record_cost_

        before = record["heads_by_kind"][0]  # the first model may have frozen heads too
        heads = f" with {heads_in_words(before)}" if any(before.values()) else ""
        change = perplexity_change(record, "95% interval ")
        cost = f"perplexity {record['ppl_ordinary']:.4f} before{heads}, {record['ppl_frozen']:.4f} after, a change of "
        text = f"{record['windows']:,} windows of {record['length']:,} tokens, in {record['precision']}"
        record_cost_(folder, f"{cost}{change}, on {text}")


parse_words = partial(parse, Command, prog="saf compare")
