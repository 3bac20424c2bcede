"""Updates, prompts and decoding of 124M from 4K to a million positions: ordinary, frozen both ways, pruned, free.

    python -m benchmarks.long_contexts --out results/long-contexts [--only update-32k decode] [--tiny]

Each group is one record of `saf bench`, written under its name while it is measured: a run that is cut loses nothing,
and a group that is there already is passed over.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro

from saf.bench.protocol import Comparison, Point
from saf.bench.speed import ModelSpeed, measure
from saf.bench.whole import Decode, Prefill, Update

WITHOUT_COMPILER = {"compile": "off", "graphs": "on"}
"""Compiling every arm of a point takes minutes; long prompts and steps spend their time in attention."""


def arms(*rates: float, **more: Any) -> dict[str, Any]:
    """Return settings that all groups share: the arms at some rates, four pairs."""
    common = {"backends": ("toeplitz", "linear"), "rates": rates, "others": (), "pruned": True, "pairs": 4}
    return {**common, "profile": False, **more}


def updates(*rates: float, **more: Any) -> dict[str, Any]:
    """Return settings of updates, compiled by layers."""
    return arms(*rates, compile="layers", repeats=1, **more)


@dataclass(kw_only=True)
class RecomputedUpdate(Update):
    """Updates that recompute activations in every arm: nothing else fits at 128K."""

    activation_checkpointing: bool = True

    def arms(self, point: Point) -> list[Comparison]:
        """Return the comparisons without the arm that keeps everything."""
        return [each for each in super().arms(point) if each.role != "keeping"]


GROUPS: dict[str, ModelSpeed] = {
    "update-32k": Update(**updates(0.25, 0.5), points=("32768x1x1",)),
    "update-64k-25": Update(**updates(0.25), points=("65536x1x1",)),
    "update-64k-50": Update(**updates(0.5), points=("65536x1x1",)),
    "update-128k": RecomputedUpdate(**updates(0.5), points=("131072x1x1",)),
    "prefill": Prefill(**arms(0.5), points=("4096x1", "16384x1"), graphs="on"),
    "prefill-long": Prefill(
        **arms(0.25, 0.5, **WITHOUT_COMPILER), points=("4096x1", "16384x1", "65536x1", "131072x1"), warmup=1
    ),
    "decode": Decode(
        **arms(0.25, 0.5, **WITHOUT_COMPILER), kernels=("flash_decode",), points=("4096x1", "65536x1")
    ),
    "decode-2-layers": Decode(
        **arms(0.25, 0.5, **WITHOUT_COMPILER), kernels=("flash_decode",), num_layers=2,
        points=("4096x1", "65536x1", "262144x1", "1048576x1"),
    ),
    "memory-32k": Update(**updates(0.5, pairs=0), memory=True, points=("32768x1x1",), warmup=1),
    "memory-64k": Update(**updates(0.5, pairs=0), memory=True, points=("65536x1x1",), warmup=1),
}  # fmt: skip
"""In the order of a run. At a million positions the caches of ten arms fit for two layers, not for twelve."""


@dataclass(kw_only=True)
class Settings:
    """Measure long contexts."""

    out: Path
    """Folder for a record of each group."""
    only: tuple[str, ...] = tuple(GROUPS)
    """Groups to measure."""
    seconds: float = 420.0
    """Seconds a group may take; what does not end within them is left out by name."""
    tiny: bool = False
    """Measure small shapes, on a CPU too, to try the script."""


def tiny(settings: ModelSpeed) -> ModelSpeed:
    """Return the same benchmark with one small point and one pair."""
    model: dict[str, Any] = (
        {"model": "tiny"} if not isinstance(settings, Decode) else {"num_layers": 1, "kernels": ("auto",)}
    )
    points = tuple("x".join(["192", *point.split("x")[1:]]) for point in settings.points[:1])
    pairs = min(1, settings.pairs) * 2
    return replace(settings, points=points, pairs=pairs, warmup=1, repeats=1, compile="off", graphs="off", **model)


def main(words: Sequence[str] | None = None) -> int:
    """Measure the groups that are not there yet."""
    settings = tyro.cli(Settings, args=words, prog="python -m benchmarks.long_contexts")
    if unknown := set(settings.only) - set(GROUPS):
        raise SystemExit(f"only must name some of {', '.join(GROUPS)}; got {', '.join(sorted(unknown))}")
    settings.out.mkdir(parents=True, exist_ok=True)
    for name in settings.only:
        path = settings.out / f"{name}.json"
        if path.exists():
            print(f"{name}: {path} is there", flush=True)
            continue
        benchmark = tiny(GROUPS[name]) if settings.tiny else GROUPS[name]
        measure(replace(benchmark, seconds=settings.seconds), out=path, say=lambda line: print(line, flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
