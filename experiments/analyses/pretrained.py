"""A model pretrained elsewhere: what freezing heads costs it by score, rate and operation, at once and after healing.

The study has pieces, a JSON file each beside the record: `selection` chooses the heads of every score and rate,
`joint` pieces those by joint cost, `ordinary` and one piece an arm measure perplexity on two texts and zero-shot
answers before and after healing, `speed` pieces time prompts and decoding. A piece is measured once; several run at a
time, in processes with a GPU each.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments.analyses.common import (
    Part,
    Record,
    TaskSettings,
    header,
    origin_of,
    piece,
    piece_file,
    say,
    subplots,
    table,
)
from saf.calibration import calibrate
from saf.data import ShuffledWindows, TextData, TokenData, calibration_windows, sequential_windows
from saf.errors import InputError, SafError
from saf.evaluate.paired import delta_of_windows
from saf.evaluate.passes import precision_in_use
from saf.evaluate.perplexity import evaluate_perplexity, read_evaluation
from saf.evaluate.zero_shot import AnswersByTask, TooLong, paired_tasks
from saf.freeze_config import FreezeConfig, Operation
from saf.freezing import CANDIDATES, FittedHead, accept_fits, fit_heads, freeze_, head_order
from saf.heads import Head, HeadSet
from saf.heal import heal_
from saf.heldout import accept_jointly
from saf.machine import Stopwatch, autocast, device_name, pick_device, visible_devices
from saf.opening import OpenedModel, open_model
from saf.records.table import percent, signed
from saf.scores import score
from saf.statistics import AttentionStatistics
from saf.surgery import install_, uninstall_

CHOICES: dict[str, dict[str, Any]] = {
    "variance": {"score": "variance"},
    "variance, 3 a layer": {"score": "variance", "max_per_layer": 3},
    "forward KL": {"score": "forward_kl"},
    "random": {"score": "random"},
}
"""Selections by a score alone; the other one is by joint cost."""
JOINT, CANDIDATES_BY = "joint cost", "forward_kl"
"""The selection by joint cost, and the score whose lowest heads it tries."""
TEXTS = ("data", "other")
TIMED = {"prefill": ("2048x8", "4096x4", "8192x2"), "decode": ("2048x8", "4096x8", "7168x8")}
"""Points of the speeds: context x sequences."""


@dataclass(frozen=True, kw_only=True)
class Settings(TaskSettings):
    """Freeze and prune heads of a pretrained model by several selections, heal, and compare with the ordinary model.

    Every piece is written as it ends, and the same command continues.
    """

    data: Path
    """Folder made by `saf data prepare` with the model's tokenizer: calibration, choice, healing and reports."""
    other: Path
    """A second text to report on: such a folder, or a file of text."""
    too_long: TooLong = "cut"
    """Treatment of questions longer than a calibration sequence: refuse them, or cut their beginning."""
    batch_size: int = 16
    """Sequences in a forward pass."""
    rates: tuple[float, ...] = (0.05, 0.1, 0.2, 0.3)
    """Shares of the heads that may be frozen."""
    sequences: int = 32
    """Number of calibration sequences."""
    length: int = 1_024
    """Tokens of a sequence or window."""
    choosing: int = 32
    """Windows that heads are chosen by in order of joint cost."""
    windows: int = 128
    """Windows of each text to report on."""
    heal: int = 2_457_600
    """Tokens of healing."""
    bos: bool = False
    """Begin each window with the tokenizer's BOS."""
    seed: int = 0
    """Seed for drawing calibration sequences, training windows and random heads."""
    speeds: tuple[float, ...] = (0.1, 0.3)
    """Rates whose prompts and decoding are timed; --speeds alone is none."""
    pairs: int = 5
    """Alternating pairs of each timing."""
    jobs: int | None = None
    """Pieces at a time, each in a process of its own and on one GPU, by turns; one a GPU if not given."""
    piece: str | None = None
    """Make this piece alone."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Heads that one piece freezes or prunes."""

    choice: str
    rate: float
    operation: Operation = "freeze"
    storage: str = "compact"

    @property
    def name(self) -> str:
        """Return the arm in words."""
        return f"{self.choice} {percent(self.rate)} {self.operation} {self.storage}"


def arms(settings: Settings) -> list[Arm]:
    """Return all arms, those by joint cost first."""
    every = [
        Arm(choice=choice, rate=rate, operation=operation)
        for choice in (JOINT, *CHOICES)
        for rate in settings.rates
        for operation in ("freeze", "prune")
    ]
    return every + [Arm(choice=JOINT, rate=rate, storage="exponential") for rate in settings.rates]


def stages(settings: Settings) -> list[list[str]]:
    """Return the names of all pieces; those of a stage need the ones before it."""
    every = arms(settings)
    joint = [f"joint {percent(rate)}" for rate in sorted(settings.rates, reverse=True)]
    timed = [f"speed {percent(rate)} {storage}" for rate in settings.speeds for storage in ("compact", "exponential")]
    return [
        ["selection"],
        [*joint, "ordinary", *(arm.name for arm in every if arm.choice != JOINT)],
        [*timed, *(arm.name for arm in every if arm.choice == JOINT)],
    ]


def measure(settings: Settings) -> dict[str, Any]:
    """Make the missing pieces and return the record of all; raise InputError while some are missing."""
    if settings.out is None:
        raise InputError("--out must name the record: pieces are written beside it")
    if settings.tasks:
        from saf.hf import lm_eval  # noqa: F401 - raises now, not after the first measurement
    if settings.piece is not None:
        Study(settings).piece(settings.piece)
        sys.exit()
    for names in stages(settings):
        _make_all(settings, [name for name in names if not piece_file(settings.out, name).is_file()])
        if missing := [name for name in names if not piece_file(settings.out, name).is_file()]:
            raise InputError(f"{len(missing)} pieces are missing ({missing[0]} ...); the same command continues")
    return Study(settings).record()


def _make_all(settings: Settings, names: Sequence[str]) -> None:
    """Make pieces, several at a time; one that fails is named, and the others go on."""
    devices = visible_devices()
    jobs = settings.jobs or max(1, len(devices))
    if jobs == 1:
        for name in names:
            Study(settings).piece(name)
        return
    lanes = list(range(jobs))

    def in_process(name: str) -> None:
        assert settings.out is not None
        lane, file = lanes.pop(), piece_file(settings.out, name)
        device = {"CUDA_VISIBLE_DEVICES": devices[lane % len(devices)]} if devices else {}
        command = [sys.executable, "-m", "experiments.analyses", "pretrained", *_words(settings), "--piece", name]
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file.with_suffix(".log"), "a") as log:
            subprocess.run(command, stdout=log, stderr=log, env=os.environ | device, check=False)
        lanes.append(lane)
        say(f"{name}: {'ended' if file.is_file() else 'failed, see ' + str(file.with_suffix('.log'))}")

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(in_process, names))


def _words(settings: Settings) -> Iterator[str]:
    """Yield the command line of the same settings, for one piece."""
    yield str(settings.model)
    for name, value in vars(settings).items():
        flag = name.replace("_", "-")
        if name in ("model", "jobs", "piece", "json", "figure") or value is None:
            continue
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        else:
            yield from (f"--{flag}", *map(str, value if isinstance(value, tuple) else [value]))


class Study:
    """The pieces of one study, each made once and read from its file afterwards."""

    def __init__(self, settings: Settings):
        self.settings = settings

    def opened(self) -> OpenedModel:
        """Open the model anew, with its heads live."""
        settings = self.settings
        return open_model(settings.model, settings.data, settings.device, precision=settings.precision)

    @cached_property
    def header(self) -> dict[str, Any]:
        """The header of the record."""
        opened = open_model(self.settings.model, self.settings.data, "cpu")
        return header(
            "pretrained",
            replace(self.settings, piece=None, jobs=None),
            device=device_name(pick_device(self.settings.device)),
            checkpoints={"model": opened.source.hash},
            data={"report": _data(opened).fingerprint, "other": open_text(self.settings, opened).fingerprint},
        )

    def piece(self, name: str) -> dict[str, Any]:
        """Return a piece, made where it is missing."""
        return piece(self.settings.out, name, origin_of(self.header), lambda: self._make(name))

    def _make(self, name: str) -> dict[str, Any]:
        say(name)
        began, settings, opened = time.monotonic(), self.settings, self.opened()
        with autocast(pick_device(settings.device), settings.precision):
            if name == "selection":
                record = _select(settings, opened)
            elif name.startswith("joint ") and name.endswith("%"):
                record = _select_jointly(settings, opened, float(name.split()[1].rstrip("%")) / 100)
            elif name.startswith("speed "):
                record = self._time(opened, *name.split()[1:])
            else:
                record = self._measure_arm(opened, next((arm for arm in arms(settings) if arm.name == name), None))
        facts = {"precision": precision_in_use(opened.model, settings.precision)}
        return {**facts, "seconds": time.monotonic() - began, **record}

    def _chosen(self, choice: str, rate: float) -> tuple[Head, ...]:
        """Return the heads of a selection at a rate."""
        if choice == JOINT:
            heads = self.piece(f"joint {percent(rate)}")["heads"]
        else:
            heads = self.piece("selection")["chosen"][choice][f"{rate:g}"]
        return tuple((layer, head) for layer, head in heads)

    def _measure_arm(self, opened: OpenedModel, arm: Arm | None) -> dict[str, Any]:
        """Return an arm's measurements at once and healed; without an arm those of the ordinary model."""
        settings, record = self.settings, dict[str, Any](arm=None if arm is None else vars(arm))
        if arm is not None:
            heads = self._chosen(arm.choice, arm.rate)
            record |= _frozen(settings, opened, heads, arm, settings.length, settings.sequences)
        record["at once"] = _evaluated(settings, opened)
        if settings.heal:
            began = time.monotonic()
            heal_(opened.model, _training(settings, opened), precision=settings.precision)
            record["healing_seconds"] = time.monotonic() - began
            record["healed"] = _evaluated(settings, opened)
        return record

    def _time(self, opened: OpenedModel, rate: str, storage: str) -> dict[str, Any]:
        """Return the records of `saf bench prefill` and `decode` of the heads by joint cost, with patterns of 8K."""
        from saf import bench

        settings, share = self.settings, float(rate.rstrip("%")) / 100
        arm = Arm(choice=JOINT, rate=share, storage=storage)
        points = [[int(size) for size in point.split("x")] for each in TIMED.values() for point in each]
        longest = min(max(length for length, _ in points) + 16, opened.longest)
        if settings.device == "cpu" or not torch.cuda.is_available():
            longest = settings.length  # a rehearsal
        heads = self._chosen(JOINT, share)
        record = _frozen(settings, opened, heads, arm, longest, max(2, settings.sequences // 8))
        with tempfile.TemporaryDirectory() as saved:
            opened.model.save_pretrained(saved)  # pyright: ignore[reportCallIssue]
            for kind, shapes in TIMED.items():
                fitting = tuple(shape for shape in shapes if int(shape.split("x")[0]) <= longest)
                options = {"model": saved, "points": fitting or (f"{longest // 2}x1",), "pairs": settings.pairs}
                options |= {"device": settings.device, "seconds": 200.0, "others": (), "profile": False}
                try:
                    record[kind] = bench.measure(bench.KINDS[kind](**options), out=None)
                except SafError as error:
                    record[kind] = {"failed": str(error)}
        return record

    def record(self) -> dict[str, Any]:
        """Return the record: facts of every arm and its paired changes from the ordinary model in the same state."""
        settings = self.settings
        pieces = {name: self.piece(name) for names in stages(settings) for name in names}
        ordinary, selection = pieces["ordinary"], pieces["selection"]
        states = [state for state in ("at once", "healed") if state in ordinary]
        entries = []
        for arm in arms(settings):
            own = pieces[arm.name]
            entry = {"name": arm.name, **own["arm"]} | {n: own[n] for n in ("heads", "kinds", "freezing_seconds")}
            entries.append(entry | {state: _changes(ordinary[state], own[state]) for state in states})
        return {
            **self.header,
            **{"model": str(settings.model), "precision": ordinary["precision"]},
            **{name: selection[name] for name in ("eligible", "fit", "variance", "forward_kl", "fit_kl")},
            "joint": [pieces[f"joint {percent(rate)}"] for rate in settings.rates],
            "ordinary": {state: _facts(ordinary[state]) for state in states},
            "arms": entries,
            "speeds": {name: each for name, each in pieces.items() if name.startswith("speed ")},
        }


# --- the heads of every selection


def _fitted(
    settings: Settings, opened: OpenedModel
) -> tuple[AttentionStatistics, dict[Head, FittedHead], dict[float, int]]:
    """Return the statistics, the fits of all heads that may be frozen, and how many each rate asks for."""
    ids = _calibration(settings, opened, settings.length, settings.sequences)
    statistics = calibrate(opened.model, ids)
    heads = HeadSet(map(tuple, statistics.measured.nonzero().tolist()))
    fits = fit_heads(opened.model, ids, statistics, heads, FreezeConfig(), Stopwatch())
    return statistics, fits, {rate: max(1, round(rate * len(heads))) for rate in settings.rates}


def _select(settings: Settings, opened: OpenedModel) -> dict[str, Any]:
    """Return the heads of every selection by a score alone, and what was measured of all heads."""
    statistics, fits, counts = _fitted(settings, opened)
    chosen = {
        choice: {
            f"{rate:g}": _by_score(statistics, fits, FreezeConfig(count=count, seed=settings.seed, **options))
            for rate, count in counts.items()
        }
        for choice, options in CHOICES.items()
    }
    return {
        "eligible": len(fits),
        "fit": sum(fit.fit_kl <= FreezeConfig.max_fit_kl for fit in fits.values()),
        "chosen": chosen,
        "variance": statistics.variance.tolist(),
        "forward_kl": statistics.forward_kl.tolist(),
        "fit_kl": [[*head, fit.fit_kl] for head, fit in fits.items()],
    }


def _select_jointly(settings: Settings, opened: OpenedModel, rate: float) -> dict[str, Any]:
    """Return the heads that cost least together at a rate, among those of lowest forward KL."""
    statistics, fits, counts = _fitted(settings, opened)
    count, model = counts[rate], opened.model

    def edit_(heads: HeadSet) -> None:
        patterns: Any = [fits[head].pattern for head in heads]
        install_(model, heads, patterns)

    tried = FreezeConfig(score=CANDIDATES_BY, count=min(CANDIDATES * count, len(fits)))
    candidates = [(layer, head) for layer, head in _by_score(statistics, fits, tried)]
    text = _choosing(settings, opened)
    joint = accept_jointly(model, candidates, text, count, edit_=edit_, undo_=partial(uninstall_, model))
    return {"rate": rate, "heads": [list(head) for head in joint.accepted], "joint_cost": joint.to_dict()}


def _by_score(
    statistics: AttentionStatistics, fits: Mapping[Head, FittedHead], config: FreezeConfig
) -> list[list[int]]:
    """Return the heads of lowest score whose fits pass, within the limits of the settings."""
    seed = {"seed": config.seed} if config.score == "random" else {}
    order = head_order({config.score: score(statistics, config.score, **seed)}, config)
    accepted, _ = accept_fits(order, lambda heads: {head: fits[head] for head in heads}, config, allow_empty=True)
    return HeadSet(accepted).to_list()


# --- text


def _data(opened: OpenedModel) -> TokenData:
    assert opened.data is not None
    return opened.data


def _bos(settings: Settings, opened: OpenedModel) -> int | None:
    return opened.encoder().beginning(settings.model) if settings.bos else None


def _begun(settings: Settings, opened: OpenedModel, windows: Tensor) -> Tensor:
    """Return windows with the token that begins a text in place of their first one, where the settings say so."""
    if (bos := _bos(settings, opened)) is not None:
        windows = windows.clone()
        windows[:, 0] = bos
    return windows


def _calibration(settings: Settings, opened: OpenedModel, length: int, count: int) -> list[Tensor]:
    windows = calibration_windows(_data(opened), length=length, count=count, seed=settings.seed)
    return list(_begun(settings, opened, windows).split(settings.batch_size))


def _choosing(settings: Settings, opened: OpenedModel) -> list[Tensor]:
    """Return windows all over the controller partition, so that they are of many documents."""
    windows = sequential_windows(_data(opened).tokens("controller"), settings.length)[:, :-1]
    places = torch.linspace(0, len(windows) - 1, min(settings.choosing, len(windows))).long()
    return list(_begun(settings, opened, windows[places]).split(1))


def _training(settings: Settings, opened: OpenedModel) -> Tensor:
    """Return the windows of healing `[N, length + 1]`."""
    tokens = _data(opened).tokens("train")
    windows = ShuffledWindows(tokens, length=settings.length, seed=settings.seed)
    return _begun(settings, opened, windows.batch(0, max(1, settings.heal // settings.length)))


# --- arms


def _frozen(
    settings: Settings, opened: OpenedModel, heads: tuple[Head, ...], arm: Arm, length: int, count: int
) -> dict[str, Any]:
    """Freeze or prune these heads in the opened model; return the event's facts."""
    ids = _calibration(settings, opened, length, count)
    patterns: dict[str, Any] = {}
    if arm.operation == "freeze":
        patterns = {"storage": arm.storage, "max_fit_kl": 10.0}  # they passed at their selection
    report = freeze_(opened.model, ids, FreezeConfig(heads=heads, operation=arm.operation, **patterns))
    exponential = [fit["kind"] for fit in report.exponential.values()]
    return {"heads": report.heads.to_list(), "freezing_seconds": sum(report.seconds.values()), "kinds": exponential}


def _evaluated(settings: Settings, opened: OpenedModel) -> dict[str, Any]:
    """Return losses of windows of both texts, and the answers to the tasks."""
    other = open_text(settings, opened)
    shape: dict[str, Any] = {"length": settings.length, "batch_size": settings.batch_size, "limit": settings.windows}
    shape |= {"precision": settings.precision, "bos": _bos(settings, opened)}
    measured: dict[str, Any] = {}
    for name, text in zip(TEXTS, (_data(opened), other), strict=True):
        with tempfile.TemporaryDirectory() as folder:
            record = evaluate_perplexity(opened.model, text, out=Path(folder), tokens=False, **shape)
            losses = read_evaluation(folder)[1].tolist()
        measured[name] = {"loss": record["loss"], "perplexity": record["perplexity"], "windows": losses}
    if settings.tasks:
        from saf.hf.lm_eval import ask

        answers = ask(opened, settings, longest=settings.length)
        measured["tasks"] = {
            name: {**task.record}
            | {"each": [[one["id"], one["answer"], bool(one["right"]), one["taken"]] for one in task.answers]}
            for name, task in answers.items()
        }
    return measured


def open_text(settings: Settings, opened: OpenedModel) -> TokenData:
    """Open the second text: a prepared folder, or a file that the tokenizer of the first one reads."""
    if settings.other.is_file():
        return TextData([settings.other], _data(opened).tokenizer())
    return TokenData.open(settings.other)


def _facts(state: Record) -> dict[str, Any]:
    """Return perplexities and accuracies without the losses of windows and the answers."""
    tasks = {name: {k: v for k, v in task.items() if k != "each"} for name, task in state.get("tasks", {}).items()}
    return {name: {"perplexity": state[name]["perplexity"]} for name in TEXTS} | {"tasks": tasks}


def _changes(ordinary: Record, own: Record) -> dict[str, Any]:
    """Return a state's perplexities and accuracies with their paired changes."""
    changes = _facts(own)
    for name in TEXTS:
        pair = [torch.tensor(each[name]["windows"], dtype=torch.float64) for each in (ordinary, own)]
        changes[name] |= {"change": delta_of_windows(*pair)}
    if own.get("tasks"):
        answers: list[AnswersByTask] = [
            {
                name: (task, [dict(zip(("id", "answer", "right", "taken"), one, strict=True)) for one in task["each"]])
                for name, task in each["tasks"].items()
            }
            for each in (ordinary, own)
        ]
        changes["answers"] = paired_tasks(*answers)
    return changes


def tables(record: Record) -> list[Part]:
    """Return perplexity and accuracy of all arms, at once and healed, and the speeds."""
    states = list(record["ordinary"])
    base = record["ordinary"]
    columns = ["arm", "heads", *(f"{text}, {state}, %" for state in states for text in TEXTS)]
    columns += [f"tasks, {state}, points" for state in states if base[state]["tasks"]]
    rows: list[list[Any]] = []
    for arm in record["arms"]:
        cells: list[Any] = [arm["name"], len(arm["heads"])]
        for state in states:
            for text in TEXTS:
                change = arm[state][text]["change"]
                low, high = change["ci95"]
                cells.append(f"{signed(change['delta_ppl_percent'], 2)} ({signed(low, 2)} to {signed(high, 2)})")
        cells += [
            signed(100 * arm[state]["answers"]["mean_difference"], 2, "") for state in states if base[state]["tasks"]
        ]
        rows.append(cells)
    ordinary = ", ".join(f"{text} {base[state][text]['perplexity']:.3f} {state}" for state in states for text in TEXTS)
    title = f"Heads of {Path(record['model']).name}: {record['eligible']} may be frozen, {record['fit']} fit"
    notes = [f"Perplexity of the ordinary model: {ordinary}. Changes are from it, in the same state, paired by window."]
    parts: list[Part] = [table(title, columns, rows, notes)]
    if speeds := _speeds(record):
        head = ["heads", "kind", "point", "ordinary / frozen"]
        parts.append(table("Speed against the same weights with all heads live", head, speeds))
    return parts


def _speeds(record: Record) -> list[list[Any]]:
    rows = []
    for name, each in record["speeds"].items():
        for kind in TIMED:
            for row in each[kind].get("rows", ()):
                if not row["refused"] and row.get("rate") is not None:
                    point = f"{row['point']['length']}x{row['point']['batch_size']}"
                    rows.append([name, f"{kind} {row['variant']}", point, f"{row['ratio']:.3f}"])
    return rows


def figure(records: Sequence[Record]) -> Figure:
    """Return the change in perplexity by rate, a line a selection, frozen and pruned, in each state."""
    record, *_ = records
    states = list(record["ordinary"])
    drawn, axes = subplots(1, len(states), size=(6 * len(states), 4))
    for axis, state in zip([axes] if len(states) == 1 else axes, states, strict=True):
        groups: dict[str, list[Record]] = {}
        for arm in record["arms"]:
            groups.setdefault(f"{arm['choice']}, {arm['operation']} {arm['storage']}", []).append(arm)
        for name, own in groups.items():
            changes = [max(0.1, arm[state]["data"]["change"]["delta_ppl_percent"]) for arm in own]
            axis.plot([100 * arm["rate"] for arm in own], changes, "--" if "prune" in name else "o-", label=name)
        axis.set(yscale="log", xlabel="heads, % of those that may be frozen", ylabel="perplexity, %", title=state)
    drawn.axes[0].legend(fontsize=6)
    return drawn
