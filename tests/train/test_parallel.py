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
from saf.train.step import Parallel
from tests.train.conftest import SMALL
from tests.train.helpers import together
from tests.train.parallel_stories import (
    KINDS,
    LAYER,
    STORIES,
    answered,
    evaluated,
    four,
    frozen_alike,
    stopping,
    story,
    two,
    uneven_targets,
)

LOSSES = 2e-6
"""Relative: losses and gradient norms of several ranks are sums in another order, in float32."""
pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this PyTorch has no torch.distributed")


@pytest.fixture(scope="module")
def stories(data, tmp_path_factory):
    """The folder of the runs of one process and of two ranks, what each rank said, and a maker of settings there."""
    folder = tmp_path_factory.mktemp("parallel")
    sizes = {"length": 32, "batch_size": 2, "accumulation": 4, "updates": 12, "eval_windows": 4}
    settings = {**SMALL, **sizes, "data": str(data), "peak_lr": 3e-3, "eval_every": 4, "save_every": 3}

    def config(name: str, **changes) -> TrainConfig:
        return TrainConfig(**{**settings, "out": str(folder / name), **changes})

    for name in STORIES:
        story(config(name), name)
    pretrain(config("layer", freeze=LAYER))
    with pytest.MonkeyPatch.context() as patch:
        stopping(patch, 4, by=True)
        assert pretrain(config("begun", freeze=LAYER))["stopped_at"] == 4
    together(2, two, str(folder), settings, codes=(0, 9))
    return folder, [read_json(folder / f"{rank}.json") for rank in range(2)], config


def numbers(folder: Path) -> list[float]:
    """Return the losses and gradient norms of a run."""
    return [line[name] for line in read_lines(folder / "metrics.jsonl") for name in ("loss", "grad_norm")]


def events(folder: Path) -> list[tuple]:
    """Return what the events of a run did, and when."""
    return [(event.kind, event.update, event.heads) for event in read_events(folder)]


def report_loss(folder: Path) -> float:
    return read_json(folder / "result.json")["report_loss"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STORIES)
def test_losses_events_and_checkpoints_are_those_of_one_process(stories, name, kind):
    folder, (first, second), _ = stories
    run, one = folder / f"{name} {kind}", folder / name
    assert numbers(run) == pytest.approx(numbers(one), rel=LOSSES)
    assert events(run) == events(one)
    assert len(events(one)) == {"undone": 3, "pruned": 1}[name]
    assert first[f"{name} {kind}"] == second[f"{name} {kind}"] == pytest.approx(report_loss(one), rel=LOSSES)
    assert first[f"{name} {kind} hash"] == second[f"{name} {kind} hash"], "the same bits on all ranks"
    assert read_json(run / "config.json")["processes"] == 2
    several, alone = (open_checkpoint(latest(path / "checkpoints")) for path in (run, one))
    assert several.state["optimizer_groups"] == alone.state["optimizer_groups"]
    for part in ("model", "optimizer"):
        found, expected = several.tensors(part), alone.tensors(part)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            if tensor.is_floating_point():  # others are hashes of patterns
                torch.testing.assert_close(found[key], tensor, rtol=2e-3, atol=1e-5)


def test_only_rank_0_writes_and_a_rank_holds_its_share(stories):
    folder, said, _ = stories
    assert [each["writes"] for each in said] == [True, False]
    path, whole = (latest(folder / name / "checkpoints") for name in ("undone fsdp", "undone"))
    assert {file.name for file in path.iterdir()} == {file.name for file in whole.iterdir()}
    assert [each["bytes"] for each in said] == [8 * saf.preset("tiny").num_parameters] * 2, "half of 16 a parameter"


def test_any_number_of_ranks_goes_on_where_others_stopped(stories):
    """One process, two ranks, one process again; and four ranks after two."""
    folder, (first, second), config = stories
    assert first["begun"]["stopped_at"] == second["begun"]["stopped_at"] == 9
    pretrain(config("begun", freeze=LAYER), resume=True)
    assert numbers(folder / "begun") == pytest.approx(numbers(folder / "layer"), rel=LOSSES)
    together(4, four, config("four"))
    assert events(folder / "four") == events(folder / "pruned")
    assert numbers(folder / "four") == pytest.approx(numbers(folder / "pruned"), rel=LOSSES)


def test_bf16_stays_close(stories):
    folder, _, config = stories
    pretrain(config("low-alone", freeze=LAYER, precision="bf16", updates=4))
    assert numbers(folder / "low") == pytest.approx(numbers(folder / "low-alone"), rel=2e-3)


def test_micro_batches_weigh_as_many_targets_as_they_have(stories):
    _, (first, second), _ = stories
    alone = uneven_targets(0, Parallel(), every=1)
    for pair in zip(first["uneven targets"], second["uneven targets"], strict=True):
        assert pair[0] == pair[1] == pytest.approx(alone, rel=LOSSES)


def test_every_rank_freezes_by_the_batches_of_the_first(stories):
    _, said, _ = stories
    assert [each["late"] for each in said] == ["done", "done"]
    first, second = (each["frozen alike"] for each in said)
    assert (first["known"], first["strange"]) == (["SelectionError", "too few"], ["ZeroDivisionError", "none"])
    assert second["known"] == first["known"]
    assert second["strange"] == ["SafError", "process 0 failed: ZeroDivisionError: none"]
    same = ("heads", "alpha", "sequences", "statistics", "output")
    assert [first[name] for name in same] == [second[name] for name in same]
    # Six heads were measured by each rank, those of the middle layer by both: the same bits as of one process.
    alone = frozen_alike(0)
    assert all(alone[name] == first[name] for name in ("heads", "sequences", "statistics"))
    torch.testing.assert_close(torch.tensor(alone["alpha"]), torch.tensor(first["alpha"]))


def test_evaluations_are_those_of_one_process_to_the_last_bit(stories, tmp_path):
    _, (first, second), config = stories
    alone = json.loads(json.dumps([evaluated(config("").data, tmp_path / "alone"), answered()]))
    assert first["evaluated"] == second["evaluated"] == alone


def test_what_one_rank_refuses_all_do(stories):
    folder, said, _ = stories
    for each in said:
        assert each["uneven"][0] == each["alone"][0] == each["unlike"][0] == "InputError"
        assert "process 1 must have the settings and data of the first one: batch_size must be 2" in each["unlike"][1]
        assert "accumulation=2 and batch_size=3" in each["uneven"][1]
        assert "needs one process, got 2" in each["alone"][1]
        assert each["trained"][0] == "UnsupportedError"
    assert not any((folder / name).exists() for name in ("uneven", "unlike", "trained"))


def test_what_fails_on_one_rank_stops_all(stories):
    folder, (first, second), _ = stories
    for each in (first, second):
        assert each["diverged"][0] == "DivergenceError"
        assert "update 4 was not applied" in each["diverged"][1]
        assert each["applied"] == 3
        assert each["event"] == ["UnsupportedError", "no room for the tables"]
        assert each["unchanged"]
    assert first["apart"] == ["SafError", "process 1 failed: KeyError: 'plan'"]
    assert second["apart"] == ["KeyError", "'plan'"]
    assert read_events(folder / "refused") == read_events(folder / "apart") == []
    assert first["lost"], "an error, and no waiting for a rank that ended"


def test_a_users_error_under_torchrun_is_printed_once_and_ends_all_processes(data, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "saf"]
    command += ["pretrain", "--data", str(data), "--out", str(tmp_path / "run"), "--device", "cpu"]
    paths = os.pathsep.join([str(Path(saf.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([*command, "--accumulation", "3"], env=environment, capture_output=True, text=True)
    assert ended.returncode != 0
    assert ended.stderr.count("accumulation must be") == 1
    assert not (tmp_path / "run").exists()
