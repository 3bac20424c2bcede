"""The inputs of runs: prepared text, examples to finetune on, zero-shot questions. The smoke scale has its own."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.scales import Scale
from saf.data import TokenData, prepare
from saf.errors import InputError

PUBLIC = {
    # Names of the training and of the test file below the folder, each also as .gz.
    "sst2": (("sst2/train.tsv",), ("sst2/dev.tsv",)),
    "boolq": (("boolq/train.jsonl",), ("boolq/val.jsonl",)),
    # Where articles were not split, training and test are the same: for times alone.
    "quality": tuple((f"quality/{part}.jsonl", "quality/quality.htmlstripped.jsonl") for part in ("train", "dev")),
}
"""The layouts of the tasks that are finetuned on; associative recall makes its own examples."""
SMOKE = Path(__file__).parent / "smoke_tasks"
"""Zero-shot questions, and in `finetuning` examples, of the smoke scale."""


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
        if self.data is None:
            raise InputError("training needs --data, a folder made by `saf data prepare`; --scale smoke makes its own")
        return self.data

    def examples(self, task: str) -> tuple[Path, Path]:
        """Return the training and the test file of a task; raise InputError where they are not there."""
        if self.tasks is None:
            raise InputError(f"finetuning on {task} needs --tasks, a folder with {PUBLIC[task][0][0]}")
        files = []
        for names in PUBLIC[task]:
            paths = [self.tasks / f"{name}{end}" for name in names for end in ("", ".gz")]
            files += [path for path in paths if path.is_file()][:1]
        if len(files) < len(PUBLIC[task]):
            named = [" or ".join(names) for names in PUBLIC[task]]
            raise InputError(f"{self.tasks} must have {' and '.join(named)}, gzipped or not; see docs/experiments.md")
        train, test = files
        return train, test


def check(inputs: Inputs, scale: Scale, records: Iterable[Mapping[str, Any]]) -> None:
    """Raise InputError for text of a vocabulary far from the scale's, or other than that of the recorded runs."""
    data = TokenData.open(inputs.text())
    # gpt2 has 50,257 tokens, and the paper's models 50,304, a multiple of 64.
    if abs(data.vocab_size / scale.vocabulary - 1) > 0.01:
        raise InputError(
            f"{inputs.data} must have a vocabulary of {scale.vocabulary:,} tokens for the scale {scale.name!r}, got "
            f"{data.vocab_size:,}; prepare the text with --vocab-size"
        )
    if any(data.fingerprint != record["provenance"]["data"].get("train") for record in records):
        raise InputError(
            f"some runs there were trained on other text than {inputs.data}; name theirs, or another --out"
        )


def smoke_inputs(folder: Path, inputs: Inputs) -> Inputs:
    """Return the inputs of the smoke scale where `inputs` has none; its text is prepared below a folder."""
    data = inputs.data or folder / "data"
    if not data.exists():
        prepare(("python",), data, max_bytes=250_000, vocab_size=512, seed=0, progress=False)
    return Inputs(data=data, tasks=inputs.tasks or SMOKE / "finetuning", questions=inputs.questions or SMOKE)
