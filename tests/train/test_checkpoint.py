import errno
import json
import os
import random
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

import saf.train.checkpoint as module
from saf.errors import CheckpointError
from saf.heads import HeadSet
from saf.models import GPT, preset
from saf.patterns import CompactPattern
from saf.records.folders import remove_leftovers_
from saf.surgery import install_, uninstall_
from saf.train.checkpoint import (
    capture_random_state,
    checkpoints,
    latest,
    load_model,
    open_checkpoint,
    prune_checkpoints_,
    restore_random_state,
    save_checkpoint,
    step_name,
)
from saf.train.optimizer import build_optimizer, optimizer_state, set_learning_rate_, step_if_finite_
from tests.train.group import begun

FILES = ("model.safetensors", "optimizer.safetensors", "saf.safetensors", "saf.json", "state.json")


@pytest.fixture
def model(generator) -> GPT:
    model = GPT(preset("tiny", vocab_size=64, num_layers=2, hidden_size=32, max_length=16))
    model.reset_parameters(generator)
    return model


@pytest.fixture
def optimizer(model):
    optimizer = build_optimizer(model)
    set_learning_rate_(optimizer, 1e-2)
    train(model, optimizer)
    return optimizer


def train(model, optimizer, seed: int = 0) -> None:
    ids = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(seed))
    model(ids[:, :-1], targets=ids[:, 1:]).backward()
    step_if_finite_(optimizer, torch.ones(1))
    optimizer.zero_grad()


def write(folder, update: int, model, optimizer, **more):
    path = folder / step_name(update)
    save_checkpoint(path, model, optimizer, state={"update": update, "model": model.config.to_dict()}, **more)
    return path


def freeze(model, optimizer, heads) -> None:
    if not heads:
        return
    heads = HeadSet(heads)
    generator = torch.Generator().manual_seed(3)
    alpha, rho = (torch.randn(len(heads), 16, generator=generator, dtype=torch.float64) for _ in range(2))
    install_(model, heads, CompactPattern.from_parameters(alpha, rho), optimizer=optimizer)


def equal(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    "heads", [[], [(0, 1), (1, 3)], [(0, 0), (0, 1), (0, 2), (0, 3)]], ids=["live", "some", "layer"]
)
def test_round_trip_is_bit_for_bit(tmp_path, model, optimizer, heads):
    freeze(model, optimizer, heads)
    train(model, optimizer, seed=1)
    checkpoint = open_checkpoint(write(tmp_path, 2, model, optimizer))
    restored = checkpoint.model()
    assert equal(model.state_dict(), restored.state_dict())
    groups, moments = optimizer_state(optimizer, model)
    again = checkpoint.optimizer(restored)
    assert optimizer_state(again, restored)[0] == groups
    assert equal(optimizer_state(again, restored)[1], moments)
    ids = torch.arange(16)[None]
    assert torch.equal(model(ids), restored(ids))
    uninstall_(model, optimizer=optimizer)
    uninstall_(restored, optimizer=again)
    assert equal(model.state_dict(), restored.state_dict())
    assert equal(optimizer_state(again, restored)[1], optimizer_state(optimizer, model)[1])


def test_holds_safetensors_and_json_alone(tmp_path, model, optimizer):
    path = write(tmp_path, 1, model, optimizer)
    assert {file.name for file in path.iterdir()} == {*FILES, "manifest.json"}


def test_hash_names_content_and_parent(tmp_path, model, optimizer):
    hashes = {
        open_checkpoint(write(tmp_path / "a", 1, model, optimizer)).hash,
        open_checkpoint(write(tmp_path / "b", 1, model, optimizer)).hash,
    }
    assert len(hashes) == 1
    child = open_checkpoint(write(tmp_path / "c", 1, model, optimizer, parent=hashes.pop()))
    assert child.parent is not None
    assert child.hash != child.parent


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_one_flipped_bit_is_refused_by_name_and_the_previous_offered(tmp_path, model, optimizer, name):
    good, bad = (write(tmp_path, update, model, optimizer) for update in (1, 2))
    content = bytearray((bad / name).read_bytes())
    content[len(content) // 2] ^= 1
    (bad / name).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(bad)
    assert str(bad / name) in str(caught.value)
    assert f"{good} is whole" in str(caught.value)
    assert open_checkpoint(good).update == 1


def test_a_checkpoint_that_lost_its_manifest_leads_to_the_nearest_earlier_one(tmp_path, model, optimizer):
    for update in (1, 2, 3, 10):
        write(tmp_path, update, model, optimizer)
    for update, words in (
        (3, f"The previous checkpoint {tmp_path / 'step-2'} is whole."),
        (1, "it has no manifest.json."),
    ):
        (tmp_path / f"step-{update}" / "manifest.json").unlink()
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(tmp_path / f"step-{update}")
        assert str(caught.value).endswith(words)


def test_messages_speak_of_earlier_checkpoints_only_where_there_are_some(tmp_path, model, optimizer, monkeypatch):
    def refused(path):
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(path)
        return str(caught.value)

    for update in (1, 2):
        (write(tmp_path, update, model, optimizer) / "saf.json").unlink()
    monkeypatch.chdir(tmp_path)
    assert refused(Path("step-1")).endswith("bytes.")
    assert refused(Path("step-2")).endswith(f"No earlier checkpoint in {tmp_path.resolve()} is whole.")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(CheckpointError, match=r"kept\. Free some space, then resume the run or repeat the command"):
        write(tmp_path / "out", 3, model, optimizer)


def test_message_shows_expected_and_actual_sum(tmp_path, model, optimizer):
    path = write(tmp_path, 1, model, optimizer)
    recorded = module.read_manifest(path)["files"]["state.json"]["sha256"]
    (path / "state.json").write_bytes((path / "state.json").read_bytes()[::-1])
    with pytest.raises(CheckpointError, match=rf"expected SHA-256 {recorded}, got [0-9a-f]{{64}}\.$"):
        open_checkpoint(path)


def test_missing_file_and_missing_checkpoint(tmp_path, model, optimizer):
    path = write(tmp_path, 1, model, optimizer)
    (path / "saf.json").unlink()
    with pytest.raises(CheckpointError, match=r"saf\.json is missing"):
        load_model(path)
    with pytest.raises(CheckpointError, match="expected a checkpoint"):
        load_model(tmp_path)


def test_never_overwrites(tmp_path, model, optimizer):
    write(tmp_path, 1, model, optimizer)
    with pytest.raises(CheckpointError, match="exists already"):
        write(tmp_path, 1, model, optimizer)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "no space left"),
        (SafetensorError("I/O error: No space left (os error 28)"), "no space left"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "quota"),
        (SafetensorError("I/O error: Disk quota exceeded (os error 122)"), "quota"),
    ],
    ids=["python", "safetensors", "python-quota", "safetensors-quota"],
)
@pytest.mark.parametrize("file", ["model.safetensors", "saf.safetensors"])
def test_full_disk_leaves_the_previous_checkpoint(tmp_path, model, optimizer, monkeypatch, error, reason, file):
    good = write(tmp_path, 1, model, optimizer)
    real = module.save_file

    def full(tensors, path, **options):
        if path.name == file:
            path.write_bytes(b"half of it")
            raise error
        real(tensors, path, **options)

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(CheckpointError, match=f"{reason}.*step-2.*{good.name} is whole"):
        write(tmp_path, 2, model, optimizer)
    assert os.listdir(tmp_path) == ["step-1"]
    assert equal(load_model(latest(tmp_path)).state_dict(), model.state_dict())


def test_a_limit_on_file_sizes_is_explained(tmp_path, model, optimizer):
    """The system's own refusal, from the functions that really write."""
    good = write(tmp_path, 1, model, optimizer)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match=f"limit on file sizes.*step-2.*{good.name} is whole"):
            write(tmp_path, 2, model, optimizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == ["step-1"]


def test_other_write_errors_pass_through(tmp_path, model, optimizer, monkeypatch):
    def broken(*arguments, **options):
        raise PermissionError(errno.EACCES, "denied")

    monkeypatch.setattr(module, "save_file", broken)
    with pytest.raises(PermissionError):
        write(tmp_path, 1, model, optimizer)
    assert os.listdir(tmp_path) == []


def killed_during_a_write(folder: Path, moment: str) -> None:
    """Write a checkpoint, and die in the middle of the next; for a process of its own."""
    model = GPT(preset("tiny", vocab_size=64, num_layers=1, hidden_size=32, max_length=16))
    optimizer = build_optimizer(model)
    write(folder, 1, model, optimizer)
    owner, name = (Path, "rename") if moment == "rename" else (module, moment)
    setattr(owner, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    write(folder, 2, model, optimizer)


@pytest.mark.parametrize("moment", ["write_manifest", "rename"])
def test_killed_during_a_write(tmp_path, moment):
    """A process killed in the middle leaves a folder that nobody takes for a checkpoint."""
    process = begun(killed_during_a_write, tmp_path, moment)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 2
    assert latest(tmp_path) == tmp_path / "step-1"
    assert open_checkpoint(tmp_path / "step-1").update == 1
    remove_leftovers_(tmp_path)
    assert os.listdir(tmp_path) == ["step-1"]


def test_order_and_pruning(tmp_path, model, optimizer):
    for update in (2, 10, 100, 9):
        write(tmp_path, update, model, optimizer)
    state = {"update": 10, "model": model.config.to_dict()}
    save_checkpoint(tmp_path / step_name(10, after_freezing=True), model, optimizer, state=state)
    (tmp_path / "step-1000").mkdir()
    names = [path.name for path in checkpoints(tmp_path)]
    assert names == ["step-2", "step-9", "step-10", "step-10-frozen", "step-100"]
    prune_checkpoints_(tmp_path, keep=0, protect=set())
    assert len(checkpoints(tmp_path)) == 5
    prune_checkpoints_(tmp_path, keep=1, protect={"step-9"})
    assert [path.name for path in checkpoints(tmp_path)] == ["step-9", "step-100"]
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()]


def test_every_generator_repeats_itself():
    original = capture_random_state()
    try:
        random.gauss(0, 1)
        np.random.randn()
        state = json.loads(json.dumps(capture_random_state()))
        first = draw()
        draw()
        restore_random_state(state)
        assert draw() == first
    finally:
        restore_random_state(original)


def test_values_that_are_not_finite_come_back(model, optimizer, tmp_path):
    state = {"update": 1, "model": model.config.to_dict(), "schedule": {"best": float("inf"), "noise": float("nan")}}
    save_checkpoint(tmp_path / "step-1", model, optimizer, state=state)
    found = open_checkpoint(tmp_path / "step-1").state["schedule"]
    assert (found["best"], np.isnan(found["noise"])) == (float("inf"), True)
