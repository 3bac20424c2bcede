"""Checkpoints: round trips to the last bit, damage by name, and which are kept."""

from pathlib import Path

import numpy as np
import pytest
import torch

from saf.checkpoint import (
    checkpoints,
    groups_and_moments,
    open_checkpoint,
    remove_old_checkpoints_,
    save_checkpoint,
    step_name,
)
from saf.errors import CheckpointError
from saf.models import GPT, preset
from saf.patterns import CompactPattern
from saf.surgery import install_, uninstall_
from saf.train.step import build_optimizer, step_if_finite_

SHAPE = {"vocab_size": 64, "num_layers": 2, "hidden_size": 32, "num_heads": 4, "max_length": 16}
FILES = ("model.safetensors", "optimizer.safetensors", "saf.safetensors", "saf.json", "state.json")


@pytest.fixture
def model(generator) -> GPT:
    model = GPT(preset("tiny", **SHAPE))
    model.reset_parameters(generator)
    return model


@pytest.fixture
def optimizer(model):
    optimizer = build_optimizer(model)
    train(model, optimizer, seed=0)
    return optimizer


def train(model: GPT, optimizer, seed: int) -> None:
    ids = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(seed))
    model(ids[:, :-1], targets=ids[:, 1:]).backward()
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    step_if_finite_(optimizer, torch.ones(1))
    optimizer.zero_grad()


def write(folder, update: int, model, optimizer, **state) -> Path:
    path = folder / step_name(update)
    save_checkpoint(path, model, optimizer, state={"update": update, "model": model.config.to_dict(), **state})
    return path


def equal(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    "heads", [[], [(0, 1), (1, 3)], [(0, head) for head in range(4)]], ids=["live", "some", "layer"]
)
def test_round_trip_is_bit_for_bit(tmp_path, model, optimizer, heads):
    if heads:
        alpha, rho = torch.randn(2, len(heads), 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        install_(model, heads, CompactPattern.from_parameters(alpha, rho), optimizer=optimizer)
    train(model, optimizer, seed=1)
    odd = {"best": float("inf"), "noise": float("nan")}
    path = write(tmp_path, 2, model, optimizer, schedule=odd)
    assert {file.name for file in path.iterdir()} == {*FILES, "manifest.json"}
    checkpoint = open_checkpoint(path)
    assert checkpoint.state["schedule"]["best"] == odd["best"]
    assert np.isnan(checkpoint.state["schedule"]["noise"])
    restored = checkpoint.model()
    again = checkpoint.optimizer(restored)
    for undo in (False, True):
        if undo:
            uninstall_(model, optimizer=optimizer)
            uninstall_(restored, optimizer=again)
        assert equal(model.state_dict(), restored.state_dict())
        assert groups_and_moments(again, restored)[0] == groups_and_moments(optimizer, model)[0]
        assert equal(groups_and_moments(again, restored)[1], groups_and_moments(optimizer, model)[1])


def test_the_hash_is_of_content_and_parent(tmp_path, model, optimizer):
    first, second = (open_checkpoint(write(tmp_path / name, 1, model, optimizer)) for name in "ab")
    state = {"update": 1, "model": model.config.to_dict()}
    child = save_checkpoint(tmp_path / "step-9", model, optimizer, state=state, parent=first.hash)
    assert first.hash == second.hash == open_checkpoint(tmp_path / "step-9").parent != child


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json"])
def test_one_flipped_bit_is_refused_by_name_and_the_previous_offered(tmp_path, model, optimizer, name):
    good, bad = (write(tmp_path, update, model, optimizer) for update in (1, 2))
    content = bytearray((bad / name).read_bytes())
    content[len(content) // 2] ^= 1
    (bad / name).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(bad)
    assert str(bad / name) in str(caught.value)
    assert f"{good} is whole" in str(caught.value)


def test_what_is_missing_exists_already_or_is_of_another_model_is_refused(tmp_path, model, optimizer):
    first, second = (write(tmp_path, update, model, optimizer) for update in (1, 2))
    (first / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"it has no manifest\.json$"):
        open_checkpoint(first)
    (second / "saf.json").unlink()
    with pytest.raises(CheckpointError, match=r"saf\.json is missing"):
        open_checkpoint(second)
    with pytest.raises(CheckpointError, match=r"step-9 does not exist \(there are step-1, step-2\); expected a check"):
        open_checkpoint(tmp_path / "step-9")


def test_order_and_pruning(tmp_path):
    def names():
        return [path.name for path in checkpoints(tmp_path)]

    for name in (*map(step_name, (2, 10, 100, 9)), step_name(10, after_freezing=True), ".writing-step-1000"):
        (tmp_path / name).mkdir()
    for keep, remaining in ((0, [2, 9, 10, "10-frozen", 100]), (1, [9, 100])):
        remove_old_checkpoints_(tmp_path, keep=keep, protect={"step-9"})
        assert names() == [f"step-{each}" for each in remaining]
