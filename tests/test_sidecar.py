"""Saved models: whole, guarded by sums, never over something else, and loaded without drawing."""

import contextlib
import json
from pathlib import Path

import pytest
import torch

import saf
from saf import sidecar as module
from saf.checkpoint import save_checkpoint
from saf.errors import CheckpointError, InputError, SafWarning, UnsupportedError
from saf.heads import HeadSet
from saf.models import GPT, GPTConfig, description
from saf.patterns import CompactPattern
from saf.records.files import read_json
from saf.surgery import install_
from saf.train.step import build_optimizer

LENGTH = 16


def frozen_model(position: str = "rope") -> GPT:
    shape = {"vocab_size": 40, "num_layers": 2, "num_heads": 2, "hidden_size": 16, "max_length": LENGTH}
    model = GPT(GPTConfig(**shape, position=position))
    install_(model, HeadSet([(0, 1)]), CompactPattern.from_parameters(*torch.randn(2, 1, LENGTH)))
    return model


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_loading_gives_the_same_outputs_and_draws_nothing(position, tmp_path):
    model = frozen_model(position)
    saf.save(model, tmp_path)
    before = torch.get_rng_state()
    loaded = saf.load(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    tokens = torch.randint(0, 40, (2, LENGTH))
    assert torch.equal(loaded(tokens), model(tokens))


@pytest.mark.parametrize("name", ["saf.safetensors", "model.safetensors"])
def test_a_flipped_bit_is_named(name, tmp_path):
    saf.save(frozen_model(), tmp_path)
    content = bytearray((tmp_path / name).read_bytes())
    content[-1] ^= 1
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{name} is damaged: expected SHA-256 \w{{64}}, got \w{{64}}"):
        saf.load(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "manifest.json"])
def test_a_folder_of_something_else_is_left_as_it_is(name, tmp_path):
    (tmp_path / name).write_text('{"schema": "saf.run/1"}')
    with pytest.raises(InputError, match=rf"{name} was not written by saf.save; choose another folder"):
        saf.save(frozen_model(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (None, "must hold a JSON object; got list"),
        ({"sha256": None}, "sha256 must name files"),
        ({"schema": None}, "expected frozen heads of schema"),
        ({"layers": [{}, {}]}, "is damaged: layers must have"),
    ],
)
def test_a_damaged_description_is_named(changes, message, tmp_path):
    saf.save(frozen_model(), tmp_path)
    state = read_json(tmp_path / "saf.json")
    (tmp_path / "saf.json").write_text(json.dumps([] if changes is None else state | changes))
    with pytest.raises(CheckpointError, match=message):
        saf.load(tmp_path)


def test_frozen_heads_without_their_model_say_whose_they_are(tmp_path):
    saf.save(frozen_model(), tmp_path)
    state = read_json(tmp_path / "saf.json")
    del state["sha256"]["model.safetensors"]  # as saved beside a model of transformers
    (tmp_path / "saf.json").write_text(json.dumps(state))
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"frozen heads without weights.*saf\.load\(model, folder\)"):
        saf.load(tmp_path)


def write_checkpoint(path, model: GPT) -> None:
    state = {"update": int(path.name.split("-")[1]), "model": model.config.to_dict()}
    save_checkpoint(path, model, build_optimizer(model), state=state)


def test_a_checkpoint_and_a_run_load_without_their_optimiser(tmp_path):
    models = [frozen_model() for _ in range(2)]
    for update, model in zip((9, 10), models, strict=True):
        write_checkpoint(tmp_path / "checkpoints" / f"step-{update}", model)
    (tmp_path / "checkpoints" / "step-10" / "optimizer.safetensors").unlink()
    tokens = torch.randint(0, 40, (2, LENGTH))
    before = torch.get_rng_state()
    for path, expected in ((tmp_path, models[1]), (tmp_path / "checkpoints" / "step-9", models[0])):
        assert torch.equal(saf.load(path)(tokens), expected(tokens))
    assert torch.equal(torch.get_rng_state(), before)
    fresh = GPT(models[1].config)
    assert torch.equal(saf.load(fresh, tmp_path)(tokens), models[1](tokens))


@pytest.mark.parametrize("trainable", [False, True])
def test_heads_keep_the_backend_they_were_saved_with(trainable, tmp_path):
    model, tokens = frozen_model(), torch.randint(0, 40, (2, LENGTH))
    more = CompactPattern.from_parameters(*torch.randn(2, 1, LENGTH))
    install_(model, [(1, 0)], more, backend="reference", trainable=trainable)
    saf.save(model, tmp_path / "saved")
    write_checkpoint(tmp_path / "step-1", model)
    actual = (
        saf.load(tmp_path / "saved"),
        saf.load(GPT(model.config), tmp_path / "saved"),
        saf.load(tmp_path / "step-1"),
    )
    for loaded in actual:
        assert [block.attention.frozen.backend for block in loaded.blocks] == ["toeplitz", "reference"]
        assert torch.equal(loaded(tokens), model(tokens))
    named = saf.load(tmp_path / "saved", backend="reference")
    assert [block.attention.frozen.backend for block in named.blocks] == ["reference", "reference"]


def test_a_backend_that_cannot_run_here_is_told(tmp_path):
    model, tokens = frozen_model(), torch.randint(0, 40, (2, LENGTH))
    saf.save(model, tmp_path)
    state = read_json(tmp_path / "saf.json")
    state["layers"][0]["backend"] = "fused"
    (tmp_path / "saf.json").write_text(json.dumps(state))
    with pytest.warns(SafWarning, match=r"backend 'fused', which is not used here: .* 'auto' takes its place"):
        loaded = saf.load(tmp_path)
    assert torch.equal(loaded(tokens), model(tokens))
    with pytest.raises(UnsupportedError, match="'fused' cannot run"):
        saf.load(tmp_path, backend="fused")


@pytest.mark.parametrize(("at", "there"), [(0, False), (1, True)])
def test_a_killed_save_is_whole_or_absent(at, there, tmp_path, monkeypatch):
    """Killed while it writes its files, the model before is there."""
    folder, tokens = tmp_path / "saved", torch.randint(0, 40, (2, LENGTH))
    before, after = frozen_model(), frozen_model()
    if there:
        saf.save(before, folder)
        (folder / "notes.txt").write_text("mine")
    steps = []

    def step(*arguments):
        steps.append(arguments)
        if len(steps) == at + 1:
            raise KeyboardInterrupt

    write, replace = module.write_json, Path.replace
    for each in (module, description):
        monkeypatch.setattr(each, "write_json", lambda *given: step(*given) or write(*given))
    monkeypatch.setattr(Path, "replace", lambda *given: step(*given) or replace(*given))
    with contextlib.suppress(KeyboardInterrupt):
        saf.save(after, folder)
    monkeypatch.undo()
    assert folder.exists() == there or at >= 2
    if folder.exists():
        expected = before if at < 2 else after
        assert torch.equal(saf.load(folder)(tokens), expected(tokens))
        assert not there or (folder / "notes.txt").read_text() == "mine"
        assert not [path for path in folder.iterdir() if path.name.startswith(".")]
