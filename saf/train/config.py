"""`TrainConfig` holds the settings of a run; `continue_from` returns those of a branch; config.json records them.

Defaults of AdamW, its learning rate and the seed are those of the paper's 124M models (its appendix on controlled
pretraining).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from saf.checkpoint import Checkpoint, open_checkpoint
from saf.errors import InputError, check_name
from saf.freeze_config import FreezeConfig
from saf.machine import Compile, Device, Execution, Precision, device_name
from saf.models import PRESETS, GPTConfig, preset
from saf.ops.live import KERNELS
from saf.records.files import read_json, to_json
from saf.records.run import absolute_path, differing
from saf.schedules import OneTime, Schedule, schedule_from_dict, schedule_to_dict, setting_of_moment
from saf.tasks import TASKS, FinetuneSettings, FinetuneTask, MQARSettings, MQARTask, Task
from saf.tasks.multiple_choice import PATHS


@dataclass(kw_only=True)
class TrainConfig:
    """The settings of one arm; a wrong value raises InputError that names its field."""

    data: str
    """Read this folder written by `saf data prepare`; to finetune, this file of training examples."""
    out: str
    """Write the run into this folder, which is new, or the one to resume."""
    task: str = "text"
    """Train on this task: text predicts every next token, mqar is associative recall, and the others are questions with
    choices (docs/tasks.md)."""
    finetuning: FinetuneSettings | None = None
    """Settings of finetuning on questions with choices; None for another task."""
    mqar: MQARSettings = field(default_factory=MQARSettings)
    """These settings generate the examples of associative recall; they have an effect with the task mqar only."""
    parent: str | None = None
    """Start from this checkpoint of another run, or from a run's newest one. The run takes over its weights, optimiser,
    data position and update number."""
    fresh: bool = False
    """Take only weights and heads from the parent. Optimiser, updates, time and data begin anew."""
    model: str = "tiny"
    """Use this preset of the model's shape: tiny, 124m, 124m-learned, 774m or 1b."""
    model_overrides: dict[str, Any] = field(default_factory=dict)
    """Change these fields of the preset, for example num_layers 2 position learned. Without vocab_size the vocabulary
    is the tokenizer's, rounded up to a multiple of 64."""
    length: int | None = None
    """Train on this number of tokens a sequence; by default the preset's longest context. A run may go on from a parent
    of another length, with as many tokens an update."""
    batch_size: int = 8
    """Put this number of sequences into a micro-batch."""
    accumulation: int = 1
    """Make an update of this number of micro-batches. Several processes share them evenly."""
    updates: int = 1_000
    """Train for this number of updates, those of the parent included."""
    update_budget: int | None = None
    """Train for this number of updates after the parent's, instead of the rest of `updates`. The learning rate still
    passes through the rest of its schedule, and events stay at their shares of `updates`."""
    time_budget_seconds: float | None = None
    """Train for this number of seconds instead of updates. The learning rate follows the share of the time that has
    passed, and training stops before an update that would exceed it."""
    peak_lr: float = 6e-4
    """Reach this learning rate at the end of the warm-up."""
    min_lr_ratio: float = 0.1
    """Last learning rate, as a share of the peak."""
    warmup: int | float = 0.1
    """Length of the warm-up: a whole number of updates, or a share of all updates."""
    rewarm: int | float = 0
    """Let the learning rate rise again from zero after each event, over this number or share of updates. 0 leaves the
    rate as scheduled."""
    lr_start: int = 0
    """Begin the learning-rate schedule at this update. A continuation of a full run gets rates of its own so."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Averaging coefficients of AdamW."""
    weight_decay: float = 0.1
    """Weight decay of matrices; vectors do not decay."""
    clip: float | None = 1.0
    """Clip the gradient norm to this value; None leaves gradients as they are."""
    seed: int = 1337
    """Draw initial weights and the order of data by this random seed."""
    sampler: Literal["shuffled", "random"] = "shuffled"
    """Read non-overlapping windows in shuffled order (shuffled), or windows that start anywhere (random)."""
    device: Device = "auto"
    """Train on this device; auto is CUDA if there is one."""
    precision: Precision = "auto"
    """Compute in this precision; auto is bf16 autocast over float32 weights on CUDA, and fp32 on a CPU."""
    compile: Compile = "auto"
    """Compile the whole model (on), or each decoder layer by itself (layers). With layers, an event compiles only
    layouts of heads that are new. auto is off on a CPU; on CUDA it is layers where the schedule has several events,
    and on otherwise."""
    activation_checkpointing: bool = False
    """Keep only the input of each decoder layer, and compute the layer again in the backward pass. The results are the
    same; an update takes less memory and about a third more time."""
    graphs: Literal["auto", "on", "off"] = "auto"
    """Replay micro-batches as CUDA graphs, because the host is slower than the GPU when they have few tokens. auto does
    so up to two sequences of 4,096 tokens of the 124M model, if all have one length. on needs one process, no
    activation checkpointing, and no compilation of examples of many lengths."""
    parallel: Literal["auto", "none", "ddp", "fsdp"] = "auto"
    """Train in several processes in this way: ddp holds the whole model in each process, fsdp holds a share of it in
    each, and none is one process. auto is ddp for several processes, or fsdp where the model does not fit."""
    kernel: str = "auto"
    """Compute live heads with this attention kernel; auto is PyTorch's choice."""
    eval_every: int = 250
    """Number of updates between losses on the controller partition; 0 measures none."""
    eval_windows: int = 32
    """Number of windows of the controller partition to evaluate; a smaller partition is evaluated whole."""
    report_tokens: int | None = None
    """Report on the first windows of the report partition that hold this many tokens; the default is all of them."""
    save_every: int = 500
    """Number of updates between checkpoints; 0 keeps only those at the freezing point and the end."""
    report_at: tuple[int, ...] = ()
    """Report on the model after these updates as at the end; 0 is before the first update, after an event that comes
    there. The run writes each report into its reports/ and its result.json."""
    save_at: tuple[float, ...] = ()
    """Save a checkpoint after these shares of the updates and keep it, for other runs to go on from; 0 is before the
    first update."""
    keep: int = 2
    """Keep this number of newest checkpoints, besides the one at the freezing point; 0 keeps all."""
    log_every: int = 10
    """Number of updates between progress lines where there is no terminal."""
    token_losses: bool = True
    """Keep the loss of every held-out token of the final report, in four bytes each. Otherwise the run keeps the losses
    of windows, which is all that a comparison reads."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    quiet: bool = False
    """Show no progress."""
    freeze: FreezeConfig | None = None
    """Freeze heads by these settings; None is the ordinary arm."""
    schedule: Schedule | None = field(default_factory=OneTime)
    """Freeze heads by this schedule. An ordinary arm saves a checkpoint where the first event would come."""
    calibration_sequences: int = 32
    """Number of sequences to calibrate on."""
    calibration_source: Literal["auto", "calibration", "train"] = "auto"
    """Calibrate on this partition of the data; auto is the partition that the folder was prepared for."""
    heldout_sequences: int = 32
    """Number of held-out sequences for scores that read outputs of heads; they are the controller's last ones."""
    track_gradients: bool = False
    """Keep the running average of Q/K gradients, so that runs that continue from this one can use gradient scores."""

    def __post_init__(self):
        choices: dict[str, Iterable[str]] = {"task": TASKS, "model": PRESETS, "kernel": ("auto", *KERNELS)}
        for name, kind in get_type_hints(TrainConfig).items():
            if get_origin(kind) is Literal:
                choices[name] = get_args(kind)
        for name, known in choices.items():
            check_name(name, getattr(self, name), known)
        # Read from JSON these are lists, and the same settings must be equal.
        self.betas = (float(self.betas[0]), float(self.betas[1]))
        self.save_at = tuple(float(share) for share in self.save_at)
        self.report_at = tuple(self.report_at)
        self.data = absolute_path(self.data)  # a run may be resumed from another working directory
        for name, usable, expected in self._conditions():
            if not usable:
                raise InputError(f"{name} must be {expected}; got {getattr(self, name)!r}")

    def _conditions(self) -> Iterator[tuple[str, bool, str]]:
        """Yield each setting with whether its value can be used and what it must be."""
        at_least = {
            0: ("eval_every", "save_every", "keep", "weight_decay", "lr_start", "seed"),
            1: ("length", "batch_size", "accumulation", "updates", "update_budget", "eval_windows", "log_every",
                "calibration_sequences", "heldout_sequences", "report_tokens"),
        }  # fmt: skip
        for least, names in at_least.items():
            for name in names:
                value = getattr(self, name)
                yield name, value is None or value >= least, f"at least {least}"
        yield "peak_lr", self.peak_lr > 0, "above 0"
        yield "clip", self.clip is None or self.clip > 0, "above 0, or None to leave gradients as they are"
        yield "min_lr_ratio", 0 <= self.min_lr_ratio <= 1, "in [0, 1]"
        yield "lr_start", self.lr_start < self.updates, f"below updates={self.updates}"
        yield "save_at", all(0 <= share <= 1 for share in self.save_at), "shares in [0, 1]"
        reports = {each for each in self.report_at if 0 <= each <= self.updates}
        yield "report_at", len(reports) == len(self.report_at), f"different updates from 0 to updates={self.updates}"
        # A whole number is of updates and a fraction a share, as in schedules: 1 and 1.0 are different moments.
        most = self.updates - self.lr_start if isinstance(self.warmup, int) else 1
        yield "warmup", 0 <= self.warmup < most, "updates or a share, fewer than all"
        budget = self.time_budget_seconds
        alone = budget is None or (budget > 0 and self.update_budget is None)
        yield "time_budget_seconds", alone, "above 0, or None with update_budget"
        task, freeze = TASKS[self.task], self.freeze
        questions = isinstance(task, type) and issubclass(task, FinetuneTask)
        yield "finetuning", self.finetuning is None or questions, f"left out with task={self.task!r}"
        used = self.task == MQARTask.name or self.mqar == MQARSettings()
        yield "mqar", used, f"left out without task={MQARTask.name!r}"
        yield "fresh", self.parent is not None or not self.fresh, "False without a parent"
        yield "freeze", freeze is None or isinstance(freeze, FreezeConfig), "a FreezeConfig"
        yield "schedule", freeze is None or self.schedule is not None, "a schedule when freezing"
        joint = freeze is not None and freeze.uses_joint_cost
        yield "freeze", not joint, "without joint cost: use the schedule validation_budget"
        trains_on = self.freeze_update != self.updates and freeze is not None
        rewarms = 0 <= self.rewarm_updates < self.updates and (trains_on or not self.rewarm)
        yield "rewarm", rewarms, "fewer updates than all, and 0 where nothing trains on after an event"
        fused = freeze is not None and freeze.backend == "fused"
        yield "kernel", self.kernel == "auto" or not fused, "auto with backend='fused', which has its own"

    @property
    def freeze_update(self) -> int | None:
        """After how many updates the first event comes, or an ordinary arm saves a checkpoint to branch from."""
        return None if self.schedule is None else self.schedule.first_update(self.updates)

    @property
    def branch_updates(self) -> frozenset[int]:
        """The updates whose checkpoints stay for other runs to go on from."""
        moments = {OneTime(at=share).first_update(self.updates) for share in self.save_at}
        return frozenset(moments if self.freeze_update is None else {*moments, self.freeze_update})

    @property
    def rewarm_updates(self) -> int:
        """Over how many updates the learning rate rises again after an event; a share is at least one update.

        >>> TrainConfig(data="", out="", updates=5_000, rewarm=0.01, freeze=FreezeConfig()).rewarm_updates
        50
        """
        return int(self.rewarm if isinstance(self.rewarm, int) else math.ceil(self.rewarm * self.updates))

    def to_dict(self) -> dict[str, Any]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        groups = {name: write(values[name]) for name, (write, _) in _GROUPS.items() if values[name] is not None}
        return values | groups

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainConfig":
        """Build from `to_dict`'s form; raise InputError naming unknown or missing fields."""
        values = dict(values)
        try:
            for name, (_, read) in _GROUPS.items():
                if isinstance(values.get(name), dict):
                    values[name] = read(values[name])
            return cls(**values)
        except TypeError as error:
            raise InputError(f"not a training configuration: {error}") from error


_GROUPS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "finetuning": (asdict, lambda values: FinetuneSettings(**values)),
    "freeze": (FreezeConfig.to_dict, lambda values: FreezeConfig(**values)),
    "schedule": (schedule_to_dict, schedule_from_dict),
    "mqar": (asdict, lambda values: MQARSettings(**values)),
}
"""Settings that are dataclasses, with the functions that write and read them."""


# --- branches

_NOT_INHERITED: dict[str, Any] = {
    "freeze": None, "rewarm": 0, "track_gradients": False, "fresh": False, "time_budget_seconds": None,
    "update_budget": None,
}  # fmt: skip
"""Settings that a branch does not take over from its parent."""


def continue_from(parent: Checkpoint | Path | str, *, out: Path | str, **changes: Any) -> TrainConfig:
    """Return the settings of a run that starts at checkpoint `parent`: those of its run, but for `changes`.

    With `freeze=` and no `schedule=`, heads are frozen right there. `track_gradients` is not taken over.

    >>> continue_from("runs/ordinary/checkpoints/step-2500", out="runs/frozen",
    ...               freeze=FreezeConfig(rate=0.25))  # doctest: +SKIP

    Raises:
        CheckpointError: `parent` is no whole checkpoint.
        InputError: Freezing, saving or reporting before the parent, fewer updates than it has done, or an unknown
            setting.
    """
    checkpoint = parent if isinstance(parent, Checkpoint) else open_checkpoint(parent)
    settings = {**checkpoint.state["settings"], **_NOT_INHERITED, "out": str(out), "parent": str(checkpoint.path)}
    fresh, freeze = changes.get("fresh"), changes.get("freeze")
    begin = 0 if fresh else checkpoint.update
    if (last := changes.get("updates", begin)) < begin:  # before a schedule is measured by them
        raise InputError(f"updates must be at least the parent's update {begin}, which they include, got {last}")
    if freeze is not None:
        settings["schedule"] = OneTime(at=begin)
    elif fresh:  # the parent's may be an update that this run does not have
        settings["schedule"] = OneTime()
    if fresh:  # another task may have other tokens, the model keeps its own
        vocab_size = checkpoint.state["model"]["vocab_size"]
        settings["model_overrides"] = {"vocab_size": vocab_size, **settings["model_overrides"]}
    config = TrainConfig.from_dict({**settings, **changes})
    # Moments that this call names must not be over; inherited ones may be, and never come.
    moments: dict[str, Sequence[int]] = {
        "report_at": changes.get("report_at", ()),
        "save_at": [OneTime(at=share).first_update(config.updates) for share in changes.get("save_at", ())],
    }
    if freeze is not None and config.schedule is not None and config.freeze_update is not None:
        moments[setting_of_moment(config.schedule)] = [config.freeze_update]
    for name, updates in moments.items():
        if (first := min(updates, default=begin)) < begin:
            raise InputError(f"{name} must be at least the parent's update {begin}, got update {first}")
    return config


# --- the model of a run


def context_length(config: TrainConfig) -> int:
    """Return the context in tokens that a run trains on: its own, or the longest that its model takes."""
    return config.length or preset(config.model, **config.model_overrides).max_length


def model_config(config: TrainConfig, *, vocab_size: int) -> GPTConfig:
    """Return the model's shape: the preset, the task's `vocab_size`, the run's length, then the overrides.

    Raises InputError where the vocabulary or the positions are too few for the data.
    """
    rounded = -(-vocab_size // 64) * 64  # the output's matrix product runs at full speed only at such widths
    length = {} if config.length is None else {"max_length": config.length}
    shape = preset(config.model, **{"vocab_size": rounded, **length, **config.model_overrides})
    # Overrides may name both; too small an embedding would fail on CUDA by an assertion that stops the process.
    if shape.vocab_size < vocab_size:
        text = config.task != MQARTask.name
        remedy = "prepare the data by the model's tokenizer" if text else "lower mqar.vocabulary"
        raise InputError(f"vocab_size must be at least the data's {vocab_size}, got {shape.vocab_size}; {remedy}")
    if config.length is not None and shape.max_length < config.length:
        raise InputError(f"max_length must be at least the run's length {config.length}, got {shape.max_length}")
    return shape


# --- config.json

_ARITHMETIC = (
    "batch_size", "accumulation", "updates", "update_budget", "time_budget_seconds", "peak_lr", "min_lr_ratio",
    "warmup", "lr_start", "betas", "weight_decay", "clip", "seed", "sampler",
)  # fmt: skip
"""Settings that decide the numbers of an update: both arms of a comparison must share them."""


def run_config(
    config: TrainConfig, model: GPTConfig, task: Task, execution: Execution, *, parent: Any, processes: int
) -> dict[str, Any]:
    """Return the contents of config.json; `train` holds the settings that decide the numbers of an update."""
    settings = config.to_dict()
    train = {
        "length": task.length,
        **{name: settings[name] for name in _ARITHMETIC},
        "precision": execution.precision,
        # Compiled kernels add up in another order: losses differ in their last bits, and later in more.
        "compile": "layers" if execution.by_layer else execution.compile,
    }
    return {
        "schema": "saf.run/1",
        "model": asdict(model),
        "train": train,
        "data": task.description(),
        "parent": parent,
        "device": device_name(execution.device),
        "processes": processes,
        "settings": settings,
    }


def read_run_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a run; raise InputError for a file that no run wrote."""
    path = folder / "config.json"
    record = read_json(path)
    if not isinstance(record.get("settings"), dict) or "parent" not in record:
        raise InputError(f"{path} must hold a run's settings and parent; restore it, or train anew")
    return record


def recorded_config(folder: Path | str) -> TrainConfig:
    """Return the settings of the run in `folder`, to resume it; raise InputError when there is no run."""
    return TrainConfig.from_dict(read_run_config(Path(folder))["settings"])


_FREE_ON_RESUME = {
    "out", "data", "device", "activation_checkpointing", "graphs", "parallel",
    "eval_every", "save_every", "save_at", "keep", "log_every", "token_losses", "tensorboard", "quiet",
}  # fmt: skip
"""Settings that a resumed run may change: places, logs and checkpoints; the data are checked by their hash."""


def check_same_run(config: TrainConfig, recorded: dict[str, Any] | None, *, resume: bool) -> None:
    """Raise InputError unless a run begins anew, or is resumed with the recorded settings, but for paths and logging.

    `recorded` are the settings of the run that the folder holds; None where it holds none.
    """

    def fixed(settings: dict[str, Any]) -> dict[str, Any]:
        staying = {key: value for key, value in to_json(settings).items() if key not in _FREE_ON_RESUME}
        if staying["finetuning"]:
            staying["finetuning"] = {key: value for key, value in staying["finetuning"].items() if key not in PATHS}
        return staying

    if resume and recorded is None:
        raise InputError(f"{config.out} holds no run to resume; check the folder, or train a new run")
    if recorded is not None and not resume:
        raise InputError(f"{config.out} holds a run already; resume it, or choose another folder")
    if recorded is not None and (changes := mismatches(fixed(recorded), fixed(config.to_dict()))):
        raise InputError(
            f"cannot resume with other settings ({changes}). Leave them out, or start another run by --parent"
        )


def mismatches(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> str:
    """Return "NAME must be VALUE, got VALUE; ..." for all entries that differ; "" where none does."""
    return "; ".join(f"{name} must be {one!r}, got {other!r}" for name, one, other in differing(expected, actual))
