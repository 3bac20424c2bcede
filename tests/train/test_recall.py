"""Runs of associative recall: resumed exactly, frozen, pruned and continued, and judged by their answers."""

import math
from functools import partial
from pathlib import Path

import pytest

import saf.train.loop as loop
from saf.calibration import gate_gradients
from saf.errors import CheckpointError, InputError
from saf.freezing.config import FreezeConfig
from saf.records.events import read_events
from saf.records.files import read_json
from saf.tasks import MQARSettings, MQARTask
from saf.train import TrainConfig, continue_from, load_model, open_checkpoint, pretrain
from tests.train.killed import Killed, die_at

pytestmark = pytest.mark.filterwarnings("ignore:.*of the development queries are answered")

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
    with pytest.raises(CheckpointError, match="was not trained on these examples"):
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
