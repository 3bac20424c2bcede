"""`saf evaluate`: held-out perplexity of one model, and its accuracy on zero-shot tasks."""

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import tyro

from saf.cli.output import countdowns, say, show
from saf.data import TextData
from saf.errors import InputError
from saf.evaluate import perplexity, zero_shot
from saf.evaluate.evaluated import facts_of, precision_in_use
from saf.evaluate.perplexity import evaluate_perplexity
from saf.evaluate.zero_shot import TooLong, zero_shot_record, zero_shot_tables
from saf.integrations.models import OpenedModel, lm_eval_tasks, open_model
from saf.machine.execution import device_name, pick_device
from saf.machine.processes import agreed, done_once, is_first, joined
from saf.records.table import Part, Table
from saf.tasks.zero_shot import TaskName


@dataclass(kw_only=True)
class Command:
    """Measure the perplexity of a model on held-out text it was neither trained nor tuned on, and zero-shot accuracy.

    Tasks are lm-eval's, with its prompts and metrics (`pip install 'saf[eval]'`). A model of transformers answers
    them without data, too.
    Several processes share the batches out when `torchrun --nproc-per-node N -m saf evaluate ...` starts them.
    """

    model: Annotated[Path, tyro.conf.Positional]
    """A checkpoint (step-N), a run (its newest checkpoint), a folder written by saf.save, or a model of transformers:
    its folder, or its name on the hub."""
    data: Path | None = None
    """Folder made by `saf data prepare`; the one it was trained on if not given. For a model of transformers its
    tokenizer must be the model's (`--tokenizer FOLDER`); a file of text will do, too."""
    tasks: tuple[TaskName, ...] = ()
    """Zero-shot tasks to answer beside."""
    task_data: Path | None = None
    """Folder of the tasks' public files, such as hellaswag/hellaswag_val.jsonl; those of the hub if not given."""
    questions: int | None = None
    """Only so many questions of each task."""
    too_long: TooLong = "refuse"
    """What to do with questions longer than the model takes: refuse them, or cut their beginning, as lm-eval does."""
    out: Path | None = None
    """Write evaluation.json and log_probs.safetensors, and of tasks zero_shot.json and zero_shot.jsonl, into this
    folder, which may hold nothing else."""
    partition: Literal["report", "controller", "calibration", "train"] = "report"
    """Which text."""
    bos: bool = False
    """Begin each window of text with the token that begins a text (BOS) of the model's tokenizer; a model that was
    trained to find one, as Gemma and Llama, is itself again with it. Tasks have it as the tokenizer adds it."""
    length: int | None = None
    """Tokens of context in a window of text, and at most in a question (the model's longest)."""
    batch_size: int = 8
    """Windows in a forward pass, or sequences of one length."""
    limit: int | None = None
    """Stop after this many windows."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """auto is bf16 autocast on CUDA and fp32 on CPU; weights in 16 bits run in their own dtype, and fp32 opens them in
    float32."""
    json: bool = False
    """Print JSON instead of a table."""

    def __post_init__(self):
        """Raise InputError for a flag that would have no effect."""
        for name, given in (("task-data", self.task_data), ("questions", self.questions)):
            if given is not None and not self.tasks:
                raise InputError(f"--{name} has no effect without --tasks; name some")
        if self.too_long != "refuse" and not self.tasks:
            raise InputError("--too-long has no effect without --tasks; name some")
        if len(set(self.tasks)) < len(self.tasks):
            raise InputError(f"each task is named once; got {', '.join(self.tasks)}")

    def run(self) -> dict[str, Any]:
        """Evaluate, show and return the records; raise InputError for an `out` of something else."""
        with joined(self.device):
            return self._run()

    def _run(self) -> dict[str, Any]:
        """Do what `run` does, in the group of processes that is there."""
        with agreed():  # all have looked before the first one writes
            if self.out is not None:
                _check_own(self.out)
        harness = lm_eval_tasks() if self.tasks else None
        opened = open_model(self.model, self.data, self.device, precision=self.precision, needs_data=harness is None)
        of_text = {"bos": False, "partition": "report", "limit": None}
        idle = [name for name, unset in of_text.items() if opened.data is None and getattr(self, name) != unset]
        if idle:
            raise InputError(f"--{idle[0]} is of text, and has no effect on tasks; give --data, or leave it out")
        record: dict[str, Any] = {}
        parts: list[Part] = []
        # Tasks first: what is missing or too long is known before minutes of perplexity.
        answered = None if harness is None else self._zero_shot(opened, harness)
        if opened.data is not None:
            record = self._perplexity(opened)
            parts.append(self._facts(opened, record))
        if answered is not None:
            record["zero_shot"] = answered
            parts += zero_shot_tables(answered)
        if is_first():
            show({"model": opened.folder, **record}, *parts, as_json=self.json)
        return record

    def _perplexity(self, opened: OpenedModel) -> dict[str, Any]:
        """Return the record of the model's perplexity on its data."""
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
            bos=opened.encoder().beginning(opened.folder) if self.bos else None,
            out=self.out,
            checkpoints=opened.checkpoints,
        )

    def _facts(self, opened: OpenedModel, record: dict[str, Any]) -> Table:
        """Return the table of the model's perplexity."""
        data = opened.data
        assert data is not None
        rows = {
            "perplexity": f"{record['perplexity']:.4f}",
            "loss, nats per token": f"{record['loss']:.5f}",
            **_by_place(record["by_position"]),
            "partition": f"{'all' if isinstance(data, TextData) else record['partition']} of {data.folder}",
            "windows": f"{record['windows']:,} of {record['length']:,} tokens",
            "precision": record["precision"],
            "each begins with token": record["bos"],
            "written to": self.out,
        }
        return Table.facts(str(opened.folder), rows)

    def _zero_shot(self, opened: OpenedModel, harness: ModuleType) -> dict[str, Any]:
        """Return the record of the model's answers."""
        settings = {name: getattr(self, name) for name in ("tasks", "questions", "too_long", "batch_size")}
        used = precision_in_use(opened.model, self.precision)
        if self.length is not None and self.length > opened.longest:
            raise InputError(f"--length {self.length:,} is more than the model takes, {opened.longest:,}; leave it out")
        answers = harness.ask(
            opened, self, longest=self.length, progress=countdowns("requests", say if is_first() else lambda text: None)
        )
        device = pick_device(self.device)
        return done_once(
            lambda: zero_shot_record(
                answers,
                settings,
                longest=self.length or opened.longest,
                precision=used,
                of=facts_of(opened.model),
                out=self.out,
                device=device_name(device),
                checkpoints=opened.checkpoints,
            )
        )


def _check_own(folder: Path) -> None:
    """Raise InputError unless the folder is new, empty or from an earlier evaluation: a run keeps its own there."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; --out takes a folder")
    own = {*perplexity.WRITTEN, *zero_shot.WRITTEN}
    others = sorted({path.name for path in folder.iterdir()} - own) if folder.exists() else []
    if others:
        raise InputError(f"{folder} holds {others[0]}, which `saf evaluate` did not write; give --out a new folder")


def _by_place(found: list[list[float]]) -> dict[str, str]:
    """Return the row of losses by place in the window; none where one range is all."""
    begins = [1, *(int(end) + 1 for end, _ in found)]
    told = [f"{loss:.3f} (tokens {begin:,}-{end:,})" for begin, (end, loss) in zip(begins, found, strict=False)]
    return {"loss by place": ", ".join(told)} if len(told) > 1 else {}
