"""A training run from top to bottom: it starts, makes updates and events, saves, stops at a signal, and reports."""

import math
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.optim import AdamW

from saf.calibration import free_bytes
from saf.checkpoint import Checkpoint, latest, open_checkpoint, restore_random_state
from saf.data.loader import INDEX_FILE
from saf.distributed import (
    all_gather,
    all_ranks_or_raise,
    in_group,
    is_rank0,
    on_rank0,
    process_group,
)
from saf.errors import CheckpointError, DivergenceError, InputError, UnsupportedError
from saf.freeze_config import check_heads
from saf.machine import Execution, rated_flops
from saf.models import GPT, GPTConfig
from saf.models.adapter import adapter_for
from saf.ops.live import pinned
from saf.records.events import inherit_events, keep_events_, read_events
from saf.records.files import locked, read_lines, remove_leftovers_, write_json, write_lines
from saf.records.table import byte_size
from saf.schedules import Event, OneTime, Outcome, Proposer, setting_of_moment
from saf.tasks import TASKS, Task, TextTask
from saf.train.config import TrainConfig, check_same_run, context_length, model_config, read_run_config, run_config
from saf.train.events import apply_event, check_freeze, needs_gradient, resolve_event, start_gradient, start_proposer
from saf.train.parallel import Parallel, Shards, micro_batches_of_one, parallel_of
from saf.train.run import Elapsed, Run, RunLog, finish, report_between
from saf.train.step import (
    CERTAIN_SHARE,
    FEW,
    Updater,
    build_optimizer,
    graphs_unsupported,
    trains_patterns,
    update_memory,
)

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
        CheckpointError: A damaged checkpoint.
        DivergenceError: A loss or gradient that is not finite; nothing of that update was applied.
        OSError: The disk is full; checkpoints up to there are whole.
        SafError: Another process of the group ended.
    """
    with process_group(config.device), _few_host_threads(config.device), ExitStack() as locks:
        with StopRequest() as stop:
            run = start_run(config, resume=resume, locks=locks)
            try:
                finished = _train(run, stop)
            except DivergenceError as error:
                raise DivergenceError(f"{error}. {run.last_good()}, with a lower peak_lr") from None
            finally:
                if run.log:
                    run.log.close()
        if not finished:
            return {"stopped_at": run.update, "checkpoint": str(on_rank0(lambda: latest(run.checkpoints)))}
        return finish(run)


@contextmanager
def _few_host_threads(device: str) -> Iterator[None]:
    """With a GPU, run host operations on one thread in this context.

    Copies of batches wake all threads, which then spin beside the one that launches kernels: an update of 34M at 4K
    takes 0.080 s with 64 threads and 0.055 s with one (four runs on an H200 host). The whole run has one number,
    since compiled code is compiled again where it changes.
    """
    threads = torch.get_num_threads()
    if device != "cpu" and torch.cuda.is_available():
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# --- updates and events


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
        report_between(run)
    run.elapsed.enter(None)
    if run.update > run.start or run.changed:
        run.save()
    return True


def apply_due_events_(run: Run, *, saved: bool = False) -> None:
    """Apply the events that are due, after a checkpoint of the state before them, unless there is one (`saved`).

    None is due where the run's budget leaves no update behind it. The place in the training data does not move.
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
    return change.outcome(number, loss_before=before, loss_after=after)


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


# --- the start of a run


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

    The run's folder is held as long as `locks` are open; settings that cannot be used leave no folder behind.

    Raises:
        InputError: A run is there already (without `resume`), or has other settings.
        CheckpointError: The checkpoint is damaged, or is of other data or another model.
        DataError: The data cannot be used, or are too few.
        UnsupportedError: The backend or kernel of the settings cannot run here.
    """
    elapsed, folder = Elapsed(), Path(config.out)
    with all_ranks_or_raise():  # all have looked before the first one writes
        _check_folder(folder, config, resume=resume)
        if resume and is_rank0():
            _lock(folder, locks)
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
        trained = config.freeze is not None and config.freeze.trainable
        parallel, reason = parallel_of(
            config.parallel, parameters=shape.num_parameters, execution=execution, trained_patterns=trained
        )
        _check_early(config, execution, task, parallel)
        _check_memory(config, execution, shape, parallel, resume=resume)
        origin = _origin(config, folder, shape, task, resume=resume)
        parts, proposer = _restore(config, execution, task, shape, parallel, origin)
    with all_ranks_or_raise():
        if is_rank0():
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            if not resume:
                _lock(folder, locks)
                _check_folder(folder, config, resume=False, now="by now, which another process began")
            shared = {"model": shape, "task": task, "execution": execution, "parent": origin.parent}
            _write_start_(folder, config, run_config(config, **shared, processes=parallel.processes), origin)
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
        start=origin.parent["update"] if origin.parent else 0,
        parent_hash=origin.parent["hash"] if origin.parent else None,
        # A parent's, too: the best guess of the first update's seconds.
        recent=deque(origin.state.get("recent", ()), maxlen=8),
    )
    if origin.checkpoint and parallel.kind == Shards.kind:
        engine = run.updater.engine
        origin.checkpoint.fill_(engine.module, engine.optimizer if origin.state else None)
    own = on_rank0(lambda: [event.update or 0 for event in run.events if "inherited" not in event.values])
    run.heads_changed = max(own, default=None)
    if is_rank0():
        run.log = _open_log(run)
    for line in _choices(run, reason):
        run.say(line)
    return run


def _restore(
    config: TrainConfig, execution: Execution, task: Task, shape: GPTConfig, parallel: Parallel, origin: Origin
) -> tuple[dict[str, Any], Proposer | None]:
    """Return the fields of the updater at the run's origin, and the schedule's state machine."""
    accumulation = micro_batches_of_one(config.accumulation, parallel.processes, batch_size=config.batch_size)
    model, optimizer = _build(config, shape, execution, origin, sharded=parallel.kind == Shards.kind)
    layouts = [site.layout for site in adapter_for(model).sites()]
    own_schedule = origin.state.get("schedule") if origin.resumed else None
    proposer = start_proposer(config, layouts, updates=config.updates, state=own_schedule)
    if config.freeze and proposer and not origin.resumed:
        check_heads(config.freeze, layouts, allow_empty=config.freeze.asks_for_none)
    return {
        "model": model,
        "optimizer": optimizer,
        "batches": task.training(origin.update, execution.device, first=parallel.rank, every=parallel.processes),
        "execution": execution,
        "accumulation": accumulation,
        "parallel": parallel,
        "clip": math.inf if config.clip is None else config.clip,
        "graphed": _graphed(config, execution, parallel, model, tokens=config.batch_size * task.length),
        "gradient": start_gradient(model, config, proposer, state=origin.state, update=origin.update),
        "done": origin.update,
    }, proposer


def _lock(folder: Path, locks: ExitStack) -> None:
    busy = InputError(f"another process trains in {folder}; wait for it, then resume")
    locks.enter_context(locked(folder / ".lock", busy))


def _check_folder(folder: Path, config: TrainConfig, *, resume: bool, now: str = "already") -> None:
    """Raise InputError unless the folder is new, or holds the run to resume with the same settings."""
    if (folder / INDEX_FILE).exists():
        raise InputError(f"out must be another folder than the data's, got {folder}")
    holds_run = (folder / "config.json").exists()
    if resume and not holds_run:
        raise InputError(f"{folder} holds no run to resume; check the folder, or train a new run")
    if holds_run and not resume:
        raise InputError(f"{folder} holds a run {now}; resume it, or choose another folder")
    if resume:
        check_same_run(config, read_run_config(folder)["settings"])


def _check_same_settings(settings: dict[str, Any]) -> None:
    """Raise InputError unless every rank has the settings of the first one."""
    first, *others = all_gather(settings)
    for rank, own in enumerate(others, 1):
        if differing := [name for name in first if own.get(name) != first[name]]:
            words = ", ".join(f"{name} {own.get(name)!r} (the first one {first[name]!r})" for name in differing)
            raise InputError(f"all processes must have the same settings and data; process {rank} has {words}")


def _check_early(config: TrainConfig, execution: Execution, task: Task, parallel: Parallel) -> None:
    """Raise before training for what would fail at the first event or update."""
    freeze = config.freeze
    task.check(calibrates=freeze is not None, scores_outputs=freeze is not None and "outputs" in freeze.needs)
    check_freeze(config, execution)
    if freeze is not None:
        freeze.check_calibration(sequences=config.calibration_sequences)
    if config.graphs == "on":
        trained, many = freeze is not None and freeze.trainable, config.finetuning is not None
        reason = graphs_unsupported(execution, parallel.kind, trained_patterns=trained, many_lengths=many)
        if reason is not None:
            raise UnsupportedError(reason)
    with pinned(config.kernel, execution.device):  # raises where the kernel cannot run here
        pass


def _check_memory(
    config: TrainConfig, execution: Execution, shape: GPTConfig, parallel: Parallel, *, resume: bool
) -> None:
    """Raise InputError for an update that certainly takes more memory than this rank's device has."""
    # Sequences of other tasks have many lengths, mostly far below the context: only the weights are certain.
    tokens = config.batch_size * context_length(config) if config.task == TextTask.name else 0
    memory = update_memory(
        shape,
        tokens,
        precision=execution.precision,
        recomputes=execution.activation_checkpointing,
        shards=parallel.processes if parallel.kind == Shards.kind else 1,
        without_heads=resume or config.parent is not None or config.freeze_update == 0,  # all may be pruned by then
    )
    device, cuda = execution.device, execution.device.type == "cuda"
    # A GPU's free memory would leave out what an earlier run in this process is about to free.
    available = torch.cuda.get_device_properties(device).total_memory if cuda else free_bytes(device)
    if available is not None and CERTAIN_SHARE * memory.total > available:
        raise InputError(
            f"training needs about {byte_size(memory.total)} of memory ({byte_size(memory.state)} for weights and "
            f"moments, {byte_size(memory.activations)} for {tokens:,} tokens), got {byte_size(available)} "
            f"{'in all' if cuda else 'free'}; take a smaller model, batch_size or length"
        )


def _graphed(config: TrainConfig, execution: Execution, parallel: Parallel, model: GPT, *, tokens: int) -> bool:
    """Return whether the run replays its micro-batches, each of so many tokens, as CUDA graphs."""
    if config.graphs != "auto":
        return config.graphs == "on"
    if config.finetuning is not None or tokens * model.config.hidden_size > FEW:
        return False
    trained = (config.freeze is not None and config.freeze.trainable) or trains_patterns(model)
    return graphs_unsupported(execution, parallel.kind, trained_patterns=trained) is None


def _origin(config: TrainConfig, folder: Path, shape: GPTConfig, task: Task, *, resume: bool) -> Origin:
    """Open the checkpoint that training goes on from, if there is one, and take over its random state."""
    own = on_rank0(lambda: latest(folder / "checkpoints")) if resume else None
    parent = read_run_config(folder)["parent"] if own is not None else None
    if (path := own or config.parent) is None:
        return Origin(None, False, {}, None)
    checkpoint = open_checkpoint(path)
    _check_model(checkpoint, shape)
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


def _check_model(checkpoint: Checkpoint, shape: GPTConfig) -> None:
    saved, expected = checkpoint.state["model"], shape.to_dict()
    if differing := [name for name in expected if saved.get(name) != expected[name]]:
        words = ", ".join(f"{name} {saved.get(name)} (the settings have {expected[name]})" for name in differing)
        advice = ". Give the data that it was trained on" if "vocab_size" in differing else ""
        raise CheckpointError(f"{checkpoint.path} holds a model with {words}{advice}")


def _parent_entry(config: TrainConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the parent's entry of config.json; raise InputError when it left nothing to do."""
    entry = {"path": config.parent, "hash": checkpoint.hash, "update": checkpoint.update}
    if config.fresh:
        return {**entry, "update": 0, "weights_of_update": checkpoint.update}
    done, budget, first = checkpoint.update, config.update_budget, config.freeze_update
    over = done >= config.updates if config.freeze is None else done > config.updates
    if over and budget is None and config.time_budget_seconds is None:
        raise InputError(f"updates must be above the {done} that the parent has done, got {config.updates}")
    if config.freeze and config.schedule and budget is not None and first is not None and first >= done + budget:
        name = setting_of_moment(config.schedule)
        raise InputError(f"{name} must be before update {done + budget}, where update_budget ends, got update {first}")
    # `saf freeze` leaves the record of its event beside the checkpoint that it made from another one.
    return {**entry, "frozen_from": checkpoint.parent} if read_events(checkpoint.path) else entry


def _build(
    config: TrainConfig, shape: GPTConfig, execution: Execution, origin: Origin, *, sharded: bool
) -> tuple[GPT, AdamW]:
    """Return model and optimiser on the device: the checkpoint's, or drawn from the run's seed.

    Where they are `sharded`, a checkpoint's weights and moments are read later, by each rank its own.
    """
    if checkpoint := origin.checkpoint:
        # "auto" chose at the event; its choice goes on, so that resuming is exact.
        named = config.freeze.backend if config.freeze and config.freeze.backend != "auto" else None
        model = checkpoint.model(execution.device, backend=named, filled=not sharded)
    else:
        model = GPT.skip_init(shape)
        model.reset_parameters(torch.Generator().manual_seed(config.seed))
        model.to(execution.device)
    for site in adapter_for(model).sites():
        site.pin(config.kernel)
    if checkpoint and origin.state:
        return model, checkpoint.optimizer(model, filled=not sharded)
    return model, build_optimizer(model, betas=config.betas, weight_decay=config.weight_decay)


def _write_start_(folder: Path, config: TrainConfig, record: dict[str, Any], origin: Origin) -> None:
    """Write config.json, cut the logs back to the origin, and take over the event of a parent that `saf freeze` made.

    The events of the origin's update come again, unless it is the state after them.
    """
    update = origin.update
    after_event = origin.checkpoint is not None and origin.resumed and origin.checkpoint.path.name.endswith("-frozen")

    def stays(line: dict[str, Any]) -> bool:
        number = line.get("update") or 0
        of_event = line.get("when", "periodic") != "periodic" or "kind" in line
        return "inherited" in line or number < update or (number == update and (after_event or not of_event))

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
    rated = rated_flops(execution.device_name, execution.precision)
    flops = tokens * run.model.config.flops_per_token(run.task.length)
    peak = flops / (rated * run.updater.parallel.processes) if rated else None
    return RunLog(run.folder, config, done=run.update, total=total, tokens=tokens, peak=peak)


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
