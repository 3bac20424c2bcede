"""A run assumes nothing of text: a task made up here trains, freezes, resumes and reports."""

from pathlib import Path

import pytest
import torch

import saf.train.loop as loop
from saf.errors import CheckpointError
from saf.freezing.config import FreezeConfig
from saf.records.files import read_json, read_lines
from saf.tasks import TASKS
from saf.train import TrainConfig, open_checkpoint, pretrain
from tests.train.killed import Killed, die_at

VOCABULARY = 30


class Copying:
    """Repeat the first half of a sequence; only the second half is counted."""

    name = "copying"
    vocab_size = VOCABULARY
    fingerprint = "made up"

    def __init__(self, settings, *, length):
        self.settings, self.length = settings, length
        self.targets_per_update = settings.batch_size * settings.accumulation * length

    def draw(self, number, device="cpu"):
        generator = torch.Generator().manual_seed(1_000 * self.settings.seed + number)
        half = torch.randint(VOCABULARY, (self.settings.batch_size, self.length // 2), generator=generator)
        inputs = torch.cat([half, half], dim=1)
        targets = inputs.roll(-1, dims=1)
        targets[:, : self.length // 2 - 1] = -100
        return inputs.to(device), targets.to(device)

    def check(self, *, calibrates, scores_outputs):
        self.checked = (calibrates, scores_outputs)

    def training(self, update, device):
        task, first = self, update * self.settings.accumulation

        class Batches:
            number = first

            def take(self):
                self.number += 1
                return task.draw(self.number, device)

        return Batches()

    def calibration(self):
        return [self.draw(-1)[0], self.draw(-2)[0]]

    def heldout(self):
        return [self.draw(-3)[0]]

    def controller_loss(self, model, execution):
        inputs, targets = self.draw(-4, execution.device)
        with torch.no_grad():
            return model(inputs, targets=targets).item()

    def report(self, model, execution, *, folder, checkpoints):
        assert checkpoints.keys() == {"final"}
        return {"report_loss": self.controller_loss(model, execution), "recalled": 0.5}

    def description(self):
        return {"fingerprint": self.fingerprint, "vocabulary": VOCABULARY}

    def state(self, update):
        return {"copied": update}

    def check_continues(self, state, path):
        if state.get("copied") != state["update"]:
            raise CheckpointError(f"{path} was trained on another task")


@pytest.fixture
def settings(monkeypatch, tmp_path):
    monkeypatch.setitem(TASKS, Copying.name, Copying)

    def make(name):
        shape = {"num_layers": 2, "num_heads": 4, "hidden_size": 32}
        return TrainConfig(
            task="copying", data="none", out=str(tmp_path / name), model_overrides=shape, length=16, batch_size=4,
            accumulation=2, updates=8, eval_every=4, save_every=2, device="cpu", tensorboard=False, quiet=True,
            freeze=FreezeConfig(rate=0.25, max_fit_kl=10.0, score="residual_cosine"),
        )  # fmt: skip

    return make


def test_a_run_of_another_task(settings, monkeypatch):
    whole = settings("whole")
    result = pretrain(whole)
    assert result["recalled"] == 0.5
    assert result["tokens"] == 8 * 2 * 4 * 16
    assert "report_perplexity" not in result
    assert len(result["intervention"]["heads"]) == 2
    assert result["provenance"]["data"] == {"train": "made up", "report": "made up"}
    assert read_json(Path(whole.out) / "config.json")["data"] == {"fingerprint": "made up", "vocabulary": VOCABULARY}
    state = open_checkpoint(f"{whole.out}/checkpoints/step-8").state
    assert state["copied"] == 8
    assert "sampler_position" not in state
    with monkeypatch.context() as patch:
        die_at(patch, loop, "run_update", 6)
        with pytest.raises(Killed):
            pretrain(settings("killed"))
    again = pretrain(settings("killed"), resume=True)
    assert again["report_loss"] == result["report_loss"]
    losses = [
        [line["loss"] for line in read_lines(Path(settings(n).out) / "metrics.jsonl")] for n in ("whole", "killed")
    ]
    assert losses[0] == losses[1]
