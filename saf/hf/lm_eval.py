"""lm-evaluation-harness on a model in memory: its tasks, prompts and metrics; this project's forward passes.

`ExactLengthModel` is what lm-eval asks; it never pads. `ask` puts the paper's five tasks to an opened model.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import datasets
import lm_eval
import lm_eval.api.model
import lm_eval.api.task
from datasets.exceptions import DatasetsError
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from torch import nn

from saf.errors import DataError, InputError, UnsupportedError
from saf.evaluate.continuations import Continuation, Tokens, likelihoods
from saf.evaluate.zero_shot import TaskAnswers, TooLong
from saf.models.adapter import longest_input
from saf.opening import Encoder, OpenedModel
from saf.tasks.zero_shot import ZERO_SHOT, TaskName, read_questions

Request = tuple[tuple[str, str], list[int], list[int]]
"""Context and continuation as text, then each as tokens."""
_SPLIT = "questions"
"""The name that questions of a file have among the splits of their data set."""
Progress = Callable[[str, int, int], None]
"""Called with a task's name, how many of its requests are answered, and how many there are; first with none."""


class Asked(Protocol):
    """Say what is asked, and how; settings of a command."""

    @property
    def tasks(self) -> Sequence[TaskName]:
        """Return the tasks."""
        ...

    @property
    def task_data(self) -> Path | None:
        """Return the folder of their public files; None is the hub."""
        ...

    @property
    def questions(self) -> int | None:
        """Return how many questions of each task, from its first on; None is all."""
        ...

    @property
    def too_long(self) -> TooLong:
        """Return what is done with questions that are too long."""
        ...

    @property
    def batch_size(self) -> int:
        """Return the most sequences in a forward pass."""
        ...

    @property
    def precision(self) -> str:
        """Return "fp32", "bf16" or "auto"."""
        ...


def ask(
    opened: OpenedModel, asked: Asked, *, longest: int | None = None, progress: Progress | None = None
) -> dict[str, TaskAnswers]:
    """Return what a model answers as it is now; the rest is as `ExactLengthModel` and `answer_tasks` have it."""
    lm = ExactLengthModel(
        opened.model,
        opened.encoder(),
        batch_size=asked.batch_size,
        precision=asked.precision,
        too_long=asked.too_long,
        longest=longest,
    )
    return answer_tasks(lm, asked.tasks, folder=asked.task_data, questions=asked.questions, progress=progress)


class ExactLengthModel(TemplateLM):
    """Answer lm-eval's requests for likelihoods by batches of one exact length.

    lm-eval itself tokenises a context with its continuation, and splits the tokens behind the context's own.
    """

    def __init__(
        self,
        model: nn.Module,
        encoder: Encoder,
        *,
        batch_size: int = 8,
        precision: str = "auto",
        too_long: TooLong = "refuse",
        longest: int | None = None,
    ):
        """Take a model and its tokenizer; `too_long` says whether long contexts lose tokens at their beginning.

        `longest` is the most tokens of an input, where that is fewer than the model takes.
        """
        super().__init__()
        self.model, self.encoder = model, encoder
        self.batch_size, self.precision = batch_size, precision
        self.progress: Callable[[int, int], None] | None = None
        """Called with (requests answered, requests) of what is asked at once."""
        self.too_long: TooLong = too_long
        self.longest = min(filter(None, (longest, longest_input(model))), default=None)
        self.cut: set[tuple[str, str]] = set()
        """The requests whose context was cut, as text."""

    @property
    def eot_token_id(self) -> int:
        """Return the token that stands before a continuation without a context."""
        if self.encoder.first is None:
            raise UnsupportedError("this request has no context, and the model's tokenizer has no token to begin with")
        return self.encoder.first

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the tokens of a text, with what the tokenizer itself adds unless `add_special_tokens` is false."""
        return self.encoder.bare(string) if add_special_tokens is False else self.encoder.encode(string)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a context and of what follows it, as lm-eval splits them: behind the context's own.

        Where one token spans the end of the context and all that follows, nothing would be left to be likely. That
        token is then what follows, behind the tokens before it; without any, behind the one that begins a text.
        """
        before, after = super()._encode_pair(context, continuation)
        if after or not continuation:
            return before, after
        whole = self.tok_encode(context + continuation)
        shared = next((n for n, (one, two) in enumerate(zip(before, whole, strict=False)) if one != two), len(whole))
        return whole[:shared] or [self.eot_token_id], whole[shared:]

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Return log-probability and greediness of each request, in order."""
        asked = [self._fitted(*request) for request in requests]
        found = likelihoods(
            self.model, asked, batch_size=self.batch_size, precision=self.precision, progress=self.progress
        )
        return [(one.log_prob, one.greedy) for one in found]

    @property
    def _bound(self) -> str:
        """Return in words how long an input may be, and by whom."""
        own = self.longest == longest_input(self.model)
        return f"the model takes {self.longest:,}" if own else f"at most {self.longest:,} are allowed"

    def _fitted(self, text: tuple[str, str], context: list[int], tokens: list[int]) -> Continuation:
        """Return a request that the model takes; raise InputError for one that is too long, where none is cut."""
        asked = Continuation(tuple(context), tuple(tokens))
        if self.longest is None or len(asked.inputs) <= self.longest:
            return asked
        if self.too_long == "refuse":
            raise InputError(
                f"a question has {len(asked.inputs):,} tokens, {self._bound}: --too-long cut leaves "
                f"out what is too much at its beginning, as lm-eval does; it begins {text[0][:60]!r}"
            )
        if len(tokens) > self.longest:
            raise InputError(f"a choice of {len(tokens):,} tokens is too long, {self._bound}")
        self.cut.add(text)
        kept: Tokens = asked.context[len(asked.inputs) - self.longest :]
        return Continuation(kept, asked.tokens)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Refuse: perplexity is measured on windows, by `saf evaluate`."""
        raise UnsupportedError("perplexity over rolling windows is not measured here; use `saf evaluate --data`")

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Refuse: tasks with choices are answered, none that generates."""
        raise UnsupportedError("tasks that generate text are not answered here, only tasks with choices")


def answer_tasks(
    lm: ExactLengthModel,
    names: Sequence[TaskName],
    *,
    folder: Path | None = None,
    questions: int | None = None,
    progress: Progress | None = None,
) -> dict[str, TaskAnswers]:
    """Return a model's answers to tasks, by name, in the order given.

    Args:
        lm: The model.
        names: Of `ZERO_SHOT`.
        folder: Where the public files of questions lie, a folder a task; the hub's when None.
        questions: Only so many of each task, from its first on.
        progress: Called before a task's first request and after each batch.

    Raises:
        DataError: A file is missing or damaged, or the hub cannot be reached.
        InputError: A question is longer than the model takes.
    """
    tasks, sources = _tasks(names, folder, questions)
    told = {}
    for name in names:
        lm.progress = None if progress is None else partial(progress, name)
        with _quiet():
            found: Any = evaluate(lm=lm, task_dict={"tasks": {name: tasks[name]}}, limit=questions, bootstrap_iters=0)
        choices = tasks[name].config.doc_to_choice
        told[name] = TaskAnswers(
            answers=[_answer(sample, lm.cut) for sample in found["samples"][name]],
            labels=tuple(choices) if isinstance(choices, list) else (),
            version=f"lm-eval {lm_eval.__version__}, task version {tasks[name].VERSION}",
            source=sources[name],
        )
    return told


def _tasks(
    names: Sequence[TaskName], folder: Path | None, limit: int | None
) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    """Return lm-eval's tasks by name, with the questions of files where there is a folder, and where these are from."""
    definitions = Path(lm_eval.__file__).parent / "tasks"
    # The folders named, not all of lm-eval's: its index of 15,000 files takes ten seconds.
    include: list[str | Path] = [definitions / ZERO_SHOT[name].definition for name in names]
    manager = TaskManager(include_defaults=False, include_path=include)
    members: list[dict[str, Any]] = [{"task": name} for name in names]
    sources = {}
    for member in members if folder is not None else ():
        assert folder is not None
        found = read_questions(member["task"], folder, limit=limit)
        sources[member["task"]] = {"path": str(found.path), "sha256": found.sha256}
        splits = {_SPLIT: datasets.Dataset.from_list(found.rows)}
        member |= {"custom_dataset": lambda _splits=splits, **_: _splits, "validation_split": _SPLIT}
        member |= {"training_split": None, "test_split": None}
    try:
        with _quiet():
            tasks = manager.load([{"group": "zero_shot", "task": members}])["tasks"]
    except (OSError, ValueError, DatasetsError) as error:
        raise DataError(
            f"the questions of {', '.join(names)} could not be had from the hub ({type(error).__name__}: {error}); "
            "offline, give a folder of their public files with --task-data"
        ) from error
    for name, task in tasks.items():
        hub = {"hub": f"{task.config.dataset_path} {task.config.dataset_name or ''}".strip()}
        sources.setdefault(name, hub | {"split": str(task.config.test_split or task.config.validation_split)})
    return tasks, sources


def _answer(sample: Mapping[str, Any], cut: set[tuple[str, str]]) -> dict[str, Any]:
    """Return one question's answer as `saf.evaluate.answers` has it, from what lm-eval keeps of it."""
    log_probs = [float(log_prob) for log_prob, _ in sample["filtered_resps"]]
    right, taken = int(sample["target"]), max(range(len(log_probs)), key=log_probs.__getitem__)
    told = {
        "id": f"{sample['doc_id']} {sample['doc_hash'][:16]}",
        "answer": right,
        "taken": taken,
        "right": bool(sample["acc"]),
        "shortened": any(tuple(text) in cut for text in sample["arguments"]),
        "log_probs": log_probs,
    }
    return told | ({"right_norm": bool(sample["acc_norm"])} if "acc_norm" in sample else {})


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep lm-eval's advice about its own settings off the terminal, and the bars of tiny steps, its and data sets'."""
    logger, bars = logging.getLogger("lm_eval"), datasets.are_progress_bars_disabled()
    level, own = logger.level, {module: module.tqdm for module in (lm_eval.api.model, lm_eval.api.task)}
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    for module in own:
        vars(module)["tqdm"] = lambda steps, **_: steps
    try:
        yield
    finally:
        for module, bar in own.items():
            vars(module)["tqdm"] = bar
        logger.setLevel(level)
        if not bars:
            datasets.enable_progress_bars()
