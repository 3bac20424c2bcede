"""What a plan lacks is told before anything is trained."""

import re
from pathlib import Path

from saf.cli import main
from saf.data import TokenData
from saf.experiments.inputs import lacking_text
from saf.experiments.measuring import plan_measurements
from saf.experiments.plan import plan
from saf.experiments.recipe import open_recipes
from saf.experiments.scales import SCALES


class Text:
    """Stands in for a data folder that holds out so many tokens."""

    folder, calibration_source = Path("data"), "calibration"

    def __init__(self, tokens: int, others: int = 10**9):
        self.tokens, self.others = tokens, others

    def num_tokens(self, partition: str) -> int:
        return self.tokens if partition == "calibration" else self.others


def test_text_that_is_too_short_is_told_before_anything_is_trained():
    recipes = open_recipes(["distributions", "matched_time"])
    made = plan(recipes, SCALES["small"], data="data", seeds=(1337,))
    found = plan_measurements(recipes, made)
    assert lacking_text(made, found, Text(430_000)) is None
    told = lacking_text(made, found, Text(400 * 1_024 - 1)) or ""
    assert re.search(r"rows and entries, seed 1337 reads 400 sequences of 1,024 tokens .*has 399", told)
    assert "16,384" not in told
    assert "; and" not in told
    told = lacking_text(made, found, Text(400 * 1_024, others=16_384)) or ""
    assert "reads 1 sequence of 16,385 tokens of the train partition, which has 0" in told
    told = lacking_text(made, found, Text(16 * 16_384 - 1)) or ""
    assert re.search(r"16K mean.* 16 sequences of 16,384 tokens.*has 15; .*; and \d+ more\. Prepare", told)


def test_a_plan_of_runs_that_find_too_little_text_begins_none(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(TokenData, "open", lambda folder: Text(1_000))
    monkeypatch.setattr(Text, "fingerprint", "data", raising=False)
    monkeypatch.setattr(Text, "vocab_size", 16_384, raising=False)
    store = tmp_path / "store"
    assert main(["run", "joint_cost", "--data", str(tmp_path), "--store", str(store)]) == 2
    assert "has too little text: joint_cost/variance" in capsys.readouterr().err
    assert not store.exists()
    assert main(["run", "joint_cost", "--data", str(tmp_path), "--store", str(store), "--dry-run"]) == 0
    assert "has too little text" in " ".join(capsys.readouterr().out.split())


def test_an_unknown_arm_is_refused_before_data_are_prepared(tmp_path, capsys):
    store = tmp_path / "store"
    assert main(["run", "timing", "--scale", "smoke", "--arms", "nothing", "--store", str(store)]) == 2
    assert "there is no arm 'nothing'" in capsys.readouterr().err
    assert not store.exists()
