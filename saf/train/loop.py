"""A training run from top to bottom: `pretrain` starts it, makes updates and events, saves, stops at a signal, reports.

`Run` (run.py) is its state, `Updater` (step.py) makes one update, `apply_event` (events.py) changes heads. The order of
a run comes first, then the parts of its start and of its result.
"""

import hashlib
import math
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, quantiles
from types import FrameType
from typing import Any

import torch
from torch.optim import AdamW

from saf.calibration import free_bytes
from saf.checkpoint import Checkpoint, checkpoint_hash, latest, open_checkpoint, restore_random_state, step_name
from saf.data.loader import INDEX_FILE
from saf.distributed import all_gather, all_ranks_or_raise, is_rank0, on_rank0, process_group
from saf.errors import CheckpointError, DivergenceError, InputError, SafWarning, UnsupportedError
from saf.freeze_config import check_heads
from saf.heads import EDITED
from saf.machine import Execution, device_name, one_host_thread
from saf.models import GPT, GPTConfig
from saf.models.adapter import adapter_for
from saf.ops.live import pinned
from saf.records.files import file_hash, locked, read_json, read_lines, remove_leftovers_, write_json, write_lines
from saf.records.result import result_header
from saf.records.run import MANIFEST, EventRecord, arm, heads_in_force, inherit_events, keep_events_, read_events
from saf.records.table import byte_size
from saf.schedules import Event, OneTime, Outcome, Proposer, setting_of_moment
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
from saf.train.events import apply_event, check_freeze, needs_gradient, resolve_event, start_gradient, start_proposer
from saf.train.parallel import Parallel, Shards, micro_batches_of_one, parallel_of
from saf.train.run import Elapsed, Run
from saf.train.step import GRAPHED_SIZE, Updater, build_optimizer, graphs_unsupported, trains_patterns, update_memory

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
        InputError: The folder holds a run already, or other settings than the run to resume; too little memory.
        CheckpointError: The checkpoint is damaged, or is of other data or another model.
        DataError: The data cannot be used, or are too few.
        UnsupportedError: The backend or kernel of the settings cannot run here.
        DivergenceError: A loss or gradient that is not finite; nothing of that update was applied.
        OSError: The disk is full; checkpoints up to there are whole.
        RuntimeError: Another process of the group ended.
    """
    with process_group(config.device), one_host_thread(config.device), ExitStack() as locks:
        with StopRequest() as stop:
            run = start_run(config, resume=resume, locks=locks)
            try:
                finished = _train(run, stop)
            except DivergenceError as error:
                good = latest(run.checkpoints) or config.parent or "the beginning"
                raise DivergenceError(f"{error}. Go on from {good} with a lower peak_lr") from None
            except torch.OutOfMemoryError as error:
                remedy = "lower batch_size or length, or pass activation_checkpointing"
                raise InputError(f"training must fit into the device's memory; {remedy} ({error})") from error
            finally:
                if run.log:
                    run.log.close()
        if not finished:
            return {"stopped_at": run.update, "checkpoint": str(on_rank0(lambda: latest(run.checkpoints)))}
        return finish(run)


def start_run(config: TrainConfig, *, resume: bool, locks: ExitStack) -> Run:
    """Open the task, build or restore model and optimiser, write config.json and open the logs.

    A file next to the run's folder is locked as long as `locks` are open. Settings that cannot be used leave no folder.
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
        _check_ranks_agree({**config.to_dict(), "data's fingerprint": task.fingerprint})
        _check_early(config, execution, task)
        parallel = parallel_of(config.parallel, parameters=shape.num_parameters, execution=execution)
        _check_memory(config, execution, shape, parallel)
        origin = _open_origin(config, folder, shape, task, resume=resume)
        start = origin.parent["update"] if origin.parent else 0
        _check_budget(config, start)
        updater_fields, proposer = _restore(config, execution, task, shape, parallel, origin)
    # All ranks have looked at the folder before the first one writes.
    shared = {"model": shape, "task": task, "execution": execution, "parent": origin.parent}
    record = run_config(config, **shared, processes=parallel.processes)
    on_rank0(lambda: _write_folder_(folder, config, record, origin))
    if origin.state:
        elapsed.load_state_dict(origin.state["elapsed"], branch=not origin.resumed)
    run = Run(
        config=config,
        folder=folder,
        execution=execution,
        task=task,
        model=updater_fields["model"],
        updater=Updater(**updater_fields),  # ranks that train together wait for each other in it
        proposer=proposer,
        elapsed=elapsed,
        start=start,
        parent_hash=origin.parent["hash"] if origin.parent else None,
        # A parent's, too: the best guess of the first update's seconds.
        recent=deque(origin.state.get("recent", ()), maxlen=8),
    )
    # Of this run alone: rewarming and timing begin after its newest event, not after a parent's.
    own = on_rank0(lambda: [event.update or 0 for event in run.events if "inherited" not in event.values])
    run.heads_changed = max(own, default=None)
    if is_rank0():
        run.open_log_()
    if parallel.processes > 1:
        run.say(f"{parallel.processes} processes ({parallel.kind}) take {run.updater.accumulation} micro-batches each")
    return run


def _train(run: Run, stop: "StopRequest") -> bool:
    """Run updates to the end; return False when a signal stopped them."""
    config = run.config
    run.model.train()
    run.elapsed.enter("train")
    if run.update == 0 and run.parent_hash is None and 0 in config.branch_updates:
        run.save()
    # Where a branch begins with an event, the state before it is the parent's checkpoint.
    apply_due_events_(run, saved=run.update == run.start and run.parent_hash is not None)
    _report_between(run)
    while not run.finished():
        record = run.run_update()
        if run.proposer:
            run.proposer.observe(run.update, record["loss"])
        if config.eval_every and run.update % config.eval_every == 0:
            run.controller_loss("periodic")
        periodic = config.save_every and run.update % config.save_every == 0
        finished = run.finished()
        # Read once: a signal that comes while this line runs waits for the next update, which is then saved.
        stopping = run.updater.parallel.any(stop.requested) and not finished
        if not finished and (stopping or periodic or run.update in config.branch_updates):
            run.save()
        if stopping:
            return False
        apply_due_events_(run)
        _report_between(run)
    run.elapsed.enter(None)
    if run.update > run.start or run.changed:
        run.save()
    return True


def apply_due_events_(run: Run, *, saved: bool = False) -> None:
    """Apply the events that are due, after a checkpoint of the state before them, unless there is one (`saved`).

    None is due where the run's budget allows no update after it. The place in the training data does not move.
    """
    budget, proposer = run.budget_share(), run.proposer
    if budget is not None and budget > 1:
        return
    while proposer and (event := proposer.propose(run.update)):
        if not saved:
            run.save()
        saved = True
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
    run.say(f"{change.summary}; took {sum(change.seconds.values()):.1f} s")
    return change.outcome(number, **losses)


def _report_between(run: Run) -> None:
    """Report on the model where the settings ask for it before the end, unless a report is there from before."""
    path = _report_path(run, run.update)
    if run.update not in run.config.report_at or run.finished() or on_rank0(path.is_file):
        return
    with run.elapsed(None), run.updater.parallel.whole():
        checkpoints = {"parent": run.parent_hash}
        report = run.task.report(run.model, run.execution, folder=path.parent, checkpoints=checkpoints)
        on_rank0(lambda: write_json(path, report))


def _report_path(run: Run, update: int) -> Path:
    return run.folder / "reports" / f"update-{update}" / "report.json"


def finish(run: Run) -> dict[str, Any]:
    """Evaluate the reporting partition, write result.json and return it; every rank calls this.

    Raises InputError where the run's time was over before the first update.
    """
    final, budget = on_rank0(lambda: latest(run.checkpoints)), run.config.time_budget_seconds
    if final is None or (budget is not None and run.update == run.start):
        raise InputError(
            f"time_budget_seconds={budget:g} must allow an update, and {run.elapsed.total:.1f} s passed before the "
            "first one; allow more time, in another folder"
        )
    with run.updater.parallel.whole():
        checkpoints: dict[str, str | None] = {"final": on_rank0(lambda: checkpoint_hash(final))}
        report = run.task.report(run.model, run.execution, folder=run.folder, checkpoints=checkpoints)
    return on_rank0(lambda: _write_result(run, final, report))


# --- the start: checks, the checkpoint that training goes on from, the folder


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


def _check_ranks_agree(settings: dict[str, Any]) -> None:
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


CERTAIN_SHARE = 0.6
"""Share of the estimated memory that updates certainly take: peaks on an H200 were 0.9 to 1.03 of the estimate, and
0.75 with half of the heads pruned."""


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


def _open_origin(config: TrainConfig, folder: Path, shape: GPTConfig, task: Task, *, resume: bool) -> Origin:
    """Open the checkpoint that training goes on from, if there is one, and take over its random state."""
    own = on_rank0(lambda: latest(folder / "checkpoints")) if resume else None
    parent = read_run_config(folder)["parent"] if own is not None else None
    if (path := own or config.parent) is None:
        return Origin()
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
            return Origin(checkpoint, parent=parent)
    task.check_continues(checkpoint.state, checkpoint.path)
    restore_random_state(checkpoint.state["random"])
    return Origin(checkpoint, own is not None, checkpoint.state, parent)


def _parent_entry(config: TrainConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the parent's entry of config.json; raise InputError when no update is left to do."""
    entry = {"path": config.parent, "hash": checkpoint.hash, "update": checkpoint.update}
    if config.fresh:
        return {**entry, "update": 0, "weights_of_update": checkpoint.update}
    done, budget = checkpoint.update, config.update_budget
    over = done >= config.updates if config.freeze is None else done > config.updates
    if over and budget is None and config.time_budget_seconds is None:
        raise InputError(f"updates must be above the {done} that the parent has done, got {config.updates}")
    # `saf freeze` writes the record of its event into the folder of its new checkpoint.
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
    many_lengths, size = config.finetuning is not None, config.batch_size * task.length * shape.hidden_size
    reason = graphs_unsupported(execution, parallel.kind, trained_patterns=trained, many_lengths=many_lengths)
    graphed = config.graphs == "on"
    if graphed and reason is not None:
        raise UnsupportedError(reason)
    if config.graphs == "auto":
        graphed = reason is None and not many_lengths and size <= GRAPHED_SIZE
    return {
        "model": model,
        "optimizer": optimizer,
        "batches": task.training(origin.update, execution.device, first=parallel.rank, every=parallel.processes),
        "execution": execution,
        "accumulation": micro_batches_of_one(config.accumulation, parallel.processes, batch_size=config.batch_size),
        "parallel": parallel,
        "clip": math.inf if config.clip is None else config.clip,
        "graphed": graphed,
        "gradient": gradient,
        "done": origin.update,
    }, proposer


def _build(
    config: TrainConfig, shape: GPTConfig, execution: Execution, origin: Origin, *, moments_on_cpu: bool
) -> tuple[GPT, AdamW]:
    """Return model and optimiser on the device: the checkpoint's, or drawn from the run's seed."""
    if checkpoint := origin.checkpoint:
        # "auto" chose a backend at the event; the checkpoint names it, so that resuming is exact.
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


def _write_folder_(folder: Path, config: TrainConfig, record: dict[str, Any], origin: Origin) -> None:
    """Write config.json, cut logs back to the origin, and take over the event of a parent that `saf freeze` wrote."""
    after_event = origin.checkpoint is not None and origin.resumed and origin.checkpoint.path.name.endswith("-frozen")

    def stays(line: dict[str, Any]) -> bool:
        """Return whether a line is of the time before the origin; the run writes all later ones again."""
        update = line.get("update") or 0
        if "inherited" in line or update != origin.update:
            return "inherited" in line or update < origin.update
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


# --- result.json


def _write_result(run: Run, final: Path, report: dict[str, Any]) -> dict[str, Any]:
    """Write result.json with the task's report of the checkpoint `final`, and return it.

    `train_loss` averages the last twentieth of the updates (at most 100). `missing` names events, reports and seconds
    that differ from the settings.
    """
    config, metrics, events = run.config, read_lines(run.folder / "metrics.jsonl"), run.events
    branch = None if config.freeze_update is None else run.checkpoints / step_name(config.freeze_update)
    branched = checkpoint_hash(branch) if branch and (branch / MANIFEST).is_file() else None
    saved = {"parent": run.parent_hash, "branch": branched, "final": checkpoint_hash(final)}
    # One for both: the fingerprint of a task covers all its data, for training and measuring.
    data = {"train": run.task.fingerprint, "report": run.task.fingerprint}
    settings, device = config.to_dict(), device_name(run.execution.device)
    header = result_header("run", settings, device=device, checkpoints=saved, data=data)
    frozen, pruned = (adapter_for(run.model).heads(kind).to_list() for kind in EDITED)
    names = {"patterns_hash": _patterns_hash(events), "heads": frozen, "pruned": pruned, "seed": config.seed}
    header["provenance"] |= names
    last = [line["loss"] for line in metrics[-max(1, min(100, config.updates // 20)) :]]
    paths = {update: _report_path(run, update) for update in config.report_at}
    reports = {update: read_json(path) if path.is_file() else None for update, path in paths.items()}
    reports |= {run.update: report} if run.update in paths else {}
    missing = list(_missing(run, events, reports))
    for difference in missing:
        warnings.warn(difference, SafWarning, stacklevel=4)
    result = {
        **header,
        "arm": arm(frozen=frozen, pruned=pruned, events=events),
        "updates": run.update,
        "tokens": run.tokens,
        "trainable_pattern_parameters": sum(logits.numel() for logits in pattern_parameters(run.model)),
        "train_loss": fmean(last) if last else None,
        **report,
        "reports": {str(update): reports[update] for update in sorted(reports) if reports[update] is not None},
        "update_seconds": _update_seconds(metrics, run.timed_from),
        "peak_memory_bytes": run.peak_memory,
        "time": run.elapsed.record(),
        "missing": missing,
        "intervention": _intervention(events) if events else None,
        "checkpoint": str(final),
    }
    write_json(run.folder / "result.json", result)
    return result


def _missing(run: Run, events: list[EventRecord], reports: dict[int, Any]) -> Iterator[str]:
    """Yield differences from the settings: time beyond the budget, events without effect, reports that are missing."""
    budget, used = run.config.time_budget_seconds or math.inf, run.elapsed.total
    if used > 1.001 * budget:  # updates of the same work differ by a thousandth
        yield f"time: the budget was {budget:.2f} s, and the run used {used:.2f} s"
    if run.changed and run.budget_share() is not None:
        yield f"events: no training followed the event after update {run.update}"
    if run.config.freeze is not None and not events:
        yield f"events: none is recorded until update {run.update}, and the settings freeze heads"
    # Schedules whose events come when the loss decides have none that must come.
    if run.proposer and not run.proposer.finished and run.config.freeze_update is not None:
        yield f"events: the run ended after update {run.update}, before all events of its schedule"
    yield from (f"reports: none after update {update}" for update, each in reports.items() if each is None)


def _update_seconds(metrics: list[dict[str, Any]], timed_from: int) -> dict[str, Any] | None:
    """Return median, 20th and 80th percentile of the seconds of updates from `timed_from` on, or of all."""
    timed = [line for line in metrics if line["update"] >= timed_from] or metrics
    if not timed:
        return None
    seconds = [line["update_seconds"] for line in timed]
    cuts = quantiles(seconds, n=10, method="inclusive") if len(seconds) > 1 else seconds * 9
    spread = {"median": cuts[4], "p20": cuts[1], "p80": cuts[7]}
    return {**spread, "first_update": timed[0]["update"], "last_update": timed[-1]["update"]}


def _intervention(events: list[EventRecord]) -> dict[str, Any]:
    """Return the summary of a run's events, at least one: first update, heads in force, seconds by part, losses.

    `loss_rise` adds up the immediate rises of the controller loss at each event; None where no run measured them.
    """
    seconds: dict[str, float] = {}
    around = [(event.values.get("loss_before"), event.values.get("loss_after")) for event in events]
    rises = [after - before for before, after in around if before is not None and after is not None]
    for event in events:
        seconds |= {name: seconds.get(name, 0.0) + cost for name, cost in event.seconds.items()}
    return {
        "update": events[0].update,
        "events": len(events),
        "heads": heads_in_force(events),
        "seconds": seconds,
        "loss_before": around[0][0],
        "loss_after": around[-1][1],
        "loss_rise": math.fsum(rises) if len(rises) == len(events) else None,
    }


def _patterns_hash(events: list[EventRecord]) -> str | None:
    """Return the SHA-256 of the tensors of the freezes that were not undone: of one file, or of the files' hashes."""
    hashes = [file_hash(event.tensors_path) for event in events if event.undone_by is None and event.tensors_path]
    return hashlib.sha256("".join(hashes).encode()).hexdigest() if len(hashes) > 1 else next(iter(hashes), None)


# --- signals


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
            hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
            for number in (signal.SIGINT, signal.SIGTERM, *hangup):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _silence_lost_terminal_()
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def _silence_lost_terminal_() -> None:
    """Send output nowhere where its terminal is gone: progress lines must not prevent the checkpoint."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
