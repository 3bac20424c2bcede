"""Comparing finished runs: what may differ, what is refused, which updates are timed, and the tables."""

import math

import pytest

from saf.compare import (
    arm_names,
    arms_table,
    compare_all,
    compare_runs,
    compare_update_times,
    differences,
    pair_tables,
    speed_caveat,
    verdict,
)
from saf.errors import CompareError, InputError
from saf.records.files import read_json, write_json
from saf.records.run import RecordedRun
from tests.report.synthetic import Shape, edit, write_pair, write_run


def test_a_comparison_holds_the_known_cost_and_speed(tmp_path):
    result = compare_runs(*write_pair(tmp_path, cost=0.004, speedup=1.1), out=tmp_path / "out")
    assert result["ci95"][0] < 100 * math.expm1(0.004) < result["ci95"][1]
    assert result["update_time_ratio"] == pytest.approx(1.1, rel=0.02)
    assert (result["timed_updates"], result["update_time_caveat"]) == ([38, 60], "")
    assert result["peak_memory_frozen"] < result["peak_memory_ordinary"]
    assert (result["heads"], result["num_heads"]) == (3, 12)
    assert read_json(tmp_path / "out" / "compare.json") == result


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", {"train__lr": 1e-3}, "train.lr: 0.0006 in the ordinary arm, 0.001 in the frozen arm"),
        ("config.json", {"train__seed": 1}, "train.seed: 1337"),
        ("config.json", {"model__position": "learned"}, "model.position"),
        ("config.json", {"data__fingerprint": "e" * 64}, "data.fingerprint"),
        ("config.json", {"parent": {"path": "x", "hash": "f" * 64}}, "starts from no checkpoint, .* checkpoint ffff"),
        ("result.json", {"updates": 59}, "updates: 60 in the ordinary arm, 59"),
        ("evaluation.json", {"precision": "bf16"}, "evaluation precision"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_difference_that_is_not_the_freezing_is_refused_unless_allowed(tmp_path, file, change, message):
    ordinary, frozen = write_pair(tmp_path)
    edit(frozen / file, **change)
    with pytest.raises(CompareError, match=message):
        compare_runs(ordinary, frozen)
    assert len(compare_runs(ordinary, frozen, allow_differences=True)["differences"]) == 1


def test_a_frozen_arm_may_start_from_a_checkpoint_of_the_ordinary_one(tmp_path):
    ordinary, frozen = write_pair(tmp_path)
    edit(frozen / "config.json", parent={"path": "x", "hash": "f" * 64})
    write_json(ordinary / "checkpoints" / "step-30" / "manifest.json", {"hash": "f" * 64})
    assert differences(RecordedRun.open(ordinary), RecordedRun.open(frozen)) == []


def evaluated_earlier(ordinary, frozen):
    again = write_run(ordinary.parent / "earlier", cost=0.01)
    for name in ("evaluation.json", "log_probs.safetensors"):
        (ordinary / name).write_bytes((again / name).read_bytes())


@pytest.mark.parametrize(
    ("harm", "error", "words"),
    [
        (lambda _, frozen: edit(frozen / "evaluation.json", windows_hash="0" * 64), CompareError, "different windows"),
        (lambda _, frozen: edit(frozen / "result.json", arm="ordinary"), CompareError, "froze or pruned no heads"),
        (lambda _, frozen: (frozen / "result.json").unlink(), InputError, "has not ended"),
        (evaluated_earlier, InputError, "must be of the run's end"),
    ],
    ids=["windows", "ordinary", "unfinished", "earlier"],
)
def test_what_cannot_be_compared_is_refused_even_when_differences_are_allowed(tmp_path, harm, error, words):
    ordinary, frozen = write_pair(tmp_path)
    harm(ordinary, frozen)
    with pytest.raises(error, match=words):
        compare_runs(ordinary, frozen, allow_differences=True)


def test_updates_after_the_event_are_timed_without_compilation_and_few_give_no_ratio(tmp_path):
    times = compare_update_times(*map(RecordedRun.open, write_pair(tmp_path, speedup=1.25)))
    assert times["update_seconds_frozen"] == pytest.approx(0.4, rel=0.02)
    times = compare_update_times(*map(RecordedRun.open, write_pair(tmp_path / "few", Shape(updates=34))))
    assert (times["timed_updates"], times["update_time_ratio"]) == ([32, 34], None)
    assert speed_caveat(times).startswith("too few updates")
    early = (tmp_path / "ordinary" / "metrics.jsonl").read_text().splitlines()[:20]
    (tmp_path / "ordinary" / "metrics.jsonl").write_text("\n".join(early) + "\n")
    times = compare_update_times(*(RecordedRun.open(tmp_path / arm) for arm in ("ordinary", "frozen")))
    assert set(times.values()) == {None}, "no update is common"


@pytest.mark.parametrize(("heads", "unclear"), [(3, True), (4, False)])
def test_times_are_unclear_where_more_is_saved_than_free_heads_would_save(tmp_path, heads, unclear):
    """Of 12 heads 3 make an update at most 4/3 times as fast, 4 make it 3/2."""
    runs = [RecordedRun.open(folder) for folder in write_pair(tmp_path, Shape(rate=heads / 12), speedup=1.4)]
    names = arm_names(runs)
    comparisons = compare_all(runs, names)
    record = comparisons[0].record
    assert ("update times unclear" in verdict(record)) == bool(record["update_time_caveat"]) == unclear
    table = arms_table(runs, names, comparisons)
    update, whole = (table.rows[1][table.columns.index(name)] for name in ("median update", "whole run"))
    assert (update.endswith("(unclear)"), "%" in whole) == (unclear, not unclear)
    if not unclear:
        ordinary, frozen = (record[f"update_seconds_spread_{arm}"] for arm in ("ordinary", "frozen"))
        assert speed_caveat({**record, "update_seconds_spread_frozen": [frozen[0], ordinary[1]]}).endswith("overlap")


def test_a_run_worse_than_the_unigram_entropy_is_named_with_the_verdict_and_with_the_arms(tmp_path):
    folders = write_pair(tmp_path)
    edit(folders[1] / "result.json", unigram_entropy=1.0)
    runs = [RecordedRun.open(folder) for folder in folders]
    names, comparisons = arm_names(runs), compare_all(runs, arm_names(runs))
    cost, _, *doubt = verdict(comparisons[0].record).splitlines()
    assert cost.startswith("Cost:")
    assert " ".join(doubt).startswith("Not to be compared: FROZEN: the loss")
    assert "worse than the unigram entropy, 1.0000" in " ".join(arms_table(runs, names, comparisons).notes)


def test_a_pair_and_all_arms_show_the_same_numbers(tmp_path):
    runs = [RecordedRun.open(folder) for folder in write_pair(tmp_path)]
    comparisons = compare_all(runs, arm_names(runs))
    (pair,), arms = pair_tables(comparisons[0].record, *runs), arms_table(runs, arm_names(runs), comparisons)
    cells = {row[0]: row[1:] for row in pair.rows}
    assert cells == {name: tuple(row[at] for row in arms.rows) for at, name in enumerate(arms.columns) if at}
    assert cells["heads frozen"] == ("0 of 12", "3 of 12")
    assert cells["whole run"] == ("40 s", "42 s (+5.00%)")
    assert cells["whole run, warm"] == ("34 s", "32 s (−5.88%)")
