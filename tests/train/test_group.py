"""What else processes share: pruning, a gradual schedule, layers computed again, memory; four of them once."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import distributed

import saf
import saf.train.loop as loop
from saf.bench import Prefill, Update, measure
from saf.errors import InputError
from saf.freeze_config import FreezeConfig
from saf.machine.execution import Execution
from saf.models import GPT, preset
from saf.records.events import read_events
from saf.records.files import read_json, read_lines
from saf.schedules import Gradual, TrainLoss
from saf.train import TrainConfig, latest, open_checkpoint, pretrain
from saf.train.optimizer import build_optimizer
from saf.train.parallel import Shards
from tests.train.group import brisk, together

LOSSES = 2e-6
"""Relative: losses and gradient norms of several processes are sums in another order, in float32."""
HALF = FreezeConfig(rate=0.5, max_fit_kl=10.0)
FEW = FreezeConfig(heads=[(0, 0), (1, 1)], max_fit_kl=10.0)
"""A head of each layer, so that a run compiled by layers has two layouts to compile."""
STORIES = {
    "pruned": {"freeze": FreezeConfig(heads=[*((0, head) for head in range(4)), (1, 1)], operation="prune")},
    "gradual": {"freeze": FEW, "schedule": Gradual(begin=0.25, end=0.75, groups=2)},
}
KINDS = ("ddp", "fsdp")
SHAPE = {"num_layers": 2, "num_heads": 4, "hidden_size": 32}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not distributed.is_available(), reason="this PyTorch has no torch.distributed"),
]


def config(folder: str, name: str, settings: dict, **changes) -> TrainConfig:
    return TrainConfig(**{**settings, "out": f"{folder}/{name}", **changes})


def two(rank: int, folder: str, settings: dict) -> None:
    """Train every story both ways, once more with layers computed again, and tell what a process holds of a model."""
    stop_at(2, config(folder, "four", settings, parallel="fsdp", **STORIES["gradual"]), signalled=rank == 1)
    for kind in KINDS:
        for name, story in STORIES.items():
            pretrain(config(folder, f"{name} {kind}", settings, parallel=kind, **story))
        again = {**STORIES["gradual"], "activation_checkpointing": True}
        pretrain(config(folder, f"again {kind}", settings, parallel=kind, **again))
    levelled(config(folder, "levelled fsdp", settings, parallel="fsdp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # programs as traced, in seconds
        pretrain(config(folder, "layers", settings, parallel="fsdp", compile="layers", **STORIES["gradual"]))
    bench(rank, folder)
    model = GPT(preset("tiny"))
    optimizer = build_optimizer(model)
    engine = Shards(torch.device("cpu")).engine(model, optimizer, Execution.of("cpu"))
    engine.forward(*torch.zeros(2, 1, 8, dtype=torch.long)).backward()
    held = [own(parameter.grad) + own(parameter) for parameter in engine.module.parameters()]
    engine.optimizer.step()
    held += [own(value) for of in engine.optimizer.state.values() for value in of.values() if value.dim()]
    Path(folder, f"held {rank}.json").write_text(json.dumps({"bytes": sum(held)}))


def bench(rank: int, folder: str) -> None:
    """Time updates that two processes share, and tell what each was told; prefill is measured by one alone."""
    shape = {"model": "tiny", "device": "cpu", "pairs": 2, "warmup": 1, "tolerance": 1e9, "profile": False}
    for kind in KINDS:
        settings = Update(points=("16x1x2",), rates=(0.5,), free=False, repeats=1, parallel=kind, **shape)
        record = measure(settings, out=Path(folder, f"bench {kind}.json"), say=lambda line: None)
        Path(folder, f"bench {kind} {rank}.json").write_text(json.dumps(record))
    with pytest.raises(InputError, match="prefill must be measured by one process"):
        measure(Prefill(points=("16x1",), **shape))
    with pytest.raises(InputError, match="2 were started, which would all do the same"):
        measure(Update(points=("16x1x2",), **shape))


def levelled(settings: TrainConfig) -> None:
    """Train by the train-loss schedule across a freeze and its undo."""
    few = {"updates": 40, "batch_size": 1, "accumulation": 2, "eval_windows": 1, "calibration_sequences": 2}
    with pytest.MonkeyPatch.context() as patch:
        brisk(patch)
        pretrain(replace(settings, freeze=HALF, schedule=TrainLoss(multiplier=2.0), **few))


def stop_at(update: int, settings: TrainConfig, *, signalled: bool) -> None:
    """Train until a signal, which one process gets, has stopped all after an update."""
    with pytest.MonkeyPatch.context() as patch:
        real = loop.run_update

        def stopping(run):
            if signalled and run.update + 1 == update:
                signal.raise_signal(signal.SIGTERM)
            return real(run)

        patch.setattr(loop, "run_update", stopping)
        assert pretrain(settings)["stopped_at"] == update


def own(tensor: torch.Tensor) -> int:
    """Return the bytes that this process holds of a tensor in shards."""
    local = tensor.to_local()
    return local.numel() * local.element_size()


def four(rank: int, folder: str, settings: dict) -> None:
    """Go on in four processes where two were stopped between two events; each reads its own of their shares."""
    pretrain(config(folder, "four", settings, parallel="fsdp", **STORIES["gradual"]), resume=True)


@pytest.fixture(scope="module")
def stories(data, tmp_path_factory):
    """The folder of the runs of two and four processes, and of one."""
    folder = str(tmp_path_factory.mktemp("group"))
    settings = {
        "data": str(data),
        "model_overrides": SHAPE,
        "length": 32,
        "batch_size": 2,
        "accumulation": 4,
        "updates": 4,
        "peak_lr": 3e-3,
        "eval_every": 0,
        "eval_windows": 4,
        "save_every": 0,
        "calibration_sequences": 4,
        "tensorboard": False,
        "quiet": True,
        "device": "cpu",
    }
    for name, story in STORIES.items():
        pretrain(config(folder, name, settings, **story))
    levelled(config(folder, "levelled", settings))
    together(2, two, folder, settings)
    together(4, four, folder, settings)
    return Path(folder)


def numbers(folder: Path) -> list[float]:
    """Return the losses and gradient norms of a run."""
    return [line[name] for line in read_lines(folder / "metrics.jsonl") for name in ("loss", "grad_norm")]


def events(folder: Path) -> list[tuple]:
    """Return what the events of a run did, and when."""
    return [(event.kind, event.update, event.heads) for event in read_events(folder)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STORIES)
def test_pruning_and_gradual_freezing_are_those_of_one_process(stories, name, kind):
    assert events(stories / f"{name} {kind}") == events(stories / name)
    assert len(events(stories / name)) == {"pruned": 1, "gradual": 2}[name]
    assert numbers(stories / f"{name} {kind}") == pytest.approx(numbers(stories / name), rel=LOSSES)
    report = [read_json(stories / of / "result.json")["report_loss"] for of in (name, f"{name} {kind}")]
    assert report[1] == pytest.approx(report[0], rel=LOSSES)


def test_the_train_loss_schedule_decides_as_in_one_process(stories):
    assert [(each, update) for each, update, _ in events(stories / "levelled")] == [("freeze", 30), ("undo", 39)]
    assert events(stories / "levelled fsdp") == events(stories / "levelled")
    assert numbers(stories / "levelled fsdp") == pytest.approx(numbers(stories / "levelled"), rel=2 * LOSSES)


def test_a_process_that_fails_ends_the_others_with_its_reason_and_one_process_goes_on(stories, data):
    """As torchrun starts and ends them; gloo would wait half an hour for the one that failed, a test does not."""
    settings = read_json(stories / "pruned ddp" / "config.json")["settings"]
    settings |= {"out": str(stories / "died"), "save_every": 2}
    starter = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*starter, str(Path(__file__).with_name("dying.py")), json.dumps(settings)]
    paths = os.pathsep.join([str(Path(saf.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": paths}
    ended = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert ended.returncode != 0
    assert "RuntimeError: the power of this node is gone" in ended.stderr
    assert "process 0 of 2 lost another one" in ended.stderr
    pretrain(TrainConfig.from_dict({**settings, "parallel": "auto"}), resume=True)
    assert numbers(stories / "died") == pytest.approx(numbers(stories / "pruned"), rel=LOSSES)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_computed_again_change_no_bit(stories, kind):
    assert numbers(stories / f"again {kind}") == numbers(stories / f"gradual {kind}")


def test_shares_compiled_by_layers_change_no_bit(stories):
    assert events(stories / "layers") == events(stories / "gradual")
    assert numbers(stories / "layers") == numbers(stories / "gradual fsdp")


@pytest.mark.parametrize("kind", KINDS)
def test_updates_that_two_processes_share_are_timed_by_the_slowest(stories, kind):
    written, *told = (read_json(stories / f"bench {kind}{of}.json") for of in ("", " 0", " 1"))
    assert [row["role"] for row in written["rows"]] == ["control", "frozen", "apart"]
    assert written["provenance"]["processes"] == 2
    assert written["left_out"] == []
    times = [[row["pair_ms"] for row in record["rows"]] for record in (written, *told)]
    assert times[0] == times[1] == times[2]


def test_four_processes_go_on_where_two_stopped_and_train_as_one(stories):
    assert events(stories / "four") == events(stories / "gradual")
    assert numbers(stories / "four") == pytest.approx(numbers(stories / "gradual"), rel=LOSSES)
    four, one = (open_checkpoint(latest(stories / of / "checkpoints")) for of in ("four", "gradual"))
    assert len(list(four.path.glob("model-*-of-4.safetensors"))) == 4
    weights = four.tensors("model")
    for name, tensor in one.tensors("model").items():
        if tensor.is_floating_point():  # others are hashes of patterns
            torch.testing.assert_close(weights[name], tensor, rtol=2e-3, atol=1e-5)


def test_each_of_two_processes_holds_half_of_16_bytes_a_parameter(stories):
    for rank in range(2):
        assert read_json(stories / f"held {rank}.json")["bytes"] == 8 * saf.preset("tiny").num_parameters
