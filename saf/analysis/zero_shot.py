"""Zero-shot accuracy of a trained model whose heads are frozen without further training (paper, appendix on Qwen3-4B).

One calibration serves all arms: each score and rate chooses and fits its own heads, which are frozen, answer the tasks,
and are undone. Or models that were frozen elsewhere answer them as they are.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import tyro
from torch import Tensor, nn

from saf.adapters import adapter_for
from saf.analysis.costs import frozen_for_now
from saf.analysis.model import SILENT, Record, Watch
from saf.arguments import SHARES, above, at_least, check_fields
from saf.calibration import calibrate
from saf.data import calibration_windows
from saf.errors import InputError
from saf.evaluate.evaluated import precision_in_use
from saf.evaluate.zero_shot import TaskAnswers, Told, TooLong, counted, paired_tasks
from saf.freezing.choice import Judged, Made, accept, choose_by
from saf.freezing.config import FreezeConfig
from saf.freezing.recipe import make_patterns
from saf.heads import Head, HeadSet
from saf.integrations.models import OpenedModel, lm_eval_tasks, open_model
from saf.machine.execution import Device, Precision, autocast, device_name, pick_device
from saf.machine.stopwatch import Stopwatch
from saf.records import paper
from saf.records.files import to_json
from saf.records.quantities import percent, signed
from saf.records.result import result_header
from saf.records.table import Part, Table
from saf.scores import score
from saf.settings import documented
from saf.statistics import AttentionStatistics
from saf.tasks.zero_shot import ZERO_SHOT, TaskName

LENGTH = 2_048
"""Tokens of a calibration sequence where nobody says: longer than the tasks' longest questions, and the length of the
paper's other patterns of Qwen3-4B."""


@documented
@dataclass(frozen=True, kw_only=True)
class ZeroShot:
    """Freeze heads of a trained model by each score at each rate, and compare its zero-shot accuracy by question.

    With --out, what is there is written after every arm: the same command goes on with what was cut off.
    """

    model: Annotated[Path, tyro.conf.Positional]
    """A checkpoint (step-N), a run, a folder of saf.save, or a model of transformers: its folder or hub name."""
    frozen: tuple[Path, ...] = ()
    """Models frozen elsewhere, which answer as they are; nothing is frozen here then."""
    data: Path | None = None
    """Calibration text: a folder made by `saf data prepare` with the model's tokenizer, or a file of text."""
    tasks: tuple[TaskName, ...] = tuple(ZERO_SHOT)
    """Tasks to answer."""
    task_data: Path | None = None
    """Folder of the tasks' public files; those of the hub when None."""
    questions: Annotated[int | None, at_least(1)] = None
    """Only so many questions of each task."""
    too_long: TooLong = "refuse"
    """What to do with questions longer than a calibration sequence: refuse them, or cut their beginning."""
    scores: tuple[Literal["variance", "forward_kl"], ...] = ("variance", "forward_kl")
    """Scores that choose heads."""
    rates: Annotated[tuple[float, ...], SHARES] = (0.1, 0.2, 0.3)
    """Shares of all heads."""
    max_fit_kl: Annotated[float, above(0)] = FreezeConfig.max_fit_kl
    """Nats per row up to which a fit is accepted."""
    sequences: Annotated[int, at_least(2)] = 512
    """Calibration sequences."""
    calibration_seed: Annotated[int, at_least(0)] = 0
    """Of the choice of calibration sequences."""
    length: Annotated[int | None, at_least(2)] = None
    """Tokens of a calibration sequence, the longest input of every arm; 2,048 or the model's longest when None."""
    batch_size: Annotated[int, at_least(1)] = 8
    """Sequences in a forward pass."""
    device: Device = "auto"
    """Where to compute; auto is CUDA if there is one."""
    precision: Precision = "auto"
    """auto is bf16 autocast on CUDA and fp32 on CPU."""

    def __post_init__(self):
        """Raise InputError naming the first field that cannot be used."""
        check_fields(self)


@dataclass(frozen=True)
class _Study:
    """Hold what all arms share: the settings, the longest input, and how to tell what happens."""

    settings: ZeroShot
    longest: int
    watch: Watch

    def answers(self, opened: OpenedModel, name: str) -> dict[str, TaskAnswers]:
        """Return what a model answers as it is now."""
        self.watch.say(f"{name}: {', '.join(self.settings.tasks)}")
        progress = self.watch.countdowns("requests")
        return lm_eval_tasks().ask(opened, self.settings, longest=self.longest, progress=progress)


def measure(settings: ZeroShot, watch: Watch = SILENT) -> dict[str, Any]:
    """Answer as the model is and with every arm, but for what `watch.before` has, and return the record.

    Raises InputError where what is there is of another model, other data, settings or sources.
    """
    lm_eval_tasks()  # now, not after the calibration
    opened = open_model(
        settings.model, settings.data, settings.device, precision=settings.precision, needs_data=not settings.frozen
    )
    longest, used = settings.length or min(LENGTH, opened.longest), precision_in_use(opened.model, settings.precision)
    opening = {"precision": settings.precision, "needs_data": False}
    others = [open_model(path, settings.data, settings.device, **opening) for path in settings.frozen]
    for other in others:
        if (its := precision_in_use(other.model, settings.precision)) != used:
            raise InputError(
                f"{other.folder} would answer in {its}, {opened.folder} in {used}; answers are compared in one "
                "precision: save both models in one dtype, or give --precision fp32, which opens both in float32"
            )
    longest = min([longest, *(other.longest for other in others)])
    study = _Study(settings, longest, watch)
    head = result_header(
        "zero-shot",
        vars(settings),
        device=device_name(pick_device(settings.device)),
        checkpoints={"model": opened.hash} | {f"frozen {n}": other.hash for n, other in enumerate(others)},
        data={} if opened.data is None else {"calibration": opened.data.fingerprint},
    )
    told = {
        "model": str(opened.folder),
        "length": longest,
        "precision": used,
        "asked": len(others) or len(settings.scores) * len(settings.rates),
    }
    if watch.before is None:
        found = study.answers(opened, "the model as it is")
        record = {**head, **told, "ordinary": _kept(found), "arms": [], "overlap": {}}
        watch.keep(record)
    else:
        _check_same(watch.before, head)
        record = dict(watch.before)
    arms, ordinary = record["arms"], _told(record["ordinary"])
    made = partial(_elsewhere, study, others) if others else partial(_frozen_here, study, opened)
    for arm in made(ordinary, done=len(arms)):
        arms.append(arm)
        record["overlap"] = _overlaps(arms)
        if not lacks(record):
            del record["ordinary"]["answers"]
        watch.keep(record)
    return record


def _kept(answers: Mapping[str, TaskAnswers]) -> dict[str, Any]:
    """Return what a record holds of the ordinary model: its tasks and, until all arms are there, its answers."""
    return {
        "tasks": {name: task.to_dict() for name, task in answers.items()},
        "answers": {
            name: [[each["id"], each["answer"], bool(each["right"])] for each in task.answers]
            for name, task in answers.items()
        },
    }


def _told(ordinary: Record) -> Told:
    """Return what `paired_tasks` takes of the ordinary model, from what `_kept` made of it."""
    answers: dict[str, list[dict[str, Any]]] = {
        name: [{"id": id_, "answer": right, "right": is_right} for id_, right, is_right in of]
        for name, of in ordinary["answers"].items()
    }
    return {name: (task, answers[name]) for name, task in ordinary["tasks"].items()}


def _check_same(before: Record, head: Record) -> None:
    """Raise InputError unless a record that was cut off is of what is asked for now, by the same sources."""
    now = to_json(head)
    parts = [(name, before["settings"].get(name), value) for name, value in now["settings"].items()]
    names = ("source_hash", "versions", "device", "checkpoints", "data")
    parts += [(name, before["provenance"].get(name), now["provenance"][name]) for name in names]
    for name, old, new in parts:
        if old != new:
            raise InputError(
                f"the record that was cut off cannot be gone on with: its {name} is {old}, now {new}; remove it, or "
                "write to another file"
            )


def lacks(record: Record) -> bool:
    """Return whether a record was cut off before its last arm."""
    return len(record["arms"]) < record["asked"]


def _elsewhere(study: _Study, others: Sequence[OpenedModel], ordinary: Told, *, done: int) -> Iterator[dict[str, Any]]:
    """Yield the arms of models that were frozen elsewhere, but for the first `done`."""
    for number, other in list(enumerate(others, 1))[done:]:
        adapter = adapter_for(other.model)
        heads = adapter.frozen_heads()
        share = len(heads) / sum(site.layout.num_heads for site in adapter.sites())
        name = f"model {number}, {percent(share)} frozen"
        arm = {"name": name, "path": str(other.folder), "score": None, "rate": None, "share": share}
        yield arm | {"heads": heads.to_list()} | _compared(ordinary, study.answers(other, name))


def _frozen_here(study: _Study, opened: OpenedModel, ordinary: Told, *, done: int) -> Iterator[dict[str, Any]]:
    """Yield the arms of every score and rate, but for the first `done`."""
    settings, model = study.settings, opened.model
    assert opened.data is not None
    windows = calibration_windows(
        opened.data,
        length=study.longest,
        count=settings.sequences,
        seed=settings.calibration_seed,
        setting="--sequences",
        shorter="--length",
    )
    ids = list(windows.split(settings.batch_size))
    with autocast(pick_device(settings.device), settings.precision):
        study.watch.say(f"calibrating on {len(windows)} sequences of {study.longest:,} tokens")
        statistics = calibrate(model, ids)
        for place, name in enumerate(settings.scores):
            made: dict[Head, Made] = {}
            for rate in settings.rates[max(0, done - place * len(settings.rates)) :]:
                config = FreezeConfig(score=name, rate=rate, max_fit_kl=settings.max_fit_kl)
                accepted, rejected = _choose(model, ids, statistics, config, made)
                heads = HeadSet(accepted)
                with frozen_for_now(model, heads, [made[head].pattern for head in heads], config.backend):
                    answers = study.answers(opened, f"{name}, {percent(rate)}")
                total = statistics.variance.numel()
                told = {"name": f"{name} {_rate_words(config, len(heads), total)}", "score": name, "rate": rate}
                told |= {"share": len(heads) / total, "heads": heads.to_list()}
                told |= _described(heads, made, rejected, statistics)
                yield told | _compared(ordinary, answers)


def _rate_words(config: FreezeConfig, frozen: int, total: int) -> str:
    """Return the rate of an arm, and what was frozen where that is fewer heads than were asked for.

    >>> _rate_words(FreezeConfig(rate=0.9), 11, 12), _rate_words(FreezeConfig(rate=0.9), 9, 12)
    ('90%', '75% (90% asked for)')
    """
    asked = percent(config.rate)
    return asked if frozen == config.requested(total) else f"{percent(round(frozen / total, 3))} ({asked} asked for)"


def _choose(
    model: nn.Module,
    ids: list[Tensor],
    statistics: AttentionStatistics,
    config: FreezeConfig,
    made: dict[Head, Made],
) -> tuple[dict[Head, Judged], dict[Head, Judged]]:
    """Return the heads that an arm freezes and those whose fits are rejected; fits stay in `made` for later arms."""
    choose = choose_by({config.score: score(statistics, config.score)}, config, group_size=1)

    def make(heads: HeadSet) -> dict[Head, Made]:
        """Return the fits of heads, those that are not there made now."""
        missing = HeadSet(head for head in heads if head not in made)
        if len(missing):
            made.update(make_patterns(model, ids, statistics, missing, config, Stopwatch()))
        return {head: made[head] for head in heads}

    return accept(choose, make, config, before=0)


def _described(
    heads: HeadSet, made: Mapping[Head, Made], rejected: Mapping[Head, Judged], statistics: AttentionStatistics
) -> dict[str, Any]:
    """Return where heads lie, and the medians of their fits' KL and of their scores."""
    layers = len(statistics.variance)
    thirds = [0, 0, 0]
    for layer, _ in heads:
        thirds[3 * layer // layers] += 1

    def middle(values: Tensor | None = None) -> float | None:
        """Return the median over the heads of a score, or without one of the fits' KL."""
        found = [made[head].fit_kl if values is None else float(values[head]) for head in heads]
        return median(found) if found else None

    return {
        "layer_thirds": thirds,
        "rejected": [[*head, judged.fit_kl] for head, judged in sorted(rejected.items())],
        "fit_kl_median": middle(),
        "forward_kl_median": middle(statistics.forward_kl),
        "variance_median": middle(statistics.variance),
    }


def _compared(ordinary: Told, frozen: Mapping[str, TaskAnswers]) -> dict[str, Any]:
    """Return an arm's answers by task, and their paired changes from the ordinary model's."""
    told = {name: (task.to_dict(), task.answers) for name, task in frozen.items()}
    changes = paired_tasks(ordinary, told)
    tasks = {name: own | {"change": changes["tasks"][name]} for name, (own, _) in told.items()}
    return {"tasks": tasks, "mean_difference": changes["mean_difference"]}


def _overlaps(arms: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return by rate the heads that two scores both choose, over those that the first one chooses."""
    found, first = {}, {}
    for arm in (arm for arm in arms if arm["score"] is not None):
        heads = {tuple(head) for head in arm["heads"]}
        one = first.setdefault(arm["rate"], heads)
        if one is not heads and one:
            found[f"{arm['rate']:g}"] = len(one & heads) / len(one)
    return found


def tables(record: Record) -> list[Part]:
    """Return accuracies beside one another, what is significant of their changes, the heads, and counts of answers."""
    tasks, arms = record["ordinary"]["tasks"], record["arms"]
    count = sum(task["questions"] for task in tasks.values())
    conditions = (
        f"Zero-shot accuracy of {record['model']}: {count:,} questions of {len(tasks)} tasks, inputs of up to "
        f"{record['length']:,} tokens, {record['precision']}; heads frozen without further training."
    )
    if lacks(record):
        conditions += f" Cut off after {len(arms)} of {record['asked']} arms."
    changes = _changes_table(record)
    if cut := sum(task["shortened"] for task in tasks.values()):
        note = f"{cut:,} questions were longer, and cut at their beginning."
        changes = replace(changes, notes=(*changes.notes, note))
    return [conditions, _accuracy_table(tasks, arms), changes, *_heads_tables(record), *_counts_tables(tasks, arms)]


def _accuracy_table(tasks: Mapping[str, Any], arms: Sequence[Record]) -> Table:
    """Return accuracy in percent: a row a task, a column an arm, the mean change below."""
    rows: list[list[str | None]] = [
        [name, *(f"{100 * of[name]['accuracy']:.2f}" for of in (tasks, *(arm["tasks"] for arm in arms)))]
        for name in tasks
    ]
    rows.append(["mean change", None, *(signed(100 * arm["mean_difference"], 2, "") for arm in arms)])
    return Table.of("Accuracy, %", ["task", "ordinary", *(arm["name"] for arm in arms)], rows)


def _changes_table(record: Record) -> Table:
    """Return the paired change of each task in each arm, points, with the p-value corrected over the arm's tasks."""
    rows = []
    for arm in record["arms"]:
        for name, task in arm["tasks"].items():
            change = task["change"]
            low, high = (signed(100 * end, 2, "") for end in change["ci95"])
            shown = f"{signed(100 * change['difference'], 2, '')} ({low} to {high})"
            gained = f"{change['gained']:,} / {change['lost']:,}"
            rows.append([arm["name"], name, shown, gained, f"{change['p_value']:.3g}", f"{change['p_holm']:.3g}"])
    notes = [
        "Intervals are 95% over questions, paired; p is of McNemar's exact test, Holm's correction is over an arm's "
        "tasks; a large p shows no equality."
    ]
    return Table.of("Changes, points", ["arm", "task", "change", "gained / lost", "p", "Holm"], rows, notes)


def _heads_tables(record: Record) -> list[Part]:
    """Return the table of the heads that each arm chose; none where they were chosen elsewhere."""
    rows = []
    for arm in record["arms"]:
        if arm["score"] is not None:
            medians = [_nats(arm[name]) for name in ("fit_kl_median", "forward_kl_median")]
            shared = record["overlap"].get(f"{arm['rate']:g}")
            thirds = "/".join(map(str, arm["layer_thirds"]))
            overlap = None if shared is None else percent(shared)
            rows.append([arm["name"], len(arm["heads"]), len(arm["rejected"]), thirds, *medians, overlap])
    head = ["arm", "heads", "rejected fits", "by thirds of the layers", "fit KL", "forward KL", "chosen by both"]
    notes = ["Medians over the heads, nats per row.", *paper.notes(paper.QWEN_ZERO_SHOT)]
    return [Table.of("Heads", head, rows, notes)] if rows else []


def _counts_tables(tasks: Mapping[str, Any], arms: Sequence[Record]) -> list[Part]:
    """Return how often each label is predicted, a row an arm, for tasks whose questions all have the same labels."""
    named = [name for name, task in tasks.items() if task["labels"]]
    rows = [["right answers", *(counted(tasks[name]["answers"], tasks[name]["labels"]) for name in named)]]
    for title, of in (("ordinary", tasks), *((arm["name"], arm["tasks"]) for arm in arms)):
        rows.append([title, *(counted(of[name]["taken"], of[name]["labels"]) for name in named)])
    return [Table.of("Answers by label", ["", *named], rows)] if named else []


def _nats(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"
