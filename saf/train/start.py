"""How a run begins, new, from a parent's checkpoint, or resumed, and what its folder then holds."""

import math
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.optim import AdamW

from saf.calibration import free_bytes, readable
from saf.checkpoint import Checkpoint, newest, open_checkpoint, restore_random_state
from saf.data.loader import INDEX_FILE
from saf.distributed import all_gather, all_ranks_or_raise, in_group, is_rank0, on_rank0, rank_and_size
from saf.errors import CheckpointError, InputError
from saf.freeze_config import check_heads
from saf.machine import Execution, rated_flops
from saf.models import GPT, GPTConfig
from saf.models.adapter import adapter_for
from saf.ops.live import pinned
from saf.records.events import EventRecord, inherit_events, keep_events_, read_events
from saf.records.files import read_lines, remove_unfinished_, write_json, write_lines
from saf.records.folders import lock_folder, remove_leftovers_
from saf.schedules import setting_of_moment
from saf.tasks import TASKS, Task
from saf.train.config import TrainConfig, check_same_run, context_length, model_config, read_run_config, run_config
from saf.train.events import check_freeze, start_gradient, start_proposer
from saf.train.logs import Elapsed, Observer, Progress
from saf.train.parallel import Parallel, Shards, micro_batches_of_one, parallel_of
from saf.train.run import Run
from saf.train.step import (
    FEW,
    Updater,
    build_optimizer,
    check_graphs,
    graphs_unsupported,
    trains_patterns,
    update_bytes_on_cpu,
)


def start_run(config: TrainConfig, *, resume: bool) -> Run:
    """Open the task, build or restore model and optimiser, write config.json and open the logs.

    Raises:
        InputError: A run is there already (without `resume`), or has other settings.
        CheckpointError: The checkpoint is damaged, or is of other data or another model.
        DataError: The data cannot be used, or are too few.
        UnsupportedError: The backend or kernel asked for cannot run here.
    """
    elapsed, folder = Elapsed(), Path(config.out)
    with all_ranks_or_raise():  # all have looked before the first one writes
        micro_batches = micro_batches_of_one(config.accumulation, rank_and_size()[1], batch_size=config.batch_size)
        lock = _lock_run(folder, config, resume=resume)
        execution = _execution(config)
        task: Task = TASKS[config.task](config, length=context_length(config))
        shape = model_config(config, vocab_size=task.vocab_size)
        _check_same_settings({**config.to_dict(), "data's fingerprint": task.fingerprint})
    with all_ranks_or_raise():
        parallel, reason = _checked_parallel(config, execution, task, shape)
        own = on_rank0(lambda: newest(folder / "checkpoints")) if resume else None
        fresh = config.fresh and own is None
        checkpoint = _open(own or config.parent, shape, task, fresh=fresh)
        parent = _parent_record(config, folder, checkpoint, resumed=own is not None)
        state, update = (checkpoint.state, checkpoint.update) if checkpoint and not fresh else ({}, 0)
        if state:
            (elapsed.resume_ if own else elapsed.branch_)(state["elapsed"])
        model, optimizer = _build(
            config, shape, execution, checkpoint, fresh=fresh, sharded=parallel.kind == Shards.kind
        )
        layouts = [site.layout for site in adapter_for(model).sites()]
        proposer = start_proposer(config, layouts, updates=config.updates, state=state.get("schedule") if own else None)
        if config.freeze and proposer and own is None:
            check_heads(config.freeze, layouts)
        gradient = start_gradient(model, config, proposer, state=state, update=update)
        graphed = _graphed(config, execution, parallel, model, tokens=config.batch_size * task.length)
    # Settings that cannot be used leave no folder behind.
    with all_ranks_or_raise():
        if is_rank0():
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            lock = lock or _lock_new(folder)
            shared = {"model": shape, "task": task, "execution": execution, "parent": parent}
            record = run_config(config, **shared, processes=parallel.processes)
            _write_start_(folder, config, record, update=update, own=own)
    run = Run(
        config=config,
        folder=folder,
        lock=lock,
        execution=execution,
        task=task,
        model=model,
        updater=Updater(
            model=model,
            optimizer=optimizer,
            batches=task.training(update, execution.device, first=parallel.rank, every=parallel.processes),
            execution=execution,
            accumulation=micro_batches,
            parallel=parallel,
            clip=math.inf if config.clip is None else config.clip,
            graphed=graphed,
            gradient=gradient,
            done=update,
        ),
        proposer=proposer,
        elapsed=elapsed,
        observer=None,
        start=parent["update"] if parent else 0,
        parent_hash=parent["hash"] if parent else None,
        heads_changed=on_rank0(lambda: max((event.update or 0 for event in _own_events(config)), default=None)),
        # A parent's, too: the best guess of what the first update will take.
        recent=deque(state.get("recent", ()), maxlen=8),
    )
    if is_rank0():
        run.observer = _observer(run)
    if checkpoint and parallel.kind == Shards.kind:
        engine = run.updater.engine
        checkpoint.fill_(engine.module, None if fresh else engine.optimizer)
    for line in _choices(run, reason):
        run.say(line)
    return run


# --- checks


def _execution(config: TrainConfig) -> Execution:
    return Execution.of(
        config.device,
        precision=config.precision,
        compile=config.compile,
        activation_checkpointing=config.activation_checkpointing,
        several_events=bool(config.freeze and config.schedule and config.schedule.several_events),
    )


def _checked_parallel(config: TrainConfig, execution: Execution, task: Task, shape: GPTConfig) -> tuple[Parallel, str]:
    """Return how ranks train together, and the reason; raise now for what would fail in the middle of training."""
    freeze = config.freeze
    trained = freeze is not None and freeze.trainable
    size = sum(parameter.numel() for parameter in GPT.undrawn(shape, "meta").parameters()) if in_group() else 0
    parallel, reason = parallel_of(config.parallel, parameters=size, execution=execution, trained_patterns=trained)
    task.check(calibrates=freeze is not None, scores_outputs=freeze is not None and "outputs" in freeze.needs)
    check_freeze(config, execution)
    if freeze is not None:
        freeze.check_calibration(sequences=config.calibration_sequences, length=task.length)
    if config.graphs == "on":
        many = config.finetuning is not None
        check_graphs(execution, parallel.kind, trained_patterns=trained, many_lengths=many)
    with pinned(config.kernel, execution.device):  # raises where the kernel cannot run here
        pass
    _check_memory(config, shape, execution)
    return parallel, reason


def _check_memory(config: TrainConfig, shape: GPTConfig, execution: Execution) -> None:
    """Raise InputError where training on a CPU takes more memory than is free: the system would end the process."""
    free = free_bytes(execution.device)
    if execution.device.type != "cpu" or free is None:
        return
    tokens = config.batch_size * context_length(config)
    state, activations = update_bytes_on_cpu(shape, execution, tokens)
    if state + activations > free:
        raise InputError(
            f"training needs about {readable(state + activations)} of memory ({readable(state)} for weights and "
            f"moments, {readable(activations)} for {tokens:,} tokens), got {readable(free)} free; take a smaller "
            "model, batch_size or length"
        )


def _check_same_settings(settings: dict[str, Any]) -> None:
    """Raise InputError unless every rank has the settings of the first one."""
    first, *others = all_gather(settings)
    for rank, own in enumerate(others, 1):
        if differing := [name for name in first if own.get(name) != first[name]]:
            words = ", ".join(f"{name} {own.get(name)!r} (the first one {first[name]!r})" for name in differing)
            raise InputError(f"all processes must have the same settings and data; process {rank} has {words}")


def _graphed(config: TrainConfig, execution: Execution, parallel: Parallel, model: GPT, *, tokens: int) -> bool:
    """Return whether the run replays its micro-batches, each of so many tokens, as CUDA graphs."""
    if config.graphs != "auto":
        return config.graphs == "on"
    trained = (config.freeze is not None and config.freeze.trainable) or trains_patterns(model)
    many = config.finetuning is not None
    reason = graphs_unsupported(execution, parallel.kind, trained_patterns=trained, many_lengths=many)
    return reason is None and not many and tokens * model.config.hidden_size <= FEW


# --- where it begins


def _open(path: str | Path | None, shape: GPTConfig, task: Task, *, fresh: bool) -> Checkpoint | None:
    """Open the checkpoint that training goes on from, if there is one, and take over its random state.

    A `fresh` run takes no more than weights and heads of it, and its tokenizer must be the task's, if that has one.
    """
    if not path:
        return None
    checkpoint = open_checkpoint(path)
    held, asked = checkpoint.state["model"], shape.to_dict()
    if differing := [name for name in asked if held.get(name) != asked[name]]:
        words = ", ".join(f"{name} {held.get(name)} (the settings ask for {asked[name]})" for name in differing)
        advice = ". Give the data that it was trained on" if "vocab_size" in differing else ""
        raise CheckpointError(f"{checkpoint.path} holds a model with {words}{advice}")
    if not fresh:
        task.check_continues(checkpoint.state, checkpoint.path)
        restore_random_state(checkpoint.state["random"])
        return checkpoint
    before, now = (state.get("tokenizer") for state in (checkpoint.state, task.state(0)))
    if before and now and before != now:
        raise CheckpointError(f"{checkpoint.path} must have the task's tokenizer ({now[:16]}), got {before[:16]}")
    return checkpoint


def _parent_record(
    config: TrainConfig, folder: Path, checkpoint: Checkpoint | None, *, resumed: bool
) -> dict[str, Any] | None:
    """Return the parent's entry of config.json; raise InputError when it left nothing to do."""
    if not config.parent:
        return None
    if resumed:
        return read_run_config(folder)["parent"]
    assert checkpoint is not None
    if config.fresh:
        return {"path": config.parent, "hash": checkpoint.hash, "update": 0, "weights_of_update": checkpoint.update}
    done, budget = checkpoint.update, config.update_budget
    over = done >= config.updates if config.freeze is None else done > config.updates
    if over and budget is None and config.time_budget_seconds is None:
        raise InputError(f"updates must be above the {done} that the parent has done, got {config.updates}")
    first = config.freeze_update
    if config.freeze and config.schedule and budget is not None and first is not None and first >= done + budget:
        name = setting_of_moment(config.schedule)
        raise InputError(f"{name} must be before update {done + budget}, where update_budget ends, got update {first}")
    record = {"path": config.parent, "hash": checkpoint.hash, "update": done}
    # `saf freeze` leaves the record of its event beside the checkpoint that it made from another one.
    return {**record, "frozen_from": checkpoint.parent} if read_events(checkpoint.path) else record


def _build(
    config: TrainConfig,
    shape: GPTConfig,
    execution: Execution,
    checkpoint: Checkpoint | None,
    *,
    fresh: bool,
    sharded: bool,
) -> tuple[GPT, AdamW]:
    """Return model and optimiser on the device: the checkpoint's, or drawn from the run's seed.

    Where they are `sharded`, a checkpoint's weights and moments are read later, by each rank its own.
    """
    if checkpoint:
        # "auto" chose at the event; what it chose goes on, so that resuming is exact.
        named = config.freeze.backend if config.freeze and config.freeze.backend != "auto" else None
        model = checkpoint.model(execution.device, backend=named, filled=not sharded)
    else:
        model = GPT.undrawn(shape)
        model.reset_parameters(torch.Generator().manual_seed(config.seed))
        model.to(execution.device)
    for site in adapter_for(model).sites():
        site.pin(config.kernel)
    if checkpoint and not fresh:
        return model, checkpoint.optimizer(model, filled=not sharded)
    return model, build_optimizer(model, betas=config.betas, weight_decay=config.weight_decay)


def _observer(run: Run) -> Observer:
    """Open the logs of a run; utilisation is of all its ranks' devices."""
    config, task, execution = run.config, run.task, run.execution
    total = config.updates if config.update_budget is None else run.start + config.update_budget
    seconds = config.time_budget_seconds and config.time_budget_seconds - run.elapsed.total
    progress = Progress(done=run.update, total=total, seconds=seconds, every=config.log_every, quiet=config.quiet)
    tokens, peak = (task.targets_per_update, rated_flops(execution.device_name, execution.precision))
    return Observer(
        run.folder,
        progress,
        tensorboard=config.tensorboard,
        purge_from=run.update + 1,
        tokens_per_update=tokens,
        flops_per_update=tokens * run.model.config.flops_per_token(task.length),
        peak_flops=None if peak is None else peak * run.updater.parallel.processes,
    )


def _choices(run: Run, reason: str) -> Iterator[str]:
    """Yield the choices that the settings left open; ranks train together as they do for this `reason`."""
    config, task, updater = run.config, run.task, run.updater
    if config.freeze and config.freeze_update == config.updates:
        yield f"heads are {config.freeze.kind} after the last update: the run ends with them, and nothing trains on"
    if updater.graphed and config.graphs == "auto":
        yield f"{config.batch_size} x {task.length:,} tokens are few: replayed as CUDA graphs (--graphs off for none)"
    if in_group():
        yield (
            f"{updater.parallel.processes} processes ({updater.parallel.kind}: {reason}) share an update of "
            f"{task.targets_per_update:,} tokens: each takes {updater.accumulation} of its {config.accumulation} "
            f"micro-batches of {config.batch_size} windows"
        )


# --- the run's folder

_OWN_FILES = ("config.json", "result.json", "*.jsonl", "event-*.safetensors")
"""Files, or patterns of their names, that nothing but the run itself writes into its folder."""


def _lock_run(folder: Path, config: TrainConfig, *, resume: bool) -> AbstractContextManager[object] | None:
    """Lock a folder that holds a run, which must be the one to resume; None when it holds none."""
    if (folder / INDEX_FILE).exists():
        raise InputError(f"out must be another folder than the data's, got {folder}")
    if not (folder / "config.json").exists():
        if resume:
            raise InputError(f"{folder} holds no run to resume; check out, or leave resume out")
        return None
    if not resume:
        raise InputError(f"{folder} holds a run already; resume it, or choose another folder")
    check_same_run(config, read_run_config(folder)["settings"])
    return lock_folder(folder) if is_rank0() else None


def _lock_new(folder: Path) -> AbstractContextManager[object]:
    """Lock a folder that held no run when this process began; raise InputError when it holds one by now."""
    lock = lock_folder(folder)
    if (folder / "config.json").exists():
        lock.__exit__(None, None, None)
        raise InputError(f"{folder} holds a run by now, which another process began; resume it, or choose another")
    return lock


def _own_events(config: TrainConfig) -> list[EventRecord]:
    """Return the events of the run itself so far; not those of the parent."""
    events = read_events(config.out) if Path(config.out).is_dir() else []
    return [event for event in events if not _inherited(event, config)]


def _inherited(event: EventRecord, config: TrainConfig) -> bool:
    """Return whether an event is a parent's; a run that freezes nothing has no other, marked as such or not."""
    return event.values.get("inherited", config.freeze is None)


def _write_start_(folder: Path, config: TrainConfig, record: dict[str, Any], *, update: int, own: Path | None) -> None:
    """Write config.json, cut the logs back to `update`, and take over the event of a parent that `saf freeze` made.

    `own` is the run's checkpoint that training goes on from; its update's events will be met again, unless it is the
    state after them.
    """
    after_event = own is not None and own.name.endswith("-frozen")

    def keep_line(line: dict[str, Any]) -> bool:
        return line["update"] < update or (line["update"] == update and (after_event or line["when"] == "periodic"))

    def keep_event(event: EventRecord) -> bool:
        if _inherited(event, config):
            return True
        return (event.update or 0) < update or (event.update == update and after_event)

    logs = {"metrics.jsonl": lambda line: line["update"] <= update, "evaluations.jsonl": keep_line}
    remove_leftovers_(folder / "checkpoints")
    remove_unfinished_(folder, _OWN_FILES)
    write_json(folder / "config.json", record)
    for name, keep in logs.items():
        if (folder / name).exists():
            write_lines(folder / name, list(filter(keep, read_lines(folder / name))))
    keep_events_(folder, keep_event)
    (folder / "result.json").unlink(missing_ok=True)
    parent = record["parent"] or {}
    if own is None and config.freeze is None and "frozen_from" in parent:
        inherit_events(Path(parent["path"]), folder)
