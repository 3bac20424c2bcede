"""What each rank of a group does, one story after the other: `two` and `four`, which test_parallel starts."""

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
from saf.calibration.measure import LayerStatistics
from saf.data import TokenData
from saf.distributed import on_rank0
from saf.errors import SelectionError, UnsupportedError
from saf.freeze_config import FreezeConfig
from saf.machine import Execution
from saf.schedules import ValidationBudget
from saf.tasks.base import Continuation, likelihoods
from saf.tasks.text import evaluate_perplexity
from saf.train import TrainConfig, load_model, pretrain
from saf.train.run import Run
from saf.train.step import Parallel, Replicas, Shards, Updater, build_optimizer

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


def dear(run: Run, when: str, real=Run.controller_loss, **more) -> float:
    """Return the controller loss, as if the first freeze had raised it."""
    first = not any(event.kind == "undo" for event in on_rank0(lambda: run.events))
    return real(run, when, **more) + (0.5 if first and when in ("after_freeze", "before_undo") else 0.0)


def story(config: TrainConfig, name: str) -> dict:
    """Train one of STORIES."""
    with pytest.MonkeyPatch.context() as patch:
        if name == "undone":
            patch.setattr(Run, "controller_loss", dear)
        return pretrain(replace(config, **STORIES[name], track_gradients=config.parallel != "fsdp"))


class Watching:
    """Keep the run that `pretrain` makes, and do something before an update of it."""

    def __init__(self, patch: pytest.MonkeyPatch, update: int = 0, action=lambda run: None):
        real = Run.run_update

        def updating(run):
            self.run = run
            if run.update + 1 == update:
                action(run)
            return real(run)

        patch.setattr(Run, "run_update", updating)


def hash_of(run: Run) -> str:
    """Return the SHA-256 of all parameters, buffers (patterns among them) and moments."""
    with run.updater.parallel.whole(moments=True):
        state = [*run.model.state_dict().values(), *run.model.buffers()]
        return digest([*state, *(value for of in run.updater.optimizer.state.values() for value in of.values())])


def digest(tensors: list[torch.Tensor]) -> str:
    plain = (tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(b"".join(plain)).hexdigest()


def raised(function) -> list[str]:
    """Return the kind and the words of what a function raises."""
    try:
        function()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


def stopping(patch: pytest.MonkeyPatch, update: int, by: bool) -> None:
    """Let a signal come to this process before an update."""
    Watching(patch, update, lambda run: by and os.kill(os.getpid(), signal.SIGTERM))


def two(rank: int, folder: str, settings: dict) -> None:
    """Train as one of two ranks, one story after the other, and write what came of each."""
    said = {}

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
                watching = Watching(patch)
                said[f"{name} {kind}"] = story(config(f"{name} {kind}", parallel=kind), name)["report_loss"]
                said[f"{name} {kind} hash"] = hash_of(watching.run)
    said["writes"] = watching.run.log is not None
    pretrain(config("low", freeze=LAYER, parallel="fsdp", precision="bf16", updates=4))
    with pytest.MonkeyPatch.context() as patch:
        stopping(patch, 9, rank == 1)
        said["begun"] = pretrain(config("begun", freeze=LAYER, parallel="fsdp"), resume=True)
    with pytest.MonkeyPatch.context() as patch:
        stopping(patch, 2, rank == 1)
        assert story(config("four", parallel="fsdp"), "pruned")["stopped_at"] == 2
    said["bytes"] = bytes_held()
    said["uneven targets"] = [uneven_targets(rank, parallel) for parallel in (Replicas(), Shards(torch.device("cpu")))]
    said["evaluated"] = [evaluated(settings["data"], f"{folder}/evaluated"), answered()]
    said["frozen alike"], said["late"] = frozen_alike(rank), late()
    refusals(rank, said, config)
    failures(rank, said, config, lambda: Path(folder, f"{rank}.json").write_text(json.dumps(said)))
    os._exit(0)  # the group is broken: nothing is left to leave in order


def four(rank: int, config: TrainConfig) -> None:
    """Go on on four ranks where two were stopped."""
    pretrain(replace(config, parallel="fsdp", **STORIES["pruned"]), resume=True)


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
    own = iter([(ids[number, :, :-1], targets[number]) for number in range(rank, 4, every)])
    updater = Updater(
        model=(model := small_model()),
        optimizer=build_optimizer(model),
        batches=own,
        execution=Execution.of("cpu"),
        accumulation=4 // every,
        parallel=parallel,
        clip=math.inf,
    )
    return list(updater.update(1e-3)[:2])


def frozen_alike(rank: int) -> dict:
    """Freeze with batches of this rank alone, and meet errors of rank 0; return what came of it."""
    answers = {}
    for name, error in (("known", SelectionError("too few")), ("strange", ZeroDivisionError("none"))):
        answers[name] = raised(lambda error=error: on_rank0(lambda: fail(error)))
    batch = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(rank))
    model = small_model(num_layers=3)
    report = saf.freeze_(model, [batch], saf.FreezeConfig(rate=0.25, max_fit_kl=9))
    answers |= {
        "heads": report.heads.to_list(),
        "alpha": report.patterns.alpha.tolist(),
        "sequences": report.statistics.sequences_hash,
        "statistics": digest([getattr(report.statistics, name) for name in LayerStatistics._fields]),
        "output": model(batch[:1] * 0)[0].sum().item(),
    }
    return answers


def late() -> str:
    """Return the outcome of work that takes longer than messages of the group may take."""
    distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=0.2))
    outcome = on_rank0(lambda: time.sleep(1) or "done")
    distributed.distributed_c10d._set_pg_timeout(timedelta(minutes=30))
    return outcome


def fail(error: Exception) -> None:
    raise error


def bytes_held() -> int:
    """Return the bytes of weights, gradients and moments that a rank holds of a sharded model."""
    model = saf.GPT(saf.preset("tiny"))
    engine = Shards(torch.device("cpu")).engine(model, build_optimizer(model), Execution.of("cpu"))
    engine.forward(*torch.zeros(2, 1, 8, dtype=torch.long)).backward()
    held = [tensor for parameter in engine.module.parameters() for tensor in (parameter, parameter.grad)]
    engine.optimizer.step()
    held += [value for of in engine.optimizer.state.values() for value in of.values() if value.dim()]
    return sum(tensor.to_local().numel() * tensor.element_size() for tensor in held)


def refusals(rank: int, said: dict, config) -> None:
    """Begin runs that no group can make; what one rank refuses, all do."""
    said["uneven"] = raised(lambda: pretrain(config("uneven", accumulation=3)))
    said["alone"] = raised(lambda: pretrain(config("alone", parallel="none")))
    said["unlike"] = raised(lambda: pretrain(config("unlike", batch_size=2 + 2 * rank)))
    trained = FreezeConfig(rate=0.5, trainable=True)
    said["trained"] = raised(lambda: pretrain(config("trained", freeze=trained, parallel="fsdp")))


def failures(rank: int, said: dict, config, write) -> None:
    """Fail on one of two ranks, one way after the other, at last by ending it."""
    with pytest.MonkeyPatch.context() as patch:

        def poison(run):
            if rank == 1:
                engine = run.updater.engine
                run.updater.engine = replace(engine, forward=lambda *a, **k: engine.forward(*a, **k) * float("nan"))

        watching = Watching(patch, 4, poison)
        said["diverged"] = raised(lambda: pretrain(config("diverged")))
        said["applied"] = watching.run.update
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(editing, "install_", lambda *_, **__: fail(UnsupportedError("no room for the tables")))
        watching = Watching(patch)
        said["event"] = raised(lambda: pretrain(config("refused", freeze=FREEZE)))
        after = watching.run.model.state_dict()
        before = load_model(watching.run.checkpoints / "step-6").state_dict()
        said["unchanged"] = digest([*before.values()]) == digest([*after.values()])
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("saf.train.loop.plan_calibration", lambda *_, **__: {}["plan"])
        said["apart"] = raised(lambda: pretrain(config("apart", freeze=FREEZE)))
    write()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("saf.train.loop.plan_calibration", lambda *_, **__: os._exit(9))
        said["lost"] = raised(lambda: pretrain(config("lost", freeze=FREEZE)))
        write()


def evaluated(data: str, out: str) -> dict:
    """Return the loss of a small model on seven windows in batches of three, the last one of one window."""
    opened = TokenData.open(data)
    model = small_model(vocab_size=opened.vocab_size)
    record = evaluate_perplexity(model, opened, batch_size=3, limit=7, out=out)
    return {name: record[name] for name in ("loss", "windows", "tokens", "log_probs_sha256", "windows_hash")}


def answered() -> list[list]:
    """Return a small model's likelihoods of continuations, in batches that do not share out evenly."""
    asked = [Continuation(tuple(range(1, 2 + n % 4)), (n, n + 1)) for n in range(11)]
    return [[one.log_prob, one.greedy] for one in likelihoods(small_model(), asked, batch_size=2)]
