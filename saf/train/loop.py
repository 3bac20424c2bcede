"""Pretraining from the first update, or the last checkpoint, to the final numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from saf.errors import CheckpointError, DivergenceError
from saf.records.folders import no_room
from saf.train.checkpoint import latest, prune_checkpoints_, save_checkpoint, step_name
from saf.train.clock import Clock
from saf.train.config import TrainConfig
from saf.train.events import GRADIENT, carry_out_, controller_loss, reads_gradient
from saf.train.random_state import capture_random_state
from saf.train.results import finish
from saf.train.signals import StopRequest
from saf.train.start import start_training
from saf.train.training import Training

EXIT_STOPPED = 75
"""Exit code of a run that a signal stopped after saving: start it again with `--resume`."""


def pretrain(config: TrainConfig, *, resume: bool = False) -> dict[str, Any]:
    """Train one arm in the folder `config.out` and return its result.json.

    With `resume` it goes on from the folder's newest checkpoint (from the beginning when there is none); on a CPU
    the outcome is bit for bit that of a run that never stopped. After a first SIGINT, SIGTERM or SIGHUP the current
    update ends, a checkpoint is saved, and `{"stopped_at": update, "checkpoint": path}` is returned.

    Raises:
        InputError: The folder holds a run already, or other settings than the run to resume.
        CheckpointError: A damaged checkpoint, or no space left for one.
        DivergenceError: A loss or gradient that is not finite; nothing of that update was applied.
    """
    clock = Clock()
    with StopRequest() as stop:
        training = start_training(config, resume=resume, clock=clock)
        try:
            with _full_disk_explained(training, "logs"):
                finished = _train(training, stop)
        except DivergenceError as error:
            raise DivergenceError(f"{error}. {_last_good(training)}, with a lower peak_lr") from None
        finally:
            training.close()
    if not finished:
        return {"stopped_at": training.update, "checkpoint": str(latest(training.checkpoints))}
    with _full_disk_explained(training, "result"):
        return finish(training)


@contextmanager
def _full_disk_explained(training: Training, files: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if (reason := no_room(error)) is None:
            raise
        raise CheckpointError(
            f"{reason}: the run's {files} could not be written. {_last_good(training)}; "
            "nothing up to there is lost: make room, then resume"
        ) from error


def _train(training: Training, stop: StopRequest) -> bool:
    """Run updates to the end; return False when a signal stopped them."""
    config = training.config
    training.model.train()
    _intervene_if_due(training, saved=training.update == training.start and training.parent_hash is not None)
    finished = training.finished()
    while not finished:
        if training.updater.compiling:
            training.observer.progress.compiling(training.update + 1)
        record = run_update(training)
        training.observer.updated(record)
        if training.schedule:
            training.schedule.observe(training.update, record["loss"])
        if config.eval_every and training.update % config.eval_every == 0:
            controller_loss(training, "periodic")
        finished = training.finished()
        periodic = config.save_every and training.update % config.save_every == 0
        # Looked at once: a signal that comes while this line runs waits for the next update, which it then saves.
        stopping = stop.requested and not finished
        if periodic or finished or stopping or training.update == config.freeze_update:
            save(training)
        if stopping:
            return False
        _intervene_if_due(training)
    return True


def run_update(training: Training) -> dict[str, Any]:
    """Do one update and return its line for metrics.jsonl; raise DivergenceError as `Updater.update` does."""
    cuda = training.execution.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    rate = training.next_learning_rate()
    done = training.updater.update(rate)
    if cuda and training.update >= training.timed_from:
        training.peak_memory = max(training.peak_memory or 0, torch.cuda.max_memory_allocated())
    return {
        "update": training.update,
        "tokens": training.update * training.tokens_per_update,
        "loss": done.loss,
        "lr": rate,
        "grad_norm": done.grad_norm,
        "update_seconds": done.seconds,
    }


def _intervene_if_due(training: Training, *, saved: bool = False) -> None:
    """Carry out the events that are due, after a checkpoint of the state before them (unless the parent is it)."""
    schedule, carried_out = training.schedule, 0
    while schedule and (events := schedule.propose(training.update)):
        if not (saved or carried_out):
            save(training)
        for event in events:
            schedule.done(event, carry_out_(training, event))
            carried_out += 1
        if not (training.config.track_gradients or reads_gradient(training.config, schedule)):
            training.updater.gradient = None
    if carried_out and training.finished():
        save(training, after_freezing=True)


def save(training: Training, *, after_freezing: bool = False) -> Path:
    """Save a checkpoint, unless it is there already, and remove the oldest ones that need not be kept."""
    path = training.checkpoints / step_name(training.update, after_freezing=after_freezing)
    if path.exists():
        return path
    state = {
        "update": training.update,
        "tokens": training.update * training.tokens_per_update,
        "sampler_position": training.update * training.windows_per_update,
        "elapsed_seconds": training.clock.elapsed,
        "model": training.model.config.to_dict(),
        "settings": training.config.to_dict(),
        "data_fingerprint": training.data.fingerprint,
        "tokenizer": training.data.index.tokenizer.sha256,
        "schedule": training.schedule.state_dict() if training.schedule else None,
        GRADIENT: training.updater.gradient.state_dict() if training.updater.gradient else None,
        "random": capture_random_state(),
    }
    with training.clock.paused():
        save_checkpoint(path, training.model, training.updater.optimizer, state=state, parent=training.parent_hash)
        branch = training.config.freeze_update
        protect = set() if branch is None else {step_name(branch)}
        prune_checkpoints_(training.checkpoints, keep=training.config.keep, protect=protect)
    return path


def _last_good(training: Training) -> str:
    good = latest(training.checkpoints) or training.config.parent
    if good is None:
        return "There is no checkpoint yet: start again"
    return f"The last good checkpoint is {good}: continue from it"
