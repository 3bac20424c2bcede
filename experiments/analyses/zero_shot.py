"""Zero-shot accuracy of a trained model whose heads are frozen without further training (paper, appendix on Qwen3-4B).

One calibration serves all arms: each score and rate chooses and fits its own heads, which are frozen, answer the tasks,
and are live again. Or models that were frozen elsewhere answer them as they are.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Literal

from matplotlib.figure import Figure
from torch import Tensor

from experiments import paper
from experiments.analyses.common import (
    Part,
    Record,
    TaskSettings,
    check_rates,
    frozen_heads,
    header,
    origin_of,
    piece,
    say,
    subplots,
    table,
)
from saf.calibration import calibrate
from saf.data import calibration_windows
from saf.errors import InputError
from saf.evaluate.passes import precision_in_use
from saf.evaluate.tables import counts_text
from saf.evaluate.zero_shot import AnswersByTask, paired_tasks
from saf.freeze_config import FreezeConfig
from saf.freezing import FittedHead, accept_fits, fit_heads, head_order
from saf.heads import Head, HeadSet
from saf.machine import Stopwatch, autocast, device_name, pick_device
from saf.models.adapter import adapter_for
from saf.opening import OpenedModel, open_model
from saf.records.table import percent
from saf.scores import score
from saf.statistics import AttentionStatistics

LENGTH = 2_048
"""Default tokens of a calibration sequence: longer than the tasks' longest questions, and the length of the paper's
other patterns of Qwen3-4B."""


@dataclass(frozen=True, kw_only=True)
class Settings(TaskSettings):
    """Freeze heads of a trained model by each score at each rate, and compare its zero-shot accuracy by question.

    With --out every arm is written as it ends, and the same command continues.
    """

    frozen: tuple[Path, ...] = ()
    """Models frozen elsewhere, which answer as they are; nothing is frozen here then."""
    data: Path | None = None
    """Calibration text: a data folder prepared with the model's tokenizer, or a file of text."""
    scores: tuple[Literal["variance", "forward_kl"], ...] = ("variance", "forward_kl")
    """Scores that choose heads."""
    rates: tuple[float, ...] = (0.1, 0.2, 0.3)
    """Shares of all heads."""
    max_fit_kl: float = FreezeConfig.max_fit_kl
    """Largest KL of an accepted fit, nats per row."""
    sequences: int = 512
    """Number of calibration sequences."""
    calibration_seed: int = 0
    """Seed for drawing calibration sequences."""
    length: int | None = None
    """Tokens of a calibration sequence, the longest input of every arm; 2,048 or the model's longest if not given."""


def measure(settings: Settings) -> dict[str, Any]:
    """Return the record; raise InputError if the arms to continue are of another model, data or settings."""
    check_rates(settings.rates)
    from saf.hf import lm_eval  # noqa: F401 - raises now, not after the calibration

    opening = {"precision": settings.precision, "needs_data": not settings.frozen}
    opened = open_model(settings.model, settings.data, settings.device, **opening)
    others = [
        open_model(path, settings.data, settings.device, precision=settings.precision, needs_data=False)
        for path in settings.frozen
    ]
    precision = precision_in_use(opened.model, settings.precision)
    for other in others:
        if (its := precision_in_use(other.model, settings.precision)) != precision:
            raise InputError(
                f"{other.folder} would answer in {its}, {opened.folder} in {precision}; save both models in one dtype, "
                "or give --precision fp32, which opens both in float32"
            )
    longest = min([settings.length or min(LENGTH, opened.longest), *(other.longest for other in others)])
    checkpoints = {"model": opened.source.hash} | {f"frozen {n}": each.source.hash for n, each in enumerate(others)}
    head = header(
        "zero-shot",
        settings,
        device=device_name(pick_device(settings.device)),
        checkpoints=checkpoints,
        data={} if opened.data is None else {"calibration": opened.data.fingerprint},
    )
    study = Study(settings, opened, longest, origin_of(head))
    arms = list(study.elsewhere(others) if others else study.frozen())
    return {
        **head,
        **{"model": str(opened.folder), "length": longest, "precision": precision},
        **{"ordinary": {"tasks": study.ordinary["tasks"]}, "arms": arms, "overlap": _overlaps(arms)},
    }


@dataclass
class Study:
    """One study: its arms are measured one after the other, each once."""

    settings: Settings
    opened: OpenedModel
    longest: int
    origin: Record

    @cached_property
    def ordinary(self) -> dict[str, Any]:
        """The ordinary model's tasks and answers."""
        return piece(self.settings.out, "ordinary", self.origin, lambda: self._answers(self.opened, "as it is"))

    def _answers(self, opened: OpenedModel, name: str) -> dict[str, Any]:
        say(f"{name}: {', '.join(self.settings.tasks)}")
        from saf.hf.lm_eval import ask

        answers = ask(opened, self.settings, longest=self.longest)
        return {
            "tasks": {name: task.record for name, task in answers.items()},
            "answers": {
                name: [[one["id"], one["answer"], bool(one["right"])] for one in task.answers]
                for name, task in answers.items()
            },
        }

    def _arm(self, opened: OpenedModel, name: str, facts: Record) -> dict[str, Any]:
        """Return an arm: its facts, its answers by task and their paired changes from the ordinary model's."""
        own = self._answers(opened, name)
        changes = paired_tasks(_by_task(self.ordinary), _by_task(own))
        tasks = {name: task | {"change": changes["tasks"][name]} for name, task in own["tasks"].items()}
        return {**facts, "tasks": tasks, "mean_difference": changes["mean_difference"]}

    def elsewhere(self, others: Sequence[OpenedModel]) -> Iterator[dict[str, Any]]:
        """Yield the arms of models that were frozen elsewhere."""
        for number, other in enumerate(others, 1):
            adapter = adapter_for(other.model)
            heads = adapter.frozen_heads()
            share = len(heads) / sum(site.layout.num_heads for site in adapter.sites())
            name = f"model {number}, {percent(share)} frozen"
            facts = {"name": name, "path": str(other.folder), "score": None, "rate": None, "share": share}
            facts["heads"] = heads.to_list()
            yield piece(
                *(self.settings.out, name, self.origin),
                lambda other=other, name=name, facts=facts: self._arm(other, name, facts),
            )

    def frozen(self) -> Iterator[dict[str, Any]]:
        """Yield the arms of every score and rate."""
        self.ordinary  # noqa: B018 - before any head is frozen
        for name in self.settings.scores:
            fitted: dict[Head, FittedHead] = {}
            for rate in self.settings.rates:
                title = f"{name} {percent(rate)}"
                make = lambda name=name, rate=rate, fitted=fitted: self._freeze(name, rate, fitted)  # noqa: E731
                yield piece(self.settings.out, title, self.origin, make)

    @cached_property
    def _calibrated(self) -> tuple[list[Tensor], AttentionStatistics]:
        assert self.opened.data is not None
        count, seed = self.settings.sequences, self.settings.calibration_seed
        windows = calibration_windows(self.opened.data, length=self.longest, count=count, seed=seed)
        say(f"calibrating on {count} sequences of {self.longest:,} tokens")
        ids = list(windows.split(self.settings.batch_size))
        return ids, calibrate(self.opened.model, ids)

    def _freeze(self, name: str, rate: float, fitted: dict[Head, FittedHead]) -> dict[str, Any]:
        """Return the arm of a score and rate; fits stay in `fitted` for later arms."""
        model, config = self.opened.model, FreezeConfig(score=name, rate=rate, max_fit_kl=self.settings.max_fit_kl)
        with autocast(pick_device(self.settings.device), self.settings.precision):
            ids, statistics = self._calibrated

            def fit(heads: HeadSet) -> dict[Head, FittedHead]:
                if missing := HeadSet(head for head in heads if head not in fitted):
                    fitted.update(fit_heads(model, ids, statistics, missing, config, Stopwatch()))
                return {head: fitted[head] for head in heads}

            accepted, rejected = accept_fits(
                head_order({name: score(statistics, name)}, config), fit, config, allow_empty=True
            )
            heads, total = HeadSet(accepted), statistics.variance.numel()
            label = percent(rate)
            if len(heads) != config.requested(total):
                label = f"{percent(round(len(heads) / total, 3))} ({label} asked for)"
            facts = {"name": f"{name} {label}", "score": name, "rate": rate, "share": len(heads) / total}
            facts |= {"heads": heads.to_list(), **_described(heads, fitted, rejected, statistics)}
            with frozen_heads(model, heads, [fitted[head].pattern for head in heads], config.backend):
                return self._arm(self.opened, f"{name}, {percent(rate)}", facts)


def _by_task(entries: Record) -> AnswersByTask:
    """Return answers as `paired_tasks` takes them."""
    return {
        name: (task, [dict(zip(("id", "answer", "right"), each, strict=True)) for each in entries["answers"][name]])
        for name, task in entries["tasks"].items()
    }


def _described(
    heads: HeadSet,
    fitted: Mapping[Head, FittedHead],
    rejected: Mapping[Head, FittedHead],
    statistics: AttentionStatistics,
) -> dict[str, Any]:
    """Return the counts of heads by thirds of the layers, and the medians of their fits' KL and of their scores."""
    layers = len(statistics.variance)
    values = {
        "fit_kl_median": [fitted[head].fit_kl for head in heads],
        "forward_kl_median": [float(statistics.forward_kl[head]) for head in heads],
        "variance_median": [float(statistics.variance[head]) for head in heads],
    }
    return {
        "layer_thirds": [sum(3 * layer // layers == third for layer, _ in heads) for third in range(3)],
        "rejected": [[*head, fit.fit_kl] for head, fit in sorted(rejected.items())],
        **{name: median(each) if each else None for name, each in values.items()},
    }


def _overlaps(arms: Sequence[Record]) -> dict[str, float]:
    """Return by rate the share of the first score's heads that the second score chooses too."""
    found, first = {}, {}
    for arm in arms:
        if arm["score"] is not None:
            heads = {tuple(head) for head in arm["heads"]}
            one = first.setdefault(arm["rate"], heads)
            if one is not heads and one:
                found[f"{arm['rate']:g}"] = len(one & heads) / len(one)
    return found


def tables(record: Record) -> list[Part]:
    """Return accuracies beside one another, their paired changes, the heads, and counts of answers."""
    tasks, arms = record["ordinary"]["tasks"], record["arms"]
    columns = {"ordinary": tasks, **{arm["name"]: arm["tasks"] for arm in arms}}
    conditions = (
        f"Zero-shot accuracy of {record['model']}: {sum(task['questions'] for task in tasks.values()):,} questions of "
        f"{len(tasks)} tasks, inputs of up to {record['length']:,} tokens, {record['precision']}; heads frozen without "
        "further training."
    )
    rows: list[list[Any]] = [
        [name, *(f"{100 * of[name]['accuracy']:.2f}" for of in columns.values())] for name in tasks
    ]
    rows.append(["mean change", None, *(f"{100 * arm['mean_difference']:+.2f}" for arm in arms)])
    parts: list[Part] = [conditions, table("Accuracy, %", ["task", *columns], rows), _changes_table(record)]
    if any(arm["score"] is not None for arm in arms):
        parts.append(_heads_table(record))
    if labelled := [name for name, task in tasks.items() if task["labels"]]:
        rows = [["right answers", *(counts_text(tasks[name]["answers"], tasks[name]["labels"]) for name in labelled)]]
        for title, of in columns.items():
            rows.append([title, *(counts_text(of[name]["taken"], of[name]["labels"]) for name in labelled)])
        parts.append(table("Answers by label", ["", *labelled], rows))
    return parts


def _changes_table(record: Record) -> Part:
    """Return the paired change of each task in each arm, in points."""
    rows = []
    for arm in record["arms"]:
        for name, task in arm["tasks"].items():
            change = task["change"]
            points, low, high = (f"{100 * value:+.2f}" for value in (change["difference"], *change["ci95"]))
            gained = f"{change['gained']:,} / {change['lost']:,}"
            p_values = (f"{change[key]:.3g}" for key in ("p_value", "p_holm"))
            rows.append([arm["name"], name, f"{points} ({low} to {high})", gained, *p_values])
    notes = [
        "Intervals are 95% over questions, paired; p is of McNemar's exact test, Holm's correction is over an arm's "
        "tasks; a large p shows no equality."
    ]
    if cut := sum(task["shortened"] for task in record["ordinary"]["tasks"].values()):
        notes.append(f"{cut:,} questions were longer, and cut at their beginning.")
    return table("Changes, points", ["arm", "task", "change", "gained / lost", "p", "Holm"], rows, notes)


def _heads_table(record: Record) -> Part:
    """Return the heads that each arm chose."""
    rows = []
    for arm in record["arms"]:
        medians = [arm[name] and f"{arm[name]:.3f}" for name in ("fit_kl_median", "forward_kl_median")]
        shared = record["overlap"].get(f"{arm['rate']:g}")
        thirds = "/".join(map(str, arm["layer_thirds"]))
        overlap = None if shared is None else percent(shared)
        rows.append([arm["name"], len(arm["heads"]), len(arm["rejected"]), thirds, *medians, overlap])
    columns = ["arm", "heads", "rejected fits", "by thirds of the layers", "fit KL", "forward KL", "chosen by both"]
    notes = ["Medians over the heads, nats per row.", *paper.notes(paper.QWEN_ZERO_SHOT)]
    return table("Heads", columns, rows, notes)


def figure(records: Sequence[Record]) -> Figure:
    """Return the change of each task and their mean by the share of frozen heads, a line a score."""
    record, *_ = records
    groups: dict[str, list[Record]] = {}
    for arm in record["arms"]:
        groups.setdefault(arm["score"] or arm["name"], []).append(arm)
    tasks = record["ordinary"]["tasks"]
    drawn, axes = subplots(-(-(len(tasks) + 1) // 3), 3)
    for axis, name in zip(axes.flat, [*tasks, None], strict=False):
        for group, arms in groups.items():
            changes = [arm["tasks"][name]["change"]["difference"] if name else arm["mean_difference"] for arm in arms]
            points = [(100 * arm["share"], 100 * change) for arm, change in zip(arms, changes, strict=True)]
            axis.plot(*zip((0, 0), *points, strict=True), "o-", label=group)
        axis.axhline(0, color="grey", lw=0.8)
        title = "mean change" if name is None else f"{name}, {100 * tasks[name]['accuracy']:.2f}% ordinary"
        axis.set(title=title, xlabel="heads frozen, %", ylabel="points")
    axes.flat[0].legend()
    for axis in axes.flat:
        axis.set_visible(axis.has_data())
    return drawn
