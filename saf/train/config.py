"""Every setting of a training run, what is checked of them at the start, and their form in JSON."""

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from saf.errors import InputError, check_name
from saf.freeze_config import FreezeConfig
from saf.machine.execution import Compile, Device, Precision
from saf.models import PRESETS
from saf.ops.live import KERNELS
from saf.records.paths import absolute_path
from saf.schedules import (
    OneTime,
    Schedule,
    schedule_from_dict,
    schedule_to_dict,
    setting_of_moment,
)
from saf.tasks import TASKS, FinetuneSettings, FinetuneTask, MQARSettings, MQARTask
from saf.train.sharing import ParallelKind

Sampler = Literal["shuffled", "random"]
LearningRateBy = Literal["update", "elapsed"]
Graphs = Literal["auto", "on", "off"]
MatchClock = Literal["everything", "warm", "scaled"]
CalibrationSource = Literal["auto", "calibration", "train"]
_CHOICES = {
    "task": TASKS,
    "model": PRESETS,
    "kernel": ("auto", *KERNELS),
    "lr_by": get_args(LearningRateBy),
    "match_clock": get_args(MatchClock),
    "sampler": get_args(Sampler),
    "device": get_args(Device),
    "precision": get_args(Precision),
    "compile": get_args(Compile),
    "graphs": get_args(Graphs),
    "parallel": get_args(ParallelKind),
    "calibration_source": get_args(CalibrationSource),
}
"""Settings that are one of several names."""


@dataclass(kw_only=True)
class TrainConfig:
    """Hold the settings of one arm; raises InputError naming the field that cannot be used."""

    data: str
    """Folder made by `saf data prepare`; to finetune, the file of training examples."""
    out: str
    """Folder of the run; new, or the one to resume."""
    task: str = "text"
    """What the run trains on and is judged by: text is pretraining on every token, mqar associative recall, the others
    questions with choices (docs/tasks.md)."""
    finetuning: FinetuneSettings | None = None
    """What finetuning on questions with choices adds; None for another task."""
    mqar: MQARSettings = field(default_factory=MQARSettings)
    """The examples of associative recall, where that is the task."""
    parent: str | None = None
    """Checkpoint of another run to start from (on the command line also the run, for its newest): weights, optimiser,
    place in the data and among the updates."""
    fresh: bool = False
    """Take nothing but weights and heads of the parent: optimiser, updates, clock and place in the data begin anew, as
    for another task."""
    model: str = "tiny"
    """Preset of the model's shape."""
    model_overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of the preset to change, on the command line such as: num_layers 2 position learned. The vocabulary is the
    tokenizer's, rounded up to 64, unless given."""
    length: int | None = None
    """Context in tokens; the preset's longest when None."""
    batch_size: int = 8
    """Windows of one micro-batch."""
    accumulation: int = 1
    """Micro-batches of one update; several processes share them out evenly."""
    updates: int = 1_000
    """Updates of the whole schedule, a parent's included."""
    peak_lr: float = 6e-4
    """Learning rate at the end of the warm-up."""
    min_lr_ratio: float = 0.1
    """Last learning rate, as a share of the peak."""
    warmup: int | float = 0.1
    """Warm-up: a whole number of updates, or a share of all of them."""
    rewarm: int | float = 0
    """After each event the learning rate rises again, from zero to its schedule: over so many updates, or a share of
    all of them; 0 for no such rise."""
    lr_by: LearningRateBy = "update"
    """Advance the learning rate by updates done or by time spent."""
    lr_start: int = 0
    """Update at which the learning-rate schedule begins; above 0 for a later continuation with rates of its own."""
    time_budget_seconds: float | None = None
    """Where the learning rate advances by time spent: stop before an update that would exceed this."""
    match_time: str | None = None
    """Finished run of the ordinary arm that went through this run's parent: train as long as it still had from there,
    the learning rate following the time, and stop before an update that would exceed it. Moments stay shares of
    updates, of which it may do more or fewer; none may be the end."""
    match_clock: MatchClock = "everything"
    """Which seconds are matched: everything, as the paper; warm, without loading and compilation; or scaled, which
    charges compilation, events, losses and checkpoints as if the reference took the paper's 187.65 minutes."""
    match_speed: float | None = None
    """Instead of this run's own clock: updates that the arm does while the reference does one, measured as a pair."""
    match_speed_source: str = ""
    """Where that speed comes from: the file of `saf bench update`."""
    match_charge_seconds: float = 0.0
    """What events and compilation are charged with beside that speed, in seconds of the paper's 187.65 minutes."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's averaging coefficients."""
    weight_decay: float = 0.1
    """Of matrices; vectors do not decay."""
    clip: float | None = 1.0
    """Largest gradient norm; None leaves gradients as they are."""
    seed: int = 1337
    """Of the initial weights and the data order."""
    sampler: Sampler = "shuffled"
    """Non-overlapping windows in shuffled order, or windows that start anywhere."""
    device: Device = "auto"
    """Where to train; auto is CUDA if there is one."""
    precision: Precision = "auto"
    """auto is bf16 autocast over float32 weights on CUDA, and fp32 on CPU."""
    compile: Compile = "auto"
    """torch.compile the whole model; auto is on for CUDA, layers where the schedule has several events, off for CPU.
    layers compiles decoder layers, one program for all of one layout, which later events take up again: they compile
    only layouts that are new."""
    compile_ahead: bool = False
    """With compile=layers: compile the layouts that events may bring in a process beside training, so that an event
    finds them in the compiler's cache on disk. Meanwhile it holds some memory of the device."""
    activation_checkpointing: bool = False
    """Keep only what enters each decoder layer, and compute the layer again in the backward pass: the same numbers for
    less memory and more time."""
    graphs: Graphs = "auto"
    """Replay the forward and backward pass of micro-batches as CUDA graphs, one for each padded length, since with few
    tokens the host is slower than the GPU; auto does so up to two sequences of 4K of the 124M model, where all have one
    length. In one process, without activation checkpointing; examples of many lengths are not compiled with it."""
    parallel: ParallelKind = "auto"
    """How processes that torchrun started train together: ddp holds the whole model in each, fsdp a share of it, which
    saves memory; none is for one process; auto is ddp for several, fsdp where that does not fit."""
    kernel: str = "auto"
    """Attention kernel of live heads, fa3 and fa4 where their packages are installed; auto is PyTorch's own choice."""
    eval_every: int = 250
    """Updates between controller evaluations; 0 for none."""
    eval_windows: int = 32
    """Windows of the controller partition to evaluate; all of them where it holds fewer."""
    save_every: int = 500
    """Updates between checkpoints; 0 for none but those at the freezing point and the end."""
    report_at: tuple[int, ...] = ()
    """Updates after which the model is judged as at the end, beside the end itself; 0 is before the first, after an
    event that comes there. Each report is in the run's reports/ and result.json."""
    save_at: tuple[float, ...] = ()
    """Shares of the updates after which a checkpoint is saved and kept, for other runs to go on from; 0 is before the
    first, where no parent's checkpoint is the same."""
    keep: int = 2
    """Newest checkpoints to keep beside the one at the freezing point; 0 keeps all."""
    log_every: int = 10
    """Updates between progress lines where there is no terminal."""
    token_losses: bool = True
    """Keep the loss of every held-out token of the final report, two bytes each; otherwise of every window alone, which
    is all that a comparison reads."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    quiet: bool = False
    """Show no progress."""
    freeze: FreezeConfig | None = None
    """How heads are frozen; None is the ordinary arm. On the command line nothing is frozen without a rate, a count or
    heads."""
    schedule: Schedule | None = field(default_factory=OneTime)
    """When heads are frozen; an ordinary arm saves a checkpoint where the first event would come, with None nowhere."""
    calibration_sequences: int = 32
    """Windows to calibrate on."""
    calibration_source: CalibrationSource = "auto"
    """Partition to calibrate on; auto is the one that the data folder was prepared for. The sampler never moves."""
    heldout_sequences: int = 32
    """Windows of the controller partition that output-aware scores read: its last ones."""
    track_gradients: bool = False
    """Keep the average that gradient scores read in any case, so that runs which continue from this one can freeze by
    them."""

    def __post_init__(self):
        """Raise InputError naming the first field that cannot be used."""
        for name, choices in _CHOICES.items():
            check_name(name, getattr(self, name), choices)
        self.betas = (float(self.betas[0]), float(self.betas[1]))
        self.save_at = tuple(float(share) for share in self.save_at)
        self.report_at = tuple(self.report_at)
        self.data = absolute_path(self.data)
        for name in _AT_LEAST_ONE:
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("eval_every", "save_every", "keep", "weight_decay", "lr_start", "seed"):
            self._require(name, getattr(self, name) >= 0, "at least 0")
        self._require("length", self.length is None or self.length >= 1, "at least 1, or None")
        self._require("peak_lr", self.peak_lr > 0, "above 0")
        self._require("clip", self.clip is None or self.clip > 0, "above 0, or None to leave gradients as they are")
        self._require("min_lr_ratio", 0 <= self.min_lr_ratio <= 1, "in [0, 1]")
        self._require("betas", all(0 <= beta < 1 for beta in self.betas), "two numbers in [0, 1)")
        self._require("lr_start", self.lr_start < self.updates, f"below updates={self.updates}")
        reports = {*self.report_at}
        usable = len(reports) == len(self.report_at) and all(0 <= each <= self.updates for each in reports)
        self._require("report_at", usable, f"different updates from 0 to updates={self.updates}")
        self._require("save_at", all(0 <= share <= 1 for share in self.save_at), "shares in [0, 1]")
        self._require("warmup", 0 <= self.warmup_share < 1, "updates or a share, fewer than all")
        self._require("rewarm", 0 <= self.rewarm_updates < self.updates, "updates or a share, fewer than all")
        budget = self.time_budget_seconds
        self._require(
            "time_budget_seconds",
            (budget is not None and budget > 0) if self.lr_by == "elapsed" else budget is None,
            'a positive number with lr_by="elapsed" and None otherwise',
        )
        kind = TASKS[self.task]
        asks = isinstance(kind, type) and issubclass(kind, FinetuneTask)
        self._require("finetuning", self.finetuning is None or asks, f"left out with task={self.task!r}")
        self._require("fresh", self.parent is not None or not self.fresh, "False without a parent")
        self._check_matching()
        if self.schedule is not None:
            self.schedule.first_update(self.updates)
        self._require("schedule", self.freeze is None or self.schedule is not None, "a schedule when freezing")
        self._require("rewarm", self.freeze is not None or not self.rewarm, "0 in a run without events")
        ends = self.freeze is not None and self.freeze_update == self.updates
        self._require("rewarm", not (ends and self.rewarm), "0 where nothing trains on behind the event")
        fixed = self.freeze is not None and (self.freeze.operation, self.freeze.storage) == ("freeze", "compact")
        useful = self.compile == "layers" and fixed
        if self.compile_ahead and not useful:
            raise InputError(
                "compile_ahead has an effect only where heads are frozen with compile='layers'; leave it out"
            )
        recalls = self.task == MQARTask.name
        self._require("mqar", recalls or self.mqar == MQARSettings(), f"left out without task={MQARTask.name!r}")
        alone = self.freeze is None or self.freeze.backend != "fused"
        self._require("kernel", self.kernel == "auto" or alone, "auto with backend='fused', which has its own")

    def _check_matching(self) -> None:
        """Raise InputError for settings of matched time that contradict one another or have no effect."""
        speed = self.match_speed
        self._require("match_speed", speed is None or 0 < speed < float("inf"), "a finite number above 0, or None")
        self._require("match_charge_seconds", 0 <= self.match_charge_seconds < float("inf"), "at least 0")
        self._require(
            "match_speed_source", bool(self.match_speed_source) == (speed is not None), "a file, with match_speed"
        )
        self._require(
            "match_charge_seconds", speed is not None or not self.match_charge_seconds, "0 without match_speed"
        )
        self._require("match_clock", speed is None or self.match_clock == "everything", "left out with match_speed")
        if self.match_time is None:
            self._require("match_speed", speed is None, "left out without match_time, which names the reference")
            self._require("match_clock", self.match_clock == "everything", "left out without match_time")
            return
        self._require("match_time", self.parent is not None, "left out without a parent, where the seconds begin")
        self._require("time_budget_seconds", self.time_budget_seconds is None, "None with match_time, which sets it")
        self._require("fresh", not self.fresh, "False with match_time, whose reference went through the parent")
        if self.freeze is None or self.schedule is None:
            return
        self._require(
            "schedule",
            self.freeze_update is None or self.freeze_update < self.updates,
            f"one whose first event ({setting_of_moment(self.schedule)}) comes before the end, updates={self.updates}, "
            "with match_time: nothing is matched where nothing trains on behind it",
        )

    def _require(self, name: str, usable: bool, expected: str) -> None:
        if not usable:
            raise InputError(f"{name} must be {expected}; got {getattr(self, name)!r}")

    @property
    def freeze_update(self) -> int | None:
        """Return after how many updates the first event comes, or an ordinary arm saves a checkpoint to branch from."""
        return None if self.schedule is None else self.schedule.first_update(self.updates)

    @property
    def branch_updates(self) -> frozenset[int]:
        """Return the updates whose checkpoints are kept for other runs to go on from."""
        asked = {OneTime(at=share).first_update(self.updates) for share in self.save_at}
        return frozenset(asked if self.freeze_update is None else {*asked, self.freeze_update})

    @property
    def warmup_share(self) -> float:
        """Return the share of the learning-rate schedule that warms up."""
        return self.warmup / (self.updates - self.lr_start) if isinstance(self.warmup, int) else self.warmup

    @property
    def rewarm_updates(self) -> int:
        """Return over how many updates the learning rate rises again after an event; at least one where any is asked.

        >>> TrainConfig(data="", out="", updates=5_000, rewarm=0.01, freeze=FreezeConfig()).rewarm_updates
        50
        """
        whole = self.rewarm if isinstance(self.rewarm, int) else math.ceil(self.rewarm * self.updates)
        return int(whole)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["betas"] = list(self.betas)
        values["save_at"] = list(self.save_at)
        values["report_at"] = list(self.report_at)
        values["finetuning"] = self.finetuning and asdict(self.finetuning)
        values["freeze"] = self.freeze and self.freeze.to_dict()
        values["schedule"] = self.schedule and schedule_to_dict(self.schedule)
        values["mqar"] = self.mqar.to_dict()
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainConfig":
        """Build from `to_dict`'s form; raise InputError naming unknown or missing fields."""
        values = dict(values)
        try:
            if isinstance(schedule := values.get("schedule"), dict):
                values["schedule"] = schedule_from_dict(schedule)
            if isinstance(finetuning := values.get("finetuning"), dict):
                values["finetuning"] = FinetuneSettings(**finetuning)
            if isinstance(mqar := values.get("mqar"), dict):
                values["mqar"] = MQARSettings.from_dict(mqar)
            freeze = values.get("freeze")
            return cls(**{**values, "freeze": FreezeConfig(**freeze) if isinstance(freeze, dict) else freeze})
        except TypeError as error:
            raise InputError(f"not a training configuration: {error}") from error


_AT_LEAST_ONE = (
    *("batch_size", "accumulation", "updates", "eval_windows", "log_every"),
    *("calibration_sequences", "heldout_sequences"),
)
