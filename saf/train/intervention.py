"""The freezing event of a run."""

from dataclasses import replace

from saf.evaluate.perplexity import evaluate_perplexity
from saf.freeze import freeze_
from saf.schedules import Event
from saf.train.batches import calibration_batches
from saf.train.training import Training


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


def intervene_(training: Training, event: Event) -> None:
    """Freeze heads between two updates, with the controller loss before and after.

    Writes freeze.json and freeze.safetensors. The place in the training data does not move.
    """
    assert training.config.freeze is not None
    assert training.schedule is not None
    controller_loss(training, "before_freeze")
    batches = calibration_batches(training.data, training.config, length=training.length)
    with training.execution.autocast():
        report = freeze_(
            training.model,
            batches,
            replace(training.config.freeze, rate=event.rate),
            optimizer=training.optimizer,
        )
    report.save(training.folder, update=event.update)
    training.schedule.done(event)
    training.prepare_forward_()
    controller_loss(training, "after_freeze")
    training.observer.progress.say(
        f"update {training.update}: froze {len(report.heads)} heads in {sum(report.seconds.values()):.1f} s"
    )
