"""Training from the first update, or the last checkpoint, to the final numbers, and how a signal stops it."""

import os
import signal
import threading
from contextlib import ExitStack, nullcontext
from types import FrameType
from typing import Any

from saf.checkpoint import latest
from saf.distributed import all_ranks_or_raise, on_rank0, process_group
from saf.errors import DivergenceError
from saf.schedules import Event, Outcome
from saf.train.config import TrainConfig
from saf.train.events import apply_event, needs_gradient, resolve_event
from saf.train.result import finish, report_between, warn_of_gaps
from saf.train.run import Run
from saf.train.start import start_run

EXIT_STOPPED = 75
"""Exit code of a run that a signal stopped after saving: start it again with `--resume`."""


def pretrain(config: TrainConfig, *, resume: bool = False) -> dict[str, Any]:
    """Train one arm in the folder `config.out` and return its result.json.

    With `resume` it goes on from the folder's newest checkpoint (from the beginning when there is none); on a CPU
    the outcome is bit for bit that of a run that never stopped. After a first SIGINT, SIGTERM or SIGHUP the current
    update ends, a checkpoint is saved, and `{"stopped_at": update, "checkpoint": path}` is returned.

    Processes that `torchrun` started, or that are in a `torch.distributed` group already, train together: each calls
    this with the same settings, and all return the same. See docs/parallel.md.

    Raises:
        InputError: The folder holds a run already, or other settings than the run to resume.
        CheckpointError: A damaged checkpoint, or no space left for one.
        DivergenceError: A loss or gradient that is not finite; nothing of that update was applied.
        SafError: Another process of the group ended.
    """
    with process_group(config.device), ExitStack() as held:
        with StopRequest() as stop:
            run = start_run(config, resume=resume)
            held.enter_context(run.lock or nullcontext())  # until the result is written, too
            warn_of_gaps(run)
            try:
                with run.full_disk_explained("logs"):
                    finished = _train(run, stop)
            except DivergenceError as error:
                raise DivergenceError(f"{error}. {run.last_good()}, with a lower peak_lr") from None
            finally:
                run.close()
        if not finished:
            return {"stopped_at": run.update, "checkpoint": str(on_rank0(lambda: latest(run.checkpoints)))}
        with run.full_disk_explained("result"):
            return finish(run)


def _train(run: Run, stop: "StopRequest") -> bool:
    """Run updates to the end; return False when a signal stopped them."""
    config = run.config
    run.model.train()
    run.elapsed.enter("train")
    if run.update == 0 and run.parent_hash is None and 0 in config.branch_updates:
        run.save()
    apply_due_events_(run, saved=run.update == run.start and run.parent_hash is not None)
    report_between(run)
    while not run.finished():
        if run.observer and run.updater.compiling:
            run.say("compiling the model for the next update, which may take a minute or more ...")
        record = run.run_update()
        if run.proposer:
            run.proposer.observe(run.update, record["loss"])
        if config.eval_every and run.update % config.eval_every == 0:
            run.controller_loss("periodic")
        periodic = config.save_every and run.update % config.save_every == 0
        finished = run.finished()
        # Looked at once: a signal that comes while this line runs waits for the next update, which it then saves.
        stopping = run.updater.parallel.any(stop.requested) and not finished
        if not finished and (stopping or periodic or run.update in config.branch_updates):
            run.save()
        if stopping:
            return False
        apply_due_events_(run)
        report_between(run)
    run.elapsed.enter(None)
    if run.update > run.start or run.changed:
        run.save()
    return True


def apply_due_events_(run: Run, *, saved: bool = False) -> None:
    """Apply the events that are due, after a checkpoint of the state before them (unless `saved`: it is there).

    None is due where the run's budget leaves no update behind it. The place in the training data does not move.
    """
    budget = run.budget_share()
    if budget is not None and budget > 1:
        return
    proposer = run.proposer
    while proposer and (events := proposer.propose(run.update)):
        if not saved:
            run.save()
        saved = True
        for event in events:
            proposer.done(event, _apply_event_(run, resolve_event(event, run.config)))
        if not needs_gradient(run.config, proposer):
            run.updater.gradient = None


def _apply_event_(run: Run, event: Event) -> Outcome:
    """Apply one event and record it, with the controller loss before and after."""
    before = run.controller_loss(f"before_{event.kind}", batches=event.batches)
    with run.elapsed("freeze"), run.updater.parallel.whole(moments=True):
        with all_ranks_or_raise():
            change = apply_event(run, event)
        run.updater.compile_()
    after = run.controller_loss(f"after_{event.kind}", batches=event.batches)
    losses = {"loss_before": before, "loss_after": after}
    with run.elapsed("freeze"):
        values = {**losses, "seconds": change.seconds, **change.values}
        number = run.record_event(event, change.heads, values, change.tensors)
    seconds = run.updater.parallel.first(sum(change.seconds.values()))
    run.say(f"{change.summary}; took {seconds:.1f} s")
    return Outcome(
        number=number,
        heads=change.heads,
        seconds=seconds,
        lowest_score=change.lowest_score,
        deferred=change.deferred,
        **losses,
    )


_HANGUP: int | None = getattr(signal, "SIGHUP", None)
"""Sent when the terminal of a run is closed; unknown to some platforms."""


class StopRequest:
    """Let SIGINT, SIGTERM and SIGHUP set `requested` in this context; a second one raises KeyboardInterrupt at once.

    Outside the main thread handlers cannot be set, and nothing is caught. A SIGHUP that the process was started to
    ignore (`nohup`) stays ignored.
    """

    def __init__(self):
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            hangup = [] if _HANGUP is None or signal.getsignal(_HANGUP) is signal.SIG_IGN else [_HANGUP]
            for number in (signal.SIGINT, signal.SIGTERM, *hangup):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == _HANGUP:
            _silence_lost_terminal_()
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()


def _silence_lost_terminal_() -> None:
    """Send output nowhere where its terminal is gone: progress lines must not prevent the checkpoint."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
