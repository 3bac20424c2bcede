"""The start of a training run: `start_run` checks the settings, opens or restores all parts, and writes config.json.

Whatever would fail at the first update or event is refused here, too little memory too. `FreezeCallback` shares the
checks of settings and schedules.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from saf.calibration import COLLECTIONS, QKGradient, read_sequences
from saf.checkpoint import Checkpoint, latest, open_checkpoint, restore_random_state
from saf.data.loader import INDEX_FILE
from saf.distributed import all_gather, all_ranks_or_raise, is_rank0, on_rank0
from saf.errors import CheckpointError, InputError, UnsupportedError
from saf.freeze_config import FreezeConfig, check_heads
from saf.heads import HeadLayout
from saf.machine import Execution, free_bytes
from saf.models import GPT, GPTConfig
from saf.models.adapter import adapter_for, longest_input
from saf.ops.frozen_heads import choose_backend
from saf.ops.live import pinned
from saf.records.files import locked, read_lines, remove_leftovers_, write_json, write_lines
from saf.records.run import inherit_events, keep_events_, read_events
from saf.records.table import byte_size
from saf.schedules import Freeze, Gradual, OneTime, Proposer, Schedule, setting_of_moment
from saf.scores import HOW_TO_MEASURE, score_name
from saf.surgery import pattern_parameters
from saf.tasks import TASKS, Task, TextTask
from saf.train.config import (
    TrainConfig,
    check_same_run,
    context_length,
    mismatches,
    model_config,
    read_run_config,
    run_config,
)
from saf.train.run import GRADIENT, Elapsed, Run, RunLog
from saf.train.step import (
    GRAPHED_SIZE,
    Parallel,
    Shards,
    Updater,
    build_optimizer,
    graphs_unsupported,
    micro_batches_per_rank,
    parallel_of,
    update_memory,
)


def start_run(config: TrainConfig, *, resume: bool, locks: ExitStack) -> Run:
    """Open the task, build or restore model and optimiser, write config.json and open the logs.

    A file next to the run's folder is locked as long as `locks` are open. Settings that cannot be used leave no folder.
    """
    elapsed, folder = Elapsed(), Path(config.out)
    with all_ranks_or_raise():
        _lock_(folder, locks)
        if (folder / INDEX_FILE).exists():  # with a run's files there, the data could not be prepared again
            raise InputError(f"out must be another folder than the data's, got {folder}")
        recorded = read_run_config(folder)["settings"] if (folder / "config.json").exists() else None
        check_same_run(config, recorded, resume=resume)
        execution = Execution.of(
            config.device,
            precision=config.precision,
            compile=config.compile,
            activation_checkpointing=config.activation_checkpointing,
            several_events=config.freeze is not None and not isinstance(config.schedule, OneTime),
        )
        task: Task = TASKS[config.task](config, length=context_length(config))
        shape = model_config(config, vocab_size=task.vocab_size)
        _check_settings(config, execution, task)
        parallel = parallel_of(config.parallel, parameters=shape.num_parameters, execution=execution)
        _check_memory(config, execution, shape, parallel)
        origin = _open_origin(config, folder, shape, task, resume=resume)
        model, optimizer = _build(config, execution, shape, origin, parallel)
        _check_length(config, task, model)
        proposer = _start_schedule(config, model, origin)
        gradient = _start_gradient(config, model, proposer, origin)
        _check_shards(config, parallel, model, gradient)
        graphed = _uses_graphs(config, execution, task, parallel, model)
        accumulation = micro_batches_per_rank(config.accumulation, parallel.processes, batch_size=config.batch_size)
    # All ranks have looked at the folder before the first one writes.
    record = run_config(config, shape, task, execution, parent=origin.parent, processes=parallel.processes)
    on_rank0(lambda: _write_folder_(folder, config, record, origin))
    # Outside of `all_ranks_or_raise`: ranks that train together wait for each other in it.
    updater = Updater(
        model=model,
        optimizer=optimizer,
        batches=task.training(origin.update, execution.device, first=parallel.rank, every=parallel.processes),
        execution=execution,
        accumulation=accumulation,
        parallel=parallel,
        clip=math.inf if config.clip is None else config.clip,
        graphed=graphed,
        gradient=gradient,
        done=origin.update,
    )
    run = Run(
        config=config,
        folder=folder,
        task=task,
        updater=updater,
        proposer=proposer,
        elapsed=elapsed,
        start=origin.start,
        parent_hash=origin.parent["hash"] if origin.parent else None,
    )
    _continue_(run, origin)
    if is_rank0():
        run.log = RunLog(run)
    if parallel.processes > 1:
        run.say(f"{parallel.processes} processes ({parallel.kind}) take {accumulation} micro-batches each")
    return run


def _lock_(folder: Path, locks: ExitStack) -> None:
    """Lock a run's folder on rank 0, or raise InputError while another process trains in it."""
    if is_rank0():
        # Next to the folder, not in it: a run that is refused leaves no folder.
        file = folder.absolute().with_name(f".{folder.absolute().name}.lock")
        locks.enter_context(locked(file, InputError(f"another process trains in {folder}; wait for it, then resume")))


# --- checks


def _check_settings(config: TrainConfig, execution: Execution, task: Task) -> None:
    """Raise before training for what would fail at the first event or update."""
    # Ranks that differ would train one model by several settings, or wait for each other forever.
    first, *others = all_gather({**config.to_dict(), "data's fingerprint": task.fingerprint})
    for rank, settings in enumerate(others, 1):
        if different := mismatches(first, settings):
            raise InputError(f"process {rank} must have the settings and data of the first one: {different}")
    freeze = config.freeze
    task.check(calibrates=freeze is not None, scores_outputs=freeze is not None and "outputs" in freeze.needs)
    if freeze is not None and config.schedule is not None:
        check_freeze(freeze, config.schedule, execution)
        freeze.check_calibration(sequences=config.calibration_sequences)
    with pinned(config.kernel, execution.device):  # raises where the kernel cannot run here
        pass


def _check_memory(config: TrainConfig, execution: Execution, shape: GPTConfig, parallel: Parallel) -> None:
    """Raise InputError where 0.75 of the estimate is more than the device has: no measured peak is below that share."""
    # Sequences of other tasks are mostly far shorter than the context: only the weights are certain.
    tokens = config.batch_size * context_length(config) if config.task == TextTask.name else 0
    shards = parallel.processes if parallel.kind == Shards.kind else 1
    needed = update_memory(shape, tokens, recomputes=config.activation_checkpointing, shards=shards)
    device, cuda = execution.device, execution.device.type == "cuda"
    # A GPU's free memory would leave out what an earlier run in this process is about to free.
    available = torch.cuda.get_device_properties(device).total_memory if cuda else free_bytes(device)
    if available is not None and 0.75 * needed.total > available:
        raise InputError(
            f"training needs about {byte_size(needed.total)} of memory ({byte_size(needed.state)} for weights and "
            f"moments), got {byte_size(available)}; lower batch_size, length or the model's size"
        )


def check_freeze(freeze: FreezeConfig, schedule: Schedule, execution: Execution) -> None:
    """Raise InputError or UnsupportedError now, not at the freezing point, for settings that cannot work there."""
    if not isinstance(schedule, OneTime | Gradual):
        names = ("heads", "match", "match_heads", "max_per_layer", "below")
        if wrong := [name for name in names if getattr(freeze, name) is not None]:
            reason = f"left out with a {schedule.name} schedule, which selects heads anew; give only or exclude"
            raise InputError(f"{' and '.join(wrong)} must be {reason}")
    if freeze.whole_groups and not isinstance(schedule, OneTime):
        raise InputError(f"whole_groups needs a one_time schedule, got {schedule.name}, which may split a KV group")
    # Weights are float32 in either case: attention computes in the precision of autocast.
    dtype = torch.bfloat16 if execution.precision == "bf16" else torch.float32
    if freeze.operation == Freeze.kind:
        choose_backend(freeze.backend, device=execution.device, dtypes=[dtype], trainable=freeze.trainable)
    if unknown := sorted(freeze.needs - HOW_TO_MEASURE.keys() - COLLECTIONS.keys()):
        known = ", ".join(sorted(HOW_TO_MEASURE))
        raise InputError(f"score {score_name(freeze.score)!r} must need some of {known}; got {', '.join(unknown)}")


# --- the checkpoint that training goes on from


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a run begins at: its own, its parent's, or none."""

    checkpoint: Checkpoint | None = None
    resumed: bool = False
    """Whether the checkpoint is the run's own."""
    state: dict[str, Any] = field(default_factory=dict)
    """The checkpoint's state.json; empty where the run takes only its weights and heads."""
    parent: dict[str, Any] | None = None
    """The parent's entry of config.json."""

    @property
    def update(self) -> int:
        return int(self.state.get("update", 0))

    @property
    def start(self) -> int:
        """The update of the parent's checkpoint; 0 without a parent."""
        return self.parent["update"] if self.parent else 0


def _open_origin(config: TrainConfig, folder: Path, shape: GPTConfig, task: Task, *, resume: bool) -> Origin:
    own = on_rank0(lambda: latest(folder / "checkpoints")) if resume else None
    parent = read_run_config(folder)["parent"] if own is not None else None
    if (path := own or config.parent) is None:
        return Origin()
    checkpoint = open_checkpoint(path)
    # The tables of rotary positions follow from the length, so training may go on with longer or shorter sequences.
    same = checkpoint.shape if shape.position == "learned" else replace(checkpoint.shape, max_length=shape.max_length)
    if different := mismatches(shape.to_dict(), same.to_dict()):
        raise CheckpointError(f"{checkpoint.path} must hold the settings' model and vocabulary: {different}")
    if own is None:
        parent = _parent_entry(config, checkpoint)
        if config.fresh:
            # Ids of another tokenizer mean other words, which nothing else would notice.
            before, now = (state.get("tokenizer") for state in (checkpoint.state, task.state(0)))
            if before and now and before != now:
                expected = f"the task's tokenizer ({now[:16]}), got {before[:16]}"
                raise CheckpointError(f"{checkpoint.path} must have {expected}")
            return Origin(checkpoint, parent=parent)
    task.check_continues(checkpoint.state, checkpoint.path)
    return Origin(checkpoint, own is not None, checkpoint.state, parent)


def _parent_entry(config: TrainConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the parent's entry of config.json; raise InputError when no update is left to do."""
    entry = {"path": config.parent, "hash": checkpoint.hash, "update": checkpoint.update}
    if config.fresh:
        return {**entry, "update": 0, "weights_of_update": checkpoint.update}
    done, budget = checkpoint.update, config.update_budget
    # Heads may be frozen at the very end of a parent, with no update after it.
    over = done >= config.updates if config.freeze is None else done > config.updates
    if over and budget is None and config.time_budget_seconds is None:
        raise InputError(f"updates must be above the {done} that the parent has done, got {config.updates}")
    # `saf freeze` writes the record of its event into the folder of its new checkpoint.
    return {**entry, "frozen_from": checkpoint.parent} if read_events(checkpoint.path) else entry


def _continue_(run: Run, origin: Origin) -> None:
    """Take over random state and seconds from the origin, and the place of the run's own newest event."""
    if origin.state:
        restore_random_state(origin.state["random"])
        run.elapsed.load_state_dict(origin.state["elapsed"], branch=not origin.resumed)
        run.recent.extend(origin.state["recent"])  # a parent's, too: the best guess of the first update's seconds
    # Of this run alone: rewarming and timing begin after its newest event, not after a parent's.
    own = on_rank0(lambda: [event.update or 0 for event in run.events if "inherited" not in event.values])
    run.last_change = max(own, default=None)


# --- model, optimiser, schedule and gradient average at the origin


def _build(
    config: TrainConfig, execution: Execution, shape: GPTConfig, origin: Origin, parallel: Parallel
) -> tuple[GPT, AdamW]:
    """Return model and optimiser on the device: the checkpoint's, or drawn from the run's seed."""
    if checkpoint := origin.checkpoint:
        # "auto" chose a backend at the event; the checkpoint names it, so that resuming is exact.
        named = config.freeze.backend if config.freeze and config.freeze.backend != "auto" else None
        model = checkpoint.model(execution.device, backend=named, shape=shape)
    else:
        model = GPT.skip_init(shape)
        # Drawn on the CPU, so that a seed means the same weights on every device.
        model.reset_parameters(torch.Generator().manual_seed(config.seed))
        model.to(execution.device)
    for site in adapter_for(model).sites():
        site.pin(config.kernel)
    if checkpoint and origin.state:
        # Whole moments take 8 bytes a parameter, which fsdp is for not having on every device.
        return model, checkpoint.optimizer(model, device="cpu" if parallel.kind == Shards.kind else None)
    return model, build_optimizer(model, betas=config.betas, weight_decay=config.weight_decay)


def _start_schedule(config: TrainConfig, model: GPT, origin: Origin) -> Proposer | None:
    """Return the schedule's state machine, or None for a run that freezes nothing.

    Raises InputError or SelectionError where its events cannot choose their heads, and InputError where the first comes
    after the run's end.
    """
    if config.freeze is None or config.schedule is None:
        return None
    layouts = [site.layout for site in adapter_for(model).sites()]
    state = origin.state.get("schedule") if origin.resumed else None
    proposer = start_proposer(config.freeze, config.schedule, layouts, updates=config.updates, state=state)
    if not origin.resumed:
        check_heads(config.freeze, layouts, allow_empty=config.freeze.asks_for_none)
    first, end = config.freeze_update, origin.start + (config.update_budget or math.inf)
    if first is not None and first >= end:
        name = setting_of_moment(config.schedule)
        raise InputError(f"{name} must be before update {end}, where update_budget ends, got update {first}")
    return proposer


def start_proposer(
    freeze: FreezeConfig, schedule: Schedule, layouts: Sequence[HeadLayout], *, updates: int, state: Any
) -> Proposer:
    """Return the schedule's state machine, in `state` where training goes on."""
    heads = sum(layout.num_heads for layout in layouts)
    limit = freeze.requested(heads)
    if state is None:
        return schedule.start(updates=updates, heads=heads, limit=min(limit, sum(each.num_live for each in layouts)))
    # A run that is resumed froze some of the live heads that it began with; the state has their number.
    proposer = schedule.start(updates=updates, heads=heads, limit=limit)
    proposer.load_state_dict(state)
    return proposer


def needs_gradient(config: TrainConfig, proposer: Proposer | None) -> bool:
    """Return whether an event that may still come, or a later arm, reads the average of Q/K gradients."""
    pending = proposer is not None and not proposer.finished
    return config.track_gradients or (pending and config.freeze is not None and "gradient" in config.freeze.needs)


def _start_gradient(
    config: TrainConfig, model: nn.Module, proposer: Proposer | None, origin: Origin
) -> QKGradient | None:
    """Return the average of Q/K gradients that a run updates, or None.

    Raises InputError when heads are to be frozen right away by gradients that no run averaged.
    """
    if not needs_gradient(config, proposer):
        return None
    if (recorded := recorded_gradient(model, origin.state)) is not None:
        return recorded
    moment, reads = config.freeze_update, config.freeze is not None and "gradient" in config.freeze.needs
    if reads and config.schedule is not None and moment is not None and moment <= origin.update:
        raise InputError(
            f"a score needs an average of Q/K gradients before update {origin.update}: train the parent with "
            f"track_gradients, or freeze later ({setting_of_moment(config.schedule)} above {origin.update})"
        )
    return QKGradient(model)


def recorded_gradient(model: nn.Module, state: Mapping[str, Any]) -> QKGradient | None:
    """Return the Q/K-gradient average in a checkpoint's `state`, or None."""
    if state.get(GRADIENT) is None:
        return None
    gradient = QKGradient(model)
    gradient.load_state_dict(state[GRADIENT])
    return gradient


# --- what this model allows


def _check_length(config: TrainConfig, task: Task, model: GPT) -> None:
    """Raise InputError where patterns of the parent's frozen heads end too early, or cannot share a layer with others.

    The patterns of a layer have one length.
    """
    limit = longest_input(model)
    if limit is not None and task.longest > limit:
        raise InputError(f"length must be at most {limit}, which the parent's frozen heads take, got {task.longest}")
    freeze = config.freeze
    if freeze is None or freeze.operation != Freeze.kind or freeze.asks_for_none:
        return
    named, sites = freeze.heads or freeze.only, adapter_for(model).sites()
    live = {(layer, head) for layer, site in enumerate(sites) for head in site.layout.live}
    choice = (live if named is None else live & set(named)) - set(freeze.exclude)
    shared = {layer: frozen.max_length for layer, _ in sorted(choice) if (frozen := sites[layer].frozen) is not None}
    length = read_sequences(task.calibration()).length if shared else 0
    for layer, frozen_length in shared.items():
        if frozen_length != length:
            more = f"to freeze more heads of layer {layer}, which has frozen ones"
            raise InputError(f"length must be {frozen_length} {more}, got {length}; or exclude the layer's heads")


def _check_shards(config: TrainConfig, parallel: Parallel, model: GPT, gradient: QKGradient | None) -> None:
    if parallel.kind == Shards.kind and (gradient is not None or _trains_patterns(config, model)):
        unsupported = "fsdp takes neither trained patterns nor averages of Q/K gradients"
        raise UnsupportedError(f"{unsupported}; take parallel='ddp'")


def _uses_graphs(config: TrainConfig, execution: Execution, task: Task, parallel: Parallel, model: GPT) -> bool:
    """Return whether micro-batches are replayed as CUDA graphs; raise UnsupportedError where they must but cannot."""
    trained, lengths = _trains_patterns(config, model), config.finetuning is not None
    unsupported = graphs_unsupported(execution, parallel.kind, trained_patterns=trained, many_lengths=lengths)
    if config.graphs == "on" and unsupported is not None:
        raise UnsupportedError(unsupported)
    if config.graphs == "auto":
        # Not for many lengths, which are padded to few: that made the ordinary arm of BoolQ 3% slower.
        size = config.batch_size * task.length * model.config.hidden_size
        return unsupported is None and not lengths and size <= GRAPHED_SIZE
    return config.graphs == "on"


def _trains_patterns(config: TrainConfig, model: GPT) -> bool:
    """Return whether the run trains patterns, of its own events or of its parent's."""
    return (config.freeze is not None and config.freeze.trainable) or bool(pattern_parameters(model))


# --- the folder


def _write_folder_(folder: Path, config: TrainConfig, record: dict[str, Any], origin: Origin) -> None:
    """Write config.json, cut logs back to the origin, and take over the event of a parent that `saf freeze` wrote."""
    after_event = origin.checkpoint is not None and origin.resumed and origin.checkpoint.path.name.endswith("-frozen")

    def stays(line: dict[str, Any]) -> bool:
        """Return whether a line is of the time before the origin; the run writes all later ones again."""
        if "inherited" in line:
            return True  # `saf freeze` did this event, and no run repeats it
        update = line.get("update") or 0
        if update != origin.update:
            return update < origin.update
        # A checkpoint is the state before the events of its update, or by its name the state after them.
        of_event = "kind" in line or line.get("when", "periodic") != "periodic"  # the event, or a loss around it
        return after_event or not of_event

    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    for each in (folder, folder / "checkpoints"):
        remove_leftovers_(each)
    write_json(folder / "config.json", record)
    for path in (folder / "metrics.jsonl", folder / "evaluations.jsonl"):
        if path.exists():
            write_lines(path, list(filter(stays, read_lines(path))))
    keep_events_(folder, lambda event: stays(event.values))
    (folder / "result.json").unlink(missing_ok=True)
    if not origin.resumed and config.freeze is None and origin.parent and "frozen_from" in origin.parent:
        inherit_events(Path(origin.parent["path"]), folder)
