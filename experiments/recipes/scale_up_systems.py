"""Updates of the 1B shape on four GPUs and on one: tab:scale-up-systems."""

from dataclasses import replace

from experiments.measurements import SMOKE_BENCH, Measurement, Number, peak_change, speedup
from experiments.paper import FOUR_GPUS, ONE_B, update_speed
from experiments.recipe import Recipe

PAPER = {
    1: {0.25: ("1.067×", "−0.57%"), 0.5: ("1.163×", "−2.31%")},
    2: {0.25: ("1.066×", "−1.83%"), 0.5: ("1.165×", "−3.99%")},
}


def _together(rate: float) -> Number:
    """An update that four GPUs share."""
    quoted = update_speed(("1b", 8_192, 2), rate, together=True)
    assert quoted is not None, rate
    return speedup(f"B=2, {rate:.0%}", rate, (8_192, 2), quoted.text, mean=True)


def _saved() -> Number:
    """The paper's estimate of what a million GPU-hours after replacement would save: 64,000 hours."""
    ratio = speedup("B=2, 25%, update time saved, %", 0.25, (8_192, 2), "6.4")
    return replace(ratio, saved=True, places=1)


RECIPE = Recipe(
    title="Updates of 1B",
    source=ONE_B,
    also=("sec:scale-up-results",),
    measurements=(
        Measurement(
            name="1B, 8K, four GPUs",
            does="bench update",
            label=FOUR_GPUS.label,
            processes=4,
            settings={
                **{"model": "1b", "points": ("8192x2x32",), "rates": (0.25, 0.5), "parallel": "ddp", "others": ()},
                **{"warmup": 10, "repeats": 5, "pairs": 4, "profile": False},
            },
            scaled={"small": {"processes": 2, "points": ("8192x2x4",), "num_layers": 8, "seconds": 300.0}},
            numbers=(*map(_together, (0.25, 0.5)), _saved()),
            # Starting a group takes longer than all other measurements of that scale.
            smoke=False,
        ),
        Measurement(
            name="1B, 8K",
            does="bench update",
            settings={
                **{"model": "1b", "points": ("8192x1x16", "8192x2x8"), "rates": (0.25, 0.5), "memory": True},
                **{"pairs": 4, "warmup": 3, "repeats": 10, "fresh": True},
            },
            scaled={
                "small": {"points": ("8192x1x4", "8192x2x2"), "num_layers": 8, "seconds": 540.0, "fresh": False},
                "smoke": {**SMOKE_BENCH, "points": ("64x1x2",), "memory": False, "fresh": False},
            },
            numbers=tuple(
                number
                for size, rates in PAPER.items()
                for rate, (speed, change) in rates.items()
                for number in (
                    speedup(f"B={size}, {rate:.0%}", rate, (8_192, size), speed),
                    peak_change(f"B={size}, {rate:.0%}, peak, %", rate, (8_192, size), change),
                )
            ),
        ),
    ),
    notes=(
        "The small scale has 8 of the 32 layers, and two GPUs instead of four.",
        "Replacement halfway saves half of that share of all update time: 3.2% in the paper.",
    ),
)
