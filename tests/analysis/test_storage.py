import pytest
import torch

import saf
from saf.analysis.storage import Storage, measure, tables
from saf.bench.models import synthetic_patterns
from saf.errors import InputError
from saf.models import GPT, GPTConfig
from saf.report.analyses import analysis_figure


def test_every_form_of_a_models_patterns_is_counted(tmp_path):
    config = GPTConfig(vocab_size=32, num_layers=2, num_heads=4, hidden_size=32, max_length=16)
    model = GPT(config)
    saf.save(model, tmp_path / "ordinary")
    with pytest.raises(InputError, match="no frozen heads"):
        measure(Storage(model=tmp_path / "ordinary"))
    heads = saf.HeadSet([(0, 1), (0, 2), (1, 3)])
    saf.install_(model, heads, synthetic_patterns(3, 16, torch.Generator().manual_seed(0)))
    saf.save(model, tmp_path / "frozen")
    record = measure(Storage(model=tmp_path / "frozen"))
    assert (record["heads"], record["layers"]) == (3, 2)
    matrix = 16 * 16 * 4
    sizes = record["bytes"]
    assert (sizes["dense_by_layer"], sizes["dense_packed"]) == (2 * 4 * matrix, 3 * matrix)
    assert sizes["compact"] == 3 * 3 * 16 * 4
    assert sizes["allocated"] > 0
    words, table = tables(record)
    assert "3 frozen heads in 2 layers" in words
    assert len(table.rows) == 4
    assert "a matrix for every frozen head: " in analysis_figure(record)
