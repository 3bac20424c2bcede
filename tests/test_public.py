"""The public names and commands: adding one is a decision, losing one breaks users."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import saf

NAMES = """
GPT AttentionStatistics CompactPattern DensePattern ExponentialPattern FreezeConfig FreezeReport FrozenHeads GPTConfig
Gradual HeadLayout HeadSet OneTime Prefill QKGradient SafError TrainLoss ValidationBudget calibrate dense_pattern
finalize_ fit fit_compact fit_exponential fit_kl freeze_ frozen_attention gate_gradients head_outputs
install_ load mixed_attention ops preset prune_ save score select storage_report uninstall_
"""
COMMANDS = "data pretrain finetune freeze evaluate compare report inspect bench doctor"


def test_the_public_names_are_these():
    assert saf.__all__ == NAMES.split()
    assert all(hasattr(saf, name) for name in saf.__all__)


def test_the_commands_are_these():
    shown = subprocess.run([sys.executable, "-m", "saf", "--help"], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^  (\w+) ", shown, re.MULTILINE) == COMMANDS.split()


def test_type_checkers_find_the_package():
    root = Path(__file__).parents[1]
    assert (root / "saf" / "py.typed").is_file()
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "py.typed" in settings["package-data"]["saf"]
