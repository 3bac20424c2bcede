"""Zero-shot tasks by lm-evaluation-harness, for a model in memory: its prompts and metrics, our forward passes.

`ask` returns the answers of an opened model. `ExactLengthModel` answers lm-eval's requests in batches without padding.
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

from saf.errors import DataError, InputError, UnsupportedError
from saf.models.adapter import longest_input
from saf.opening import Encoder, OpenedModel
from saf.tasks.base import Continuation, Progress, TaskAnswers, likelihoods
from saf.tasks.zero_shot import ZERO_SHOT, TaskName, TooLong, read_questions, task_answers

Request = tuple[tuple[str, str], list[int], list[int]]
"""Context and continuation as text, then each as tokens."""
TaskProgress = Callable[[str, int, int], None]
"""A callback with a task's name, the number of its answered requests, and their total."""


def ask(
    opened: OpenedModel, settings: Any, *, longest: int | None = None, progress: TaskProgress | None = None
) -> dict[str, TaskAnswers]:
    """Return a model's answers by task; `settings` are those of `saf evaluate` about tasks and how they run."""
    lm = ExactLengthModel(
        opened.model,
        opened.encoder(),
        batch_size=settings.batch_size,
        precision=settings.precision,
        too_long=settings.too_long,
        longest=longest,
    )
    return answer_tasks(lm, settings.tasks, folder=settings.task_data, questions=settings.questions, progress=progress)


def answer_tasks(
    lm: "ExactLengthModel", names: Sequence[TaskName], *, folder: Path | None = None, questions: int | None = None,
    progress: TaskProgress | None = None,
) -> dict[str, TaskAnswers]:  # fmt: skip
    """Return a model's answers by task, to the first `questions` of each task.

    Questions come from the tasks' public files in `folder`, or from the hub. Raises DataError where a file is missing
    or damaged, or the hub cannot be reached; InputError for a question that is too long for the model.
    """
    tasks, sources = _tasks(names, folder, questions)
    answers = {}
    for name in names:
        lm.progress = None if progress is None else partial(progress, name)
        task_dict: Any = {"tasks": {name: tasks[name]}}
        with _quiet():
            # No bootstrap: intervals are of the answers of two models, paired by question (saf.paired).
            output: Any = evaluate(lm=lm, task_dict=task_dict, limit=questions, bootstrap_iters=0)
        choices = tasks[name].config.doc_to_choice
        answers[name] = task_answers(
            [_answer(sample, lm.cut) for sample in output["samples"][name]],
            labels=choices if isinstance(choices, list) else [],
            version=f"lm-eval {lm_eval.__version__}, task version {tasks[name].VERSION}",
            source=sources[name],
        )
    return answers


class ExactLengthModel(TemplateLM):
    """Compute the likelihoods that lm-eval requests, in batches of inputs of equal length.

    lm-eval tokenises a context together with its continuation, and splits them at the length of the context alone.
    With `too_long="cut"` long contexts lose tokens at their beginning. `longest` sets a lower limit of an input's
    tokens than the model's own.
    """

    def __init__(
        self, model: nn.Module, encoder: Encoder, *, batch_size: int = 8, precision: str = "auto",
        too_long: TooLong = "refuse", longest: int | None = None,
    ):  # fmt: skip
        super().__init__()
        self.model, self.encoder, self.too_long = model, encoder, too_long
        self.batch_size, self.precision = batch_size, precision
        self.progress: Progress | None = None
        """A callback with the number of answered requests of a task, and their total."""
        self.longest = min(filter(None, (longest, longest_input(model))), default=None)
        self.cut: set[tuple[str, str]] = set()
        """Context and continuation of the requests whose context was cut."""

    @property
    def eot_token_id(self) -> int:
        """The token before a continuation that has no context."""
        if self.encoder.first_token is None:
            raise UnsupportedError("this request has no context, and the model's tokenizer has no token to begin with")
        return self.encoder.first_token

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.encoder.encode_plain(string) if add_special_tokens is False else self.encoder.encode(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Return for each request its log-probability, and whether greedy decoding yields its continuation."""
        answers = likelihoods(
            self.model,
            [self._fitted(*request) for request in requests],
            batch_size=self.batch_size,
            precision=self.precision,
            progress=self.progress,
        )
        return [(each.log_prob, each.greedy) for each in answers]

    def _fitted(self, text: tuple[str, str], context: list[int], tokens: list[int]) -> Continuation:
        """Return a request cut to the model's length; raise InputError where it may not or cannot be cut."""
        request = Continuation(tuple(context), tuple(tokens))
        if self.longest is None or len(request.inputs) <= self.longest:
            return request
        if self.too_long == "refuse":
            raise InputError(
                f"a question must have at most {self.longest:,} tokens, got {len(request.inputs):,}; --too-long cut "
                f"shortens it at its beginning, {text[0][:60]!r}"
            )
        # A choice takes as many inputs as it has tokens: one of the context, and its own but the last.
        if len(tokens) > self.longest:
            raise InputError(f"a choice must have at most {self.longest:,} tokens, got {len(tokens):,}")
        self.cut.add(text)
        return Continuation(request.context[len(request.inputs) - self.longest :], request.tokens)

    def loglikelihood_rolling(self, *_: Any, **__: Any) -> Any:
        raise UnsupportedError("tasks must have choices; perplexity is measured by `saf evaluate --data`")

    generate_until = loglikelihood_rolling


def _tasks(
    names: Sequence[TaskName], folder: Path | None, limit: int | None
) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    """Return lm-eval's tasks by name, with questions from files where a folder is named, and the questions' sources."""
    definitions = Path(lm_eval.__file__).parent / "tasks"
    # The folders named, not all of lm-eval's: its index of 15,000 files takes ten seconds.
    include: list[str | Path] = [definitions / ZERO_SHOT[name].definition for name in names]
    members: list[dict[str, Any]] = [{"task": name} for name in names]
    sources = {}
    if folder is not None:
        for member in members:
            questions, sources[member["task"]] = read_questions(member["task"], folder, limit=limit)
            splits = {"questions": datasets.Dataset.from_list(questions)}
            member |= {
                "custom_dataset": lambda _splits=splits, **_: _splits,  # a default: a closure would see the last task's
                "validation_split": "questions",
                "training_split": None,
                "test_split": None,
            }
    try:
        with _quiet():
            manager = TaskManager(include_defaults=False, include_path=include)
            tasks = manager.load([{"group": "zero_shot", "task": members}])["tasks"]
    except (OSError, ValueError, DatasetsError) as error:
        raise DataError(
            f"the hub must have the questions of {', '.join(names)}, got {type(error).__name__}: {error}; offline, "
            "give a folder of their public files with --task-data"
        ) from error
    for name, task in tasks.items():
        hub = {"hub": f"{task.config.dataset_path} {task.config.dataset_name or ''}".strip()}
        sources.setdefault(name, hub | {"split": str(task.config.test_split or task.config.validation_split)})
    return tasks, sources


def _answer(sample: Mapping[str, Any], cut: set[tuple[str, str]]) -> dict[str, Any]:
    """Return one question's answer as `saf.tasks.base` records it, from lm-eval's sample."""
    log_probs = [float(log_prob) for log_prob, _ in sample["filtered_resps"]]
    answer = {
        "id": f"{sample['doc_id']} {sample['doc_hash'][:16]}",
        "answer": int(sample["target"]),
        "taken": max(range(len(log_probs)), key=log_probs.__getitem__),  # the first of equal ones, as lm-eval's argmax
        "right": bool(sample["acc"]),
        "shortened": any(tuple(text) in cut for text in sample["arguments"]),
        "log_probs": log_probs,
    }
    if "acc_norm" in sample:
        answer["right_norm"] = bool(sample["acc_norm"])
    return answer


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence lm-eval's advice about its own settings, and the progress bars of lm-eval and data sets."""
    logger, bars = logging.getLogger("lm_eval"), datasets.are_progress_bars_disabled()
    level, own = logger.level, {module: module.tqdm for module in (lm_eval.api.model, lm_eval.api.task)}
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    for module in own:  # lm-eval has no option for its own bars
        vars(module)["tqdm"] = lambda steps, **_: steps
    try:
        yield
    finally:
        for module, bar in own.items():
            vars(module)["tqdm"] = bar
        logger.setLevel(level)
        if not bars:
            datasets.enable_progress_bars()
