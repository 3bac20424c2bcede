"""The examples for transformers and FSDP2, and the notebook, run as they stand."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import saf
from tests.report.synthetic import write_data

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("huggingface_*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_it_runs(path, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(path), str(tmp_path / "folder")])
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()
    assert list((tmp_path / "folder").rglob("saf.json"))


def test_the_cells_of_the_notebook_run_in_order(tmp_path, monkeypatch, capsys):
    book = json.loads((EXAMPLES / "tour.ipynb").read_text(encoding="utf-8"))
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


def test_a_sharded_loop_freezes_in_two_processes(tmp_path):
    words = ["--standalone", "--nproc-per-node", "2", str(EXAMPLES / "fsdp2_loop.py"), str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run([sys.executable, "-m", "torch.distributed.run", *words], check=True, env=environment)
    saf.load(tmp_path)
    assert len(json.loads((tmp_path / "saf.json").read_text())["layers"]) > 0


def test_two_arms_are_pretrained_and_their_record_is_a_result(tmp_path, monkeypatch, capsys):
    write_data(tmp_path)
    sizes = "--updates 6 --length 32 --batch-size 2 --layers 2 --heads 4 --hidden 32 --calibration 4 --windows 8"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["FILE", *f"--data data --out results/run --max-fit-kl 9 {sizes}".split()])
    with torch.random.fork_rng():
        runpy.run_path(str(EXAMPLES / "pretrain_with_trainer.py"), run_name="__main__")
    run = Path("results/run")
    record = json.loads((run / "trainer.json").read_text())
    assert (record["frozen heads"], record["frozen after update"], record["paired windows"]) == (2, 3, 8)
    ordinary, frozen = (arm["perplexity"] for arm in record["arms"])
    assert record["change of perplexity, %"] == pytest.approx(100 * (frozen / ordinary - 1))
    assert ordinary != frozen
    logs = [
        json.loads((run / arm / "checkpoint-6" / "trainer_state.json").read_text())["log_history"]
        for arm in ("ordinary", "frozen")
    ]
    before, after = ([entry["loss"] for entry in log if entry["step"] <= 3 and "loss" in entry] for log in logs)
    assert before == after, "one training up to the midpoint"
