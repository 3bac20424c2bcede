"""Zero-shot accuracy of a trained model whose heads are frozen without further training (paper, appendix on Qwen3-4B).

One calibration serves all arms: each score and rate chooses and fits its own heads, which are frozen, answer the tasks,
and are live again. Or models that were frozen elsewhere answer them as they are.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import tyro
from matplotlib.figure import Figure
from torch import Tensor, nn

from experiments import paper
from experiments.analyses.common import (
    Output,
    Part,
    Record,
    check_rates,
    frozen_heads,
    header,
    save,
    say,
    subplots,
    table,
)
from saf.calibration import calibrate
from saf.data import calibration_windows
from saf.errors import InputError
from saf.evaluate.model_facts import precision_in_use
from saf.evaluate.tables import counts_text
from saf.evaluate.zero_shot import AnswersByTask, TaskAnswers, TooLong, paired_tasks
from saf.freeze_config import FreezeConfig
from saf.freezing import FittedHead, accept_fits, fit_heads, head_order
from saf.heads import Head, HeadSet
from saf.machine import Device, Precision, Stopwatch, autocast, device_name, pick_device
from saf.models.adapter import adapter_for
from saf.opening import OpenedModel, open_model
from saf.records.files import to_json
from saf.records.result import read_result
from saf.records.table import percent
from saf.scores import score
from saf.statistics import AttentionStatistics
from saf.tasks.zero_shot import ZERO_SHOT, TaskName

LENGTH = 2_048
"""Default tokens of a calibration sequence: longer than the tasks' longest questions, and the length of the paper's
other patterns of Qwen3-4B."""


@dataclass(frozen=True, kw_only=True)
class Settings(Output):
    """Freeze heads of a trained model by each score at each rate, and compare its zero-shot accuracy by question.

    With --out the record is written after every arm; the same command continues one that was cut off.
    """

    model: tyro.conf.Positional[Path]
    """A checkpoint (step-N), a run, a folder of saf.save, or a model of transformers: its folder or hub name."""
    frozen: tuple[Path, ...] = ()
    """Models frozen elsewhere, which answer as they are; nothing is frozen here then."""
    data: Path | None = None
    """Calibration text: a data folder prepared with the model's tokenizer, or a file of text."""
    tasks: tuple[TaskName, ...] = tuple(ZERO_SHOT)
    """Tasks to answer."""
    task_data: Path | None = None
    """Folder of the tasks' public files; those of the hub if not given."""
    questions: int | None = None
    """Number of questions of each task; all if not given."""
    too_long: TooLong = "refuse"
    """Treatment of questions longer than a calibration sequence: refuse them, or cut their beginning."""
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
    batch_size: int = 8
    """Sequences in a forward pass."""
    device: Device = "auto"
    """Device to compute on; auto is CUDA if there is one."""
    precision: Precision = "auto"
    """Precision to compute in; auto is bf16 autocast on CUDA and fp32 on CPU."""


def unfinished(path: Path) -> dict[str, Any] | None:
    """Return the record of a study that was cut off before its last arm; None for a finished one or another kind."""
    record = read_result(path)
    return record if record["kind"] == "zero-shot" and len(record["arms"]) < record["asked"] else None


def measure(settings: Settings) -> dict[str, Any]:
    """Return the record; raise InputError if the record to continue is of another model, data, settings or sources."""
    check_rates(settings.rates)
    from saf.hf import lm_eval  # noqa: F401 - raises now, not after the calibration

    opening = {"precision": settings.precision, "needs_data": not settings.frozen}
    opened = open_model(settings.model, settings.data, settings.device, **opening)
    opening["needs_data"] = False
    others = [open_model(path, settings.data, settings.device, **opening) for path in settings.frozen]
    precision = precision_in_use(opened.model, settings.precision)
    for other in others:
        if (its := precision_in_use(other.model, settings.precision)) != precision:
            raise InputError(
                f"{other.folder} would answer in {its}, {opened.folder} in {precision}; save both models in one dtype, "
                "or give --precision fp32, which opens both in float32"
            )
    longest = [settings.length or min(LENGTH, opened.longest), *(other.longest for other in others)]
    record: dict[str, Any] = {
        **header(
            "zero-shot",
            settings,
            device=device_name(pick_device(settings.device)),
            checkpoints={"model": opened.source.hash}
            | {f"frozen {n}": other.source.hash for n, other in enumerate(others)},
            data={} if opened.data is None else {"calibration": opened.data.fingerprint},
        ),
        "model": str(opened.folder),
        "length": min(longest),
        "precision": precision,
        "asked": len(others) or len(settings.scores) * len(settings.rates),
    }
    before = unfinished(settings.out) if settings.out is not None and settings.out.exists() else None
    if before is None:
        answers = _answers(opened, settings, min(longest), "the model as it is")
        record |= {"ordinary": _entries(answers), "arms": [], "overlap": {}}
        save(record, settings)
    else:
        _check_same(before, record)
        record = dict(before)
    arms, ordinary = record["arms"], _ordinary(record["ordinary"])
    made = _elsewhere(others, settings, record, ordinary) if others else _frozen(opened, settings, record, ordinary)
    for arm in made:
        arms.append(arm)
        record["overlap"] = _overlaps(arms)
        if len(arms) == record["asked"]:
            del record["ordinary"]["answers"]
        save(record, settings)
    return record


def _answers(opened: OpenedModel, settings: Settings, longest: int, name: str) -> dict[str, TaskAnswers]:
    say(f"{name}: {', '.join(settings.tasks)}")
    from saf.hf.lm_eval import ask

    return ask(opened, settings, longest=longest)


def _entries(answers: Mapping[str, TaskAnswers]) -> dict[str, Any]:
    """Return the record of the ordinary model: its tasks and, until all arms are measured, its answers."""
    kept = {
        name: [[each["id"], each["answer"], bool(each["right"])] for each in task.answers]
        for name, task in answers.items()
    }
    return {"tasks": {name: task.to_dict() for name, task in answers.items()}, "answers": kept}


def _ordinary(entries: Record) -> AnswersByTask:
    """Return the argument of `paired_tasks` from the result of `_entries`."""
    return {
        name: (task, [dict(zip(("id", "answer", "right"), each, strict=True)) for each in entries["answers"][name]])
        for name, task in entries["tasks"].items()
    }


def _check_same(before: Record, now: Record) -> None:
    """Raise InputError unless both records have the same settings and origin."""
    now = to_json({"settings": now["settings"], "provenance": now["provenance"]})
    names = ("source_hash", "versions", "device", "checkpoints", "data")
    parts = [(name, before["settings"].get(name), value) for name, value in now["settings"].items()]
    parts += [(name, before["provenance"].get(name), now["provenance"][name]) for name in names]
    for name, old, new in parts:
        if old != new:
            raise InputError(f"the record to continue has {name} {old}, now {new}; remove it, or write to another file")


def _elsewhere(
    others: Sequence[OpenedModel], settings: Settings, record: Record, ordinary: AnswersByTask
) -> Iterator[dict[str, Any]]:
    """Yield the arms of models that were frozen elsewhere, without those that the record has."""
    for number, other in list(enumerate(others, 1))[len(record["arms"]) :]:
        adapter = adapter_for(other.model)
        heads = adapter.frozen_heads()
        share = len(heads) / sum(site.layout.num_heads for site in adapter.sites())
        name = f"model {number}, {percent(share)} frozen"
        arm = {"name": name, "path": str(other.folder), "score": None, "rate": None, "share": share}
        answers = _answers(other, settings, record["length"], name)
        yield arm | {"heads": heads.to_list()} | _compared(ordinary, answers)


def _frozen(
    opened: OpenedModel, settings: Settings, record: Record, ordinary: AnswersByTask
) -> Iterator[dict[str, Any]]:
    """Yield the arms of every score and rate, without those that the record has."""
    assert opened.data is not None
    model, longest, done = opened.model, record["length"], len(record["arms"])
    windows = calibration_windows(
        opened.data,
        length=longest,
        count=settings.sequences,
        seed=settings.calibration_seed,
    )
    ids = list(windows.split(settings.batch_size))
    with autocast(pick_device(settings.device), settings.precision):
        say(f"calibrating on {len(windows)} sequences of {longest:,} tokens")
        statistics = calibrate(model, ids)
        total = statistics.variance.numel()
        for place, name in enumerate(settings.scores):
            fitted: dict[Head, FittedHead] = {}
            for rate in settings.rates[max(0, done - place * len(settings.rates)) :]:
                config = FreezeConfig(score=name, rate=rate, max_fit_kl=settings.max_fit_kl)
                accepted, rejected = _choose(model, ids, statistics, config, fitted)
                heads = HeadSet(accepted)
                with frozen_heads(model, heads, [fitted[head].pattern for head in heads], config.backend):
                    answers = _answers(opened, settings, longest, f"{name}, {percent(rate)}")
                label = percent(rate)
                if len(heads) != config.requested(total):
                    label = f"{percent(round(len(heads) / total, 3))} ({label} asked for)"
                arm = {"name": f"{name} {label}", "score": name, "rate": rate, "share": len(heads) / total}
                arm |= {"heads": heads.to_list(), **_described(heads, fitted, rejected, statistics)}
                yield arm | _compared(ordinary, answers)


def _choose(
    model: nn.Module,
    ids: list[Tensor],
    statistics: AttentionStatistics,
    config: FreezeConfig,
    fitted: dict[Head, FittedHead],
) -> tuple[dict[Head, FittedHead], dict[Head, FittedHead]]:
    """Return the heads that an arm freezes and those whose fits are rejected; fits stay in `fitted` for later arms."""

    def fit(heads: HeadSet) -> dict[Head, FittedHead]:
        if missing := HeadSet(head for head in heads if head not in fitted):
            fitted.update(fit_heads(model, ids, statistics, missing, config, Stopwatch()))
        return {head: fitted[head] for head in heads}

    order = head_order({config.score: score(statistics, config.score)}, config)
    return accept_fits(order, fit, config, allow_empty=True)


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
        "rejected": [[*head, judged.fit_kl] for head, judged in sorted(rejected.items())],
        **{name: median(each) if each else None for name, each in values.items()},
    }


def _compared(ordinary: AnswersByTask, frozen: Mapping[str, TaskAnswers]) -> dict[str, Any]:
    """Return an arm's answers by task, and their paired changes from the ordinary model's."""
    own = {name: (task.to_dict(), task.answers) for name, task in frozen.items()}
    changes = paired_tasks(ordinary, own)
    tasks = {name: task | {"change": changes["tasks"][name]} for name, (task, _) in own.items()}
    return {"tasks": tasks, "mean_difference": changes["mean_difference"]}


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
    conditions = (
        f"Zero-shot accuracy of {record['model']}: {sum(task['questions'] for task in tasks.values()):,} questions of "
        f"{len(tasks)} tasks, inputs of up to {record['length']:,} tokens, {record['precision']}; heads frozen without "
        "further training."
    )
    if len(arms) < record["asked"]:
        conditions += f" Cut off after {len(arms)} of {record['asked']} arms."
    rows: list[list[str | None]] = [
        [name, *(f"{100 * of[name]['accuracy']:.2f}" for of in (tasks, *(arm["tasks"] for arm in arms)))]
        for name in tasks
    ]
    rows.append(["mean change", None, *(f"{100 * arm['mean_difference']:+.2f}" for arm in arms)])
    accuracy = table("Accuracy, %", ["task", "ordinary", *(arm["name"] for arm in arms)], rows)
    parts = [conditions, accuracy, _changes_table(record)]
    if any(arm["score"] is not None for arm in arms):
        parts.append(_heads_table(record))
    if labelled := [name for name, task in tasks.items() if task["labels"]]:
        rows = [["right answers", *(counts_text(tasks[name]["answers"], tasks[name]["labels"]) for name in labelled)]]
        for title, of in (("ordinary", tasks), *((arm["name"], arm["tasks"]) for arm in arms)):
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


def figure(record: Record) -> Figure:
    """Return the change of each task and their mean by the share of frozen heads, a line a score."""
    groups: dict[str, list[Record]] = {}
    for arm in record["arms"]:
        groups.setdefault(arm["score"] or arm["name"], []).append(arm)
    tasks = record["ordinary"]["tasks"]
    drawn, axes = subplots(-(-(len(tasks) + 1) // 3), 3)
    for axis, name in zip(axes.flat, [*tasks, None], strict=False):
        for group, arms in groups.items():
            changes = [arm["tasks"][name]["change"]["difference"] if name else arm["mean_difference"] for arm in arms]
            shares = [arm["share"] if arm.get("share") is not None else arm["rate"] for arm in arms]
            axis.plot(
                [0, *(100 * share for share in shares)], [0, *(100 * each for each in changes)], "o-", label=group
            )
        axis.axhline(0, color="grey", lw=0.8)
        title = "mean change" if name is None else f"{name}, {100 * tasks[name]['accuracy']:.2f}% ordinary"
        axis.set(title=title, xlabel="heads frozen, %", ylabel="points")
    axes.flat[0].legend()
    for axis in axes.flat:
        axis.set_visible(axis.has_data())
    return drawn
