"""How a run begins: new, from a parent's checkpoint, or resumed."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.optim import AdamW

from saf.adapters import adapter_for
from saf.calibration.plan import free_bytes, readable
from saf.errors import CheckpointError, InputError
from saf.freeze_config import check_heads
from saf.machine.execution import Execution
from saf.machine.peaks import rated_flops
from saf.machine.processes import agreed, done_once, gathered, group_place, in_group, is_first
from saf.models import GPT, GPTConfig
from saf.ops.live import pinned
from saf.records.events import read_events
from saf.tasks import TASKS, Task
from saf.train.allowance import Allowance, allowance_of, match
from saf.train.checkpoint import Checkpoint, newest, open_checkpoint, restore_random_state
from saf.train.clock import Clock, seconds_until
from saf.train.config import TrainConfig
from saf.train.events import check_freeze, start_gradient, start_proposer
from saf.train.folder import lock_new, lock_run, own_events, write_start_
from saf.train.graphs import check_graphs, graphs_pay
from saf.train.memory import STATE_BYTES
from saf.train.observer import Observer, Progress
from saf.train.optimizer import build_optimizer
from saf.train.parallel import Parallel, Shards
from saf.train.run import RECORDS, Run
from saf.train.run_config import context_length, model_config, read_run_config, run_config
from saf.train.sharing import micro_batches_of_one, parallel_of
from saf.train.updater import Updater


def start_run(config: TrainConfig, *, resume: bool, clock: Clock) -> Run:
    """Open the task, build or restore model and optimiser, write config.json and open the logs.

    Raises:
        InputError: A run is there already (without `resume`), or has other settings.
        CheckpointError: The checkpoint is damaged, or is of other data or another model.
        DataError: The data cannot be used, or are too few.
        UnsupportedError: The backend or kernel asked for cannot run here.
    """
    folder = Path(config.out)
    with agreed():  # what one process cannot start, none does; and all have looked before the first one writes
        own_share = micro_batches_of_one(config.accumulation, group_place()[1], batch_size=config.batch_size)
        lock = lock_run(folder, config, resume=resume)
        execution = Execution.of(
            config.device,
            precision=config.precision,
            compile=config.compile,
            activation_checkpointing=config.activation_checkpointing,
            several_events=bool(config.freeze and config.schedule and config.schedule.several_events),
        )
        task: Task = TASKS[config.task](config, length=context_length(config))
        shape = model_config(config, vocab_size=task.vocab_size)
        _check_alike({**config.to_dict(), "data's fingerprint": task.fingerprint})
    freeze = config.freeze
    with agreed():
        size = sum(parameter.numel() for parameter in GPT.undrawn(shape, "meta").parameters()) if in_group() else 0
        trained = freeze is not None and freeze.trainable
        parallel, why = parallel_of(config.parallel, parameters=size, execution=execution, trained_patterns=trained)
        task.check(calibrates=freeze is not None, scores_outputs=freeze is not None and "outputs" in freeze.needs)
        check_freeze(config, execution)
        if freeze is not None:
            freeze.check_calibration(sequences=config.calibration_sequences)
        _check_launches(config, execution, parallel, trained_patterns=trained)
        own = done_once(lambda: newest(folder / "checkpoints")) if resume else None
        fresh = config.fresh and own is None
        checkpoint = _open(own or config.parent, shape, task, fresh=fresh)
        state, update = (checkpoint.state, checkpoint.update) if checkpoint and not fresh else (None, 0)
        parent = _parent_record(config, folder, checkpoint, resumed=own is not None)
        model, optimizer = _build(
            config, shape, execution, checkpoint, fresh=fresh, filled=parallel.kind != Shards.kind
        )
        for site in adapter_for(model).sites():
            site.pin(config.kernel)
        matched = _matched(config, folder, checkpoint, resumed=own is not None)
        allowance = allowance_of(config, matched)
        if checkpoint and not fresh:
            (clock.go_on if own else clock.start_from)(seconds_until(checkpoint))
        layouts = [site.layout for site in adapter_for(model).sites()]
        left = state["schedule"] if own and state else None
        proposer = start_proposer(config, layouts, updates=config.updates, state=left)
        if freeze and proposer and own is None:
            check_heads(freeze, layouts)
        gradient = start_gradient(model, config, proposer, state=state, update=update)
        graphed = _replays(config, execution, parallel, model, tokens=config.batch_size * task.length)
    start = parent["update"] if parent else 0
    # Settings that cannot be used leave no folder behind.
    with agreed():
        if is_first():
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            lock = lock or lock_new(folder)
            record = run_config(
                config,
                model=shape,
                task=task,
                execution=execution,
                parent=parent,
                matched=matched,
                processes=parallel.processes,
            )
            logged = state.get(RECORDS) if own and state else None
            write_start_(folder, config, record, update=update, own=own, records=logged)
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
            accumulation=own_share,
            parallel=parallel,
            clip=math.inf if config.clip is None else config.clip,
            graphed=graphed,
            gradient=gradient,
            done=update,
            # A parent's, too: what its updates took is the best guess of what the first one will.
            expected_seconds=(state or {}).get("expected_seconds", 0.0),
            compile_seconds=(state or {}).get("compile_seconds", 0.0),
        ),
        proposer=proposer,
        clock=clock,
        observer=_observer(config, execution, shape, task, update, start, clock, allowance, parallel.processes)
        if is_first()
        else None,
        start=start,
        parent_hash=parent["hash"] if parent else None,
        allowance=allowance,
        heads_changed=max((event.update or 0 for event in done_once(lambda: own_events(config))), default=None),
    )
    if checkpoint and parallel.kind == Shards.kind:
        checkpoint.fill_(run.updater.engine, moments=not fresh)
    for line in _choices(run, why, own_share):
        run.say(line)
    return run


def _choices(run: Run, why: str, own_share: int) -> Iterator[str]:
    """Yield what people should know of choices that the run left open: `why` processes share updates as they do."""
    config, task, parallel = run.config, run.task, run.updater.parallel
    if config.freeze and config.freeze_update == config.updates:
        yield f"heads are {config.freeze.kind} after the last update: the run ends with them, and nothing trains on"
    if run.updater.graphed and config.graphs == "auto":
        yield (
            f"{config.batch_size} x {task.length:,} tokens are few for this device: their passes are replayed as CUDA "
            "graphs; --graphs off launches each kernel by itself"
        )
    if in_group():
        yield (
            f"{parallel.processes} processes ({parallel.kind}: {why}) share an update of "
            f"{task.targets_per_update:,} tokens: each takes {own_share} of its {config.accumulation} micro-batches of "
            f"{config.batch_size} windows"
        )


def _check_memory(shape: GPTConfig, execution: Execution, batch_size: int, length: int) -> None:
    """Raise InputError where training on a CPU takes more memory than is free: the system would end the process.

    A layer keeps its norms', projections' and MLP's inputs and outputs for the backward pass: 8 + 2 mlp_ratio widths a
    token, a lower bound (19 to 23 measured, of 16).
    """
    free = free_bytes(execution.device)
    if execution.device.type != "cpu" or free is None:
        return
    # Compiled code keeps what its compiler chooses: one layer's is certain.
    layers = 1 if execution.activation_checkpointing or execution.compile else shape.num_layers
    width = (8 + 2 * shape.mlp_ratio) * shape.hidden_size * (2 if execution.precision == "bf16" else 4)
    state, activations = STATE_BYTES * shape.num_parameters, batch_size * length * layers * width
    if state + activations > free:
        raise InputError(
            f"training needs about {readable(state + activations)} of memory ({readable(state)} for weights and "
            f"moments, {readable(activations)} for batch_size={batch_size} x {length:,} tokens), got {readable(free)} "
            "free; take a smaller model, batch_size or length"
        )


def _check_launches(config: TrainConfig, execution: Execution, parallel: Parallel, *, trained_patterns: bool) -> None:
    """Raise UnsupportedError now for what the first update, or the first one after an event, could not launch."""
    if config.graphs == "on":
        many_lengths = config.finetuning is not None
        check_graphs(execution, parallel.kind, trained_patterns=trained_patterns, many_lengths=many_lengths)
    with pinned(config.kernel, execution.device):
        pass


def _replays(config: TrainConfig, execution: Execution, parallel: Parallel, model: GPT, *, tokens: int) -> bool:
    """Return whether the run replays its passes, each of so many tokens, as CUDA graphs."""
    if config.graphs != "auto":
        return config.graphs == "on"
    frozen = [site.frozen for site in adapter_for(model).sites() if site.frozen is not None]
    return graphs_pay(
        execution,
        parallel.kind,
        size=tokens * model.config.hidden_size,
        trained_patterns=(config.freeze is not None and config.freeze.trainable)
        or any(each.trainable for each in frozen),
        many_lengths=config.finetuning is not None,
    )


def _check_alike(settings: dict[str, Any]) -> None:
    """Raise InputError unless every process of the group has the settings of the first one."""
    first, *others = gathered(settings)
    for number, own in enumerate(others, 1):
        if differing := [name for name in first if own.get(name) != first[name]]:
            words = ", ".join(f"{name} {own.get(name)!r} (the first one {first[name]!r})" for name in differing)
            raise InputError(
                f"all processes train by the same settings and data; process {number} has {words}. Start every one "
                "with the same words, where it reads the same files"
            )


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
        advice = " The vocabulary is that of the data: give --data the folder that it was trained on."
        raise CheckpointError(
            f"{checkpoint.path} holds a model with {words}.{advice if 'vocab_size' in differing else ''}"
        )
    if fresh:
        before, now = (state.get("tokenizer") for state in (checkpoint.state, task.state(0)))
        if before and now and before != now:
            raise CheckpointError(
                f"{checkpoint.path} was trained with another tokenizer ({before[:16]}) than the task's ({now[:16]}); "
                "give the one that it was trained with"
            )
        return checkpoint
    task.check_continues(checkpoint.state, checkpoint.path)
    restore_random_state(checkpoint.state["random"])
    return checkpoint


def _parent_record(
    config: TrainConfig, folder: Path, checkpoint: Checkpoint | None, *, resumed: bool
) -> dict[str, Any] | None:
    """Return what config.json says of the parent; None without one. Raises InputError when it left nothing to do."""
    if not config.parent:
        return None
    if resumed:
        return read_run_config(folder)["parent"]
    assert checkpoint is not None
    if config.fresh:
        return {"path": config.parent, "hash": checkpoint.hash, "update": 0, "weights_of_update": checkpoint.update}
    ended = checkpoint.update >= config.updates if config.freeze is None else checkpoint.update > config.updates
    if ended and config.time_budget_seconds is None and config.match_time is None:
        raise InputError(
            f"the parent has done {checkpoint.update} updates already, and updates={config.updates} counts from the "
            "very first; ask for more, or choose an earlier parent"
        )
    record = {"path": config.parent, "hash": checkpoint.hash, "update": checkpoint.update}
    # `saf freeze` leaves the record of its event beside the checkpoint that it made from another one.
    return {**record, "frozen_from": checkpoint.parent} if read_events(checkpoint.path) else record


def _matched(
    config: TrainConfig, folder: Path, checkpoint: Checkpoint | None, *, resumed: bool
) -> dict[str, Any] | None:
    """Return what config.json says of the reference of a run at matched time; None for another run."""
    if config.match_time is None:
        return None
    if resumed:
        return read_run_config(folder)["matched"]
    assert checkpoint is not None, "match_time needs a parent"
    return match(config, checkpoint)


def _build(
    config: TrainConfig,
    shape: GPTConfig,
    execution: Execution,
    checkpoint: Checkpoint | None,
    *,
    fresh: bool,
    filled: bool,
) -> tuple[GPT, AdamW]:
    """Return model and optimiser on the device: the checkpoint's, or drawn from the run's seed.

    The optimiser of a `fresh` run is a new one. Unless `filled`, a checkpoint's weights and moments are not read.
    """
    _check_memory(shape, execution, config.batch_size, context_length(config))
    if checkpoint:
        # "auto" chose at the event; what it chose goes on, so that resuming is exact.
        named = config.freeze.backend if config.freeze and config.freeze.backend != "auto" else None
        model = checkpoint.model(execution.device, backend=named, filled=filled)
        if fresh:
            return model, build_optimizer(model, betas=config.betas, weight_decay=config.weight_decay)
        return model, checkpoint.optimizer(model, filled=filled)
    model = GPT.undrawn(shape)
    model.reset_parameters(torch.Generator().manual_seed(config.seed))
    model.to(execution.device)
    return model, build_optimizer(model, betas=config.betas, weight_decay=config.weight_decay)


def _observer(
    config: TrainConfig,
    execution: Execution,
    shape: GPTConfig,
    task: Task,
    update: int,
    start: int,
    clock: Clock,
    allowance: Allowance | None,
    processes: int,
) -> Observer:
    """Open the logs of a run that stands after `update` updates; utilisation is of all its processes' devices."""
    left = allowance.seconds_left(clock.parts) if allowance else None
    own = allowance.updates if allowance else None
    total = config.updates if own is None else start + own
    progress = Progress(done=update, total=total, budget=left, every=config.log_every, quiet=config.quiet)
    tokens, peak = task.targets_per_update, rated_flops(execution.device_name, execution.precision)
    return Observer(
        Path(config.out),
        progress,
        tensorboard=config.tensorboard,
        purge_from=update + 1,
        tokens_per_update=tokens,
        flops_per_update=tokens * shape.flops_per_token(task.length),
        peak_flops=None if peak is None else peak * processes,
    )
