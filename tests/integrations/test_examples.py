"""The examples for transformers run as they stand."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("huggingface_*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs(path, hf, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(path), str(tmp_path / "folder")])
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()
    assert list((tmp_path / "folder").rglob("saf.json"))
