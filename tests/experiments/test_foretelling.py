"""What measurements are foretold to take, against what records say that they took."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from saf.cli import main
from saf.experiments.foretelling import foretell, foretell_bytes
from saf.experiments.measuring import PlannedMeasurement, plan_measurements
from saf.experiments.plan import Plan, plan
from saf.experiments.planned_run import peak_bytes
from saf.experiments.recipe import open_recipes
from saf.experiments.scales import SCALES
from saf.models import GPT, preset
from saf.prefill import LastToken
from saf.records.files import read_json

BENCH = Path(__file__).parents[2] / "results" / "bench"
PAPER = SCALES["paper"]
RATES = replace(PAPER.rates, start=10.0)
"""A benchmark's process reads no data and saves no checkpoint."""


def planned(kind, settings):
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    return PlannedMeasurement(key="k", does=kind, on=(), settings=settings, seed=None, tables=(("x", "y"),))


@pytest.mark.parametrize(
    "name",
    [
        *("update-4k-again", "update-8k", "update-16k", "memory-4k"),
        *("prefill-b64-4k", "prefill-512", "prefill-b1", "op-layer-4k", "finetune-sst2", "finetune-boolq"),
    ],
)
def test_benchmarks_took_about_what_is_foretold(name):
    record = read_json(BENCH / f"{name}.json")
    # Of a limit that nothing, or little, was left out for; without it the arithmetic alone answers.
    settings = {key: value for key, value in record["settings"].items() if key != "seconds" and value is not None}
    told = foretell(planned(f"bench {record['kind']}", settings), Plan(scale=PAPER, data=""), RATES)
    assert 0.7 < told / record["seconds"] < 1.4


@pytest.mark.parametrize("name", ["memory-4k", "memory-1b"])
def test_peaks_were_about_what_is_foretold(name):
    record = read_json(BENCH / f"{name}.json")
    for entry in record["memory"]:
        if not entry["rate"]:
            shape = preset(record["settings"]["model"], max_length=entry["point"]["length"])
            told = peak_bytes(shape, entry["point"]["length"] * entry["point"]["batch_size"])
            assert told == pytest.approx(entry["bytes"], rel=0.04)


def test_the_peak_of_prompts_was_about_what_is_foretold():
    record = read_json(BENCH / "memory-qwen3.json")
    for entry in (entry for entry in record["memory"] if not entry["rate"]):
        point = entry["point"]
        settings = record["settings"] | {"points": [f"{point['length']}x{point['batch_size']}"], "others": ()}
        told = foretell_bytes(planned("bench prefill", settings), Plan(scale=PAPER, data=""))
        assert told == pytest.approx(entry["bytes"], rel=0.04)


@pytest.mark.parametrize("scale", SCALES)
def test_every_measurement_of_every_recipe_is_foretold(scale):
    recipes = open_recipes()
    made = plan(recipes, SCALES[scale], data="data", seeds=(1,))
    for each in plan_measurements(recipes, made).planned.values():
        assert foretell(each, made, RATES) > 0, each.title
        assert (foretell_bytes(each, made) or 1) > 0, each.title


def test_memory_is_that_of_the_largest_point_and_of_attention_held_whole():
    def told(kind="bench update", **changes):
        settings = {"points": ("4096x8x15",), **changes}
        return foretell_bytes(planned(kind, settings), Plan(scale=PAPER, data=""))

    assert told() == peak_bytes(preset("124m", max_length=4096), 4096 * 8)
    assert told(points=("4096x2x60", "4096x8x15")) == told()
    assert told("bench prefill", others=("flash", "math")) == told("bench prefill", others=("flash",))
    assert told("bench prefill", kernels=("math",)) - told("bench prefill") == 8 * 8 * 12 * 4096**2
    assert told("bench errors") is None


def test_a_prompt_keeps_the_logits_of_its_last_token_and_ways_that_take_more_memory_are_told_apart(tmp_path, capsys):
    words = ["run", "prefill_systems", "--scale", "paper", "--dry-run", "--store", str(tmp_path)]
    assert main([*words, "--json"]) == 0
    most = max(json.loads(capsys.readouterr().out)["measuring_bytes"].values())
    assert most < 30 * 2**30, "of 64 prompts of 16K"
    assert main(words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "prefill_systems/lengths, 64 sequences 1536.00 GiB;" in shown
    assert "Where it does not fit, that arm is left out by name." in shown
    model = GPT(preset("tiny", max_length=8, vocab_size=32))
    assert LastToken(model)(torch.zeros(2, 8, dtype=torch.long)).shape == (2, 1, 32)


def test_a_limit_of_its_own_is_never_exceeded_and_more_pairs_take_longer():
    def told(**changes):
        settings = {"points": ("4096x8x15",), "rates": (0.25,), **changes}
        return foretell(planned("bench update", settings), Plan(scale=PAPER, data=""), RATES)

    assert told() < told(pairs=16) < told(pairs=16, memory=True)
    assert told(seconds=12.0) == 12.0
    assert told(precompile=True, workers=4) < told()


def test_a_dry_run_says_when_measurements_end(tmp_path, capsys):
    assert main(["run", "one_head", "recovery", "--dry-run", "--store", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["measuring_seconds"]) == found["measurements"] > 2
    assert max(filter(None, found["measuring_bytes"].values())) > 1e8, "a model of 34M parameters"
    heads, others = max(found["measuring_seconds"].values()), min(found["measuring_seconds"].values())
    assert heads > others > 0, "single heads go through the model once each"
