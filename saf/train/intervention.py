"""The freezing event of a run."""

from dataclasses import replace

import torch

from saf.calibration import plan_calibration
from saf.errors import InputError, UnsupportedError
from saf.evaluate.perplexity import evaluate_perplexity
from saf.freezing.choice import scores_collect
from saf.freezing.recipe import freeze_
from saf.machine.execution import Execution
from saf.ops.backends import choose_backend
from saf.schedules import Event, Freeze, Outcome
from saf.scores import HOW_TO_COLLECT, score_name
from saf.train.batches import calibration_batches, heldout_batches
from saf.train.config import TrainConfig
from saf.train.training import Training


def check_freeze(config: TrainConfig, execution: Execution) -> None:
    """Raise InputError or UnsupportedError now, not at the freezing point, for settings that cannot work there."""
    freeze = config.freeze
    if freeze is None:
        return
    dtype = torch.bfloat16 if execution.precision == "bf16" else torch.float32
    choose_backend(freeze.backend, device=execution.device, dtypes=[dtype], trainable=freeze.trainable)
    if unknown := sorted(freeze.needs - HOW_TO_COLLECT.keys()):
        raise InputError(
            f"score {score_name(freeze.score)!r} needs {', '.join(unknown)}, which a run cannot give; "
            f"it gives {', '.join(sorted(HOW_TO_COLLECT))}"
        )


def controller_loss(training: Training, when: str) -> float:
    """Return the loss (nats per token) on the controller partition, recorded as `when`."""
    record = evaluate_perplexity(
        training.model,
        training.data,
        partition="controller",
        length=training.length,
        batch_size=training.config.batch_size,
        limit=training.config.eval_windows,
        precision=training.execution.precision,
    )
    training.observer.evaluated(training.update, record["loss"], when)
    return record["loss"]


def intervene_(training: Training, event: Event) -> Outcome:
    """Freeze heads between two updates, with the controller loss before and after.

    Writes freeze.json and freeze.safetensors. The place in the training data does not move.
    """
    assert training.config.freeze is not None
    if not isinstance(event, Freeze):
        raise UnsupportedError(f"a run cannot carry out {event} yet; it freezes heads alone")
    before = controller_loss(training, "before_freeze")
    config, freeze = training.config, training.config.freeze
    batches = calibration_batches(training.data, config, length=training.length)
    heldout = None
    if "outputs" in freeze.needs:
        count, size = config.heldout_sequences, config.batch_size
        heldout = heldout_batches(training.data, length=training.length, count=count, batch_size=size)
    needed = {"gradient": training.updater.gradient} if training.updater.gradient else None
    with training.execution.autocast():
        plan = plan_calibration(training.model, batches, collect=scores_collect(freeze, needed or {}))
        training.observer.progress.say(f"update {training.update}: {plan}")
        report = freeze_(
            training.model,
            batches,
            replace(freeze, rate=event.rate),
            optimizer=training.updater.optimizer,
            heldout=heldout,
            needed=needed,
        )
    report.save(training.folder, update=training.update)
    training.updater.compile_()
    after = controller_loss(training, "after_freeze")
    training.observer.progress.say(
        f"update {training.update}: {report.told}; took {sum(report.seconds.values()):.1f} s"
    )
    return Outcome(
        number=1, heads=report.heads, loss_before=before, loss_after=after, seconds=sum(report.seconds.values())
    )
