"""Trained models whose heads are frozen or pruned: accuracy on zero-shot tasks and perplexity (paper, on Qwen3-4B).

Each arm opens the model anew, freezes heads by a score at a rate, and is measured at once and, with --heal, again after
healing.
"""

import itertools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
import tyro
from matplotlib.figure import Figure
from torch import Tensor

from experiments import paper
from experiments.analyses.common import RunsModel, check_rates, subplots
from experiments.records import Record
from saf.calibration.capture import measurable_heads
from saf.cli.output import print_progress
from saf.data import TextData, TokenData, calibration_windows, sequential_windows, shuffled_windows
from saf.errors import InputError
from saf.freeze_config import FreezeConfig
from saf.freeze_report import FreezeReport
from saf.freezing import freeze_
from saf.healing import heal_
from saf.machine import autocast, device_name, pick_device
from saf.models.adapter import adapter_for
from saf.opening import OpenedModel, open_model
from saf.paired import delta_of_windows, paired_tasks
from saf.records.files import read_json, to_json, write_json
from saf.records.table import Part, Table, percent, signed
from saf.selection import heads_at_rate
from saf.tasks.base import TaskAnswers, precision_in_use
from saf.tasks.text import evaluate_perplexity, read_evaluation
from saf.tasks.zero_shot import ZERO_SHOT, TaskName, TooLong, counts_text

LENGTH = 2_048
"""Default tokens of a calibration sequence: longer than the tasks' longest questions, and the length of the paper's
other patterns of Qwen3-4B."""
CHOICES: dict[str, dict[str, Any]] = {
    "variance": {"score": "variance"},
    "variance_spread": {"score": "variance", "max_per_layer": 3},
    "forward_kl": {"score": "forward_kl"},
    "random": {"score": "random"},
    "joint_cost": {"score": "forward_kl", "joint_cost": True},
    # As good a choice for pruning: the candidates of the paper's score for it, by what pruning them costs together.
    "pruning_cost": {"score": "gate_taylor", "joint_cost": True, "operation": "prune"},
}
"""The settings of `FreezeConfig` by the name of a way to choose heads; pruning_cost prunes them."""
STYLES = {" pruned": "--", " in linear time": ":"}
"""Line styles of controls in the figure, in the colour of the score whose heads they have."""


@dataclass(frozen=True, kw_only=True)
class ZeroShot(RunsModel):
    """Freeze heads of a trained model by each score at each rate, and compare its zero-shot accuracy by question.

    With --out every arm is written as it ends, and the same command continues.
    """

    kind = "zero-shot"
    model: tyro.conf.Positional[Path]
    """A checkpoint (step-N), a run, a folder of saf.save, or a model of transformers: its folder or hub name."""
    data: Path | None = None
    """Text for calibration: a data folder prepared with the model's tokenizer, or a file of text."""
    tasks: tuple[TaskName, ...] = tuple(ZERO_SHOT)
    """Tasks to answer; --tasks alone is none."""
    task_data: Path | None = None
    """Folder of the tasks' public files; those of the hub by default."""
    questions: int | None = None
    """Number of questions of each task; all by default."""
    too_long: TooLong = "refuse"
    """Treatment of questions longer than a calibration sequence: refuse them, or cut their beginning."""
    scores: tuple[Literal["variance", "variance_spread", "forward_kl", "random", "joint_cost", "pruning_cost"], ...] = (
        "variance",
        "forward_kl",
    )
    """Scores that choose heads; variance_spread takes three of a layer at most, joint_cost those that cost least, and
    pruning_cost prunes those whose pruning costs least."""
    rates: tuple[float, ...] = (0.1, 0.2, 0.3)
    """Shares of the eligible heads: the live ones of layers that can be frozen, without a sliding window."""
    controls: bool = False
    """Also prune the heads of each frozen arm, and freeze those by joint cost in linear time."""
    max_fit_kl: float = FreezeConfig.max_fit_kl
    """Largest KL of an accepted fit, nats per row."""
    sequences: int = 512
    """Number of calibration sequences."""
    calibration_seed: int = 0
    """Seed for drawing calibration sequences, windows of healing and random heads."""
    length: int | None = None
    """Tokens of a calibration sequence, the longest input of every arm; 2,048 or the model's longest by default."""
    other: Path | None = None
    """Another text to measure perplexity on, such as the data or a file of text."""
    windows: int = 0
    """Windows of each text to measure perplexity on."""
    choosing: int = 64
    """Windows that heads are chosen by joint cost on, half of them to order the heads."""
    heal: int = 0
    """Tokens of healing; every arm and the ordinary model are then measured a second time."""
    bos: bool = False
    """Begin each window with the tokenizer's BOS."""

    def measure(self) -> dict[str, Any]:
        """Return the record; raise InputError if files of arms are of another model, data or settings."""
        if self.tasks:
            from saf.hf import lm_eval  # noqa: F401 - raises now, not after the calibration
        opened = self.open()
        study = Study(self, self._head(opened))
        ordinary = study.measure_once("ordinary", lambda: {"states": study.states(opened, "as it is")})
        return _record(ordinary, [arm for title in self.plan if (arm := study.arm(title)) is not None])

    def _head(self, opened: OpenedModel) -> dict[str, Any]:
        """Return the first entries of the record: its header, model, longest input, precision and eligible heads."""
        data = {name: text.fingerprint for name, text in self.texts(opened).items()}
        device, hashes = device_name(pick_device(self.device)), {"model": opened.source.hash}
        head = self.header(device=device, checkpoints=hashes, data=data)
        eligible = len(measurable_heads(adapter_for(opened.model)))
        check_rates(self.rates, eligible)
        return {
            **head,
            "model": str(opened.folder),
            "length": self.length or min(LENGTH, opened.longest),
            "precision": precision_in_use(opened.model, self.precision),
            "eligible": eligible,
        }

    @cached_property
    def plan(self) -> "dict[str, PlannedArm]":
        """The arms by title, all but the ordinary one."""
        arms: list[PlannedArm] = []
        for score, rate in itertools.product(self.scores, self.rates):
            arms.append(chosen := PlannedArm(score, rate))
            if self.controls and score != "pruning_cost":
                arms.append(PlannedArm(f"{score} pruned", rate, heads_of=chosen.title))
            if self.controls and score == "joint_cost":
                arms.append(PlannedArm(f"{score} in linear time", rate, heads_of=chosen.title))
        return {arm.title: arm for arm in arms}

    def open(self) -> OpenedModel:
        """Open the model anew."""
        return open_model(self.model, self.data, self.device, precision=self.precision)

    def texts(self, opened: OpenedModel) -> dict[str, TokenData]:
        """Return the text for calibration and, with --other, that one, in tokens of the same tokenizer."""
        if (data := opened.data) is None:
            return {}
        texts = {"calibration": data}
        if (path := self.other) is not None:
            texts["other"] = TextData(path, data.tokenizer()) if path.is_file() else TokenData.open(path)
        return texts

    @staticmethod
    def tables(record: Record) -> list[Part]:
        tasks, arms = record["ordinary"]["tasks"], record["arms"]
        columns = {"ordinary": tasks, **{arm["name"]: arm["tasks"] for arm in arms}}
        questions = sum(task["questions"] for task in tasks.values())
        parts: list[Part] = [
            f"Zero-shot accuracy of {record['model']}: {questions:,} questions of {len(tasks)} tasks, inputs of up to "
            f"{record['length']:,} tokens, {record['precision']}; heads frozen without further training but for "
            "healing."
        ]
        if tasks:
            rows: list[list[Any]] = [
                [name, *(f"{100 * of[name]['accuracy']:.2f}" for of in columns.values())] for name in tasks
            ]
            rows.append(["mean change", None, *(f"{100 * arm['mean_difference']:+.2f}" for arm in arms)])
            parts += [Table.of("Accuracy, %", ["task", *columns], rows), _changes_table(record)]
        if record["ordinary"]["texts"] or "healed" in record["ordinary"]:
            parts.append(_texts_table(record))
        parts.append(_heads_table(record))
        if labelled := [name for name, task in tasks.items() if task["labels"]]:
            rights = (counts_text(tasks[name]["answers"], tasks[name]["labels"]) for name in labelled)
            rows = [["right answers", *rights]]
            for title, of in columns.items():
                rows.append([title, *(counts_text(of[name]["taken"], of[name]["labels"]) for name in labelled)])
            parts.append(Table.of("Answers by label", ["", *labelled], rows))
        return parts

    @staticmethod
    def draw(records: Sequence[Record]) -> Figure:
        """Return the change of each task and their mean by the share of frozen heads, a line a score."""
        record, *_ = records
        groups: dict[str, list[Record]] = {}
        for arm in record["arms"]:
            groups.setdefault(arm["score"], []).append(arm)
        tasks = record["ordinary"]["tasks"]
        drawn, axes = subplots(-(-(len(tasks) + 1) // 3), 3)
        scores = [group for group in groups if not group.endswith(tuple(STYLES))]
        for axis, name in zip(axes.flat, [*tasks, None] if tasks else (), strict=False):
            for group, arms in groups.items():
                changes = [a["tasks"][name]["change"]["difference"] if name else a["mean_difference"] for a in arms]
                points = [(100 * arm["share"], 100 * change) for arm, change in zip(arms, changes, strict=True)]
                control = next((suffix for suffix in STYLES if group.endswith(suffix)), "")
                style = {"color": f"C{scores.index(group.removesuffix(control))}", "ls": STYLES.get(control, "-")}
                axis.plot(*zip((0, 0), *points, strict=True), marker="o", markersize=3, label=group, **style)
            axis.axhline(0, color="grey", lw=0.8)
            title = "mean change" if name is None else f"{name}, {100 * tasks[name]['accuracy']:.2f}% ordinary"
            axis.set(title=title, xlabel="eligible heads frozen or pruned, %", ylabel="points")
        if axes.flat[0].has_data():
            drawn.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
        for axis in axes.flat:
            axis.set_visible(axis.has_data())
        return drawn


# --- arms


class PlannedArm(NamedTuple):
    """An arm of a study before it is measured."""

    score: str
    """The score that chooses its heads, or that of the arm whose heads it has and what is done with them."""
    rate: float
    heads_of: str | None = None
    """For a control, the title of the arm whose heads it has."""

    @property
    def title(self) -> str:
        return f"{self.score} {percent(self.rate)}"


@dataclass(frozen=True)
class Study:
    """Measures the arms of one study, each once; with --out, each has a file of its own next to the record."""

    settings: ZeroShot
    head: Record
    """The first entries of the record: its header, model, longest input, precision and eligible heads."""
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Arms by title: `facts` about their heads, and `states`, the measurements at once and, with --heal, healed."""

    def measure_once(self, title: str, measure: Callable[[], Record]) -> dict[str, Any]:
        """Return an arm, from its file if there is one, else measured; raise InputError for a file of another study."""
        if title in self.arms:
            return self.arms[title]
        path = None
        if (out := self.settings.out) is not None:
            folder = out.with_name(f"{out.name.partition('.')[0]}-pieces")
            path = folder / f"{title.replace('%', '').replace(' ', '-')}.json"
        if path is not None and path.is_file():
            arm = read_json(path)
            _check_origin(arm, to_json(self.head), path)
        else:
            arm = to_json({"name": title, "head": self.head, **measure()})
            if path is not None:
                write_json(path, arm)
        self.arms[title] = arm
        return arm

    def arm(self, title: str) -> dict[str, Any] | None:
        """Return an arm, measured unless it was before; None for a control of an arm that froze nothing."""
        settings, planned = self.settings, self.settings.plan[title]
        if (other := planned.heads_of) is None:
            config = self._choosing(planned)
        else:
            chosen = self.arm(other)
            assert chosen is not None  # which has heads of its own choice
            if not (heads := tuple(map(tuple, chosen["facts"]["heads"]))):
                return None
            if planned.score.endswith(" pruned"):
                config = FreezeConfig(heads=heads, operation="prune")
            else:  # in linear time; the limit is high, since these heads passed when they were chosen
                config = FreezeConfig(heads=heads, storage="exponential", max_fit_kl=10.0)

        def measure() -> dict[str, Any]:
            opened = settings.open()
            report = self._freeze(opened, config, title)
            return {"facts": _facts(report, planned, self.head["eligible"]), "states": self.states(opened, title)}

        return self.measure_once(title, measure)

    def _choosing(self, planned: PlannedArm) -> FreezeConfig:
        """Return the settings of an arm whose score chooses heads."""
        event = {**CHOICES[planned.score], "count": heads_at_rate(planned.rate, self.head["eligible"])}
        if planned.score == "random":
            event["seed"] = self.settings.calibration_seed
        if "operation" not in event:
            event |= {"storage": "compact", "max_fit_kl": self.settings.max_fit_kl}
        return FreezeConfig(**event)

    def _freeze(self, opened: OpenedModel, config: FreezeConfig, title: str) -> FreezeReport:
        count, seed, data = self.settings.sequences, self.settings.calibration_seed, opened.data
        length = self.head["length"]
        assert data is not None
        print_progress(f"{title}: calibrating on {count} sequences of {length:,} tokens")
        windows = calibration_windows(data, length=length, count=count, seed=seed)
        ids = self._with_bos(opened, windows).split(self.settings.batch_size)
        heldout = None
        if config.joint_cost:
            # Windows from all over the partition, so that they are of many documents.
            all_windows = sequential_windows(data.tokens("controller"), length)[:, :-1]
            chosen = torch.linspace(0, len(all_windows) - 1, min(self.settings.choosing, len(all_windows))).long()
            heldout = self._with_bos(opened, all_windows[chosen]).split(1)
        # Losses are accepted whatever they are, since they are what is to be measured.
        with autocast(pick_device(self.settings.device), self.settings.precision):
            return freeze_(opened.model, ids, config, heldout=heldout, accept_loss=True, allow_empty=True)

    def states(self, opened: OpenedModel, title: str) -> dict[str, Any]:
        """Return the measurements of a model, "at once" and, with --heal, "healed"."""
        states = {"at once": self._measure(opened, title)}
        if self.settings.heal:
            assert opened.data is not None
            text, seed = opened.data.tokens("train"), self.settings.calibration_seed
            count = max(1, self.settings.heal // self.head["length"])
            windows = shuffled_windows(text, 0, count, length=self.head["length"], seed=seed)
            # Of the training partition: heads were chosen on the others.
            heal_(opened.model, self._with_bos(opened, windows), precision=self.settings.precision)
            states["healed"] = self._measure(opened, f"{title}, healed")
        return states

    def _measure(self, opened: OpenedModel, title: str) -> dict[str, Any]:
        """Return the answers to the tasks, and the losses of windows of the texts."""
        settings, longest, answers, texts = self.settings, self.head["length"], {}, {}
        if settings.tasks:
            print_progress(f"{title}: {', '.join(settings.tasks)}")
            from saf.hf.lm_eval import ask

            answers = ask(opened, settings, longest=longest)
        for name, text in settings.texts(opened).items() if settings.windows else ():
            # Losses of windows are returned in a file.
            with tempfile.TemporaryDirectory() as folder:
                shape: Any = {"length": longest, "batch_size": settings.batch_size, "limit": settings.windows}
                shape |= {"precision": settings.precision, "bos": self._bos(opened)}
                record = evaluate_perplexity(opened.model, text, out=folder, tokens=False, **shape)
                losses = read_evaluation(folder)[1].tolist()
            texts[name] = {"perplexity": record["perplexity"], "windows": losses}
        tasks = {
            name: {**task.record, "each": [[one["id"], one["answer"], bool(one["right"])] for one in task.answers]}
            for name, task in answers.items()
        }
        return {"tasks": tasks, "texts": texts}

    def _bos(self, opened: OpenedModel) -> int | None:
        return opened.encoder().require_bos(self.settings.model) if self.settings.bos else None

    def _with_bos(self, opened: OpenedModel, windows: Tensor) -> Tensor:
        """Return windows whose first token is replaced by the BOS, if --bos is set."""
        if (bos := self._bos(opened)) is not None:
            windows = windows.clone()
            windows[:, 0] = bos
        return windows


def _facts(report: FreezeReport, planned: PlannedArm, eligible: int) -> dict[str, Any]:
    """Return an arm's name, heads, their number in each third of the layers, and medians of their fits and scores."""
    statistics, heads, label = report.statistics, report.heads, percent(planned.rate)
    layers = len(statistics.variance)
    if len(heads) != report.requested:
        label = f"{percent(round(len(heads) / eligible, 3))} ({label} asked for)"
    return {
        "name": f"{planned.score} {label}",
        "score": planned.score,
        "rate": planned.rate,
        "share": len(heads) / eligible,
        "heads": heads.to_list(),
        "seconds": sum(report.seconds.values()),
        "layer_thirds": [sum(3 * layer // layers == third for layer, _ in heads) for third in range(3)],
        "rejected": [[*head, kl] for head, kl in sorted(report.rejected.items())],
        "fit_kl_median": _median(list(report.fit_kl.values())),
        "forward_kl_median": _median([float(statistics.forward_kl[head]) for head in heads]),
        "variance_median": _median([float(statistics.variance[head]) for head in heads]),
    }


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


# --- changes of arms from the ordinary model


def _record(ordinary: Record, measured: Sequence[Record]) -> dict[str, Any]:
    arms = [{**each["facts"], **_by_state(each["states"], ordinary["states"])} for each in measured]
    return {**ordinary["head"], "ordinary": _by_state(ordinary["states"]), "arms": arms, "overlap": _overlaps(arms)}


def _check_origin(arm: Record, head: Record, path: Path) -> None:
    """Raise InputError for an arm of other settings, another model or other text."""
    own, other = ({"settings": each["settings"], **each["provenance"]} for each in (arm["head"], head))
    if changed := [name for name in ("settings", "checkpoints", "data") if own[name] != other[name]]:
        raise InputError(f"{path} is of other {changed[0]}; remove its folder, or give another --out")


def _by_state(own: Record, ordinary: Record | None = None) -> dict[str, Any]:
    """Return a model's measurements at once, and in the entry `healed` those after healing, as tables need them.

    With those of the ordinary model, the changes from it in the same state are added.
    """
    states = {state: _summary(each, ordinary and ordinary[state]) for state, each in own.items()}
    return {**states.pop("at once"), **states}


def _summary(own: Record, ordinary: Record | None) -> dict[str, Any]:
    """Return measurements without single answers and windows, with their paired changes from the ordinary model's."""
    tasks = {name: {key: task[key] for key in task if key != "each"} for name, task in own["tasks"].items()}
    texts = {name: {"perplexity": text["perplexity"]} for name, text in own["texts"].items()}
    summary: dict[str, Any] = {"tasks": tasks, "texts": texts}
    if ordinary is None:
        return summary
    for name, text in texts.items():
        pair = [torch.tensor(each["texts"][name]["windows"], dtype=torch.float64) for each in (ordinary, own)]
        text["change"] = delta_of_windows(*pair)
    if tasks:
        changes = paired_tasks(_answers(ordinary), _answers(own))
        for name, task in tasks.items():
            task["change"] = changes["tasks"][name]
        summary["mean_difference"] = changes["mean_difference"]
    return summary


def _answers(measured: Record) -> dict[str, TaskAnswers]:
    keys = ("id", "answer", "right")
    return {
        name: TaskAnswers(task, [dict(zip(keys, each, strict=True)) for each in task["each"]])
        for name, task in measured["tasks"].items()
    }


def _overlaps(arms: Sequence[Record]) -> dict[str, float]:
    """Return by rate the share of the first score's heads that the second score chooses too."""
    by_rate: dict[float, dict[str, set[tuple[int, int]]]] = {}
    for arm in arms:
        if arm["score"] in CHOICES:
            by_rate.setdefault(arm["rate"], {})[arm["score"]] = set(map(tuple, arm["heads"]))
    pairs = {f"{rate:g}": list(sets.values())[:2] for rate, sets in by_rate.items() if len(sets) > 1}
    return {rate: len(one & other) / len(one) for rate, (one, other) in pairs.items() if one}


# --- tables


def _changes_table(record: Record) -> Part:
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
    return Table.of("Changes, points", ["arm", "task", "change", "gained / lost", "p", "Holm"], rows, notes)


def _texts_table(record: Record) -> Part:
    """Return each arm's change of perplexity and mean change of accuracy, at once and healed."""
    ordinary, rows = record["ordinary"], []
    states = {"at once": ordinary} | ({"healed": ordinary["healed"]} if "healed" in ordinary else {})
    for arm in record["arms"]:
        row = [arm["name"], len(arm["heads"])]
        for state in states:
            own = arm.get(state, arm)  # measurements at once are the arm's own entries
            for text in own["texts"].values():
                change = text["change"]
                rise, low, high = (
                    signed(value, 0 if abs(value) >= 100 else 2, "")
                    for value in (change["delta_ppl_percent"], *change["ci95"])
                )
                row.append(f"{rise} ({low} to {high})")
            row.append(signed(100 * own["mean_difference"], 2, "") if own["tasks"] else None)
        rows.append(row)
    columns = ["arm", "heads"]
    for state in states:
        columns += [*(f"{name}, {state}, %" for name in ordinary["texts"]), f"tasks, {state}, points"]
    of_ordinary = [
        f"{name} {text['perplexity']:.3f} {state}"
        for state, own in states.items()
        for name, text in own["texts"].items()
    ]
    notes = [f"Perplexity of the ordinary model: {', '.join(of_ordinary)}. Changes are from it, in the same state."]
    return Table.of("Perplexity and healing", columns, rows, notes)


def _heads_table(record: Record) -> Part:
    rows = []
    for arm in record["arms"]:
        medians = [arm[name] and f"{arm[name]:.3f}" for name in ("fit_kl_median", "forward_kl_median")]
        shared = record["overlap"].get(f"{arm['rate']:g}")
        thirds = "/".join(map(str, arm["layer_thirds"]))
        overlap = None if shared is None else percent(shared)
        rows.append([arm["name"], len(arm["heads"]), len(arm["rejected"]), thirds, *medians, overlap])
    columns = ["arm", "heads", "rejected fits", "by thirds of the layers", "fit KL", "forward KL", "chosen by both"]
    notes = ["Medians over the heads, nats per row.", paper.QWEN_ZERO_SHOT.note]
    return Table.of("Heads", columns, rows, notes)
