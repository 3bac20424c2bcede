"""How many bytes patterns take: the paper's figures, and what a model really holds."""

import pytest
import torch

import saf
from saf.frozen_state import storage_of
from saf.heads import HeadSet
from saf.models import GPT, GPTConfig
from saf.patterns import CompactPattern, DensePattern

LENGTH = 40
SHAPE = GPTConfig(vocab_size=20, num_layers=3, num_heads=4, hidden_size=32, max_length=LENGTH)


def test_storage_of_the_papers_heads():
    heads = [(layer, head) for layer in range(10) for head in range(4 if layer < 6 else 3)]
    report = storage_of(heads, length=4096, num_heads=12)
    assert len(heads) == 36
    assert report.dense_by_layer / 1e9 == pytest.approx(8.060, rel=1e-3)
    assert report.dense_packed / 1e9 == pytest.approx(2.416, rel=1e-3)
    assert report.compact == 36 * 3 * 4096 * 4
    assert report.ratio == pytest.approx(4096 / 3)
    assert storage_of([], length=8, num_heads=12).ratio == 1


def test_a_model_tells_what_its_tables_hold():
    """As much as its tensors' storages, counted here without the model's help."""
    model, soft = GPT(SHAPE), CompactPattern.from_parameters(torch.zeros(LENGTH), -0.1 * torch.arange(LENGTH))
    nothing = saf.storage_report(model)
    assert (nothing.allocated, nothing.compact, nothing.dense_packed) == (0, 0, 0)
    saf.install_(model, HeadSet([(0, 1), (0, 2)]), [soft, DensePattern(soft.dense().float())], backend="toeplitz")
    saf.install_(model, HeadSet([(2, 0)]), soft, trainable=True)
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
