"""A run that takes nothing but weights and heads of its parent."""

import pytest
import torch

from saf.errors import InputError
from saf.freeze_config import FreezeConfig
from saf.records.files import read_json
from saf.records.run import RecordedRun
from saf.train import latest, pretrain
from saf.train.checkpoint import open_checkpoint
from saf.train.run_config import settings_after


@pytest.fixture
def parent(settings):
    """A finished frozen run's last checkpoint."""
    config = settings("parent", updates=4, freeze=FreezeConfig(rate=0.25, max_fit_kl=10.0))
    pretrain(config)
    return latest(f"{config.out}/checkpoints")


def test_a_fresh_run_has_the_parents_weights_and_heads_and_begins_at_update_0(parent, tmp_path):
    checkpoint = open_checkpoint(parent)
    config = settings_after(checkpoint, out=tmp_path / "fresh", fresh=True, updates=1, peak_lr=1e-30, warmup=0)
    result = pretrain(config)
    run = RecordedRun.open(tmp_path / "fresh")
    assert [line["update"] for line in run.metrics] == [1]
    assert run.config["parent"]["update"] == 0
    assert run.config["parent"]["weights_of_update"] == 4
    assert run.arm == "frozen"
    assert result["provenance"]["heads"] == read_json(parent.parents[1] / "result.json")["provenance"]["heads"]
    assert result["time"]["parent_parts"] is None
    assert run.lacks == []
    before, after = checkpoint.model(), open_checkpoint(latest(tmp_path / "fresh" / "checkpoints"))
    for name, weights in after.model().state_dict().items():
        assert torch.equal(weights, before.state_dict()[name]), name
    moments = after.optimizer(after.model()).state
    assert all(float(state["step"]) == 1 for state in moments.values())


def test_what_contradicts_a_fresh_start_is_refused(settings, parent):
    with pytest.raises(InputError, match="fresh must be False without a parent"):
        settings(fresh=True)
    with pytest.raises(InputError, match="fresh must be False with match_time"):
        settings(fresh=True, parent=str(parent), match_time="runs/ordinary")
