"""Setting a run up: new, from a parent's checkpoint, or resumed."""

from pathlib import Path
from typing import IO, Any

import torch

from saf.adapters import adapter_for
from saf.data import TokenData
from saf.errors import CheckpointError, InputError
from saf.freezing.choice import check_heads
from saf.machine.execution import Execution
from saf.machine.peaks import rated_flops
from saf.models import GPT, GPTConfig
from saf.ops.live import pinned
from saf.records.events import read_events
from saf.records.files import read_json
from saf.records.folders import lock_folder, remove_leftovers_
from saf.schedules import Proposer
from saf.train.batches import SAMPLERS, MicroBatches, check_heldout
from saf.train.checkpoint import Checkpoint, latest, open_checkpoint
from saf.train.clock import Clock
from saf.train.config import TrainConfig
from saf.train.events import check_freeze, start_gradient
from saf.train.observer import Observer
from saf.train.optimizer import build_optimizer
from saf.train.progress import Progress
from saf.train.random_state import restore_random_state
from saf.train.run_config import check_same_run, model_config, run_config
from saf.train.run_folder import write_start
from saf.train.training import Training
from saf.train.updater import Updater


def start_training(config: TrainConfig, *, resume: bool, clock: Clock) -> Training:
    """Open the data, build or restore model and optimiser, write config.json and open the logs.

    Raises:
        InputError: A run is there already (without `resume`), or has other settings.
        CheckpointError: The checkpoint is damaged, or is of other data or another model.
    """
    folder = Path(config.out)
    lock = _lock_run(folder, config, resume=resume)
    execution, data = (
        Execution.of(config.device, precision=config.precision, compile=config.compile),
        TokenData.open(config.data),
    )
    shape = model_config(config, data)
    length = config.length or shape.max_length
    check_heldout(data, config, length=length)
    check_freeze(config, execution)
    with pinned(config.kernel, execution.device):
        pass  # raises now what it would raise in the first update
    own = latest(folder / "checkpoints") if resume else None
    checkpoint = _open(own or config.parent, shape, data)
    state, update = (checkpoint.state, checkpoint.update) if checkpoint else (None, 0)
    parent = _parent_record(config, folder, checkpoint, resumed=own is not None)
    model, optimizer = _build(config, shape, execution, checkpoint)
    for site in adapter_for(model).sites():
        site.pin(config.kernel)
    if own and state:
        clock.advance(state["elapsed_seconds"])
    schedule = _schedule(config, state["schedule"] if own and state else None)
    if config.freeze and schedule and not schedule.finished:
        check_heads(config.freeze, [site.layout for site in adapter_for(model).sites()])
    gradient = start_gradient(model, config, schedule, state=state, update=update)
    # Settings that cannot be used leave no folder behind.
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    lock = lock or lock_folder(folder)
    remove_leftovers_(folder / "checkpoints")
    record = run_config(config, model=shape, data=data, execution=execution, parent=parent)
    write_start(folder, config, record, update=update, own=own)
    return Training(
        config=config,
        folder=folder,
        lock=lock,
        execution=execution,
        data=data,
        length=length,
        updater=Updater(
            model=model,
            optimizer=optimizer,
            batches=_batches(config, data, length, update, execution),
            execution=execution,
            accumulation=config.accumulation,
            clip=config.clip,
            gradient=gradient,
            done=update,
        ),
        schedule=schedule,
        clock=clock,
        observer=_observer(config, folder, execution, shape, length, update, clock),
        start=parent["update"] if parent else 0,
        parent_hash=parent["hash"] if parent else None,
    )


def _lock_run(folder: Path, config: TrainConfig, *, resume: bool) -> IO[str] | None:
    """Lock a folder that holds a run, which must be the one to resume; None when it holds none."""
    if not (folder / "config.json").exists():
        return None
    lock = lock_folder(folder)
    if not resume:
        raise InputError(f"{folder} holds a run already; resume it, or choose another folder")
    check_same_run(config, read_json(folder / "config.json")["settings"])
    return lock


def _open(path: str | Path | None, shape: GPTConfig, data: TokenData) -> Checkpoint | None:
    """Open the checkpoint that training goes on from, if there is one, and take over its random state."""
    checkpoint = open_checkpoint(path) if path else None
    if checkpoint:
        _check_fits(checkpoint, shape, data)
        restore_random_state(checkpoint.state["random"])
    return checkpoint


def _check_fits(checkpoint: Checkpoint, shape: GPTConfig, data: TokenData) -> None:
    if checkpoint.state["model"] != shape.to_dict():
        raise CheckpointError(
            f"{checkpoint.path} holds a model of shape {checkpoint.state['model']}; the settings ask for {shape}"
        )
    if checkpoint.state["data_fingerprint"] != data.fingerprint:
        raise CheckpointError(
            f"{checkpoint.path} was trained on data with fingerprint {checkpoint.state['data_fingerprint'][:16]}; "
            f"the data folder has {data.fingerprint[:16]}. Use the folder it was trained on"
        )


def _parent_record(
    config: TrainConfig, folder: Path, checkpoint: Checkpoint | None, *, resumed: bool
) -> dict[str, Any] | None:
    if not config.parent:
        return None
    if resumed:
        return read_json(folder / "config.json")["parent"]
    assert checkpoint is not None
    position = checkpoint.state["sampler_position"]
    if position != checkpoint.update * config.batch_size * config.accumulation:
        raise InputError(
            f"the parent used {position // max(checkpoint.update, 1)} windows an update, this run "
            f"{config.batch_size} x {config.accumulation}; keep their product so that the data go on where they stopped"
        )
    ended = checkpoint.update >= config.updates if config.freeze is None else checkpoint.update > config.updates
    if ended and config.time_budget_seconds is None:
        raise InputError(
            f"the parent has done {checkpoint.update} updates already, and updates={config.updates} counts from the "
            "very first; ask for more, or choose an earlier parent"
        )
    record = {"path": config.parent, "hash": checkpoint.hash, "update": checkpoint.update}
    # `saf freeze` leaves the record of the event beside the checkpoint that it made from another one.
    by_freeze = bool(read_events(checkpoint.path))
    return {**record, "frozen_from": checkpoint.parent} if by_freeze else record


def _build(config: TrainConfig, shape: GPTConfig, execution: Execution, checkpoint: Checkpoint | None):
    if checkpoint:
        backend = config.freeze.backend if config.freeze else "auto"
        model = checkpoint.model(execution.device, backend=backend)
        return model, checkpoint.optimizer(model)
    model = GPT.undrawn(shape)
    model.reset_parameters(torch.Generator().manual_seed(config.seed))
    model.to(execution.device)
    return model, build_optimizer(model, betas=config.betas, weight_decay=config.weight_decay)


def _schedule(config: TrainConfig, state: dict[str, Any] | None) -> Proposer | None:
    if config.freeze is None or config.schedule is None:
        return None
    schedule = config.schedule.start(updates=config.updates, rate=config.freeze.rate)
    if state is not None:
        # Checkpoints once kept a schedule's name as "schedule".
        schedule.load_state_dict({"name": state["schedule"], **state} if "schedule" in state else state)
    return schedule


def _batches(config: TrainConfig, data: TokenData, length: int, update: int, execution: Execution) -> MicroBatches:
    windows = SAMPLERS[config.sampler](data.tokens("train"), length=length, seed=config.seed)
    position = update * config.batch_size * config.accumulation
    return MicroBatches(windows, size=config.batch_size, position=position, device=execution.device)


def _observer(
    config: TrainConfig,
    folder: Path,
    execution: Execution,
    shape: GPTConfig,
    length: int,
    update: int,
    clock: Clock,
) -> Observer:
    budget = config.time_budget_seconds
    left = None if budget is None else budget - clock.elapsed
    progress = Progress(done=update, total=config.updates, budget=left, every=config.log_every, quiet=config.quiet)
    tokens = config.batch_size * config.accumulation * length
    return Observer(
        folder,
        progress,
        tensorboard=config.tensorboard,
        purge_from=update + 1,
        tokens_per_update=tokens,
        flops_per_update=tokens * shape.flops_per_token(length),
        peak_flops=rated_flops(execution.device_name, execution.precision),
    )
