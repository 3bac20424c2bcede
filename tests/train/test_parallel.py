"""Several ranks train as one process does: losses, heads, events, checkpoints; and fail together."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed

import saf
from saf.records.files import read_json, read_lines
from saf.records.run import read_events
from saf.train import TrainConfig, latest, open_checkpoint, pretrain
from tests.train.conftest import SMALL
from tests.train.helpers import run_ranks
from tests.train.parallel_stories import (
    KINDS,
    LAYER,
    LOSSES,
    STORIES,
    evaluated,
    four,
    frozen_alike,
    stopping,
    story,
    two,
)

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this PyTorch has no torch.distributed")


@pytest.fixture(scope="module")
def stories(text_data, tmp_path_factory):
    """The folder of the runs of one process and of two ranks, and a maker of settings there."""
    folder = tmp_path_factory.mktemp("parallel")
    sizes = {"length": 32, "batch_size": 2, "accumulation": 4, "updates": 12, "eval_windows": 4}
    settings = {**SMALL, **sizes, "data": str(text_data), "peak_lr": 3e-3, "eval_every": 4, "save_every": 3}

    def config(name: str, **changes) -> TrainConfig:
        return TrainConfig(**{**settings, "out": str(folder / name), **changes})

    for name in STORIES:
        story(config(name), name)
    pretrain(config("layer", freeze=LAYER))
    with pytest.MonkeyPatch.context() as patch:
        stopping(patch, 4, by=True)
        assert pretrain(config("begun", freeze=LAYER))["stopped_at"] == 4
    run_ranks(2, two, str(folder), settings, codes=(0, 9))
    return folder, config


def numbers(folder: Path) -> list[float]:
    """Return the losses and gradient norms of a run."""
    return [line[name] for line in read_lines(folder / "metrics.jsonl") for name in ("loss", "grad_norm")]


def events(folder: Path) -> list[tuple]:
    """Return what the events of a run did, and when."""
    return [(event.kind, event.update, event.heads) for event in read_events(folder)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STORIES)
def test_losses_events_and_checkpoints_are_those_of_one_process(stories, name, kind):
    folder, _ = stories
    run, one = folder / f"{name} {kind}", folder / name
    assert numbers(run) == pytest.approx(numbers(one), rel=LOSSES)
    assert events(run) == events(one)
    assert len(events(one)) == {"undone": 3, "pruned": 1}[name]
    losses = [read_json(path / "result.json")["report_loss"] for path in (run, one)]
    assert losses[0] == pytest.approx(losses[1], rel=LOSSES)
    assert read_json(run / "config.json")["processes"] == 2
    several, alone = (open_checkpoint(latest(path / "checkpoints")) for path in (run, one))
    assert several.state["optimizer_groups"] == alone.state["optimizer_groups"]
    for part in ("model", "optimizer"):
        found, expected = several.tensors(part), alone.tensors(part)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            if tensor.is_floating_point():  # others are hashes of patterns
                torch.testing.assert_close(found[key], tensor, rtol=2e-3, atol=1e-5)


def test_any_number_of_ranks_goes_on_where_others_stopped(stories):
    """One process, two ranks, one process again; and four ranks after two."""
    folder, config = stories
    pretrain(config("begun", freeze=LAYER), resume=True)
    assert numbers(folder / "begun") == pytest.approx(numbers(folder / "layer"), rel=LOSSES)
    run_ranks(4, four, config("four"))
    assert events(folder / "four") == events(folder / "pruned")
    assert numbers(folder / "four") == pytest.approx(numbers(folder / "pruned"), rel=LOSSES)


def test_every_rank_freezes_by_the_batches_of_the_first_and_evaluates_to_the_last_bit(stories, tmp_path):
    folder, config = stories
    assert not read_events(folder / "refused")
    assert not read_events(folder / "unlike")
    outcomes, alone = read_json(folder / "outcomes.json"), frozen_alike(0)
    assert outcomes["evaluated"] == json.loads(json.dumps(evaluated(config("").data, tmp_path / "alone")))
    assert all(alone[name] == outcomes["frozen"][name] for name in ("heads", "sequences", "statistics"))
    torch.testing.assert_close(torch.tensor(alone["alpha"]), torch.tensor(outcomes["frozen"]["alpha"]))


def test_a_users_error_under_torchrun_is_printed_once_and_ends_all_processes(text_data, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "saf"]
    command += ["pretrain", "--data", str(text_data), "--out", str(tmp_path / "run"), "--device", "cpu"]
    paths = os.pathsep.join([str(Path(saf.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([*command, "--accumulation", "3"], env=environment, capture_output=True, text=True)
    assert ended.returncode != 0
    assert ended.stderr.count("accumulation must be") == 1
    assert not (tmp_path / "run").exists()
