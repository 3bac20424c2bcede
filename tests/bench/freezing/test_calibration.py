"""The benchmark of interventions: what it records, that it changes nothing, and when it refuses to compare."""

import os
import statistics
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import saf
from saf.bench import measure
from saf.bench.freezing.calibration import empty_kernel_cache, inputs_of, points_of
from saf.bench.freezing.dense import measure_dense
from saf.bench.freezing.fits import measure_fits, read_goals
from saf.bench.freezing.intervention import Interventions
from saf.bench.freezing.model import build, sequences, structure_
from saf.bench.freezing.settings import CalibrationSettings
from saf.bench.harness.settings import Point
from saf.bench.harness.timing import Budget
from saf.calibration import calibrate
from saf.cli.bench import COMMANDS
from saf.errors import InputError, UnsupportedError
from saf.machine.execution import Execution
from saf.models import GPT, GPTConfig, preset
from saf.patterns import CompactPattern
from saf.records.files import read_json
from saf.statistics import AttentionStatistics

STAGES = ["capture", "statistics", "score", "select", "fit", "install", "other"]
CPU = torch.device("cpu")
EXECUTION = Execution.of("cpu")


def settings(**given) -> CalibrationSettings:
    return CalibrationSettings(**{"model": "tiny", "points": ("48x4",), "repeats": 3, "device": "cpu"} | given)


def interventions(model: GPT, count: int = 4, length: int = 48) -> Interventions:
    ids = torch.randint(model.config.vocab_size, (count, length), generator=torch.Generator().manual_seed(1))
    return Interventions(model, list(ids.split(2)), EXECUTION)


def small_model() -> GPT:
    model = GPT(GPTConfig(vocab_size=40, num_layers=2, num_heads=4, hidden_size=32, max_length=48))
    model.reset_parameters(torch.Generator().manual_seed(0))
    structure_(model, torch.Generator().manual_seed(0))
    return model


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "calibration.json"
    said: list[str] = []
    record = measure(settings(rates=(0.25, 0.5), dense_layers=3), out=path, say=said.append)
    assert read_json(path) == record
    return record, said


def test_a_row_for_each_rate_for_all_fits_and_for_the_dense_collection(record):
    found, said = record
    assert (found["schema"], found["kind"], found["finished"], found["left_out"]) == (
        "saf.result/2", "calibration", True, [],
    )  # fmt: skip
    assert found["provenance"]["versions"]["torch"]
    assert [(row["part"], row.get("rate"), row.get("heads")) for row in found["rows"]] == [
        ("intervention", 0.25, 4), ("intervention", 0.5, 8), ("fit", None, 16), ("dense", None, None),
    ]  # fmt: skip
    assert all("not trained" in row["weights"] and row["text"] == "random tokens" for row in found["rows"])
    assert sum(": warm " in line for line in said) == 6
    assert any("model runs 1 x" in line for line in said)
    rows = (", 25% of heads: ", ", 50% of heads: ", "] fit: of tiny; heads 16; ", "] dense collection: point tiny ")
    assert all(sum(row in line for line in said) == 1 for row in rows)


def test_times_are_medians_and_first_use_is_apart(record):
    for row in record[0]["rows"][:2]:
        assert list(row["stages"]) == list(row["first_stages"]) == STAGES
        for stage in (*row["stages"].values(), row["spread"]):
            assert len(stage["all"]) == row["repeats"] == 3
            assert stage["median"] == statistics.median(stage["all"])
        assert row["seconds"] == row["spread"]["median"]
        for number, whole in enumerate(row["spread"]["all"]):
            parts = [stage["all"][number] for stage in row["stages"].values()]
            assert sum(parts) == pytest.approx(whole)
            assert parts[-1] >= 0
        assert row["first_use_seconds"] == pytest.approx(row["first_seconds"] - row["seconds"])
        assert row["same_each_time"] is True
        assert row["bar_seconds"] is None  # bars are for GPUs
        assert row["peak_bytes"] > 50e6
        assert row["planned_bytes"] > 2 * 4 * 48 * 128 * 4 * 4


def test_the_dense_collection_agrees_and_says_that_it_is_extrapolated(record):
    row = record[0]["rows"][-1]
    ours = record[0]["rows"][1]
    assert (row["layers"], row["of_layers"], row["extrapolated"], row["agrees"]) == (3, 4, True, True)
    assert row["seconds"] == pytest.approx(4 * statistics.mean(row["layer_seconds"]))
    assert set(row["difference"]) == {"variance", "forward_kl", "eta_abs", "eta_rel", "row_entropy"}
    assert 0 < max(row["difference"].values()) < 1e-5
    assert row["statistics_seconds"] == ours["stages"]["statistics"]["median"]
    assert row["ratio"] == pytest.approx(row["seconds"] / row["statistics_seconds"])
    expected = ours["seconds"] - row["statistics_seconds"] + row["seconds"]
    assert row["intervention_seconds"] == pytest.approx(expected)


def test_statistics_that_differ_are_refused():
    events = interventions(small_model())
    found = calibrate(events.model, events.ids)
    row = measure_dense(events, found, layers=2, budget=Budget())
    assert (row["agrees"], row["extrapolated"], row["layers"]) == (True, False, 2)
    assert row["seconds"] == pytest.approx(sum(row["layer_seconds"]))
    found.eta_rel[1, 2, 5] *= 1.1
    row = measure_dense(events, found, layers=2, budget=Budget())
    assert row["agrees"] is False
    worst = found.eta_rel[1, 2, 5] / 11 / calibrate(events.model, events.ids).eta_rel[1, 2].max()
    assert row["difference"]["eta_rel"] == pytest.approx(worst.item(), rel=1e-3)
    assert row["difference"]["variance"] < 1e-5
    assert measure_dense(events, found, layers=2, budget=Budget(1e-9)) is None


def test_an_intervention_is_undone_with_its_moments():
    events = interventions(small_model())
    optimizer = events._optimizer
    for state in optimizer.state.values():
        state["exp_avg"].normal_()

    def everything() -> list[torch.Tensor]:
        held = [*events.model.parameters(), *events.model.buffers()]
        return [tensor.detach().clone() for tensor in held] + [
            optimizer.state[parameter]["exp_avg"].clone() for parameter in events.model.parameters()
        ]

    before = everything()
    event = events.once(0.5)
    assert len(event.report.heads) == 4
    assert event.seconds > sum(event.report.seconds.values())
    assert len(before) == len(everything())
    assert all(torch.equal(one, other) for one, other in zip(before, everything(), strict=True))
    assert not any(attention.layout.frozen for attention in events.model.attention_layers())


def test_structure_makes_heads_differ_and_see_distance():
    plain = GPT(preset("tiny", vocab_size=64))
    plain.reset_parameters(torch.Generator().manual_seed(0))
    made = GPT(preset("tiny", vocab_size=64))
    made.load_state_dict(plain.state_dict())
    structure_(made, torch.Generator().manual_seed(0))
    ids = torch.randint(64, (4, 256), generator=torch.Generator().manual_seed(0))
    before, after = calibrate(plain, [ids]), calibrate(made, [ids])
    spread = [(found.variance.max() / found.variance.min()).item() for found in (before, after)]
    assert spread[1] > 3 * spread[0]
    assert (after.row_entropy < before.row_entropy).all()
    count = torch.arange(256, 0, -1)
    near = [(found.eta_rel / count)[..., :8].sum(-1).mean() for found in (before, after)]
    assert near[1] > 1.5 * near[0]


def reference_file(path, **changes):
    generator = torch.Generator().manual_seed(0)
    pattern = CompactPattern.from_parameters(*(0.3 * torch.randn(2, 2, 3, 40, generator=generator)).double())
    dense = pattern.dense()
    eta_rel = torch.stack([dense.diagonal(-lag, -2, -1).sum(-1) for lag in range(40)], -1)
    arrays = {
        "eta_abs": dense.sum(-2),
        "eta_rel": eta_rel,
        "mean_row_entropy": -torch.xlogy(dense, dense).sum((-1, -2)) / 40,
        "reference_fit_kl": torch.full((2, 3), 1e-4),
    }
    np.savez(path, **{name: array.numpy() for name, array in arrays.items() if changes.get(name, True)})
    return path


def test_fits_of_a_file_are_measured_against_its_reference(tmp_path):
    row = measure_fits(read_goals(reference_file(tmp_path / "a.npz")), repeats=3, device=CPU, budget=Budget())
    assert (row["heads"], row["length"], row["repeats"], row["not_converged"]) == (6, 40, 3, 0)
    # Compact patterns fit themselves: nothing is left, so the fit is better than a reference of 1e-4 nats.
    assert abs(row["worst_kl"]) < 1e-7
    assert row["excess_kl"] == pytest.approx(-1e-4, abs=1e-7)
    assert row["bar_excess_kl"] == 0.002
    assert row["sweeps"]["max"] >= row["sweeps"]["mean"] >= 1
    plain = read_goals(reference_file(tmp_path / "b.npz", reference_fit_kl=False))
    assert measure_fits(plain, repeats=3, device=CPU, budget=Budget())["excess_kl"] is None
    assert measure_fits(plain, repeats=3, device=CPU, budget=Budget(1e-9)) is None
    with pytest.raises(InputError, match="lacks the arrays eta_rel"):
        read_goals(reference_file(tmp_path / "c.npz", eta_rel=False))
    with pytest.raises(InputError, match="does not exist"):
        read_goals(tmp_path / "none.npz")


def test_statistics_written_by_save_are_fitted_too(tmp_path):
    events = interventions(small_model())
    calibrate(events.model, events.ids).save(tmp_path / "s.safetensors")
    assert len(read_goals(tmp_path / "s.safetensors").eta_abs) == 8
    found = measure(
        settings(rates=(), statistics=tmp_path / "s.safetensors"), out=tmp_path / "o.json", say=lambda _: None
    )
    assert [(row["part"], row["heads"], row["of"]) for row in found["rows"]] == [
        ("fit", 8, str(tmp_path / "s.safetensors"))
    ]
    assert AttentionStatistics.load(tmp_path / "s.safetensors").length == 48


def test_a_record_has_the_hashes_of_what_was_measured(monkeypatch, tmp_path):
    found = SimpleNamespace(checkpoint=SimpleNamespace(hash="abc"))
    monkeypatch.setattr("saf.bench.freezing.calibration.find_model", lambda path: found)
    assert inputs_of(settings(model_folder=tmp_path)) == {"checkpoints": {"model": "abc"}, "data": {}}
    assert inputs_of(settings()) == {"checkpoints": {}, "data": {}}


def test_a_trained_model_and_its_text(tmp_path):
    saf.save(small_model(), tmp_path / "model")
    given = settings(model_folder=tmp_path / "model")
    model, weights = build(given, Point(32, 3), CPU)
    assert weights == f"trained: {tmp_path / 'model'}"
    assert torch.equal(model.embed.weight, small_model().embed.weight)
    ids, _ = sequences(settings(model_folder=tmp_path / "model", batch_size=2), Point(32, 3), model)
    assert [tuple(batch.shape) for batch in ids] == [(2, 32), (1, 32)]
    with pytest.raises(InputError, match="takes 64 tokens"):
        build(given, Point(64, 3), CPU)
    with pytest.raises(InputError, match=r"expected a checkpoint \(step-N\), a run or a folder written by saf.save"):
        build(settings(model_folder=tmp_path), Point(32, 3), CPU)


def test_without_time_everything_is_left_out():
    said: list[str] = []
    found = measure(settings(seconds=1e-6), say=said.append)
    assert found["rows"] == []
    assert "out of time" in found["left_out"][0]["why"]
    assert "a median needs 3" in found["left_out"][1]["why"]


def test_what_does_not_fit_is_left_out_with_its_knob(monkeypatch):
    monkeypatch.setattr("saf.calibration.plan.free_bytes", lambda device: 1)
    found = measure(settings(), say=lambda _: None)
    assert found["rows"] == []
    assert "not enough memory" in found["left_out"][0]["why"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"repeats": 2}, "repeats must be at least 3"),
        ({"rates": (0.0,)}, "rates must be shares"),
        ({"rates": ()}, "nothing to measure"),
        ({"seconds": 0.0}, "seconds must be above 0"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"dense_layers": -1}, "dense_layers must be at least 0"),
        ({"data": Path("text")}, "give model_folder too"),
    ],
)
def test_settings_that_cannot_be_used(given, message):
    with pytest.raises(InputError, match=message):
        settings(**given)


def test_points_are_the_models_own_unless_given():
    assert points_of(settings(points=(), model="124m")) == [Point(4096, 32)]
    assert points_of(settings(points=(), model="1b")) == [Point(8192, 16)]
    assert points_of(settings(points=("64x2", "32x1"))) == [Point(64, 2), Point(32, 1)]
    with pytest.raises(InputError, match="unknown model preset"):
        points_of(settings(points=(), model="125m"))
    with pytest.raises(InputError, match="such as --points 4096x32"):
        points_of(settings(points=(), model_folder=Path("somewhere")))


def test_the_kernel_cache_is_empty_for_the_time_of_a_measurement(monkeypatch, tmp_path):
    for before in (None, str(tmp_path)):
        monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
        if before is not None:
            monkeypatch.setenv("TRITON_CACHE_DIR", before)
        with empty_kernel_cache():
            assert os.listdir(os.environ["TRITON_CACHE_DIR"]) == []
        assert os.environ.get("TRITON_CACHE_DIR") == before


def test_the_command_prints_tables_and_refuses_when_nothing_was_measured(tmp_path, capsys):
    words = ["--model", "tiny", "--points", "32x3", "--repeats", "3", "--device", "cpu", "--dense-layers", "1"]
    words += ["--statistics", str(reference_file(tmp_path / "a.npz"))]
    command = COMMANDS["calibration"]
    command.from_words([*words, "--out", str(tmp_path / "o.json")]).run()
    printed = capsys.readouterr()
    for text in ("tiny, 32x3, 25% of heads", "statistics", "first use", "a.npz", "within", "1 of 4"):
        assert text in printed.out
    assert "dense collection" in printed.err
    with pytest.raises(UnsupportedError, match="nothing could be measured"):
        command.from_words([*words, "--out", str(tmp_path / "p.json"), "--seconds", "1e-6"]).run()
