"""What each of two processes of a group does, one story after the other: `process`, which test_parallel starts."""

import copy
import hashlib
import json
import os
import signal
from pathlib import Path

import pytest
import torch

import saf
import saf.freeze as recipe
import saf.train.loop as loop
from saf.data import TokenData
from saf.errors import UnsupportedError
from saf.evaluate.continuations import Continuation, likelihoods
from saf.evaluate.perplexity import evaluate_perplexity
from saf.freeze_config import FreezeConfig
from saf.machine.processes import _ended_peers_told, done_once
from saf.schedules import ValidationBudget
from saf.train import TrainConfig, pretrain
from saf.train.run import Run
from saf.train.shares import write_shares

FREEZE = FreezeConfig(rate=0.5, max_fit_kl=10.0)
EVENTS = {"freeze": FREEZE, "schedule": ValidationBudget(begin=0.5, every=0.25), "track_gradients": True}
"""A freeze that is undone, one that stays, and an update after each."""

LAYER = FreezeConfig(heads=[(0, 0), (0, 1), (0, 2), (0, 3), (1, 2)], max_fit_kl=10.0)
"""A layer that keeps no query and no key weights."""
KINDS = ("ddp", "fsdp")


def dear(run: Run, when: str, real=Run.controller_loss, **more) -> float:
    """Return the controller loss, as if the first freeze had raised it."""
    first = not any(event.kind == "undo" for event in done_once(lambda: run.events))
    return real(run, when, **more) + (0.5 if first and when in ("after_freeze", "before_undo") else 0.0)


def hash_of(run: Run) -> str:
    """Return the SHA-256 of all parameters, buffers (patterns among them) and moments."""
    with run.updater.parallel.whole(moments=True):
        state = [*run.model.state_dict().values(), *run.model.buffers()]
        state += [value for of in run.updater.optimizer.state.values() for value in of.values()]
        return hashlib.sha256(b"".join(map(bytes_of, state))).hexdigest()


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes, of any dtype."""
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def far(patch: pytest.MonkeyPatch) -> None:
    """Let a process see nothing of what another one wrote, as on a machine where files appear late."""
    exists = Path.exists
    patch.setattr(Path, "exists", lambda path: not path.name.startswith("step-") and exists(path))
    patch.setattr("saf.train.run.read_events", lambda folder: [])
    patch.setattr("saf.train.results.latest", lambda folder: None)


class Watching:
    """Keep the run that `pretrain` makes, and do something before an update of it."""

    def __init__(self, patch: pytest.MonkeyPatch, before=lambda run: None):
        real, update = loop.start_run, loop.run_update
        self.run: Run | None = None

        def start(*arguments, **options):
            self.run = real(*arguments, **options)
            return self.run

        def updating(run):
            before(run)
            return update(run)

        patch.setattr(loop, "start_run", start)
        patch.setattr(loop, "run_update", updating)


def at_update(update: int, action):
    """Return what does something before an update, numbered from 1."""
    return lambda run: action(run) if run.update + 1 == update else None


def raised(function) -> list[str]:
    """Return the kind and the words of what a function raises, and whether another process tells of it."""
    try:
        function()
    except Exception as error:
        return [type(error).__name__, str(error), *["heard"] * getattr(error, "heard", False)]
    return []


def elsewhere(rank: int, folder: Path, *more) -> list[str]:
    """Write shares, of which the second process's lie on a disk of its own."""
    written = write_shares(folder, *more)
    for path in folder.glob("*-2-of-2*") if rank else ():
        path.unlink()
    return written


def process(rank: int, folder: str, settings: dict) -> None:
    """Train as one of two processes, one story after the other, and write what came of each."""
    told = {}

    def config(name: str, **changes) -> TrainConfig:
        return TrainConfig(**{**settings, "out": f"{folder}/{name}", **changes})

    def tell() -> None:
        Path(folder, f"{rank}.json").write_text(json.dumps(told))

    for kind in KINDS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Run, "controller_loss", dear)
            if rank:
                far(patch)
            watching = Watching(patch)
            told[kind] = pretrain(config(kind, parallel=kind, **EVENTS))["report_loss"]
            told[f"{kind} hash"] = hash_of(watching.run)
        told["writes"] = [watching.run.observer is not None, watching.run.lock is not None]
    told["answered"] = answered()
    told["evaluated"] = evaluated(settings["data"], f"{folder}/evaluated")
    told["uneven"] = raised(lambda: pretrain(config("uneven", accumulation=3)))
    told["alone"] = raised(lambda: pretrain(config("alone", parallel="none")))
    told["unlike"] = raised(lambda: pretrain(config("unlike", batch_size=2 + 2 * rank)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("saf.train.checkpoint.write_shares", lambda folder, *more: elsewhere(rank, folder, *more))
        told["elsewhere"] = raised(lambda: pretrain(config("elsewhere", parallel="fsdp", save_every=1)))
    with pytest.MonkeyPatch.context() as patch:
        signalled = at_update(5, lambda run: rank == 1 and os.kill(os.getpid(), signal.SIGTERM))
        Watching(patch, signalled)
        told["stopped"] = pretrain(config("stopped", freeze=LAYER, parallel="fsdp"))
    with pytest.MonkeyPatch.context() as patch:
        Watching(patch, at_update(9, lambda run: rank == 0 and os.kill(os.getpid(), signal.SIGTERM)))
        told["begun"] = pretrain(config("begun", freeze=LAYER, parallel="fsdp"), resume=True)
    told["resumed"] = pretrain(config("begun", freeze=LAYER), resume=True)["report_loss"]
    pretrain(config("low", freeze=LAYER, parallel="fsdp", precision="bf16"))
    told["trained"] = raised(
        lambda: pretrain(config("trained", freeze=FreezeConfig(rate=0.5, trainable=True), parallel="fsdp"))
    )
    failures(rank, told, config, tell)
    os._exit(0)  # the group is broken: nothing is left to leave in order


def failures(rank: int, told: dict, config, tell) -> None:
    """Fail in one of two processes, one way after the other, at last by ending it."""
    with pytest.MonkeyPatch.context() as patch:

        def poison(run):
            if rank == 1:
                forward = run.updater.forward
                run.updater.forward = lambda *inputs, **named: forward(*inputs, **named) * float("nan")

        watching = Watching(patch, at_update(4, poison))
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
        told["lost"] = raised(lambda: joined_again(lambda: pretrain(config("lost", freeze=FREEZE))))
        tell()


def joined_again(work) -> None:
    """Do work as `joined` does it in a process that torchrun started."""
    with _ended_peers_told():
        work()


def evaluated(data: str, out: str) -> dict:
    """Return what a small model is found to lose on seven windows in batches of three, the last one of one window."""
    data_ = TokenData.open(data)
    model = saf.GPT(saf.preset("tiny", vocab_size=data_.vocab_size, max_length=16))
    model.reset_parameters(torch.Generator().manual_seed(0))
    return evaluate_perplexity(model, data_, batch_size=3, limit=7, out=out)


def answered() -> list[list]:
    """Return what a small model makes of continuations, in batches that do not share out evenly."""
    model = saf.GPT(saf.preset("tiny", vocab_size=64, max_length=16))
    model.reset_parameters(torch.Generator().manual_seed(0))
    asked = [Continuation(tuple(range(1, 2 + n % 4)), (n, n + 1)) for n in range(11)]
    return [[one.log_prob, one.greedy] for one in likelihoods(model, asked, batch_size=2)]


def refused(patch: pytest.MonkeyPatch, rank: int) -> tuple[list[str], bool]:
    """Let installation fail in the second process; return what `freeze_` raises, and whether the model is as before."""
    real = recipe.install_

    def failing(*arguments, **options):
        if rank == 1:
            raise UnsupportedError("no room for the tables")
        real(*arguments, **options)

    patch.setattr(recipe, "install_", failing)
    model = saf.GPT(saf.preset("tiny", vocab_size=64, max_length=16))
    model.reset_parameters(torch.Generator().manual_seed(0))
    before = copy.deepcopy(model.state_dict())
    batch = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(1))
    error = raised(lambda: saf.freeze_(model, [batch], FREEZE))
    after = model.state_dict()
    return error, after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
