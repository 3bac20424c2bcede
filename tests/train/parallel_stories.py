"""What each rank of a group does, one story after the other: `two` and `four`, which test_parallel starts."""

import copy
import hashlib
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import saf
import saf.freezing as editing
import saf.train.loop as loop
from saf.checkpoint import _write_shards
from saf.data import TokenData
from saf.distributed import _lost_peers_explained, all_gather, on_rank0
from saf.errors import UnsupportedError
from saf.evaluate.continuations import Continuation, likelihoods
from saf.evaluate.perplexity import evaluate_perplexity
from saf.freeze_config import FreezeConfig
from saf.machine import Execution
from saf.schedules import Gradual, TrainLoss, ValidationBudget
from saf.train import TrainConfig, pretrain
from saf.train.parallel import Shards
from saf.train.run import Run
from saf.train.step import build_optimizer
from tests.train.helpers import brisk

FREEZE = FreezeConfig(rate=0.5, max_fit_kl=10.0)
LAYER = FreezeConfig(heads=[(0, 0), (0, 1), (0, 2), (0, 3), (1, 2)], max_fit_kl=10.0)
"""A layer that keeps no query and no key weights."""
STORIES = {
    # A freeze that is undone, one that stays, and an update after each.
    "undone": {"freeze": FREEZE, "schedule": ValidationBudget(begin=0.5, every=0.25), "track_gradients": True},
    "pruned": {
        "freeze": FreezeConfig(heads=[*((0, head) for head in range(4)), (1, 1)], operation="prune"),
        "updates": 4,
    },
    "gradual": {
        "freeze": FreezeConfig(heads=[(0, 0), (1, 1)], max_fit_kl=10.0),
        "schedule": Gradual(begin=0.25, end=0.75, groups=2),
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
        return pretrain(replace(config, **STORIES[name]))


def levelled(config: TrainConfig) -> None:
    """Train by the train-loss schedule across a freeze and its undo."""
    few = {"updates": 40, "batch_size": 1, "accumulation": 2, "eval_windows": 1, "calibration_sequences": 2}
    with pytest.MonkeyPatch.context() as patch:
        brisk(patch)
        few |= {"eval_every": 0, "save_every": 0, "schedule": TrainLoss(multiplier=2.0)}
        pretrain(replace(config, freeze=FREEZE, **few))


class Watching:
    """Keep the run that `pretrain` makes, and do something before an update of it."""

    def __init__(self, patch: pytest.MonkeyPatch, update: int = 0, action=lambda run: None):
        start, real = loop.start_run, Run.run_update
        self.run: Run | None = None

        def starting(*arguments, **options):
            self.run = start(*arguments, **options)
            return self.run

        def updating(run):
            if run.update + 1 == update:
                action(run)
            return real(run)

        patch.setattr(loop, "start_run", starting)
        patch.setattr(Run, "run_update", updating)


def hash_of(run: Run) -> str:
    """Return the SHA-256 of all parameters, buffers (patterns among them) and moments."""
    with run.updater.parallel.whole(moments=True):
        state = [*run.model.state_dict().values(), *run.model.buffers()]
        state += [value for of in run.updater.optimizer.state.values() for value in of.values()]
        plain = (tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() for tensor in state)
        return hashlib.sha256(b"".join(plain)).hexdigest()


def raised(function) -> list[str]:
    """Return the kind and the words of what a function raises, and whether another rank prints it."""
    try:
        function()
    except Exception as error:
        return [type(error).__name__, str(error), *["printed elsewhere"] * getattr(error, "printed_elsewhere", False)]
    return []


def two(rank: int, folder: str, settings: dict) -> None:
    """Train as one of two ranks, one story after the other, and write what came of each."""
    told = {}

    def config(name: str, **changes) -> TrainConfig:
        return TrainConfig(**{**settings, "out": f"{folder}/{name}", **changes})

    for kind in KINDS:
        for name in STORIES:
            with pytest.MonkeyPatch.context() as patch:
                if rank:  # sees nothing of what rank 0 writes, as on a machine where files appear late
                    exists = Path.exists
                    patch.setattr(Path, "exists", lambda at, was=exists: not at.name.startswith("step-") and was(at))
                    patch.setattr("saf.train.run.read_events", lambda folder: [])
                    patch.setattr("saf.train.result.latest", lambda folder: None)
                watching = Watching(patch)
                told[f"{name} {kind}"] = story(config(f"{name} {kind}", parallel=kind), name)["report_loss"]
                told[f"{name} {kind} hash"] = hash_of(watching.run)
    told["writes"] = watching.run.observer is not None
    levelled(config("levelled fsdp", parallel="fsdp"))
    pretrain(config("low", freeze=LAYER, parallel="fsdp", precision="bf16"))
    resumed_elsewhere(rank, told, config)
    told["bytes"] = bytes_held()
    told["evaluated"] = [evaluated(settings["data"], f"{folder}/evaluated"), answered()]
    refusals(rank, told, config)
    failures(rank, told, config, lambda: Path(folder, f"{rank}.json").write_text(json.dumps(told)))
    os._exit(0)  # the group is broken: nothing is left to leave in order


def resumed_elsewhere(rank: int, told: dict, config) -> None:
    """Stop at a signal to one rank, and go on where one process was stopped; then in another kind of group."""
    with pytest.MonkeyPatch.context() as patch:
        Watching(patch, 5, lambda run: rank == 1 and os.kill(os.getpid(), signal.SIGTERM))
        told["stopped"] = pretrain(config("stopped", freeze=LAYER, parallel="fsdp"))
    with pytest.MonkeyPatch.context() as patch:
        Watching(patch, 9, lambda run: rank == 0 and os.kill(os.getpid(), signal.SIGTERM))
        told["begun"] = pretrain(config("begun", freeze=LAYER, parallel="fsdp"), resume=True)
    told["resumed"] = pretrain(config("begun", freeze=LAYER), resume=True)["report_loss"]
    with pytest.MonkeyPatch.context() as patch:
        Watching(patch, 2, lambda run: rank == 1 and os.kill(os.getpid(), signal.SIGTERM))
        assert story(config("four", parallel="fsdp"), "gradual")["stopped_at"] == 2


def four(rank: int, folder: str, settings: dict) -> None:
    """Go on on four ranks where two were stopped between two events; each reads its own of their shards."""
    config = TrainConfig(**{**settings, "out": f"{folder}/four", "parallel": "fsdp", **STORIES["gradual"]})
    pretrain(config, resume=True)


def bytes_held() -> int:
    """Return the bytes of weights, gradients and moments that a rank holds of a sharded model."""
    model = saf.GPT(saf.preset("tiny"))
    engine = Shards(torch.device("cpu")).engine(model, build_optimizer(model), Execution.of("cpu"))
    engine.forward(*torch.zeros(2, 1, 8, dtype=torch.long)).backward()
    held = [tensor for parameter in engine.module.parameters() for tensor in (parameter, parameter.grad)]
    engine.optimizer.step()
    held += [value for of in engine.optimizer.state.values() for value in of.values() if value.dim()]
    return sum(tensor.to_local().numel() * tensor.element_size() for tensor in held)


def refusals(rank: int, told: dict, config) -> None:
    """Begin runs that no group can make; what one rank refuses, all do."""
    told["uneven"] = raised(lambda: pretrain(config("uneven", accumulation=3)))
    told["alone"] = raised(lambda: pretrain(config("alone", parallel="none")))
    told["unlike"] = raised(lambda: pretrain(config("unlike", batch_size=2 + 2 * rank)))
    trained = FreezeConfig(rate=0.5, trainable=True)
    told["trained"] = raised(lambda: pretrain(config("trained", freeze=trained, parallel="fsdp")))

    def elsewhere(folder, *more):
        """Write shards, of which rank 1's lie on a disk of its own."""
        written = _write_shards(folder, *more)
        for path in folder.glob("shard-00002-*") if rank else ():
            path.unlink()
        all_gather(None)  # before rank 0 looks
        return written

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("saf.checkpoint._write_shards", elsewhere)
        told["elsewhere"] = raised(lambda: pretrain(config("elsewhere", parallel="fsdp", save_every=1)))


def failures(rank: int, told: dict, config, tell) -> None:
    """Fail on one of two ranks, one way after the other, at last by ending it."""
    with pytest.MonkeyPatch.context() as patch:

        def poison(run):
            if rank == 1:
                engine = run.updater.engine
                run.updater.engine = replace(engine, forward=lambda *a, **k: engine.forward(*a, **k) * float("nan"))

        watching = Watching(patch, 4, poison)
        told["diverged"] = raised(lambda: pretrain(config("diverged")))
        told["applied"] = watching.run.update
    with pytest.MonkeyPatch.context() as patch:
        told["refused"], told["unchanged"] = refused(patch, rank)
        watching = Watching(patch)
        told["event"] = raised(lambda: pretrain(config("refused", freeze=FREEZE)))
        told["frozen"] = sum(layer.layout.num_frozen for layer in watching.run.model.attention_layers())
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("saf.train.events.plan_calibration", lambda *inputs, **options: {}["plan"])
        told["apart"] = raised(lambda: pretrain(config("apart", freeze=FREEZE)))
    tell()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("saf.calibration.driver.calibrate", lambda *inputs, **options: os._exit(9))

        def lost():
            with _lost_peers_explained():
                pretrain(config("lost", freeze=FREEZE))

        told["lost"] = raised(lost)
        tell()


def evaluated(data: str, out: str) -> dict:
    """Return the loss of a small model on seven windows in batches of three, the last one of one window."""
    opened = TokenData.open(data)
    model = saf.GPT(saf.preset("tiny", vocab_size=opened.vocab_size, max_length=16))
    model.reset_parameters(torch.Generator().manual_seed(0))
    record = evaluate_perplexity(model, opened, batch_size=3, limit=7, out=out)
    return {name: record[name] for name in ("loss", "windows", "tokens", "log_probs_sha256", "windows_hash")}


def answered() -> list[list]:
    """Return a small model's likelihoods of continuations, in batches that do not share out evenly."""
    model = saf.GPT(saf.preset("tiny", vocab_size=64, max_length=16))
    model.reset_parameters(torch.Generator().manual_seed(0))
    asked = [Continuation(tuple(range(1, 2 + n % 4)), (n, n + 1)) for n in range(11)]
    return [[one.log_prob, one.greedy] for one in likelihoods(model, asked, batch_size=2)]


def refused(patch: pytest.MonkeyPatch, rank: int) -> tuple[list[str], bool]:
    """Let installation fail on rank 1; return what `freeze_` raises, and whether the model is as before."""
    real = editing.install_

    def failing(*arguments, **options):
        if rank == 1:
            raise UnsupportedError("no room for the tables")
        real(*arguments, **options)

    patch.setattr(editing, "install_", failing)
    model = saf.GPT(saf.preset("tiny", vocab_size=64, max_length=16))
    model.reset_parameters(torch.Generator().manual_seed(0))
    before = copy.deepcopy(model.state_dict())
    batch = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(1))
    error = raised(lambda: saf.freeze_(model, [batch], FREEZE))
    after = model.state_dict()
    return error, after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
