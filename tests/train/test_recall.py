"""Runs of associative recall: resumed exactly, frozen, pruned and continued, and judged by their answers."""

import math
from functools import partial
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace

import pytest
import torch

import saf.train.loop as loop
from saf.calibration import gate_gradients
from saf.cli import main
from saf.cli.finetune import parse_words
from saf.errors import CheckpointError, CompareError, InputError, SafWarning
from saf.evaluate.compare_recall import compare_recall, paired_tests, recall_comparison_tables
from saf.evaluate.recall import not_learnt
from saf.freeze_config import FreezeConfig
from saf.records.events import read_events
from saf.records.files import read_json, write_json
from saf.records.run import RecordedRun
from saf.surgery import pattern_parameters
from saf.tasks import MQARSettings, MQARTask
from saf.train import TrainConfig, continue_from, load_model, open_checkpoint, pretrain
from tests.train.conftest import SMALL, assert_patterns_train_without_decay
from tests.train.killed import Killed, die_at

pytestmark = pytest.mark.filterwarnings("ignore:the task is not learnt")

MQAR = MQARSettings(
    length=16, pairs=2, vocabulary=40, test_lengths=(16, 32), test_pairs=(4, 2), test_examples=8, development=8
)


@pytest.fixture
def settings(settings):
    """Return a function that makes the settings of a run of associative recall in `tmp_path/name`."""
    return partial(settings, task="mqar", mqar=MQAR, eval_windows=8)


@pytest.fixture
def outcome(outcome):
    """Return a function that reads what must not depend on interruptions, the answers among it."""

    def read(folder) -> dict:
        written = read_json(Path(folder) / "recall.json")
        return {**outcome(folder), "recall": [written["development"], written["tests"]]}

    return read


@pytest.mark.parametrize(("module", "name", "call"), [(loop, "run_update", 8), (loop, "finish", 1)])
def test_resumed_is_uninterrupted_bit_for_bit(settings, finished, outcome, monkeypatch, module, name, call):
    freeze = FreezeConfig(rate=0.25, max_fit_kl=10.0)
    expected = outcome(finished(settings(freeze=freeze), "frozen"))
    config = settings(freeze=freeze)
    with monkeypatch.context() as patch:
        die_at(patch, module, name, call)
        with pytest.raises(Killed):
            pretrain(config)
    pretrain(config, resume=True)
    assert outcome(config.out) == expected


def test_patterns_are_calibrated_on_the_whole_context_and_answer_there(settings, finished):
    folder = finished(settings(freeze=FreezeConfig(rate=0.25, max_fit_kl=10.0)), "frozen")
    (event,) = read_events(folder)
    assert event.values["length"] == 32
    result = read_json(folder / "result.json")
    assert [one["length"] for one in result["recall"]["tests"]] == [16, 32]
    assert result["provenance"]["heads"]


def test_recorded_settings_come_back(settings, finished):
    folder = finished(settings(), "ordinary")
    recorded = read_json(folder / "config.json")["settings"]
    assert TrainConfig.from_dict(recorded).mqar == MQAR
    with pytest.raises(InputError, match="mqar must be left out without task='mqar'"):
        settings(task="text")
    with pytest.raises(CheckpointError, match="was trained on other data"):
        pretrain(continue_from(folder / "checkpoints" / "step-12", out=f"{folder}-other", seed=5, updates=14))


def test_heads_are_replaced_or_pruned_in_a_trained_model_and_it_goes_on_with_a_new_optimiser(settings, finished):
    """Immediate replacement is the checkpoint after the event, recovery the updates that follow."""
    folder = finished(settings(), "ordinary")
    parent = folder / "checkpoints" / "step-12"
    task = MQARTask(settings(), length=32)
    gates = gate_gradients(load_model(parent), task.calibration())
    arms = {
        "frozen": FreezeConfig(rate=0.25, max_fit_kl=10.0),
        "pruned": FreezeConfig(rate=0.25, score="gate_taylor", operation="prune"),
    }
    for name, freeze in arms.items():
        out = folder.parent / f"{folder.name}-{name}"
        replaced = pretrain(continue_from(parent, out=out, freeze=freeze))
        (event,) = read_events(out)
        assert (replaced["arm"], replaced["updates"], event.update) == (name, 12, 12)
        if name == "pruned":
            scores = gates / gates.norm(dim=1, keepdim=True)
            assert sorted(event.heads) == sorted([list(divmod(i, 4)) for i in scores.flatten().argsort()[:2].tolist()])
        again = continue_from(out / "checkpoints" / "step-12-frozen", out=f"{out}-on", fresh=True, seed=5, updates=3)
        recovered = pretrain(again)
        kind = "heads" if name == "frozen" else "pruned"
        assert recovered["provenance"][kind] == replaced["provenance"][kind]
        after = open_checkpoint(recovered["checkpoint"])
        assert all(int(state["step"]) == 3 for state in after.optimizer(after.model()).state.values())
        assert after.state["sampler_position"] == 3 * 8


def test_trained_patterns_go_on_training_without_decay(settings, finished):
    freeze = FreezeConfig(rate=0.25, max_fit_kl=10.0, trainable=True)
    folder = finished(settings(freeze=freeze), "trainable")
    out = folder.parent / f"{folder.name}-fresh"
    result = pretrain(
        continue_from(folder / "checkpoints" / "step-12", out=out, fresh=True, updates=2, weight_decay=0.5)
    )
    assert result["trainable_pattern_parameters"] > 0
    groups = open_checkpoint(out / "checkpoints" / "step-2").state["optimizer_groups"]
    decays = {name: group["weight_decay"] for group in groups for name in group["names"]}
    patterns = [name for name in decays if "pattern_" in name]
    assert patterns
    assert {decays[name] for name in patterns} == {0.0}
    assert 0.5 in decays.values()


def test_a_model_of_text_learns_recall_with_the_vocabulary_and_context_it_has(settings, finished):
    folder = finished(settings(task="text", mqar=MQARSettings(), updates=4), "text")
    out = folder.parent / f"{folder.name}-recall"
    config = continue_from(
        folder / "checkpoints" / "step-4", out=out, fresh=True, task="mqar", mqar=MQAR, updates=2, eval_every=0
    )
    result = pretrain(config)
    model = load_model(result["checkpoint"])
    assert model.config.vocab_size > MQAR.vocabulary
    assert model.config.to_dict() == load_model(folder / "checkpoints" / "step-4").config.to_dict()
    # All output classes compete, so that an untrained answer is about as likely as any of them.
    assert result["report_loss"] == pytest.approx(math.log(model.config.vocab_size), abs=1.0)


MADE = "--mqar.length 16 --mqar.pairs 2 --mqar.vocabulary 40 --mqar.test-lengths 16 32 --mqar.test-pairs 4 2"
FEW = "--mqar.test-examples 8 --mqar.development 8 --eval-windows 8 --calibration-sequences 4 --no-tensorboard"
WORDS = [*MADE.split(" "), *FEW.split(" ")]
FREEZE = ["--freeze.rate", "0.25", "--freeze.max-fit-kl", "10"]


@pytest.fixture(scope="module")
def finetuned(data, tmp_path_factory):
    """Return a function that runs `saf finetune` on recall and returns the run's folder; once for equal names."""
    folder, done = tmp_path_factory.mktemp("finetuned-recall"), {}
    text = TrainConfig(data=str(data), out=str(folder / "text"), length=32, updates=2, eval_every=0, **SMALL)
    pretrain(text)

    def run(name, *words, parent="text/checkpoints/step-2"):
        if name not in done:
            start = ["finetune", "--parent", str(folder / parent), "--out", str(folder / name), "--quiet"]
            assert main([*start, *map(str, words)]) == 0
            done[name] = folder / name
        return done[name]

    return run


def result_of(folder):
    return read_json(folder / "result.json")


def test_a_checkpoint_is_finetuned_on_recall_and_other_arms_like_it(finetuned, capsys):
    ordinary = finetuned("ordinary", "--task", "mqar", "--updates", "4", *WORDS)
    settings = TrainConfig.from_dict(read_json(ordinary / "config.json")["settings"])
    assert (settings.peak_lr, settings.weight_decay, settings.batch_size, settings.min_lr_ratio) == (1e-4, 0.01, 16, 1)
    frozen = finetuned("during", "--like", ordinary, *FREEZE)
    results = [result_of(folder) for folder in (ordinary, frozen)]
    assert [one["arm"] for one in results] == ["ordinary", "frozen"]
    assert len({one["provenance"]["data"]["train"] for one in results}) == 1
    assert results[0]["updates"] == results[1]["updates"] == 4
    # The gate is the ordinary arm's, in its own result and in that of the other.
    assert results[0]["recall"]["gate_of"] is None
    assert results[1]["recall"]["gate_of"] == str(ordinary)
    accuracies = {one["recall"]["gate_accuracy"] for one in results}
    assert accuracies == {results[0]["recall"]["development"]["accuracy"]}
    assert str(ordinary) in not_learnt(results[1]["recall"])
    assert "not to be compared" in capsys.readouterr().out


def test_patterns_train_in_finetuning_on_recall_and_do_not_decay(finetuned):
    words = ["--task=mqar", "--updates=1", "--peak-lr=1e-3", "--schedule.at=0", *FREEZE, "--freeze.trainable"]
    folders = [finetuned(f"decay {decay}", *words, *WORDS, "--weight-decay", decay) for decay in (0, 0.5)]
    assert_patterns_train_without_decay(*(folder / "checkpoints" / "step-1" for folder in folders), 0.5)
    # Of the parent's patterns, too, with a new optimiser.
    parent = "decay 0/checkpoints/step-1"
    on = [finetuned(f"on {decay}", *words[:6], *WORDS, "--weight-decay", decay, parent=parent) for decay in (0, 0.5)]
    assert_patterns_train_without_decay(*(folder / "checkpoints" / "step-1" for folder in on), 0.5)
    moved = zip(
        *(pattern_parameters(load_model(of / "checkpoints" / "step-1")) for of in (folders[0], on[0])), strict=True
    )
    assert all(not torch.equal(*pair) for pair in moved)


def test_replacement_and_recovery_are_one_run_judged_at_several_updates(finetuned):
    parent = "ordinary/checkpoints/step-4"
    finetuned("ordinary", "--task", "mqar", "--updates", "4", *WORDS)
    arms = {
        "plain": [],
        "replaced": FREEZE,
        "pruned": ["--freeze.rate", "0.25", "--freeze.operation", "prune", "--freeze.score", "gate_taylor"],
        "the same heads pruned": ["--freeze.operation", "prune", "--freeze.heads"],
    }
    words = ["--task", "mqar", "--updates", "3", "--report-at", "0", "1", "3", "--save-every", "0"]
    before = result_of(finetuned("ordinary"))
    for name, more in arms.items():
        heads = [finetuned("replaced")] if more[-1:] == ["--freeze.heads"] else []
        folder = finetuned(name, *words, *more, *heads, parent=parent)
        result = result_of(folder)
        assert list(result["reports"]) == ["0", "1", "3"]
        assert result["reports"]["3"]["recall"] == result["recall"]
        assert result["recall"]["gate_of"] == str(folder.parent / "ordinary")
        assert result["provenance"]["seed"] == before["provenance"]["seed"] + 1_000
        assert [event.update for event in read_events(folder)] == [0] * bool(more)
        first = read_json(folder / "reports" / "update-0" / "recall.json")
        assert (first["tests"] == read_json(folder.parent / "ordinary" / "recall.json")["tests"]) == (not more)
        final = open_checkpoint(result["checkpoint"])
        assert {int(state["step"]) for state in final.optimizer(final.model()).state.values()} == {3}
    same = [result_of(finetuned(name))["provenance"] for name in ("replaced", "the same heads pruned")]
    assert same[0]["heads"] == same[1]["pruned"] != []
    # What immediate replacement gives is what a run gives that goes no further.
    at = folder.parent / "ordinary" / "checkpoints" / "step-4"
    alone = pretrain(continue_from(at, out=folder.parent / "alone", freeze=FreezeConfig(rate=0.25, max_fit_kl=10.0)))
    assert alone["recall"]["tests"] == result_of(folder.parent / "replaced")["reports"]["0"]["recall"]["tests"]


def test_reports_in_between_are_those_of_a_run_that_never_stopped(settings, finished, monkeypatch):
    expected = result_of(finished(settings(report_at=(0, 5, 12)), "reported"))["reports"]
    config = settings(report_at=(0, 5, 12))
    with monkeypatch.context() as patch:
        die_at(patch, loop, "run_update", 8)
        with pytest.raises(Killed):
            pretrain(config)
    assert pretrain(config, resume=True)["reports"] == expected
    with pytest.raises(InputError, match="report_at must be different updates from 0 to updates=12"):
        settings(report_at=(13,))


def test_two_runs_of_recall_are_compared_test_by_test_and_example_by_example(finetuned, tmp_path, capsys):
    """Gate and ordinary run decide no query; what was answered of every example gives the interval."""
    ordinary = finetuned("ordinary", "--task", "mqar", "--updates", "4", *WORDS)
    frozen = finetuned("during", "--like", ordinary, *FREEZE)
    capsys.readouterr()
    assert main(["compare", str(ordinary), str(frozen)]) == 0
    shown = capsys.readouterr().out
    assert "Queries of recall that two runs answer" in shown
    assert "The task is not learnt" in " ".join(shown.split())
    record = read_json(frozen / "compare.json")
    assert record["kind"] == "recall_comparison"
    assert [(test["length"], test["pairs"], test["examples"]) for test in record["tests"]] == [(16, 4, 8), (32, 2, 8)]
    for place, test in enumerate(record["tests"]):
        told = [result_of(folder)["recall"]["tests"][place]["accuracy"] for folder in (ordinary, frozen)]
        assert test["accuracy"] == told
        assert test["difference"] == told[1] - told[0]
        assert test["ci95"][0] < test["difference"] < test["ci95"][1]
    words = ["--task", "mqar", "--updates", "3", "--report-at", "0", "1", "3", "--save-every", "0"]
    pair = [
        finetuned(name, *words, *more, parent="ordinary/checkpoints/step-4")
        for name, more in (("plain", []), ("replaced", FREEZE))
    ]
    assert main(["compare", *map(str, pair)]) == 0
    assert list(read_json(pair[1] / "compare.json")["reports"]) == ["0", "1"]
    assert "0 updates" in capsys.readouterr().out
    assert main(["report", *map(str, pair), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "Queries of recall that two runs answer" in page
    assert "could not be compared" not in page


def test_runs_of_recall_with_other_queries_are_refused_and_accuracies_alone_have_no_interval(
    finetuned, tmp_path, capsys
):
    ordinary = finetuned("ordinary", "--task", "mqar", "--updates", "4", *WORDS)
    frozen = finetuned("during", "--like", ordinary, *FREEZE)
    more = finetuned("more", "--like", ordinary, *FREEZE, "--mqar.test-examples", "9")
    with pytest.raises(CompareError, match=r"mqar\.test_examples: 8 in the first run, 9 in the second"):
        compare_recall(*map(RecordedRun.open, (ordinary, more)))
    with pytest.raises(CompareError, match=r"tested on different queries \(mqar.test_examples is 8 and 9\)"):
        compare_recall(*map(RecordedRun.open, (ordinary, more)), allow_differences=True)
    with pytest.raises(CompareError, match="one has 16 tokens with 4 pairs, the other none"):
        paired_tests(result_of(ordinary)["recall"]["tests"][:1], [])
    without = tmp_path / "without"
    copytree(frozen, without)
    (without / "recall.json").unlink()
    record = compare_recall(RecordedRun.open(ordinary), RecordedRun.open(without))
    assert {test["ci95"] for test in record["tests"]} == {None}
    assert any("No interval can be given" in note for note in recall_comparison_tables(record)[0].notes)
    written = read_json(frozen / "recall.json")
    written["tests"][0]["accuracy"] += 0.125
    write_json(without / "recall.json", written)
    with pytest.raises(InputError, match="other answers than the run's"):
        compare_recall(RecordedRun.open(ordinary), RecordedRun.open(without))
    with pytest.raises(InputError, match="was not judged by recall"):
        compare_recall(RecordedRun.open(ordinary), RecordedRun.open(ordinary.parent / "text"))


def test_words_that_recall_has_no_use_for_are_refused_and_tests_follow_the_context(finetuned, tmp_path):
    parent = finetuned("ordinary", "--task", "mqar", "--updates", "4", *WORDS).parent / "text/checkpoints/step-2"
    start = ["--task", "mqar", "--parent", str(parent), "--out", str(tmp_path / "run")]
    with pytest.raises(InputError, match="have no effect on mqar"):
        parse_words([*start, "--test", "file"])
    with pytest.raises(InputError, match="whose examples come once"):
        parse_words([*start, "--epochs", "2"]).run()
    with pytest.raises(InputError, match="must be a finished run of recall"):
        parse_words([*start, *WORDS, "--mqar.ordinary", str(tmp_path)]).run()
    assert parse_words(start).config.mqar.tests == ()
    assert MQARSettings().within(2_048).tests == MQARSettings().tests[:-1]
    with pytest.warns(SafWarning, match="the tests of 4,096 tokens are left out"):
        MQARTask(SimpleNamespace(mqar=MQARSettings().within(2_048)), length=2_048)
