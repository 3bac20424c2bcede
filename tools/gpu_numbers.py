"""Measure on one H200 the numbers that no change may lose, and compare each with its required value.

    python tools/gpu_numbers.py                # about ten minutes; exits 1 when a number misses its bound
    python tools/gpu_numbers.py --dry-run      # the same code at toy sizes, on the CPU too; no bound applies

Speeds are medians of alternating pairs with a control, by the protocol of `saf bench`: the ordinary model's time over
the frozen model's, both on cuDNN's attention.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import freezing
from saf import bench

SPEEDS: dict[str, dict[str, Any]] = {
    "update": {"points": ("4096x8x4", "16384x2x4")},
    "prefill": {"points": ("4096x64",)},
}
LOWEST = {
    ("update", 4_096): {0.25: 1.075, 0.5: 1.17},
    ("update", 16_384): {0.25: 1.14, 0.5: 1.335},
    ("prefill", 4_096): {0.25: 1.055, 0.5: 1.15},
}
"""Speedups by kind, context and share of heads."""
MOST_FREEZING_SECONDS = 0.5
"""Of 25% of 124M on 32 sequences of 4,096 tokens, warm."""
MOST_MEMORY_CHANGE = -7.0
"""Percent of an update's peak of 1B at 8K, half of the heads frozen."""


@dataclass(frozen=True)
class Number:
    """One measured number, its unit and its bound."""

    name: str
    value: float
    unit: str
    bound: float
    at_most: bool = False

    @property
    def passed(self) -> bool:
        """Whether the value keeps to its bound."""
        return self.value <= self.bound if self.at_most else self.value >= self.bound


def speeds(dry_run: bool) -> Iterator[Number]:
    """Measure updates and prompts of 124M with 25 and 50% of the heads frozen; a refused ratio is a miss."""
    for kind, settings in SPEEDS.items():
        options = {"model": "124m", "rates": (0.25, 0.5), "backends": ("toeplitz",), "others": (), "free": False}
        options |= settings | {"profile": False}
        if dry_run:
            point = "64x2x1" if kind == "update" else "64x2"
            options |= {"model": "tiny", "points": (point,), "pairs": 2, "warmup": 1, "tolerance": 10.0}
        for row in bench.measure(bench.KINDS[kind](**options), out=None)["rows"]:
            if row["backend"] is None or (kind == "prefill" and row["variant"] != "call"):
                continue
            length, rate = row["point"]["length"], row["rate"]
            bound = LOWEST.get((kind, length), {}).get(rate, 0.0)
            value = 0.0 if row["refused"] else row["ratio"]
            yield Number(f"{kind} at {length:,}, {rate:.0%} frozen", value, "x", bound)


def seconds(dry_run: bool) -> Iterator[Number]:
    """Measure the warm seconds of freezing."""
    options = {"model": "tiny", "points": ("64x8",), "repeats": 3} if dry_run else {"model": "124m"}
    rows = freezing.measure(freezing.Freezing(**options))["rows"]
    for row in rows:
        if row["part"] == "intervention":
            yield Number("freezing 25%, warm", row["spread"]["median"], "s", MOST_FREEZING_SECONDS, at_most=True)


def memory(dry_run: bool) -> Iterator[Number]:
    """Measure the change of an update's peak memory; on a CPU there is none to measure."""
    if not torch.cuda.is_available():
        return
    options = {"model": "tiny" if dry_run else "1b", "points": ("64x2x1" if dry_run else "8192x2x1",)}
    settings = {**options, "rates": (0.5,), "backends": ("toeplitz",), "others": (), "free": False, "pairs": 0}
    for entry in bench.measure(bench.KINDS["update"](**settings, memory=True), out=None)["memory"]:
        if entry["backend"] is not None:
            change = entry["change_percent"]
            yield Number("update's peak memory, 50% frozen", change, "%", MOST_MEMORY_CHANGE, at_most=True)


def main() -> int:
    """Print a row a number as it is measured; return 1 when one misses its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="toy sizes, on any device; bounds do not apply")
    dry_run = parser.parse_args().dry_run
    if not torch.cuda.is_available() and not dry_run:
        parser.error("the numbers need a CUDA device; without one only --dry-run runs")
    missed = 0
    print(f"{'number':<42}{'required':>12}{'measured':>12}  verdict", flush=True)
    for number in (each for part in (speeds, seconds, memory) for each in part(dry_run)):
        required = f"{'<=' if number.at_most else '>='} {number.bound:g}"
        verdict = "dry run" if dry_run else "pass" if number.passed else "FAIL"
        missed += not number.passed
        print(f"{number.name:<42}{required:>12}{number.value:>10.3f} {number.unit:<2}  {verdict}", flush=True)
    return 1 if missed and not dry_run else 0


if __name__ == "__main__":
    sys.exit(main())
