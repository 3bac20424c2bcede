"""What runs read: prepared text, examples to finetune on, zero-shot questions; the smoke scale makes its own."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.scales import Scale
from saf.data import TokenData, prepare
from saf.errors import InputError

PUBLIC = {
    # Training and test file below the folder, each also as .gz.
    "sst2": (("sst2/train.tsv",), ("sst2/dev.tsv",)),
    "boolq": (("boolq/train.jsonl",), ("boolq/val.jsonl",)),
    # Where articles were not split, training and test are the same: for times alone.
    "quality": (
        *(("quality/train.jsonl", "quality/quality.htmlstripped.jsonl"),),
        *(("quality/dev.jsonl", "quality/quality.htmlstripped.jsonl"),),
    ),
}
"""The layouts of the tasks that are finetuned on; associative recall makes its own examples."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Folders that runs and measurements read."""

    data: Path | None = None
    """Made by `saf data prepare`."""
    tasks: Path | None = None
    """Files of examples, in the public sets' own layouts."""
    questions: Path | None = None
    """Files of zero-shot tasks; None takes the hub's."""

    def text(self) -> Path:
        """Return the folder of prepared text; raise InputError where none is named."""
        if self.data is None:
            raise InputError("training needs --data, a folder made by `saf data prepare`")
        return self.data

    def examples(self, task: str) -> tuple[Path, Path]:
        """Return the training and the test file of a task; raise InputError where they are not there."""
        if self.tasks is None:
            raise InputError(f"finetuning on {task} needs --tasks, a folder with {PUBLIC[task][0][0]}")
        train, test = PUBLIC[task]
        return self._first(train), self._first(test)

    def _first(self, names: tuple[str, ...]) -> Path:
        assert self.tasks is not None
        files = [self.tasks / f"{name}{end}" for name in names for end in ("", ".gz")]
        first = next((path for path in files if path.is_file()), None)
        if first is None:
            raise InputError(f"{self.tasks} has no {' or '.join(names)}, gzipped or not; see docs/experiments.md")
        return first


def check(inputs: Inputs, scale: Scale, records: Iterable[Mapping[str, Any]]) -> None:
    """Raise InputError for text of a vocabulary far from the scale's, or other than that of the recorded runs."""
    data = TokenData.open(inputs.text())
    if abs(data.vocab_size / scale.vocabulary - 1) > 0.01:
        raise InputError(
            f"{inputs.data} has a vocabulary of {data.vocab_size:,} tokens, and the scale {scale.name!r} has "
            f"{scale.vocabulary:,}: its models would be of another size. Prepare the text with --vocab-size"
        )
    if any(data.fingerprint != record["provenance"]["data"].get("train") for record in records):
        raise InputError(
            f"some runs there were trained on other text than {inputs.data}; name theirs, or another --out"
        )


def smoke_inputs(folder: Path, inputs: Inputs) -> Inputs:
    """Return the inputs of the smoke scale, made below a folder where `inputs` has none."""
    data, tasks = inputs.data or folder / "data", inputs.tasks or folder / "tasks"
    if not data.exists():
        prepare(("python",), data, max_bytes=250_000, vocab_size=512, seed=0, progress=False)
    if inputs.tasks is None:
        for name, text in _smoke_examples().items():
            (tasks / name).parent.mkdir(parents=True, exist_ok=True)
            (tasks / name).write_text(text)
    return Inputs(data=data, tasks=tasks, questions=inputs.questions or Path(__file__).parent / "smoke_tasks")


def _smoke_examples() -> Mapping[str, str]:
    """Return files of a few short examples of every task."""
    words = ("good", "bad", "for", "not", "self", "if", "in", "or")
    lines = [f"{words[n % 2]} {words[2 + n % 6]} {n}\t{1 - n % 2}" for n in range(80)]
    questions_of_passages: list[Any] = [
        {"question": f"is {n}", "passage": words[n % 8], "idx": n, "label": n % 2 == 0} for n in range(80)
    ]
    questions = [{"question": f"{n}", "options": ["a", "b"], "gold_label": 1 + n % 2} for n in range(20)]
    return {
        "sst2/train.tsv": "\n".join(["sentence\tlabel", *lines[:64]]) + "\n",
        "sst2/dev.tsv": "\n".join(["sentence\tlabel", *lines[64:]]) + "\n",
        "boolq/train.jsonl": "".join(json.dumps(each) + "\n" for each in questions_of_passages[:64]),
        "boolq/val.jsonl": "".join(json.dumps(each) + "\n" for each in questions_of_passages[64:]),
        PUBLIC["quality"][0][-1]: json.dumps({"article": " ".join(words), "questions": questions}) + "\n",
    }
