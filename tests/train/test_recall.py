"""Runs of associative recall: resumed exactly, frozen, pruned and continued, and judged by their answers."""

from functools import partial
from pathlib import Path

import pytest

import saf.train.loop as loop
from saf.errors import CheckpointError, InputError
from saf.freezing.config import FreezeConfig
from saf.records.events import read_events
from saf.records.files import read_json
from saf.tasks import MQARSettings
from saf.train import TrainConfig, continue_from, pretrain
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
