"""The main job on two CPU cores: train a tiny model on this Python's own text, freeze a quarter of its heads, compare.

The frozen heads run in linear time: beyond a band of distances a head is a sum of damped cosines, which has a state.

Each step is a `saf` command, printed before it runs; the folder given as the only argument keeps everything.
"""

import json
import os
import shlex
import sys
import time
from pathlib import Path

# Waiting threads give the core back: on a busy machine training is several times faster. Read when PyTorch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from saf.cli import main

UPDATES = 420
TRAINING = {"--model": "tiny", "--length": 256, "--batch-size": 8, "--updates": UPDATES, "--peak-lr": 3e-3}


def saf(*arguments: object) -> None:
    """Print a command and run it; stop the demo when it fails."""
    words = [str(argument) for argument in arguments]
    print(f"\n$ saf {shlex.join(words)}", flush=True)
    if code := main(words):
        sys.exit(code)


def demo(folder: Path) -> None:
    """Prepare data, train both arms from one midpoint, compare them and write the report."""
    data, ordinary, frozen = folder / "data", folder / "ordinary", folder / "frozen"
    settings = [part for pair in TRAINING.items() for part in pair]
    saf("data", "prepare", "python", "--out", data, "--vocab-size", 2048, "--max-bytes", 9_000_000)
    saf("pretrain", "--data", data, "--out", ordinary, *settings)
    midpoint = ordinary / "checkpoints" / f"step-{UPDATES // 2}"
    saf("pretrain", "--parent", midpoint, "--out", frozen, "--freeze.rate", 0.25, "--freeze.storage", "exponential")
    saf("inspect", frozen)
    saf("compare", ordinary, frozen)
    saf("report", ordinary, frozen, "--out", folder)


def check(folder: Path) -> None:
    """Say what the model has learnt; fail when it has not learnt enough for the comparison to mean anything."""
    result = json.loads((folder / "ordinary" / "result.json").read_text())
    loss, unigram = result["report_loss"], result["unigram_entropy"]
    print(f"\nheld-out loss {loss:.3f} nats per token; unigram entropy of the same text {unigram:.3f}")
    if loss > unigram - 1:
        sys.exit("the model has hardly learnt: its loss should be well under the unigram entropy")


if __name__ == "__main__":
    start = time.monotonic()
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo")
    if target.exists():
        sys.exit(f"{target} exists already; remove it, or name another folder: python examples/demo.py FOLDER")
    demo(target)
    check(target)
    minutes = (time.monotonic() - start) / 60
    print(
        "A quarter of the heads froze halfway and now attend by position alone, at the cost in perplexity above.\n"
        "So small a model gains no time: attention is a small share of its updates. 124M at 64K gains 1.28x on a GPU."
    )
    print(f"{minutes:.1f} minutes; the report is {(target / 'report.html').resolve()}")
