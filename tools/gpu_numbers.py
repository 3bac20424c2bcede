"""Measure on one H200 the numbers that no change may lose: ten minutes; exits 1 where one misses its bound.

    python tools/gpu_numbers.py

Speedups are of 124M with 25% and 50% of the heads frozen, by the protocol of `saf bench`, both sides on cuDNN.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import freezing
from saf import bench

RATES = (0.25, 0.5)
# Some below what was measured (docs/log.md): 1.081 / 1.181, 1.145 / 1.349 and 1.068 / 1.169.
SPEEDUPS = {
    ("update", "4096x8x4"): (1.075, 1.17),
    ("update", "16384x2x4"): (1.14, 1.335),
    ("prefill", "4096x64"): (1.055, 1.15),
}
"""Lowest by kind and point, at each rate."""
# Without what only informs, so that all numbers take ten minutes.
SETTINGS = {"rates": RATES, "backends": ("toeplitz",), "others": (), "free": False, "profile": False}


def numbers() -> Iterator[tuple[str, float, float]]:
    """Yield each number's name, its value and its lowest value; a refused speedup is 0."""
    for (kind, point), lowest in SPEEDUPS.items():
        for row in bench.measure(bench.KINDS[kind](model="124m", points=(point,), **SETTINGS), out=None)["rows"]:
            if row["backend"] is not None and row["variant"] in ("update", "call"):
                name = f"{kind} {point}, {row['rate']:.0%} frozen, speedup"
                yield name, 0.0 if row["refused"] else row["ratio"], lowest[RATES.index(row["rate"])]
    (row,) = freezing.measure(freezing.Freezing(model="124m"))["rows"]
    # Seconds below the bound, not seconds: of every number more is better.
    yield "freezing 25% of 124M, warm, seconds saved of 0.5", 0.5 - row["seconds"], 0.0
    update = bench.KINDS["update"](
        model="1b", points=("8192x2x1",), pairs=0, memory=True, **SETTINGS | {"rates": (0.5,)}
    )
    for entry in bench.measure(update, out=None)["memory"]:
        if entry["backend"] is not None:
            yield "peak memory of an update of 1B, 50% frozen, % saved", -entry["change_percent"], 7.0


def main() -> int:
    """Print a row a number as it is measured; return 1 when one misses its bound."""
    if not torch.cuda.is_available():
        sys.exit("the numbers need a CUDA device")
    missed = 0
    for name, value, lowest in numbers():
        missed += not value >= lowest  # `not >=`, so that NaN misses
        print(f"{name:<60}{value:>9.3f} of {lowest:g}  {'pass' if value >= lowest else 'FAIL'}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
