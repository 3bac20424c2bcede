"""Tuning on the device: candidates agree, the choice is kept and used."""

import pytest
import torch

from saf.bench.tuning import TuneSettings, measure_tuning

pytestmark = pytest.mark.gpu


def test_the_fastest_candidate_is_kept(tmp_path, monkeypatch):
    from saf.ops.toeplitz import choices

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    choices.choices_of.cache_clear()
    record = measure_tuning(TuneSettings(points=("600x1",), heads=(2,)), out=tmp_path / "tune.json")
    assert len(record["rows"]) == 2
    kept = choices.read_choices(torch.device("cuda", 0))
    assert [kept[row["shape"]].name for row in record["rows"]] == [row["chosen"] for row in record["rows"]]
    choices.choices_of.cache_clear()
