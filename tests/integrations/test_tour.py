"""The notebook runs from its first cell to its last, and is kept without what a run of it prints."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

TOUR = Path(__file__).resolve().parents[2] / "examples" / "tour.ipynb"


def test_its_cells_run_in_order(tmp_path, monkeypatch, capsys):
    book = json.loads(TOUR.read_text(encoding="utf-8"))
    assert (book["nbformat"], len({cell["id"] for cell in book["cells"]})) == (4, len(book["cells"]))
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    with torch.random.fork_rng():
        for cell in book["cells"]:
            if cell["cell_type"] == "code":
                assert (cell["outputs"], cell["execution_count"]) == ([], None), "kept without outputs"
                exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
                assert capsys.readouterr().out.strip(), cell["id"]
    assert len(names["heads"]) == 3
    assert names["loss"](names["ordinary"]) < 3, "the model has learnt something: an untrained one loses 5.5 nats"
    assert (tmp_path / "llama.html").is_file()
