"""Two processes train as one does: the same data, losses, heads and checkpoints, and they stop and fail together."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from torch import distributed

from saf.errors import CheckpointError, DivergenceError, InputError, SafError, UnsupportedError
from saf.evaluate.perplexity import read_evaluation
from saf.machine.execution import Execution
from saf.machine.processes import is_first
from saf.records.events import read_events
from saf.records.files import read_json, read_lines, read_metadata
from saf.records.folders import MANIFEST
from saf.train import TrainConfig, latest, open_checkpoint, pretrain
from saf.train.run import Run
from saf.train.shares import write_shares
from saf.train.sharing import micro_batches_of_one, parallel_of
from tests.train.group import together
from tests.train.parallel_stories import (
    EVENTS,
    KINDS,
    LAYER,
    Watching,
    answered,
    at_update,
    dear,
    evaluated,
    process,
)

CPU, WORLD = Execution.of("cpu"), 2
LOSSES = 2e-6
"""Relative: losses and gradient norms of several processes are sums in another order, in float32."""

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this PyTorch has no torch.distributed")


@pytest.fixture(scope="module")
def stories(data, tmp_path_factory):
    """The folder of the runs of two processes, what each told, and a function that makes settings in that folder."""
    folder = tmp_path_factory.mktemp("parallel")
    settings = {
        "data": str(data),
        "model_overrides": {"num_layers": 2, "num_heads": 4, "hidden_size": 32},
        "length": 32,
        "batch_size": 2,
        "accumulation": 4,
        "updates": 12,
        "peak_lr": 3e-3,
        "eval_every": 4,
        "eval_windows": 4,
        "save_every": 3,
        "calibration_sequences": 4,
        "tensorboard": False,
        "quiet": True,
        "device": "cpu",
    }

    def config(name: str, **changes) -> TrainConfig:
        return TrainConfig(**{**settings, "out": str(folder / name), **changes})

    with pytest.MonkeyPatch.context() as patch:
        Watching(patch, at_update(4, lambda run: os.kill(os.getpid(), signal.SIGTERM)))
        assert pretrain(config("begun", freeze=LAYER))["stopped_at"] == 4
    together(WORLD, process, str(folder), settings, codes=(0, 9))
    return folder, [read_json(folder / f"{rank}.json") for rank in range(WORLD)], config


def numbers(folder: Path) -> list[float]:
    """Return the losses and gradient norms of a run."""
    return [line[name] for line in read_lines(folder / "metrics.jsonl") for name in ("loss", "grad_norm")]


@pytest.fixture(scope="module")
def whole(stories):
    """The folder of a run that one process made from its first to its last update."""
    config = stories[2]("whole", freeze=LAYER)
    pretrain(config)
    return Path(config.out)


@pytest.fixture(scope="module")
def eventful(stories):
    """The folder and the report's loss of a run of one process across a freeze, its undo and another freeze."""
    config = stories[2]("eventful", **EVENTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "controller_loss", dear)
        return Path(config.out), pretrain(config)["report_loss"]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights and moments of a run's last checkpoint; hashes of patterns, which are integers, left out."""
    checkpoint = open_checkpoint(latest(folder / "checkpoints"))
    names = ("model", "optimizer")
    found = {f"{name} {key}": tensor for name in names for key, tensor in checkpoint.tensors(name).items()}
    return {name: tensor for name, tensor in found.items() if tensor.is_floating_point()}


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_heads_are_those_of_one_process_across_a_freeze_and_an_undo(stories, eventful, kind):
    folder, (first, second), _ = stories
    alone, report = eventful
    assert numbers(folder / kind) == pytest.approx(numbers(alone), rel=LOSSES)
    together, one = (read_events(path) for path in (folder / kind, alone))
    assert [(event.kind, event.update, event.heads) for event in together] == [
        (event.kind, event.update, event.heads) for event in one
    ]
    assert {"freeze", "undo"} == {event.kind for event in together}
    assert any(event.kind == "freeze" and event.undone_by is None for event in together)
    assert first[kind] == second[kind] == pytest.approx(report, rel=LOSSES)
    assert read_json(folder / kind / "config.json")["processes"] == WORLD


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_holds_what_one_process_writes(stories, eventful, kind):
    several, one = tensors(stories[0] / kind), tensors(eventful[0])
    assert several.keys() == one.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(
            several[name], tensor, rtol=2e-3, atol=1e-5, msg=lambda words, at=name: f"{at}: {words}"
        )
    states = [read_json(latest(path / "checkpoints") / "state.json") for path in (stories[0] / kind, eventful[0])]
    averages = [state["qk_gradient"]["average"] for state in states]
    for row, expected in zip(*averages, strict=True):
        assert row == pytest.approx(expected, rel=1e-3)
    assert states[0]["optimizer_groups"] == states[1]["optimizer_groups"]


def test_each_process_writes_its_share_and_a_damaged_one_is_refused(stories, eventful, tmp_path):
    path, whole = (latest(of / "checkpoints") for of in (stories[0] / "fsdp", eventful[0]))
    assert read_json(path / "manifest.json")["files"].keys() == {file.name for file in path.iterdir()} - {MANIFEST}
    for name in ("model", "optimizer"):
        files = sorted(path.glob(f"{name}*"))
        assert [file.name for file in files] == [f"{name}-{number}-of-2.safetensors" for number in (1, 2)]
        assert all("DCP_SHARDING_INFO" in read_metadata(file) for file in files)
        size = (whole / f"{name}.safetensors").stat().st_size
        assert all(file.stat().st_size < 0.6 * size for file in files)
    bad = tmp_path / path.name
    shutil.copytree(path, bad)
    with open(bad / "model-2-of-2.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    with pytest.raises(CheckpointError, match=r"model-2-of-2.safetensors is damaged"):
        open_checkpoint(bad)
    (bad / "optimizer-1-of-2.safetensors").unlink()
    (bad / "model-2-of-2.safetensors").write_bytes((path / "model-2-of-2.safetensors").read_bytes())
    assert open_checkpoint(bad, optimizer=False).model().config == open_checkpoint(path).model().config
    with pytest.raises(CheckpointError, match=r"optimizer-1-of-2.safetensors is missing"):
        open_checkpoint(bad)


def test_what_is_no_tensor_is_not_written(tmp_path):
    with pytest.raises(CheckpointError, match="model files hold tensors alone; step is int"):
        write_shares(tmp_path, "model", {"weight": torch.ones(2), "step": 3})
    assert not list(tmp_path.iterdir())


def test_an_evaluation_shared_out_is_that_of_one_process_to_the_last_bit(stories, tmp_path):
    folder, (first, second), config = stories
    alone = evaluated(config("").data, tmp_path / "alone")
    assert first["evaluated"] == second["evaluated"]
    for name in ("loss", "windows", "tokens", "log_probs_sha256", "windows_hash"):
        assert first["evaluated"][name] == alone[name]
    assert read_evaluation(folder / "evaluated")[0]["loss"] == alone["loss"]
    assert first["answered"] == second["answered"] == answered()


@pytest.mark.parametrize("kind", KINDS)
def test_all_processes_hold_the_same_bits_and_one_writes(stories, kind):
    folder, (first, second), _ = stories
    assert first[f"{kind} hash"] == second[f"{kind} hash"]
    assert (first["writes"], second["writes"]) == ([True, True], [False, False])
    assert len(read_lines(folder / kind / "metrics.jsonl")) == 12


def test_a_signal_to_any_process_stops_all_and_one_process_goes_on(stories, whole):
    folder, (first, second), config = stories
    assert first["stopped"] == second["stopped"]
    assert first["stopped"]["stopped_at"] == 5
    report = pretrain(config("stopped", freeze=LAYER), resume=True)["report_loss"]
    assert numbers(folder / "stopped") == pytest.approx(numbers(whole), rel=LOSSES)
    assert report == pytest.approx(read_json(whole / "result.json")["report_loss"], rel=LOSSES)


def test_shards_go_on_where_one_process_stopped_and_replicas_where_shards_did(stories, whole):
    folder, (first, second), _ = stories
    assert first["begun"] == second["begun"]
    assert first["begun"]["stopped_at"] == 9
    assert numbers(folder / "begun") == pytest.approx(numbers(whole), rel=LOSSES)
    assert first["resumed"] == second["resumed"]
    assert read_events(folder / "begun")[0].heads == read_events(whole)[0].heads == [list(head) for head in LAYER.heads]


def test_shards_in_bf16_lose_what_one_process_does(stories):
    folder, _, config = stories
    alone = config("low-alone", freeze=LAYER, precision="bf16")
    pretrain(alone)
    assert numbers(folder / "low") == pytest.approx(numbers(Path(alone.out)), rel=2e-3)
    assert numbers(folder / "low") != numbers(Path(alone.out))


def test_what_cannot_be_shared_out_is_refused_by_all(stories):
    folder, told, _ = stories
    assert [len(each["uneven"]) for each in told] == [2, 3]  # one of them tells people
    for each in told:
        assert each["uneven"][0] == each["alone"][0] == each["unlike"][0] == InputError.__name__
        assert "process 1 has batch_size 4 (the first one 2)" in each["unlike"][1]
        assert "2 processes cannot share evenly" in each["uneven"][1]
        assert "accumulation=2 and batch_size=3" in each["uneven"][1]
        assert "2 were started" in each["alone"][1]
        assert each["trained"][0] == UnsupportedError.__name__
        assert "train them with parallel='ddp'" in each["trained"][1]
    assert not (folder / "uneven").exists()
    assert not (folder / "unlike").exists()
    assert not (folder / "trained").exists()


def test_a_loss_that_is_not_finite_in_one_process_stops_all(stories):
    for each in stories[1]:
        assert each["diverged"][0] == DivergenceError.__name__
        assert "update 4 was not applied" in each["diverged"][1]
        assert each["applied"] == 3


def test_where_one_process_cannot_install_none_does(stories):
    folder, told, _ = stories
    for each in told:
        assert each["refused"] == each["event"] == [UnsupportedError.__name__, "no room for the tables"]
        assert each["unchanged"]
        assert each["frozen"] == 0
    assert read_events(folder / "refused") == []


def test_an_error_is_heard_wherever_the_others_are(stories):
    """One process failed before the event's first exchange, in which the other one was."""
    folder, (first, second), _ = stories
    assert first["apart"] == [SafError.__name__, "process 1 failed: KeyError: 'plan'"]
    assert second["apart"] == [KeyError.__name__, "'plan'"]
    assert read_events(folder / "apart") == []


def test_shares_that_the_first_process_does_not_find_make_no_checkpoint(stories):
    folder, told, _ = stories
    for each in told:
        assert each["elsewhere"][0] == CheckpointError.__name__
        assert "does not find model-2-of-2.safetensors of another one" in each["elsewhere"][1]
    assert not list((folder / "elsewhere" / "checkpoints").iterdir())


def test_a_process_that_ends_takes_the_others_along(stories):
    kind, words = stories[1][0]["lost"]
    assert kind == SafError.__name__
    assert "process 0 of 2 lost another one" in words


def test_without_a_group_a_process_is_alone():
    assert is_first()
    assert parallel_of("auto", parameters=1, execution=CPU, trained_patterns=False)[0].processes == 1
    with pytest.raises(InputError, match="torchrun --nproc-per-node"):
        parallel_of("ddp", parameters=1, execution=CPU, trained_patterns=False)
    assert micro_batches_of_one(8, 4, batch_size=1) == 2
    with pytest.raises(InputError, match="choose another number of processes"):
        micro_batches_of_one(1, 3, batch_size=2)
