"""Stories that each rank of a group trains, and asserts what it sees: `two` and `four`, which test_parallel starts."""

import hashlib
import json
import math
import os
import signal
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed

import saf
import saf.freezing as editing
from saf.data import TokenData
from saf.distributed import all_gather, on_rank0
from saf.errors import DivergenceError, InputError, SafError, SelectionError, UnsupportedError
from saf.freeze_config import FreezeConfig
from saf.machine import Execution
from saf.schedules import ValidationBudget
from saf.statistics import LayerStatistics
from saf.tasks.base import Continuation, likelihoods
from saf.tasks.text import evaluate_perplexity
from saf.train import TrainConfig, loop, pretrain
from saf.train.run import Run
from saf.train.step import Parallel, Replicas, Shards, Updater, build_optimizer

LOSSES = 2e-6
"""Relative: losses and gradient norms of several ranks are sums in another order, in float32."""
FREEZE = FreezeConfig(rate=0.5, max_fit_kl=10.0)
LAYER = FreezeConfig(heads=[(0, 0), (0, 1), (0, 2), (0, 3), (1, 2)], max_fit_kl=10.0)
"""A layer that keeps no query and no key weights."""
STORIES = {
    # A freeze that is undone, one that stays, and an update after each.
    "undone": {"freeze": FREEZE, "schedule": ValidationBudget(begin=0.5, every=0.25)},
    "pruned": {
        "freeze": FreezeConfig(heads=[*((0, head) for head in range(4)), (1, 1)], operation="prune"),
        "updates": 4,
    },
}
KINDS = ("ddp", "fsdp")


def raised_loss(run: Run, when: str, real=Run.controller_loss, **more) -> float:
    """Return the controller loss, as if the first freeze had raised it."""
    first = not any(event.kind == "undo" for event in on_rank0(lambda: run.events))
    return real(run, when, **more) + (0.5 if first and when in ("after_freeze", "before_undo") else 0.0)


def story(config: TrainConfig, name: str) -> dict:
    """Train one of STORIES."""
    with pytest.MonkeyPatch.context() as patch:
        if name == "undone":
            patch.setattr(Run, "controller_loss", raised_loss)
        return pretrain(replace(config, **STORIES[name], track_gradients=config.parallel != "fsdp"))


class BeforeUpdate:
    """Keep the run that `pretrain` makes, and do something before an update of it."""

    def __init__(self, patch: pytest.MonkeyPatch, update: int = 0, action=lambda run: None):
        real = loop.run_update

        def updating(run):
            self.run = run
            if run.update + 1 == update:
                action(run)
            return real(run)

        patch.setattr(loop, "run_update", updating)


def stopping(patch: pytest.MonkeyPatch, update: int, by: bool) -> None:
    """Let a signal come to this process before an update."""
    BeforeUpdate(patch, update, lambda run: by and os.kill(os.getpid(), signal.SIGTERM))


def two(rank: int, folder: str, settings: dict) -> None:
    """Train as one of two ranks; rank 0 writes for test_parallel what one process must find too."""

    def config(name: str, **changes) -> TrainConfig:
        return TrainConfig(**{**settings, "out": f"{folder}/{name}", **changes})

    for kind in KINDS:
        for name in STORIES:
            with pytest.MonkeyPatch.context() as patch:
                if rank:  # sees nothing of what rank 0 writes, as on a machine where files appear late
                    exists = Path.exists
                    patch.setattr(Path, "exists", lambda at, was=exists: not at.name.startswith("step-") and was(at))
                    patch.setattr("saf.train.run.read_events", lambda folder: [])
                    patch.setattr("saf.train.start.latest", lambda folder: None)
                watch = BeforeUpdate(patch)
                same_on_all_ranks(
                    [story(config(f"{name} {kind}", parallel=kind), name)["report_loss"], hash_of(watch.run)]
                )
                assert (watch.run.log is None) == (rank > 0)
    with pytest.MonkeyPatch.context() as patch:
        stopping(patch, 9, rank == 1)
        assert pretrain(config("begun", freeze=LAYER, parallel="fsdp"), resume=True)["stopped_at"] == 9
    with pytest.MonkeyPatch.context() as patch:
        stopping(patch, 2, rank == 1)
        assert story(config("four", parallel="fsdp"), "pruned")["stopped_at"] == 2
    assert bytes_held() == 8 * saf.preset("tiny").num_parameters, "half of 16 a parameter"
    for parallel in (Replicas(), Shards(torch.device("cpu"))):
        assert uneven_targets(rank, parallel) == pytest.approx(uneven_targets(0, Parallel(), every=1), rel=LOSSES)
    outcomes = {"evaluated": same_on_all_ranks(evaluated(settings["data"], f"{folder}/evaluated"))}
    outcomes["frozen"] = same_on_all_ranks(frozen_alike(rank))
    if rank == 0:
        Path(folder, "outcomes.json").write_text(json.dumps(outcomes))
    errors_and_slow_work_of_rank_0(rank)
    refusals(rank, config)
    failures(rank, config)
    os._exit(0)  # the group is broken: nothing is left to leave in order


def four(rank: int, config: TrainConfig) -> None:
    """Go on on four ranks where two were stopped."""
    pretrain(replace(config, parallel="fsdp", **STORIES["pruned"]), resume=True)


def same_on_all_ranks(value):
    """Return the value, which must be the same on all ranks."""
    assert all(each == value for each in all_gather(value))
    return value


def hash_of(run: Run) -> str:
    """Return the SHA-256 of all parameters, buffers (patterns among them) and moments."""
    with run.updater.parallel.whole(moments=True):
        state = [*run.model.state_dict().values(), *run.model.buffers()]
        return digest([*state, *(value for of in run.updater.optimizer.state.values() for value in of.values())])


def digest(tensors) -> str:
    plain = (tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(b"".join(plain)).hexdigest()


# --- an update


def small_model(**changes) -> saf.GPT:
    model = saf.GPT(saf.preset("tiny", **{"vocab_size": 64, "max_length": 16, **changes}))
    model.reset_parameters(torch.Generator().manual_seed(0))
    return model


def uneven_targets(rank: int, parallel: Parallel, every: int = 2) -> list[float]:
    """Return loss and gradient norm of an update whose four micro-batches have unequal numbers of targets."""
    ids = torch.randint(0, 64, (4, 1, 17), generator=torch.Generator().manual_seed(0))
    targets = ids[..., 1:].clone()
    for number, own in enumerate(targets):
        own[:, 3 + 4 * number :] = -100
    updater = Updater(
        model=(model := small_model()),
        optimizer=build_optimizer(model),
        batches=iter([(ids[number, :, :-1], targets[number]) for number in range(rank, 4, every)]),
        execution=Execution.of("cpu"),
        accumulation=4 // every,
        parallel=parallel,
        clip=math.inf,
    )
    return list(updater.update(1e-3)[:2])


def bytes_held() -> int:
    """Return the bytes of weights, gradients and moments that a rank holds of a sharded model."""
    model = saf.GPT(saf.preset("tiny"))
    engine = Shards(torch.device("cpu")).engine(model, build_optimizer(model), Execution.of("cpu"))
    engine.forward(*torch.zeros(2, 1, 8, dtype=torch.long)).backward()
    held = [tensor for parameter in engine.module.parameters() for tensor in (parameter, parameter.grad)]
    engine.optimizer.step()
    held += [value for of in engine.optimizer.state.values() for value in of.values() if value.dim()]
    return sum(tensor.to_local().numel() * tensor.element_size() for tensor in held)


# --- work that ranks share


def evaluated(data: str, out: str) -> list:
    """Return the loss of a small model on seven windows, and likelihoods: batches do not share out evenly."""
    opened = TokenData.open(data)
    model = small_model(vocab_size=opened.vocab_size)
    record = evaluate_perplexity(model, opened, batch_size=3, limit=7, out=out)
    names = ("loss", "windows", "tokens", "log_probs_sha256", "windows_hash")
    questions = [Continuation(tuple(range(1, 2 + n % 4)), (n, n + 1)) for n in range(11)]
    answers = [[one.log_prob, one.greedy] for one in likelihoods(small_model(), questions, batch_size=2)]
    return [[record[name] for name in names], answers]


def frozen_alike(rank: int) -> dict:
    """Freeze with batches of this rank alone; six heads are measured by each rank, of the middle layer by both."""
    batch = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(rank))
    model = small_model(num_layers=3)
    report = saf.freeze_(model, [batch], saf.FreezeConfig(rate=0.25, max_fit_kl=9))
    return {
        "heads": report.heads.to_list(),
        "alpha": report.patterns.alpha.tolist(),
        "sequences": report.statistics.sequences_hash,
        "statistics": digest([getattr(report.statistics, name) for name in LayerStatistics._fields]),
        "output": model(torch.zeros(1, 16, dtype=torch.long))[0].sum().item(),
    }


def errors_and_slow_work_of_rank_0(rank: int) -> None:
    """Errors of rank 0 arrive as what they are, or named; its work may take longer than messages of the group."""
    with pytest.raises(SelectionError, match="too few"):
        on_rank0(lambda: fail(SelectionError("too few")))
    strange = (SafError, "process 0 failed: ZeroDivisionError: none") if rank else (ZeroDivisionError, "none")
    with pytest.raises(strange[0], match=strange[1]):
        on_rank0(lambda: fail(ZeroDivisionError("none")))
    distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=0.2))
    assert on_rank0(lambda: time.sleep(1) or "done") == "done"
    distributed.distributed_c10d._set_pg_timeout(timedelta(minutes=30))


def fail(error: Exception) -> None:
    raise error


# --- what cannot work


def refusals(rank: int, config) -> None:
    """Begin runs that no group can make; what one rank refuses, all do."""
    trained = {"freeze": FreezeConfig(rate=0.5, trainable=True), "parallel": "fsdp"}
    for error, words, changes in (
        (InputError, "accumulation=2 and batch_size=3", {"accumulation": 3}),
        (InputError, "needs one process, got 2", {"parallel": "none"}),
        (InputError, "process 1 must have .*: batch_size must be 2, got 4", {"batch_size": 2 + 2 * rank}),
        (UnsupportedError, "fsdp takes neither", trained),
    ):
        with pytest.raises(error, match=words):
            pretrain(config("refused before", **changes))
    assert not Path(config("refused before").out).exists()


def failures(rank: int, config) -> None:
    """Fail on one of two ranks, one way after the other, at last by ending it."""
    with pytest.MonkeyPatch.context() as patch:

        def poison(run):
            if rank == 1:
                engine = run.updater.engine
                run.updater.engine = replace(engine, forward=lambda *a, **k: engine.forward(*a, **k) * float("nan"))

        watch = BeforeUpdate(patch, 4, poison)
        with pytest.raises(DivergenceError, match=r"update 4 was not applied.*Go on from .*step-3 with"):
            pretrain(config("diverged"))
        assert watch.run.update == 3
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(editing, "install_", lambda *_, **__: fail(UnsupportedError("no room for the tables")))
        watch = BeforeUpdate(patch)
        with pytest.raises(UnsupportedError, match="no room for the tables"):
            pretrain(config("refused", freeze=FREEZE))
        before = saf.load(watch.run.checkpoints / "step-6").state_dict()
        assert digest(before.values()) == digest(watch.run.model.state_dict().values()), "rank 0 undid its edit"
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("saf.train.events.plan_calibration", lambda *_, **__: {}["plan"])
        error, words = (KeyError, "plan") if rank else (SafError, "process 1 failed: KeyError: 'plan'")
        with pytest.raises(error, match=words):
            pretrain(config("unlike", freeze=FREEZE))
        patch.setattr("saf.train.events.plan_calibration", lambda *_, **__: os._exit(9) if rank else "")
        with pytest.raises((SafError, RuntimeError)):  # and no waiting for a rank that ended
            pretrain(config("lost", freeze=FREEZE))
