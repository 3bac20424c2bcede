"""`saf evaluate` measures the held-out perplexity of one model, and its accuracy on zero-shot tasks."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from saf.cli.output import ProgressBars, show
from saf.cli.parsing import parse
from saf.data import TextData
from saf.distributed import all_ranks_or_raise, is_rank0, on_rank0, process_group
from saf.errors import InputError
from saf.machine import Device, Precision, device_name, pick_device
from saf.opening import OpenedModel, open_model
from saf.records.table import Table
from saf.tasks.base import model_facts, precision_in_use
from saf.tasks.text import EVALUATION_FILES, evaluate_perplexity
from saf.tasks.zero_shot import ZERO_SHOT_FILES, TaskName, TooLong, zero_shot_record, zero_shot_tables


@dataclass(kw_only=True)
class Command:
    """Measure the perplexity of a model on held-out text, and its zero-shot accuracy.

    A run, on the held-out text of its own data; a Hugging Face model, on a file of text and on zero-shot tasks:

      $ saf evaluate runs/frozen
      $ saf evaluate MODEL --data text.txt --tasks piqa arc_easy --out after

    Tasks are lm-eval's, with its prompts and metrics (`pip install 'saf[eval]'`); a Hugging Face model needs no --data
    for them. `torchrun --nproc-per-node N -m saf evaluate ...` shares the batches among several processes.
    """

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Evaluate this checkpoint (step-N), run (its newest checkpoint), folder written by saf.save, or Hugging Face model
    (its folder, or its name on the hub)."""
    data: Path | None = None
    """Read this file of text, or folder written by `saf data prepare` with the model's tokenizer (its --tokenizer takes
    the folder of the training data, or a Hugging Face model); by default the data that the model was trained on."""
    tasks: tuple[TaskName, ...] = ()
    """Answer these zero-shot tasks."""
    task_data: Path | None = None
    """Read the tasks' public files, such as hellaswag/hellaswag_val.jsonl, from this folder, not from the hub."""
    questions: int | None = None
    """Answer this many questions of each task; by default all."""
    too_long: TooLong = "refuse"
    """Refuse questions longer than the model takes, or cut their beginning, as lm-eval does."""
    out: Path | None = None
    """Write evaluation.json and log_probs.safetensors, and for tasks zero_shot.json and zero_shot.jsonl, into this
    folder, which may hold nothing else."""
    partition: Literal["report", "controller", "calibration", "train"] = "report"
    """Read this partition of the text."""
    bos: bool = False
    """Begin each window of text with the beginning-of-text token (BOS) of the model's tokenizer, as Gemma and Llama
    were trained. Questions of tasks have it if the tokenizer adds it."""
    length: int | None = None
    """Use this many tokens of context in a window, and at most in a question; by default the model's longest."""
    batch_size: int = 8
    """Run this number of windows, or of equally long answers, in a forward pass."""
    limit: int | None = None
    """Stop after this many windows."""
    device: Device = "auto"
    """Compute on this device; auto is CUDA if there is one."""
    precision: Precision = "auto"
    """Compute in this precision; auto is bf16 autocast on CUDA and fp32 on CPU. Weights in 16 bits run in their own
    dtype, and fp32 opens them in float32."""
    json: bool = False
    """Print JSON instead of a table."""

    def __post_init__(self):
        if not self.tasks:
            self._refuse("task_data", "questions", "too_long", without="--tasks")
        if len(set(self.tasks)) < len(self.tasks):
            raise InputError(f"each task must be named once; got {', '.join(self.tasks)}")

    def run(self) -> dict[str, Any]:
        with process_group(self.device):
            with all_ranks_or_raise():  # every process checks before the first one writes
                self._check_out()
            if self.tasks:
                from saf.hf import lm_eval  # noqa: F401 - a missing package raises before the model is opened
            opened = open_model(self.model, self.data, self.device, precision=self.precision, needs_data=not self.tasks)
            record, tables, answers = {}, [], None
            if opened.data is None:
                self._refuse("bos", "partition", "limit", without="--data")
            with ProgressBars(quiet=not is_rank0()) as bars:
                # Tasks first: missing or too long questions raise an error before minutes of perplexity.
                if self.tasks:
                    answers = self._zero_shot(opened, bars)
                if opened.data is not None:
                    record = self._perplexity(opened, bars)
                    tables.append(self._table(opened, record))
            if answers is not None:
                record["zero_shot"] = answers
                tables += zero_shot_tables(answers)
            if is_rank0():
                show({"model": opened.folder, **record}, *tables, as_json=self.json)
        return record

    def _refuse(self, *names: str, without: str) -> None:
        """Raise InputError if one of these settings differs from its default."""
        for name in names:
            if getattr(self, name) != getattr(Command, name):
                raise InputError(f"--{name.replace('_', '-')} has no effect without {without}; leave it out")

    def _check_out(self) -> None:
        """Raise InputError unless the folder is new, empty or from an earlier evaluation."""
        if self.out is None or not self.out.exists():
            return
        if not self.out.is_dir():
            raise InputError(f"{self.out} is a file; --out takes a folder")
        # A folder is recognised by its files: a run and an evaluation in one folder could not be distinguished.
        others = sorted({path.name for path in self.out.iterdir()} - {*EVALUATION_FILES, *ZERO_SHOT_FILES})
        if others:
            raise InputError(f"{self.out} holds {others[0]}, which `saf evaluate` did not write; name a new folder")

    def _perplexity(self, opened: OpenedModel, bars: ProgressBars) -> dict[str, Any]:
        assert opened.data is not None
        if isinstance(opened.data, TextData) and self.partition != "report":
            raise InputError(f"{self.data} is text, all of which is read; leave --partition out")
        return evaluate_perplexity(
            opened.model,
            opened.data,
            partition=self.partition,
            length=self.length or opened.longest,
            batch_size=self.batch_size,
            limit=self.limit,
            precision=self.precision,
            bos=opened.encoder().require_bos(opened.folder) if self.bos else None,
            out=self.out,
            checkpoints=opened.checkpoints,
            progress=bars("evaluating", "windows"),
        )

    def _table(self, opened: OpenedModel, record: dict[str, Any]) -> Table:
        data: Any = opened.data
        losses, begin = [], 1
        for end, loss in record["by_position"]:
            losses.append(f"{loss:.3f} (tokens {begin:,}-{end:,})")
            begin = end + 1
        rows = {
            "perplexity": f"{record['perplexity']:.4f}",
            "loss, nats per token": f"{record['loss']:.5f}",
            "loss by position": ", ".join(losses) if len(losses) > 1 else None,
            "partition": f"{'all' if isinstance(data, TextData) else record['partition']} of {data.folder}",
            "windows": f"{record['windows']:,} of {record['length']:,} tokens",
            "precision": record["precision"],
            "each begins with token": record["bos"],
            "written to": self.out,
        }
        return Table.facts(str(opened.folder), rows)

    def _zero_shot(self, opened: OpenedModel, bars: ProgressBars) -> dict[str, Any]:
        from saf.hf.lm_eval import ask

        if self.length is not None and self.length > opened.longest:
            raise InputError(f"--length {self.length:,} is more than the model takes, {opened.longest:,}; leave it out")

        def show_task(name: str, done: int, total: int) -> None:
            bars(f"answering {name}", "requests")(done, total)

        answers = ask(opened, self, longest=self.length, progress=show_task)
        settings = {name: getattr(self, name) for name in ("tasks", "questions", "too_long", "batch_size")}
        facts = {"precision": precision_in_use(opened.model, self.precision), "of": model_facts(opened.model)}
        facts["longest"] = self.length or opened.longest
        header = {"device": device_name(pick_device(self.device)), "checkpoints": opened.checkpoints}
        return on_rank0(lambda: zero_shot_record(answers, settings, facts=facts, out=self.out, **header))


parse_words = partial(parse, Command, prog="saf evaluate")
