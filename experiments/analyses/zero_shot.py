"""Trained models whose heads are frozen or pruned: accuracy on zero-shot tasks and perplexity (paper, on Qwen3-4B).

Each arm opens the model anew, freezes heads by a score at a rate, and is measured at once and, with --heal, again after
healing.
"""

import itertools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

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
    fitter: str = FreezeConfig.fitter
    """Fitter of the compact patterns."""
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
        opened = self._open()
        head = self._head(opened)
        ordinary = self._once(head, "ordinary", lambda: {"states": self._states(opened, "as it is")})
        arms: list[dict[str, Any]] = []
        for score, rate in itertools.product(self.scores, self.rates):
            choice = {**CHOICES[score], "count": heads_at_rate(rate, head["eligible"])}
            if score == "random":
                choice["seed"] = self.calibration_seed
            if "operation" not in choice:
                choice |= {"storage": "compact", "max_fit_kl": self.max_fit_kl, "fitter": self.fitter}
            config = FreezeConfig(**choice)
            arms.append(self._arm(head, score, rate, config))
            # Controls have the heads of their frozen arm.
            heads = tuple(map(tuple, arms[-1]["facts"]["heads"]))
            if self.controls and heads and config.operation == "freeze":
                arms.append(self._arm(head, f"{score} pruned", rate, FreezeConfig(heads=heads, operation="prune")))
                if score == "joint_cost":
                    # The limit is high, since these heads passed when they were chosen.
                    linear = FreezeConfig(heads=heads, storage="exponential", max_fit_kl=10.0)
                    arms.append(self._arm(head, f"{score} in linear time", rate, linear))
        of_arms = [{**each["facts"], **_by_state(each["states"], ordinary["states"])} for each in arms]
        # Pieces that were there already have the header of the first command.
        head = ordinary["head"]
        return {**head, "ordinary": _by_state(ordinary["states"]), "arms": of_arms, "overlap": _overlaps(of_arms)}

    def _open(self) -> OpenedModel:
        """Open the model anew."""
        return open_model(self.model, self.data, self.device, precision=self.precision)

    def _texts(self, opened: OpenedModel) -> dict[str, TokenData]:
        """Return the text for calibration and, with --other, that one, in tokens of the same tokenizer."""
        data: Any = opened.data
        texts = {"calibration": data}
        if (path := self.other) is not None:
            texts["other"] = TextData(path, data.tokenizer()) if path.is_file() else TokenData.open(path)
        return texts

    def _longest(self, opened: OpenedModel) -> int:
        """Return the tokens of a calibration sequence, and of the longest input of every arm."""
        return self.length or min(LENGTH, opened.longest)

    def _head(self, opened: OpenedModel) -> dict[str, Any]:
        """Return the first entries of the record: its header, model, longest input, precision and eligible heads."""
        data = {name: text.fingerprint for name, text in self._texts(opened).items()}
        device, hashes = device_name(pick_device(self.device)), {"model": opened.source.hash}
        eligible = len(measurable_heads(adapter_for(opened.model)))
        check_rates(self.rates, eligible)
        return {
            **self.header(device=device, checkpoints=hashes, data=data),
            "model": str(opened.folder),
            "length": self._longest(opened),
            "precision": precision_in_use(opened.model, self.precision),
            "eligible": eligible,
        }

    # --- arms: each has `facts` about its heads, and `states`, the measurements at once and, with --heal, healed

    def _once(self, head: Record, title: str, measure: Callable[[], Record]) -> dict[str, Any]:
        """Return an arm from its file next to the record, if there is one, else measured; without --out it has none.

        Raises InputError for a file of other settings, another model or other text.
        """
        path = None
        if self.out is not None:
            folder = self.out.with_name(f"{self.out.name.partition('.')[0]}-pieces")
            path = folder / f"{title.replace('%', '').replace(' ', '-')}.json"
        if path is None or not path.is_file():
            arm = to_json({"name": title, "head": head, **measure()})
            if path is not None:
                write_json(path, arm)
            return arm
        arm = read_json(path)
        own, other = ({"settings": each["settings"], **each["provenance"]} for each in (arm["head"], to_json(head)))
        if changed := [name for name in ("settings", "checkpoints", "data") if own[name] != other[name]]:
            raise InputError(f"{path} is of other {changed[0]}; remove its folder, or give another --out")
        return arm

    def _arm(self, head: Record, score: str, rate: float, config: FreezeConfig) -> dict[str, Any]:
        """Return an arm: the model with heads frozen or pruned by `config`."""
        title = f"{score} {percent(rate)}"

        def measure() -> dict[str, Any]:
            opened = self._open()
            facts = _facts(self._freeze(opened, config, title), score, rate, head["eligible"])
            return {"facts": facts, "states": self._states(opened, title)}

        return self._once(head, title, measure)

    def _freeze(self, opened: OpenedModel, config: FreezeConfig, title: str) -> FreezeReport:
        data: Any = opened.data
        length = self._longest(opened)
        print_progress(f"{title}: calibrating on {self.sequences} sequences of {length:,} tokens")
        windows = calibration_windows(data, length=length, count=self.sequences, seed=self.calibration_seed)
        ids = self._with_bos(opened, windows).split(self.batch_size)
        heldout = None
        if config.joint_cost:
            # Windows from all over the partition, so that they are of many documents.
            all_windows = sequential_windows(data.tokens("controller"), length)[:, :-1]
            chosen = torch.linspace(0, len(all_windows) - 1, min(self.choosing, len(all_windows))).long()
            heldout = self._with_bos(opened, all_windows[chosen]).split(1)
        # Losses are accepted whatever they are, since they are what is to be measured.
        with autocast(pick_device(self.device), self.precision):
            return freeze_(opened.model, ids, config, heldout=heldout, accept_loss=True, allow_empty=True)

    def _states(self, opened: OpenedModel, title: str) -> dict[str, Any]:
        states = {"at once": self._measured(opened, title)}
        if self.heal:
            data: Any = opened.data
            text, length = data.tokens("train"), self._longest(opened)
            count = max(1, self.heal // length)
            # Of the training partition: heads were chosen on the others.
            windows = shuffled_windows(text, 0, count, length=length, seed=self.calibration_seed)
            heal_(opened.model, self._with_bos(opened, windows), precision=self.precision)
            states["healed"] = self._measured(opened, f"{title}, healed")
        return states

    def _measured(self, opened: OpenedModel, title: str) -> dict[str, Any]:
        """Return the answers to the tasks, and the losses of windows of the texts."""
        longest, answers, texts = self._longest(opened), {}, {}
        if self.tasks:
            print_progress(f"{title}: {', '.join(self.tasks)}")
            from saf.hf.lm_eval import ask

            answers = ask(opened, self, longest=longest)
        for name, text in self._texts(opened).items() if self.windows else ():
            # Losses of windows are returned in a file.
            with tempfile.TemporaryDirectory() as folder:
                shape: Any = {"length": longest, "batch_size": self.batch_size, "limit": self.windows}
                shape |= {"precision": self.precision, "bos": self._bos(opened)}
                record = evaluate_perplexity(opened.model, text, out=folder, tokens=False, **shape)
                losses = read_evaluation(folder)[1].tolist()
            texts[name] = {"perplexity": record["perplexity"], "windows": losses}
        tasks = {name: {**task.record, "each": task.answers} for name, task in answers.items()}
        return {"tasks": tasks, "texts": texts}

    def _bos(self, opened: OpenedModel) -> int | None:
        return opened.encoder().require_bos(self.model) if self.bos else None

    def _with_bos(self, opened: OpenedModel, windows: Tensor) -> Tensor:
        """Return windows whose first token is replaced by the BOS, if --bos is set."""
        if (bos := self._bos(opened)) is not None:
            windows = windows.clone()
            windows[:, 0] = bos
        return windows

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


# --- arms as entries of the record


def _facts(report: FreezeReport, score: str, rate: float, eligible: int) -> dict[str, Any]:
    """Return an arm's name, heads, their number in each third of the layers, and medians of their fits and scores."""
    statistics, heads, label = report.statistics, report.heads, percent(rate)
    layers = len(statistics.variance)
    values = {name: [float(getattr(statistics, name)[head]) for head in heads] for name in ("forward_kl", "variance")}
    values["fit_kl"] = list(report.fit_kl.values())
    if len(heads) != report.requested:
        label = f"{percent(round(len(heads) / eligible, 3))} ({label} asked for)"
    return {
        "name": f"{score} {label}",
        "score": score,
        "rate": rate,
        "share": len(heads) / eligible,
        "heads": heads.to_list(),
        "seconds": sum(report.seconds.values()),
        "layer_thirds": [sum(3 * layer // layers == third for layer, _ in heads) for third in range(3)],
        "rejected": [[*head, kl] for head, kl in sorted(report.rejected.items())],
        # None where no head was frozen.
        **{f"{name}_median": median(each) if each else None for name, each in values.items()},
    }


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
        changes = paired_tasks(
            *(
                {name: TaskAnswers(task, task["each"]) for name, task in each["tasks"].items()}
                for each in (ordinary, own)
            )
        )
        for name, task in tasks.items():
            task["change"] = changes["tasks"][name]
        summary["mean_difference"] = changes["mean_difference"]
    return summary


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
