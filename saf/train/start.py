"""`start_run` opens a run: it checks the settings, restores or draws model and optimiser, and writes config.json."""

import math
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import AdamW

from saf.calibration import free_bytes
from saf.checkpoint import Checkpoint, latest, open_checkpoint, restore_random_state
from saf.data.loader import INDEX_FILE
from saf.distributed import all_gather, all_ranks_or_raise, is_rank0, on_rank0
from saf.errors import CheckpointError, InputError, UnsupportedError
from saf.freeze_config import check_heads
from saf.machine import Execution, device_name, rated_flops
from saf.models import GPT, GPTConfig
from saf.models.adapter import adapter_for
from saf.ops.live import pinned
from saf.records.files import locked, read_lines, remove_leftovers_, write_json, write_lines
from saf.records.run import inherit_events, keep_events_, read_events
from saf.records.table import byte_size
from saf.schedules import OneTime, Proposer, setting_of_moment
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
from saf.train.events import check_freeze, start_gradient, start_proposer
from saf.train.parallel import Parallel, Shards, micro_batches_of_one, parallel_of
from saf.train.run import Elapsed, Run, RunLog
from saf.train.step import GRAPHED_SIZE, Updater, build_optimizer, graphs_unsupported, trains_patterns, update_memory

CERTAIN_SHARE = 0.6
"""Share of the estimated memory that updates certainly take: peaks on an H200 were 0.9 to 1.03 of the estimate, and
0.75 with half of the heads pruned."""


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a run begins at: its own, its parent's, or none."""

    checkpoint: Checkpoint | None
    resumed: bool
    """Whether the checkpoint is the run's own."""
    state: dict[str, Any]
    """The checkpoint's state.json; empty where the run takes only its weights and heads."""
    parent: dict[str, Any] | None
    """The parent's entry of config.json."""

    @property
    def update(self) -> int:
        return int(self.state.get("update", 0))


def start_run(config: TrainConfig, *, resume: bool, locks: ExitStack) -> Run:
    """Open the task, build or restore model and optimiser, write config.json and open the logs.

    A file beside the run's folder is locked as long as `locks` are open; settings that cannot be used leave no folder.

    Raises:
        InputError: A run is there already (without `resume`), or has other settings.
        CheckpointError: The checkpoint is damaged, or is of other data or another model.
        DataError: The data cannot be used, or are too few.
        UnsupportedError: The backend or kernel of the settings cannot run here.
    """
    elapsed, folder = Elapsed(), Path(config.out)
    with all_ranks_or_raise():
        if is_rank0():
            busy = InputError(f"another process trains in {folder}; wait for it, then resume")
            absolute = folder.absolute()
            locks.enter_context(locked(absolute.with_name(f".{absolute.name}.lock"), busy))
        _check_folder(folder, config, resume=resume)
        execution = Execution.of(
            config.device,
            precision=config.precision,
            compile=config.compile,
            activation_checkpointing=config.activation_checkpointing,
            several_events=bool(config.freeze) and not isinstance(config.schedule, OneTime),
        )
        task: Task = TASKS[config.task](config, length=context_length(config))
        shape = model_config(config, vocab_size=task.vocab_size)
        _check_same_settings({**config.to_dict(), "data's fingerprint": task.fingerprint})
        _check_early(config, execution, task)
        parallel = parallel_of(config.parallel, parameters=shape.num_parameters, execution=execution)
        _check_memory(config, execution, shape, parallel)
        origin = _origin(config, folder, shape, task, resume=resume)
        start = origin.parent["update"] if origin.parent else 0
        _check_budget(config, start)
        parts, proposer = _restore(config, execution, task, shape, parallel, origin)
    # All ranks have looked at the folder before the first one writes.
    shared = {"model": shape, "task": task, "execution": execution, "parent": origin.parent}
    record = run_config(config, **shared, processes=parallel.processes)
    on_rank0(lambda: _write_start_(folder, config, record, origin))
    if origin.state:
        elapsed.go_on_(origin.state["elapsed"], branch=not origin.resumed)
    run = Run(
        config=config,
        folder=folder,
        execution=execution,
        task=task,
        model=parts["model"],
        updater=Updater(**parts),  # ranks that train together meet in it
        proposer=proposer,
        elapsed=elapsed,
        start=start,
        parent_hash=origin.parent["hash"] if origin.parent else None,
        # A parent's, too: the best guess of the first update's seconds.
        recent=deque(origin.state.get("recent", ()), maxlen=8),
    )
    own = on_rank0(lambda: [event.update or 0 for event in run.events if "inherited" not in event.values])
    run.heads_changed = max(own, default=None)
    if is_rank0():
        run.log = _open_log(run)
    if parallel.processes > 1:
        run.say(f"{parallel.processes} processes ({parallel.kind}) take {parts['accumulation']} micro-batches each")
    return run


# --- checks before anything is written


def _check_folder(folder: Path, config: TrainConfig, *, resume: bool) -> None:
    """Raise InputError unless the folder is new, or holds the run to resume with the same settings."""
    if (folder / INDEX_FILE).exists():
        raise InputError(f"out must be another folder than the data's, got {folder}")
    holds_run = (folder / "config.json").exists()
    if resume and not holds_run:
        raise InputError(f"{folder} holds no run to resume; check the folder, or train a new run")
    if holds_run and not resume:
        raise InputError(f"{folder} holds a run already; resume it, or choose another folder")
    if resume:
        check_same_run(config, read_run_config(folder)["settings"])


def _check_same_settings(settings: dict[str, Any]) -> None:
    """Raise InputError unless every rank has the settings of the first one."""
    first, *others = all_gather(settings)
    for rank, own in enumerate(others, 1):
        if differing := "; ".join(mismatches(first, own)):
            raise InputError(f"process {rank} must have the settings and data of the first one: {differing}")


def _check_early(config: TrainConfig, execution: Execution, task: Task) -> None:
    """Raise before training for what would fail at the first event or update."""
    freeze = config.freeze
    task.check(calibrates=freeze is not None, scores_outputs=freeze is not None and "outputs" in freeze.needs)
    check_freeze(config, execution)
    if freeze is not None:
        freeze.check_calibration(sequences=config.calibration_sequences)
    with pinned(config.kernel, execution.device):  # raises where the kernel cannot run here
        pass


def _check_memory(config: TrainConfig, execution: Execution, shape: GPTConfig, parallel: Parallel) -> None:
    """Raise InputError for updates that certainly take more memory than the device has."""
    # Sequences of other tasks have many lengths, mostly far below the context: only the weights are certain.
    tokens = config.batch_size * context_length(config) if config.task == TextTask.name else 0
    shards = parallel.processes if parallel.kind == Shards.kind else 1
    needed = update_memory(shape, tokens, recomputes=config.activation_checkpointing, shards=shards)
    device, cuda = execution.device, execution.device.type == "cuda"
    # A GPU's free memory would leave out what an earlier run in this process is about to free.
    available = torch.cuda.get_device_properties(device).total_memory if cuda else free_bytes(device)
    if available is not None and CERTAIN_SHARE * needed.total > available:
        raise InputError(
            f"training needs about {byte_size(needed.total)} of memory ({byte_size(needed.state)} for weights and "
            f"moments), got {byte_size(available)}; lower batch_size, length or the model's size"
        )


def _check_budget(config: TrainConfig, start: int) -> None:
    """Raise InputError for a first event that comes when `update_budget` is over."""
    first, budget = config.freeze_update, config.update_budget
    if config.freeze and config.schedule and budget and first is not None and first >= start + budget:
        name, end = setting_of_moment(config.schedule), start + budget
        raise InputError(f"{name} must be before update {end}, where update_budget ends, got update {first}")


# --- the checkpoint to begin at


def _origin(config: TrainConfig, folder: Path, shape: GPTConfig, task: Task, *, resume: bool) -> Origin:
    """Open the checkpoint that training goes on from, if there is one, and take over its random state."""
    own = on_rank0(lambda: latest(folder / "checkpoints")) if resume else None
    parent = read_run_config(folder)["parent"] if own is not None else None
    if (path := own or config.parent) is None:
        return Origin(None, False, {}, None)
    checkpoint = open_checkpoint(path)
    if differing := "; ".join(mismatches(shape.to_dict(), checkpoint.state["model"])):
        raise CheckpointError(f"{checkpoint.path} must hold the settings' model and vocabulary: {differing}")
    if own is None:
        parent = _parent_entry(config, checkpoint)
        if config.fresh:
            before, now = (state.get("tokenizer") for state in (checkpoint.state, task.state(0)))
            if before and now and before != now:
                expected = f"the task's tokenizer ({now[:16]}), got {before[:16]}"
                raise CheckpointError(f"{checkpoint.path} must have {expected}")
            return Origin(checkpoint, False, {}, parent)
    task.check_continues(checkpoint.state, checkpoint.path)
    restore_random_state(checkpoint.state["random"])
    return Origin(checkpoint, own is not None, checkpoint.state, parent)


def _parent_entry(config: TrainConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the parent's entry of config.json; raise InputError when it left nothing to do."""
    entry = {"path": config.parent, "hash": checkpoint.hash, "update": checkpoint.update}
    if config.fresh:
        return {**entry, "update": 0, "weights_of_update": checkpoint.update}
    done, budget = checkpoint.update, config.update_budget
    over = done >= config.updates if config.freeze is None else done > config.updates
    if over and budget is None and config.time_budget_seconds is None:
        raise InputError(f"updates must be above the {done} that the parent has done, got {config.updates}")
    # `saf freeze` leaves the record of its event beside the checkpoint that it made from another one.
    return {**entry, "frozen_from": checkpoint.parent} if read_events(checkpoint.path) else entry


def _restore(
    config: TrainConfig, execution: Execution, task: Task, shape: GPTConfig, parallel: Parallel, origin: Origin
) -> tuple[dict[str, Any], Proposer | None]:
    """Return the fields of the updater at the run's origin, and the schedule's state machine."""
    model, optimizer = _build(config, shape, execution, origin, moments_on_cpu=parallel.kind == Shards.kind)
    layouts = [site.layout for site in adapter_for(model).sites()]
    own_schedule = origin.state.get("schedule") if origin.resumed else None
    proposer = start_proposer(config, layouts, updates=config.updates, state=own_schedule)
    if config.freeze and proposer and not origin.resumed:
        check_heads(config.freeze, layouts, allow_empty=config.freeze.asks_for_none)
    gradient = start_gradient(model, config, proposer, state=origin.state, update=origin.update)
    trained = (config.freeze is not None and config.freeze.trainable) or trains_patterns(model)
    if parallel.kind == Shards.kind and (gradient is not None or trained):
        raise UnsupportedError("fsdp takes neither trained patterns nor averages of Q/K gradients; take parallel='ddp'")
    many, tokens = config.finetuning is not None, config.batch_size * task.length
    no_graphs = graphs_unsupported(execution, parallel.kind, trained_patterns=trained, many_lengths=many)
    if config.graphs == "on" and no_graphs is not None:
        raise UnsupportedError(no_graphs)
    small = not many and tokens * shape.hidden_size <= GRAPHED_SIZE
    return {
        "model": model,
        "optimizer": optimizer,
        "batches": task.training(origin.update, execution.device, first=parallel.rank, every=parallel.processes),
        "execution": execution,
        "accumulation": micro_batches_of_one(config.accumulation, parallel.processes, batch_size=config.batch_size),
        "parallel": parallel,
        "clip": math.inf if config.clip is None else config.clip,
        "graphed": config.graphs == "on" or (config.graphs == "auto" and small and no_graphs is None),
        "gradient": gradient,
        "done": origin.update,
    }, proposer


def _build(
    config: TrainConfig, shape: GPTConfig, execution: Execution, origin: Origin, *, moments_on_cpu: bool
) -> tuple[GPT, AdamW]:
    """Return model and optimiser on the device: the checkpoint's, or drawn from the run's seed."""
    if checkpoint := origin.checkpoint:
        # "auto" chose at the event; its choice goes on, so that resuming is exact.
        named = config.freeze.backend if config.freeze and config.freeze.backend != "auto" else None
        model = checkpoint.model(execution.device, backend=named)
    else:
        model = GPT.skip_init(shape)
        model.reset_parameters(torch.Generator().manual_seed(config.seed))
        model.to(execution.device)
    for site in adapter_for(model).sites():
        site.pin(config.kernel)
    if checkpoint and origin.state:
        return model, checkpoint.optimizer(model, device="cpu" if moments_on_cpu else None)
    return model, build_optimizer(model, betas=config.betas, weight_decay=config.weight_decay)


# --- the folder


def _write_start_(folder: Path, config: TrainConfig, record: dict[str, Any], origin: Origin) -> None:
    """Write config.json, cut the logs back to the origin, and take over the event of a parent that `saf freeze` made.

    The events of the origin's update come again, unless it is the state after them.
    """
    update = origin.update
    after_event = origin.checkpoint is not None and origin.resumed and origin.checkpoint.path.name.endswith("-frozen")

    def stays(line: dict[str, Any]) -> bool:
        number = line.get("update") or 0
        of_event = line.get("when", "periodic") != "periodic" or "kind" in line  # a measurement around it, or itself
        return "inherited" in line or number < update or (number == update and (after_event or not of_event))

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


def _open_log(run: Run) -> RunLog:
    """Open the logs of a run; utilisation is of all its ranks' devices."""
    config, tokens, execution = run.config, run.task.targets_per_update, run.execution
    total = config.updates if config.update_budget is None else run.start + config.update_budget
    rated = rated_flops(device_name(execution.device), execution.precision)
    flops = tokens * run.model.config.flops_per_token(run.task.length)
    peak = flops / (rated * run.updater.parallel.processes) if rated else None
    return RunLog(run.folder, config, done=run.update, total=total, tokens=tokens, peak=peak)
