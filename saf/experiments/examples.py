"""Files of the tasks that arms are finetuned on: where they lie in a folder, and how large runs become."""

import gzip
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from saf.errors import InputError
from saf.records.files import file_hash, write_atomically
from saf.tasks import MQARSettings, MQARTask
from saf.tasks.examples import read_examples
from saf.tasks.zero_shot import ZERO_SHOT, find_questions
from saf.train.finetuning import DEFAULTS, MOST_EPOCHS, OF_TASKS


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Say where a folder of tasks has the examples of one, and how many the public files have."""

    train: tuple[str, ...]
    """Names of the training file below the folder, the first that is there counts; each with .gz behind it too."""
    test: tuple[str, ...]
    examples: int
    """Of the public training file."""
    tokens: float
    """Mean of an example, by the paper's app:scale-up-details."""


WHOLE = "quality/quality.htmlstripped.jsonl"
"""Articles that no split was made of: what is trained on is tested on too, for times alone."""
LAYOUTS = {
    "sst2": Layout(train=("sst2/train.tsv",), test=("sst2/dev.tsv",), examples=67_349, tokens=25.4),
    "boolq": Layout(train=("boolq/train.jsonl",), test=("boolq/val.jsonl",), examples=9_427, tokens=142.8),
    "quality": Layout(
        train=("quality/train.jsonl", WHOLE),
        test=("quality/dev.jsonl", WHOLE),
        examples=2_523,
        tokens=6_207.5,
    ),
}
"""By task; recall makes its own examples."""


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Hold the files of one task."""

    task: str
    train: Path
    test: Path

    @cached_property
    def count(self) -> int:
        """Return how many examples of the training file can be used, before those that are too long are left out."""
        return len(read_examples(self.train, self.task).examples)

    @cached_property
    def fingerprint(self) -> str:
        """Return the SHA-256 of both files' sums."""
        return hashlib.sha256((file_hash(self.train) + file_hash(self.test)).encode()).hexdigest()


def find_examples(folder: Path) -> dict[str, Examples]:
    """Return the files of every task that a folder has.

    Raises:
        InputError: It is no folder, or has the files of none, nor questions of a zero-shot task.
    """
    found = {}
    for task, layout in LAYOUTS.items():
        train, test = (_first(folder, names) for names in (layout.train, layout.test))
        if train and test:
            found[task] = Examples(task=task, train=train, test=test)
    if not found and not any(find_questions(task, folder) for task in ZERO_SHOT):
        wanted = "; ".join(f"{layout.train[0]} and {layout.test[0]}" for layout in LAYOUTS.values())
        raise InputError(f"{folder} has no examples of a task; expected files such as {wanted}, gzipped or not")
    return found


def _first(folder: Path, names: tuple[str, ...]) -> Path | None:
    """Return the first of some files that is there, gzipped or not."""
    paths = [folder / name for name in names]
    both = [path for plain in paths for path in (plain, plain.with_name(plain.name + ".gz"))]
    return next((path for path in both if path.is_file()), None)


def finetuning_settings(task: str) -> dict[str, Any]:
    """Return what `saf finetune` takes over from no parent, as far as it decides how long a run takes."""
    decided = {"batch_size", "accumulation", "updates", "compile", "max_tokens"}
    return {name: value for name, value in {**DEFAULTS, **OF_TASKS[task]}.items() if name in decided}


@dataclass(frozen=True, kw_only=True)
class Work:
    """Say how much a finetuned run does, as far as it is known before."""

    updates: int
    """All that are trained, those that choose the number of epochs included."""
    tokens: float
    """Of an update."""
    length: float
    """Tokens of an example."""
    tested: float
    """Tokens that the model is given to judge it."""


def work_of(
    task: str, settings: Mapping[str, Any], *, chooses: bool, context: int, files: Examples | None = None
) -> Work:
    """Return what a run is expected to do, with as many epochs as can be chosen.

    Args:
        task: Its name.
        settings: Of the run.
        chooses: Whether it chooses the number of epochs itself, which takes as many again.
        context: The model's, which no example is longer than.
        files: Its examples; where they are not known, as many as the public files have.
    """
    rows = int(settings["batch_size"]) * int(settings.get("accumulation", 1))
    if task == MQARTask.name:
        named = {name.rpartition(".")[2]: value for name, value in settings.items() if name.startswith(f"{task}.")}
        mqar = MQARSettings(**named)
        reports = 1 + len(settings.get("report_at", ()))
        tested = reports * mqar.test_examples * sum(length for length, _ in mqar.tests)
        return Work(
            updates=int(settings["updates"]),
            tokens=float(rows * mqar.length),
            length=float(mqar.length),
            tested=float(tested),
        )
    layout = LAYOUTS[task]
    known = layout.examples if files is None else files.count
    examples = min(known, int(settings.get("most_examples") or known))
    epochs = int(settings.get("epochs") or MOST_EPOCHS)
    trained = -(-examples * 9 // 10 // rows)
    tokens = min(layout.tokens, float(context), float(settings.get("max_tokens") or context))
    # A question is read once for each choice; public test files have a tenth of the training ones or fewer.
    tested = 0.2 * examples * tokens * (1 + chooses * MOST_EPOCHS)
    return Work(updates=trained * (epochs + chooses * MOST_EPOCHS), tokens=rows * tokens, length=tokens, tested=tested)


def is_of_files(task: str) -> bool:
    """Return whether a task has files of examples."""
    return task in LAYOUTS


def smoke_examples() -> dict[str, Examples]:
    """Return the examples that `write_smoke_examples` would write, whose files are not there: their number and sums."""
    with TemporaryDirectory() as folder:
        found = find_examples(write_smoke_examples(Path(folder)))
        for each in found.values():
            _ = each.count, each.fingerprint  # which are kept, read while the files are there
    return found


def write_smoke_examples(folder: Path) -> Path:
    """Write a few short examples of every task, for the smoke scale where no folder is named; return the folder."""
    words = ("good", "bad", "for", "not", "self", "if", "in", "or")
    lines = [f"{words[number % 2]} {words[2 + number % 6]} {number}\t{1 - number % 2}" for number in range(80)]
    head = "sentence\tlabel\n"
    asked = [
        {"question": f"is {number}", "passage": words[number % 8], "idx": number, "label": number % 2 == 0}
        for number in range(80)
    ]
    articles = [
        {
            "article": " ".join(words),
            "questions": [
                {"question": f"{number}", "options": ["a", "b"], "gold_label": 1 + number % 2} for number in range(20)
            ],
        }
    ]
    texts = {
        "sst2/train.tsv": head + "\n".join(lines[:64]) + "\n",
        "sst2/dev.tsv": head + "\n".join(lines[64:]) + "\n",
        "boolq/train.jsonl": "".join(json.dumps(each) + "\n" for each in asked[:64]),
        "boolq/val.jsonl": "".join(json.dumps(each) + "\n" for each in asked[64:]),
        f"{WHOLE}.gz": "".join(json.dumps(each) + "\n" for each in articles),
    }
    for name, text in texts.items():
        data = text.encode()
        write_atomically(folder / name, gzip.compress(data, mtime=0) if name.endswith(".gz") else data)
    return folder
