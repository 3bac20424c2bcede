"""Arms at matched time with measured speeds in place of their clocks."""

import json
from pathlib import Path

import pytest

from saf.cli import main
from saf.errors import InputError
from saf.experiments.document import render_document
from saf.experiments.execution import Lanes, execute
from saf.experiments.launching import words
from saf.experiments.plan import plan
from saf.experiments.recipe import Arm, Recipe
from saf.experiments.scales import SCALES
from saf.experiments.speeds import CHARGE_SECONDS, Speeds
from saf.experiments.store import Store
from saf.records.files import write_json
from saf.records.result import result_header


def row(rate, backend, ratio, *, role="frozen", batch=4, refused=False, kernel="auto", variant="update"):
    point = {"length": 32, "batch_size": batch, "accumulation": 1}
    told = {"role": role, "point": point, "backend": backend, "rate": rate, "ratio": ratio, "kernel": kernel}
    told["variant"] = variant
    return {**told, "model": "tiny", "refused": refused}


ROWS = (
    row(0.0, None, 1.0, role="control"),
    row(0.25, "toeplitz", 1.5),
    row(0.25, "fused", 1.2),
    row(0.25, "free", 2.0, role="free"),
    row(0.25, "pruned", 1.75, role="pruned"),
    row(0.5, "toeplitz", 9.0, refused=True),
    row(0.25, "toeplitz", 7.0, kernel="flash"),
    row(0.25, "toeplitz", 3.0, variant="update graph"),
)


@pytest.fixture
def speeds_file(tmp_path):
    def write(name: str = "speeds.json", rows=ROWS, kind: str = "update") -> Path:
        write_json(tmp_path / name, {**result_header(kind, {"model": "tiny"}), "rows": list(rows)})
        return tmp_path / name

    return write


@pytest.fixture
def matched(recipe):
    """An ordinary arm, frozen and pruned ones at matched time, one on the raw clock, and one with other data."""

    def arm(name, settings, **others):
        return Arm(name=name, parent="ordinary", match="ordinary", settings=settings, **others)

    return Recipe(
        title="Made up",
        source=recipe.source,
        columns=("perplexity", "delta"),
        arms=(
            Arm(name="ordinary", reference=None),
            arm("again", {"match_clock": "scaled"}, reseed=1_000),
            arm("frozen", {"freeze.rate": 0.25, "match_clock": "scaled"}),
            arm("pruned", {"freeze.operation": "prune"}, heads="frozen"),
            arm("half", {"freeze.rate": 0.5}),
            arm("as half", {"freeze.operation": "prune"}, heads="half"),
            arm("raw", {"freeze.rate": 0.25, "match_clock": "everything"}),
        ),
    )


def planned(recipe, path, **others):
    return plan({"made_up": recipe}, SCALES["smoke"].at_speeds(Speeds.read([path])), data="data", seeds=(1,), **others)


def test_arms_get_the_speed_of_their_context_rate_and_way(matched, speeds_file):
    path = speeds_file()
    made = planned(matched, path)
    settings = {arm: made.runs[key].settings for (_, arm, _), key in made.arms.items()}
    assert {arm: of.get("match_speed") for arm, of in settings.items()} == {
        "ordinary": None, "again": 1.0, "frozen": 1.5, "pruned": 1.75,
    }  # fmt: skip
    assert settings["frozen"]["match_speed_source"] == str(path)
    assert settings["frozen"]["match_charge_seconds"] == CHARGE_SECONDS
    assert "match_charge_seconds" not in settings["again"]
    assert all(of.get("match_clock", "everything") == "everything" for of in settings.values())
    assert not made.clocks, "nothing that these runs take decides what comes of them"
    assert len(made.notes) == 3
    assert "no speed of it was measured: half" in made.notes[0]
    assert "it needs half: as half" in made.notes[1]
    assert "raw" in made.notes[2]


def test_an_arm_that_was_named_is_not_left_out(matched, speeds_file):
    with pytest.raises(
        InputError, match=r"made_up/half cannot be run as the scale was changed.*no speed of it was measured"
    ):
        planned(matched, speeds_file(), arms=("half",))


def test_keys_depend_on_the_speed_and_not_on_the_file(matched, speeds_file):
    def frozen(*arguments):
        return planned(matched, speeds_file(*arguments)).arms["made_up", "frozen", 1]

    usual = frozen("one.json")
    assert frozen("other.json") == usual
    assert frozen("one.json", (row(0.25, "toeplitz", 1.6),)) != usual
    clocks = plan({"made_up": matched}, SCALES["smoke"], data="data", seeds=(1,))
    assert clocks.arms["made_up", "frozen", 1] != usual
    assert clocks.arms["made_up", "ordinary", 1] == planned(matched, speeds_file()).arms["made_up", "ordinary", 1]


def test_the_same_arm_again_has_other_data_from_its_parent_on(matched):
    made = plan({"made_up": matched}, SCALES["smoke"], data="data", seeds=(1, 2))
    again = [made.runs[made.arms["made_up", "again", seed]] for seed in (1, 2)]
    assert [run.flags["seed"] for run in again] == [1_001, 1_002]
    assert [run.seed for run in again] == [1, 2], "it stands in the table of its parent's seed"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"kind": "prefill"}, "'prefill'; expected one of `saf bench update`"),
        ({"rows": ROWS[:1]}, "no accepted speed"),
        ({"rows": (ROWS[1], ROWS[1])}, "tell twice of"),
    ],
)
def test_files_that_tell_no_speed_are_refused(speeds_file, arguments, expected):
    with pytest.raises(InputError, match=expected):
        Speeds.read([speeds_file(**arguments)])


def test_of_several_batches_the_own_one_is_taken(matched, speeds_file):
    batches = [row(0.25, "toeplitz", ratio, batch=batch) for batch, ratio in ((2, 1.1), (4, 1.2), (8, 1.3))]
    made = planned(matched, speeds_file(rows=batches), arms=("frozen",))
    assert made.runs[made.arms["made_up", "frozen", 1]].settings["match_speed"] == 1.2
    with pytest.raises(InputError, match="several speeds fit runs of 32 tokens x 4"):
        planned(matched, speeds_file(rows=[batches[0], batches[2]]), arms=("frozen",))


def test_such_arms_share_a_gpu_and_stand_in_a_table_of_their_own(matched, speeds_file, trainer, tmp_path):
    store = Store(tmp_path / "results" / "store").open(write=True)
    made = planned(matched, speeds_file())
    assert made.scale.speeds is not None
    store.keep_speeds_(made.scale.speeds)
    trainer.heads = [[0, 3]]
    outcome = execute(made, store, store.folder, say=lambda text: None, launch=trainer, lanes=Lanes(jobs=3))
    assert len(outcome.ended) == 4
    line = " ".join(words(made.runs[made.arms["made_up", "again", 1]], Store(tmp_path / "another"), tmp_path))
    assert "--match-speed 1.0" in line
    assert "--seed 1001" in line
    text = render_document(tmp_path / "results", tmp_path, recipes={"made_up": matched})["results.md"]
    assert f"### made_up, smoke-speeds-{made.scale.speeds.name}" in text
    assert "1.7500 at 25% pruned, 32 tokens x 4, tiny" in text
    # The summary has frozen heads and the same ones pruned, at the rate that a speed was measured of.
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| perplexity, %, matched time")]
    told = [(what.removeprefix("| "), quarter != "–", half != "–") for what, _, quarter, _, half, *_ in lines]
    assert told == [
        ("perplexity, %, matched time", True, False),
        ("perplexity, %, matched time, these heads pruned", True, False),
    ]
    assert text.count("Rows of a scale other than the paper's are of a small model") == 1, "the summary says it once"
    assert f"--scale smoke --store results/store --data DATA --seeds 1 --match-speed {tmp_path / 'speeds.json'}" in text


def test_what_has_no_effect_is_refused(speeds_file, tmp_path, capsys):
    base = ["run", "--scale", "smoke", "--dry-run", "--store", str(tmp_path / "store")]
    assert main([*base, "timing", "--match-speed", str(speeds_file())]) == 2
    assert "no effect where no arm is at matched time" in capsys.readouterr().err
    assert main([*base, "matched_time", "--match-charge-seconds", "3"]) == 2
    assert "no effect without --match-speed" in capsys.readouterr().err
    assert main(base) == 2
    assert "a dry run is of recipes, and none is named" in capsys.readouterr().err
    for wrong in ([*base, "timing"], ["run"]):
        assert main([*wrong, "--out", str(tmp_path / "tables")]) == 2
        assert "--out takes the tables of recipes that were run, and none is" in capsys.readouterr().err
    assert main([*base, "matched_time", "--match-speed", str(speeds_file()), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] > 1
