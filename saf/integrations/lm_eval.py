"""lm-evaluation-harness on a model in memory: its tasks, prompts and metrics; this project's forward passes.

lm-eval asks `ExactLengthModel`, which never pads; `ask` puts the paper's five tasks to an opened model.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import lm_eval.api.model
import lm_eval.api.task
from datasets.exceptions import DatasetsError
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from torch import nn

from saf.adapters import longest_input
from saf.errors import DataError, InputError, UnsupportedError
from saf.evaluate.continuations import Continuation, Tokens, likelihoods
from saf.evaluate.zero_shot import TaskAnswers, TooLong
from saf.integrations.models import Encoder, OpenedModel
from saf.tasks.zero_shot import ZERO_SHOT, TaskName, read_questions

Request = tuple[tuple[str, str], list[int], list[int]]
"""Context and continuation as text, then each as tokens."""
Progress = Callable[[str, int, int], None]
"""Called with a task's name, its requests answered, and its requests; first with none."""
_SPLIT = "questions"
"""The name that questions of a file have among the splits of their data set."""


def ask(
    opened: OpenedModel, settings: Any, *, longest: int | None = None, progress: Progress | None = None
) -> dict[str, TaskAnswers]:
    """Answer what the settings of a command ask: their tasks, task_data, questions, too_long, batch_size, precision."""
    options = {name: getattr(settings, name) for name in ("batch_size", "precision", "too_long")}
    lm = ExactLengthModel(opened.model, opened.encoder(), longest=longest, **options)
    return answer_tasks(lm, settings.tasks, folder=settings.task_data, questions=settings.questions, progress=progress)


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
        """`longest` is the most tokens of an input, where that is fewer than the model takes."""
        super().__init__()
        self.model, self.encoder = model, encoder
        self.batch_size, self.precision, self.too_long = batch_size, precision, too_long
        self.progress: Callable[[int, int], None] | None = None
        """Called with (requests answered, requests) of one task."""
        self.longest = min(filter(None, (longest, longest_input(model))), default=None)
        self.cut: set[tuple[str, str]] = set()
        """The requests whose context was cut, as text."""

    @property
    def eot_token_id(self) -> int:
        """The token that stands before a continuation without a context."""
        if self.encoder.first is None:
            raise UnsupportedError("this request has no context, and the model's tokenizer has no token to begin with")
        return self.encoder.first

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Tokens of a text, with those that the tokenizer itself adds unless `add_special_tokens` is false."""
        return self.encoder.bare(string) if add_special_tokens is False else self.encoder.encode(string)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Split the tokens of context and continuation as lm-eval does: behind the context's own.

        Where one token spans the end of the context and the whole continuation, that leaves none to score. That token
        is then the continuation, behind the tokens before it; without any, behind the one that begins a text.
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
        """Log-probability and greediness of each request, in order."""
        pairs = [self._fit(*request) for request in requests]
        options = {"batch_size": self.batch_size, "precision": self.precision, "progress": self.progress}
        return [(one.log_prob, one.greedy) for one in likelihoods(self.model, pairs, **options)]

    def _fit(self, text: tuple[str, str], context: list[int], tokens: list[int]) -> Continuation:
        """A request that the model takes; raise InputError for one that is too long, where none is cut."""
        pair = Continuation(tuple(context), tuple(tokens))
        excess = len(pair.inputs) - (self.longest or len(pair.inputs))
        if excess <= 0:
            return pair
        if self.too_long == "refuse" or excess >= len(context):
            bound = "the model takes" if self.longest == longest_input(self.model) else "the limit is"
            raise InputError(
                f"a question has {len(pair.inputs):,} tokens, {bound} {self.longest:,}: --too-long cut leaves out the "
                f"beginning of a context, as lm-eval does; it begins {text[0][:60]!r}"
            )
        self.cut.add(text)
        kept: Tokens = pair.context[excess:]
        return Continuation(kept, pair.tokens)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Refuse: perplexity is measured on windows, by `saf evaluate`."""
        raise UnsupportedError("perplexity over rolling windows is not measured here; use `saf evaluate --data`")

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Refuse: only tasks with choices are answered."""
        raise UnsupportedError("tasks that generate text are not answered here, only tasks with choices")


def answer_tasks(
    lm: ExactLengthModel,
    names: Sequence[TaskName],
    *,
    folder: Path | None = None,
    questions: int | None = None,
    progress: Progress | None = None,
) -> dict[str, TaskAnswers]:
    """A model's answers to tasks of `ZERO_SHOT`, by name, in the order given.

    Questions come from the public files in `folder`, a folder a task, or from the hub; the first `questions` of each
    task, or all.

    Raises:
        DataError: A file is missing or damaged, or the hub cannot be reached.
        InputError: A question is longer than the model takes.
    """
    tasks, sources = _tasks(names, folder, questions)
    answers = {}
    for name in names:
        lm.progress = None if progress is None else partial(progress, name)
        with _quiet():
            found: Any = evaluate(lm=lm, task_dict={"tasks": {name: tasks[name]}}, limit=questions, bootstrap_iters=0)
        choices = tasks[name].config.doc_to_choice
        answers[name] = TaskAnswers(
            answers=[_answer(sample, lm.cut) for sample in found["samples"][name]],
            labels=tuple(choices) if isinstance(choices, list) else (),
            version=f"lm-eval {lm_eval.__version__}, task version {tasks[name].VERSION}",
            source=sources[name],
        )
    return answers


def _tasks(
    names: Sequence[TaskName], folder: Path | None, limit: int | None
) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    """lm-eval's tasks by name, with the questions of files where there is a folder, and where these are from."""
    definitions = Path(lm_eval.__file__).parent / "tasks"
    # The folders named, not all of lm-eval's: its index of 15,000 files takes ten seconds.
    include: list[str | Path] = [definitions / ZERO_SHOT[name].definition for name in names]
    manager = TaskManager(include_defaults=False, include_path=include)
    members, sources = [], {}
    for name in names:
        member: dict[str, Any] = {"task": name}
        if folder is not None:
            found = read_questions(name, folder, limit=limit)
            sources[name] = {"path": str(found.path), "sha256": found.sha256}
            splits = {_SPLIT: datasets.Dataset.from_list(found.rows)}
            member |= {"custom_dataset": lambda _splits=splits, **_: _splits, "validation_split": _SPLIT}
            member |= {"training_split": None, "test_split": None}
        members.append(member)
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
    """One question's answer as in `saf.evaluate.answers`, from what lm-eval keeps of it."""
    log_probs = [float(log_prob) for log_prob, _ in sample["filtered_resps"]]
    answer = {
        "id": f"{sample['doc_id']} {sample['doc_hash'][:16]}",
        "answer": int(sample["target"]),
        "taken": max(range(len(log_probs)), key=log_probs.__getitem__),
        "right": bool(sample["acc"]),
        "shortened": any(tuple(text) in cut for text in sample["arguments"]),
        "log_probs": log_probs,
    }
    return answer | ({"right_norm": bool(sample["acc_norm"])} if "acc_norm" in sample else {})


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
