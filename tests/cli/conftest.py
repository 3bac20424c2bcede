import json
from pathlib import Path

import pytest

from saf.cli import main


@pytest.fixture(scope="session")
def arms(text_data, tmp_path_factory) -> tuple[Path, Path]:
    """A trained ordinary run and the frozen one that continues from its midpoint; do not change them."""
    from saf.freeze_config import FreezeConfig
    from saf.train import TrainConfig, continue_from, pretrain
    from tests.train.conftest import SMALL

    folder = tmp_path_factory.mktemp("cli-runs")
    often = {"updates": 24, "eval_every": 8, "eval_windows": 4, "save_every": 0}
    pretrain(TrainConfig(data=str(text_data), out=str(folder / "ordinary"), length=32, **SMALL, **often))
    parent = folder / "ordinary" / "checkpoints" / "step-12"
    pretrain(continue_from(parent, out=folder / "frozen", freeze=FreezeConfig(rate=0.25)))
    return folder / "ordinary", folder / "frozen"


@pytest.fixture
def saf(capsys):
    """Return a function that runs a command and returns its exit code, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def saf_json(saf):
    """Return a function that runs a command with `--json` and returns what it printed, which must be JSON alone."""

    def run(*arguments: object) -> dict:
        code, out, _ = saf(*arguments, "--json")
        assert code == 0
        return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    return run
