"""Saved models: whole, guarded by sums, never over something else, and loaded without drawing."""

import json

import pytest
import torch

import saf
from saf.checkpoint import save_checkpoint
from saf.errors import CheckpointError, InputError, SafWarning, UnsupportedError
from saf.frozen_state import storage_of
from saf.models import GPT, GPTConfig
from saf.patterns import CompactPattern, DensePattern
from saf.records.files import read_json
from saf.surgery import install_
from saf.train.step import build_optimizer

LENGTH = 16
TOKENS = torch.randint(0, 40, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def frozen_model(position: str = "rope", *, trainable: bool | None = None) -> GPT:
    """Return a model with a frozen head, and with another one on the reference backend if that is trainable or not."""
    shape = {"vocab_size": 40, "num_layers": 2, "num_heads": 2, "hidden_size": 16, "max_length": LENGTH}
    model = GPT(GPTConfig(**shape, position=position))
    install_(model, [(0, 1)], CompactPattern.from_parameters(*torch.randn(2, 1, LENGTH)))
    if trainable is not None:
        more = CompactPattern.from_parameters(*torch.randn(2, 1, LENGTH))
        install_(model, [(1, 0)], more, backend="reference", trainable=trainable)
    return model


def write_checkpoint(path, model: GPT) -> None:
    state = {"update": int(path.name.split("-")[1]), "model": model.config.to_dict()}
    save_checkpoint(path, model, build_optimizer(model), state=state)


@pytest.mark.parametrize(("position", "trainable"), [("rope", False), ("learned", True)])
def test_loading_gives_the_same_outputs_and_backends_and_draws_nothing(position, trainable, tmp_path):
    model = frozen_model(position, trainable=trainable)
    saf.save(model, tmp_path / "saved")
    write_checkpoint(tmp_path / "step-1", model)
    before = torch.get_rng_state()
    opened = (saf.load(tmp_path / "saved"), saf.load(tmp_path / "step-1"))
    assert torch.equal(torch.get_rng_state(), before)
    for loaded in (*opened, saf.load(GPT(model.config), tmp_path / "saved")):
        assert [block.attention.frozen.backend for block in loaded.blocks] == ["toeplitz", "reference"]
        assert torch.equal(loaded(TOKENS), model(TOKENS))
    named = saf.load(tmp_path / "saved", backend="reference")
    assert [block.attention.frozen.backend for block in named.blocks] == ["reference", "reference"]


def test_a_checkpoint_and_a_run_load_without_their_optimiser(tmp_path):
    models = [frozen_model() for _ in range(2)]
    for update, model in zip((9, 10), models, strict=True):
        write_checkpoint(tmp_path / "checkpoints" / f"step-{update}", model)
    (tmp_path / "checkpoints" / "step-10" / "optimizer.safetensors").unlink()
    for path, expected in ((tmp_path, models[1]), (tmp_path / "checkpoints" / "step-9", models[0])):
        assert torch.equal(saf.load(path)(TOKENS), expected(TOKENS))
    assert torch.equal(saf.load(GPT(models[1].config), tmp_path)(TOKENS), models[1](TOKENS))


def test_a_backend_that_cannot_run_here_is_named(tmp_path):
    model = frozen_model()
    saf.save(model, tmp_path)
    state = read_json(tmp_path / "saf.json")
    state["layers"][0]["backend"] = "fused"
    (tmp_path / "saf.json").write_text(json.dumps(state))
    with pytest.warns(SafWarning, match=r"backend 'fused' run with 'auto'"):
        loaded = saf.load(tmp_path)
    assert torch.equal(loaded(TOKENS), model(TOKENS))
    with pytest.raises(UnsupportedError, match="'fused' cannot run"):
        saf.load(tmp_path, backend="fused")


@pytest.mark.parametrize("name", ["config.json", "manifest.json"])
def test_a_folder_of_something_else_is_left_as_it_is(name, tmp_path):
    (tmp_path / name).write_text('{"schema": "saf.run/1"}')
    with pytest.raises(InputError, match=rf"{name} was not written by saf.save; choose another folder"):
        saf.save(frozen_model(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: [], "must hold a JSON object; got list"),
        (lambda state: state | {"schema": None}, "must have schema 'saf.heads/1'"),
        # As saved for a model of transformers.
        (lambda state: state["sha256"].pop("model.safetensors") and state, r"without weights.*saf\.load\(model, fold"),
    ],
)
def test_a_damaged_description_is_named(change, message, tmp_path):
    saf.save(frozen_model(), tmp_path)
    (tmp_path / "saf.json").write_text(json.dumps(change(read_json(tmp_path / "saf.json"))))
    with pytest.raises(CheckpointError, match=message):
        saf.load(tmp_path)


@pytest.mark.parametrize("name", ["saf.safetensors", "model.safetensors"])
def test_a_flipped_bit_is_named(name, tmp_path):
    saf.save(frozen_model(), tmp_path)
    content = bytearray((tmp_path / name).read_bytes())
    content[-1] ^= 1
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{name} is damaged: expected SHA-256 \w{{64}}, got \w{{64}}"):
        saf.load(tmp_path)


# --- bytes of patterns


def test_storage_of_the_papers_heads():
    heads = [(layer, head) for layer in range(10) for head in range(4 if layer < 6 else 3)]
    report = storage_of(heads, length=4096, num_heads=12)
    assert len(heads) == 36
    assert report.dense_by_layer / 1e9 == pytest.approx(8.060, rel=1e-3)
    assert report.dense_packed / 1e9 == pytest.approx(2.416, rel=1e-3)
    assert report.compact == 36 * 3 * 4096 * 4
    assert report.ratio == pytest.approx(4096 / 3)
    assert storage_of([], length=8, num_heads=12).ratio == 1


def test_the_bytes_of_patterns_are_those_of_the_models_tables():
    """As much as its tensors' storages, counted here without the model's help."""
    model, soft = (
        GPT(GPTConfig(vocab_size=20, num_layers=3, num_heads=4, hidden_size=32, max_length=LENGTH)),
        CompactPattern.from_parameters(torch.zeros(LENGTH), -0.1 * torch.arange(LENGTH)),
    )
    nothing = saf.storage_report(model)
    assert (nothing.allocated, nothing.compact, nothing.dense_packed) == (0, 0, 0)
    install_(model, [(0, 1), (0, 2)], [soft, DensePattern(soft.dense().float())], backend="toeplitz")
    install_(model, [(2, 0)], soft, trainable=True)
    report = saf.storage_report(model)
    assert report.compact == 3 * 3 * LENGTH * 4
    assert report.dense_by_layer == 2 * 4 * LENGTH * LENGTH * 4
    names = dict(model.blocks[0].attention.frozen.named_buffers())
    assert "float32_toeplitz_weights" in names
    assert "bfloat16_toeplitz_weights" in names
    layers = [block.attention.frozen for block in model.blocks if block.attention.frozen is not None]
    tensors = [tensor for layer in layers for tensor in [*layer.buffers(), *layer.parameters()]]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    assert report.allocated == sum(storages.values()) >= LENGTH * LENGTH * (4 + 2) + 2 * LENGTH * 4
