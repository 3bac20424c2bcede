"""Every recipe at the smoke scale: trained, measured and written in every form."""

import time

import pandas as pd
import pytest

from experiments.__main__ import main
from experiments.recipe import all_recipes

SECONDS = 90
"""Of one core: 60 on an idle one, and what other tests at the same time take from the caches."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::saf.errors.SafWarning")
def test_all_recipes_are_run_and_shown_in_a_minute(tmp_path, capsys):
    began = time.process_time()
    words = [*all_recipes(), "--scale", "smoke", "--out", str(tmp_path), "--tables", str(tmp_path / "tables")]
    assert main(words) == 0, capsys.readouterr().err[-4_000:]
    assert time.process_time() - began < SECONDS
    assert "its numbers mean nothing" in capsys.readouterr().out
    for name in all_recipes():
        found, stem = all_recipes()[name], tmp_path / "tables" / f"smoke-{name}"
        if found.metrics or any(each.smoke is not None for each in found.measurements):
            assert found.title in stem.with_suffix(".md").read_text()
        if found.metrics:
            numbers = pd.read_csv(stem.with_suffix(".csv"))
            assert numbers["mean"].notna().sum() >= len(found.smoke or found.rows)
            assert "toprule" in stem.with_suffix(".tex").read_text()
    recalled = pd.read_csv(tmp_path / "tables" / "smoke-recall.csv").set_index(["row", "metric"])
    assert 0 <= recalled.loc[("mean 25%, 500 updates after replacement", "recall 32 2"), "mean"] <= 100
    schedules = pd.read_csv(tmp_path / "tables" / "smoke-schedules.csv").set_index(["row", "metric"])
    assert schedules.loc[("train loss, z = 3.0", "heads"), "mean"] >= 1
    assert (tmp_path / "tables" / "smoke-rates_and_patterns-rates.svg").read_text().startswith("<svg")
