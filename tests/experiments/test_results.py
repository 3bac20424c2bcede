"""Tables of results: the newest measurement stands, answers have cells."""

import copy
import re
from pathlib import Path

from experiments import benchmarks
from experiments.recipe import all_recipes
from experiments.results import RECIPES, recipe_blocks, render, stale
from experiments.tables import RecipeTable
from saf.records.files import write_json
from tests.report.benchmark_records import TIMES, record

ROOT = Path(__file__).resolve().parents[2]


def dated(name: str, date: str, *, times: dict[str, list[float]] = TIMES) -> dict:
    measured = copy.deepcopy(record(times=times))
    measured["provenance"]["date"] = date
    return {**measured, "name": name, "elsewhere": ""}


def test_the_newest_measurement_stands_and_a_refused_one_replaces_none():
    old, new = dated("old", "2026-01-01"), dated("new", "2026-01-02")
    noisy = dated("noisy", "2026-01-03", times={**TIMES, "control cudnn": [120.0] * 4})
    tables = dict(benchmarks.speeds([old, new, noisy], "update"))
    (frame,) = tables.values()
    assert set(frame["in"]) == {"new"}
    assert "refused" not in set(frame["speedup"])
    (alone,) = dict(benchmarks.speeds([noisy], "update")).values()
    assert set(alone["speedup"]) == {"refused"}


def test_pages_are_rendered_from_records_and_what_differs_is_named(tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "bench").symlink_to(ROOT / "results" / "bench")
    pages = render(tmp_path / "results", tmp_path / "docs")
    names = {path.name for path in pages}
    assert {"updates.md", "inference.md", "attention.md", "freezing.md", "cells.csv"} <= names
    for path, text in pages.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "docs" / "results.md").write_text("| | 25% |\n|---|---|\n| update | 1.081×, 77.7× |")
    (tmp_path / "README.md").write_text(
        "| | 25% | paper |\n|---|---|---|\n| update | 1.081×, 66.6× | 55.5× |\nand 44.4×"
    )
    problems = stale(tmp_path / "results", tmp_path / "docs")
    assert [re.search("[0-9.]+× stands in no cell", each)[0][:5] for each in problems] == ["66.6×", "77.7×"]
    (tmp_path / "docs" / "results" / "updates.md").write_text("")
    assert any("updates.md: not what" in problem for problem in stale(tmp_path / "results", tmp_path / "docs"))


def test_a_recipes_benchmarks_are_shown_and_drawn_beside_the_papers_numbers(tmp_path):
    measured = {**record(), "experiment": {"seed": None}}
    write_json(tmp_path / "measurements" / "training_systems.batches" / "once.json", measured)
    shown = RecipeTable(all_recipes()["training_systems"], "small", [])
    table, figure, _ = recipe_blocks(shown, tmp_path)
    assert table.title == "Updates after freezing, batches: 124m"
    assert table.frame.loc["4096x8x4; 25% frozen, toeplitz", ["speedup", "paper"]].tolist() == ["1.081×", "1.056×"]
    assert "25% frozen, toeplitz" in figure.picture[2]
    folder = {**measured, "settings": {**measured["settings"], "model": "runs/frozen"}}
    folder["rows"] = [{**row, "model": "runs/frozen"} for row in measured["rows"]]
    write_json(tmp_path / "measurements" / "training_systems.batches" / "once.json", folder)
    assert next(recipe_blocks(shown, tmp_path)).title == "Updates after freezing, batches: a trained model"


def test_every_committed_scale_is_shown():
    committed = {path.parents[1].name for path in (ROOT / "results").glob("*/*/seed-*.json")}
    shown = {scale for scales in RECIPES.values() for scale in scales}
    assert committed <= shown
    assert shown <= {path.name for path in (ROOT / "results").iterdir()}
