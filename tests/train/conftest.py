from pathlib import Path

import pytest

from saf.records.files import read_json, read_lines
from saf.train import TrainConfig, latest, pretrain

SMALL = {
    "model_overrides": {"num_layers": 2, "num_heads": 4, "hidden_size": 32},
    "batch_size": 4,
    "calibration_sequences": 4,
    "tensorboard": False,
    "quiet": True,
    "device": "cpu",
}
"""Settings of runs of under a second."""


@pytest.fixture
def settings(text_data, tmp_path):
    """Return a function that makes the settings of a run of under a second in `tmp_path/name`."""

    def make(name: str = "run", **changes) -> TrainConfig:
        values = {
            **SMALL,
            "data": str(text_data),
            "out": str(tmp_path / name),
            "length": 32,
            "accumulation": 2,
            "updates": 12,
            "peak_lr": 3e-3,
            "eval_every": 4,
            "eval_windows": 4,
            "save_every": 3,
        }
        return TrainConfig(**{**values, **changes})

    return make


@pytest.fixture
def outcome():
    """Return a function that reads what must not depend on interruptions: tensors and logged losses of a run."""

    def read(folder) -> dict:
        folder = Path(folder)
        final = latest(folder / "checkpoints")
        names = ("model.safetensors", "optimizer.safetensors", "saf.safetensors", "saf.json")
        return {
            "final": final.name,
            **{name: (final / name).read_bytes() for name in names},
            "metrics": [
                {key: value for key, value in line.items() if key != "update_seconds"}
                for line in read_lines(folder / "metrics.jsonl")
            ],
            "evaluations": read_lines(folder / "evaluations.jsonl"),
            "report_loss": read_json(folder / "result.json")["report_loss"],
        }

    return read


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """Return a function that trains the settings of a name once for all tests and returns the run's folder."""
    done = {}

    def run(config, key):
        if key not in done:
            config.out = str(tmp_path_factory.mktemp("finished") / key)
            pretrain(config)
            done[key] = config.out
        return Path(done[key])

    return run
