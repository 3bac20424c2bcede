"""A calibration kept in a folder: killed anywhere it goes on to the same bits, and nothing else is taken for it."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from saf.calibration import calibrate
from saf.errors import CheckpointError
from saf.heads import HeadSet
from saf.models import GPT, GPTConfig
from saf.patterns import CompactPattern
from saf.statistics import AttentionStatistics
from saf.surgery import install_

FIELDS = ("variance", "forward_kl", "eta_abs", "eta_rel", "row_entropy")
COLLECT = ("mean_rows", "sharp_eta_abs", "sharp_row_entropy", "row_variance")


def model(dtype: torch.dtype = torch.float32) -> GPT:
    made = GPT(GPTConfig(vocab_size=30, num_layers=4, num_heads=4, hidden_size=32, max_length=40)).to(dtype)
    made.reset_parameters(torch.Generator().manual_seed(0))
    for block in made.blocks:
        block.attention.q_proj.weight.data *= 40
    return made


def batches(seed: int = 1) -> list[torch.Tensor]:
    ids = torch.randint(0, 30, (5, 40), generator=torch.Generator().manual_seed(seed))
    return [ids[:2], ids[2:]]


def same(one: AttentionStatistics, other: AttentionStatistics) -> bool:
    pairs = [(getattr(one, name), getattr(other, name)) for name in FIELDS]
    pairs += [(one.collected[name], other.collected[name]) for name in one.collected]
    assert set(one.collected) == set(other.collected)
    # As integers: NaN of frozen heads equals NaN.
    return all(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in pairs)


def interrupt_at(layers: int):
    def progress(done: int, total: int) -> None:
        if done == layers:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize("collect", [(), COLLECT])
@pytest.mark.parametrize("capture_bytes", [None, 2 * 5 * 40 * 32 * 4])
def test_an_interrupted_calibration_goes_on_to_the_same_bits(tmp_path, monkeypatch, collect, capture_bytes):
    whole = calibrate(model(), batches(), collect=collect)
    options = {"collect": collect, "capture_bytes": capture_bytes, "folder": tmp_path / "calibration"}
    with pytest.raises(KeyboardInterrupt):
        calibrate(model(), batches(), **options, progress=interrupt_at(2))
    seen = []
    from saf.calibration import driver

    measure = driver.measure_layer
    monkeypatch.setattr(driver, "measure_layer", lambda *a, **k: seen.append("measured") or measure(*a, **k))
    resumed = calibrate(model(), batches(), **options, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(2, 4), "measured", (3, 4), "measured", (4, 4)]
    assert same(resumed, whole)


def test_a_killed_process_is_continued_to_the_same_bits(tmp_path):
    script = (
        "import os, signal, sys; sys.path.insert(0, sys.argv[1]); import torch; torch.set_num_threads(1);"
        "from test_resume import *;"
        "calibrate(model(), batches(), folder=sys.argv[2],"
        " progress=lambda done, total: done == 3 and os.kill(os.getpid(), signal.SIGKILL))"
    )
    here, folder = Path(__file__).parent, tmp_path / "calibration"
    environment = os.environ | {"PYTHONPATH": str(here.parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script, str(here), str(folder)], env=environment)
    assert done.returncode == -signal.SIGKILL
    assert sorted(path.name for path in folder.glob("layer-*")) == [f"layer-00{n}" for n in range(3)]
    assert same(calibrate(model(), batches(), folder=folder), calibrate(model(), batches()))


def test_a_finished_calibration_is_read_without_running_the_model(tmp_path):
    whole = calibrate(model(), batches(), folder=tmp_path)
    made, seen = model(), []
    made.blocks[0].register_forward_pre_hook(lambda *_: pytest.fail("the model was run"))
    again = calibrate(made, batches(), folder=tmp_path, progress=lambda *done: seen.append(done))
    assert seen == [(4, 4)]
    assert same(again, whole)
    assert again.sequences_hash == whole.sequences_hash


def test_a_layer_killed_between_its_two_files_is_measured_again(tmp_path, monkeypatch):
    from saf.calibration import resume

    write = resume.write_json

    def refuse(path, record):
        if "layer-001" in path.parent.name:
            raise KeyboardInterrupt
        return write(path, record)

    monkeypatch.setattr(resume, "write_json", refuse)
    with pytest.raises(KeyboardInterrupt):
        calibrate(model(), batches(), folder=tmp_path)
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calibration.json", "layer-000"]
    seen = []
    resumed = calibrate(model(), batches(), folder=tmp_path, progress=lambda *done: seen.append(done[0]))
    assert seen == [1, 2, 3, 4]
    assert same(resumed, calibrate(model(), batches()))


def changed_weight() -> GPT:
    made = model()
    made.blocks[3].mlp.down.weight.data[0, 0] += 1e-3
    return made


def with_frozen_head(shift: float) -> GPT:
    made = model()
    install_(made, HeadSet([(1, 2)]), CompactPattern.from_parameters(torch.zeros(1, 40), shift * torch.ones(1, 40)))
    return made


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"batches": batches(2)}, ["sequences"]),
        ({"batches": batches()[::-1]}, ["sequences", "batches"]),
        ({"batches": batches()[:1]}, ["sequences", "num_sequences", "batches"]),
        ({"batches": [torch.cat(batches())]}, ["batches"]),
        ({"batches": [batch[:, :20] for batch in batches()]}, ["sequences", "length"]),
        ({"model": changed_weight()}, ["model"]),
        ({"model": with_frozen_head(0.0)}, ["model", "heads"]),
        ({"collect": ("mean",)}, ["collect"]),
        ({"collect": ("mean_rows",)}, ["collect", "positions"]),
        ({"heads": [(0, 1)]}, ["heads"]),
    ],
)
def test_other_inputs_are_refused_by_name(tmp_path, change, names):
    calibrate(model(), batches(), folder=tmp_path)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    given = {"model": model(), "batches": batches()} | change
    with pytest.raises(CheckpointError, match="calibration of other inputs") as error:
        calibrate(given.pop("model"), given.pop("batches"), **given, folder=tmp_path)
    listed = str(error.value).split("(")[1]
    assert [part.split(":")[0].strip() for part in listed.split(";")[:-1]] == names
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files


def test_another_pattern_of_a_frozen_head_is_another_model(tmp_path):
    calibrate(with_frozen_head(0.0), batches(), folder=tmp_path)
    made = model()
    slope = CompactPattern.from_parameters(torch.zeros(1, 40), torch.linspace(0, 1, 40)[None])
    install_(made, HeadSet([(1, 2)]), slope)
    with pytest.raises(CheckpointError, match=r"other inputs \(model: "):
        calibrate(made, batches(), folder=tmp_path)


def test_lower_precision_is_another_calibration(tmp_path):
    calibrate(model(), batches(), folder=tmp_path)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(CheckpointError, match="autocast: null there"):
        calibrate(model(), batches(), folder=tmp_path)


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="no calibration; name a new folder"):
        calibrate(model(), batches(), folder=tmp_path)
    with pytest.raises(CheckpointError, match="no calibration; name a new folder"):
        calibrate(model(), batches(), folder=tmp_path / "notes.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_damage_is_told_by_name(tmp_path):
    calibrate(model(), batches(), folder=tmp_path)
    path = tmp_path / "layer-002" / "statistics.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"layer-002/statistics.safetensors is damaged: .*; remove layer-002 to"):
        calibrate(model(), batches(), folder=tmp_path)
    shutil.rmtree(tmp_path / "layer-002")
    assert same(calibrate(model(), batches(), folder=tmp_path), calibrate(model(), batches()))
    (tmp_path / "calibration.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"calibration.json is not valid JSON"):
        calibrate(model(), batches(), folder=tmp_path)


def test_the_index_says_of_what_it_is(tmp_path):
    calibrate(model(), batches(), folder=tmp_path, heads=[(0, 3), (2, 0)])
    record = json.loads((tmp_path / "calibration.json").read_text())
    assert (record["schema"], record["num_sequences"], record["length"]) == ("saf.calibration/2", 5, 40)
    assert (record["heads"], record["batches"], record["device"]) == ([[0, 3], [2, 0]], [2, 3], "cpu")
    assert sorted(path.name for path in tmp_path.glob("layer-*")) == ["layer-000", "layer-002"]
