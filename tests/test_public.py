"""The public names and commands: adding one is a decision, losing one breaks users."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import saf

NAMES = """
GPT AttentionStatistics CompactPattern DensePattern ExponentialPattern FreezeConfig FreezeReport FrozenHeads GPTConfig
Gradual HeadLayout HeadSet OneTime Prefill QKGradient SafError TrainLoss ValidationBudget calibrate dense_pattern
finalize_ fit fit_compact fit_exponential fit_kl freeze_ frozen_attention gate_gradients head_outputs
install_ load mixed_attention ops preset prune_ save score select storage_report uninstall_
"""
COMMANDS = "data pretrain finetune freeze evaluate compare report inspect bench doctor"
README = """
saf freeze HuggingFaceTB/SmolLM2-135M-Instruct --data text.txt --score forward_kl --rate 0.02 --budget 1% --length 256 --out frozen
pip install .
pip install .[cli,data,hf]
make demo
make test
saf data prepare my_texts --out data
saf pretrain --data data --out runs/ordinary --model tiny --updates 300 --peak-lr 3e-3
saf pretrain --parent runs/ordinary/checkpoints/step-150 --out runs/frozen --freeze.rate 0.25
saf compare runs/ordinary runs/frozen
saf report runs/ordinary runs/frozen
"""  # noqa: E501


def test_the_public_names_are_these():
    assert saf.__all__ == NAMES.split()
    assert all(hasattr(saf, name) for name in saf.__all__)


def test_the_commands_are_these():
    shown = subprocess.run([sys.executable, "-m", "saf", "--help"], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^  (\w+) ", shown, re.MULTILINE) == COMMANDS.split()


def test_the_readme_shows_these_commands():
    text = Path(__file__).parents[1].joinpath("README.md").read_text()
    lines = "".join(re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)).splitlines()
    assert [" ".join(shlex.split(line, comments=True)) for line in lines] == README.strip().splitlines()
