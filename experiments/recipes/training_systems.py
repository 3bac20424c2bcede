"""Updates at several batches, rates and contexts: tab:training-systems-details, and the systems half of two others."""

from experiments.measurements import SMOKE_BENCH, Measurement, Number, peak_change, speedup
from experiments.paper import MAIN, RATES, update_memory, update_speed
from experiments.recipe import Recipe

SHARES = (0.1, 0.25, 0.5, 0.75)
SMOKE = {**SMOKE_BENCH, "memory": False}
LARGE = {"model": "124m", "memory": True}


def _quoted(found) -> str | None:
    return None if found is None else found.text


def _of_batches() -> tuple[Number, ...]:
    point = (4_096, 8)
    speeds = [speedup(f"B=8, {r:.0%}", r, point, _quoted(update_speed(("124m", *point), r))) for r in SHARES]
    speeds += [speedup(f"B={size}, {r:.0%}", r, (4_096, size), "plotted") for size in (2, 4) for r in SHARES]
    arms = [(0.0, None, "ordinary cudnn"), *((r, "toeplitz", None) for r in SHARES)]
    peaks = {0.0: "32.21 GiB", 0.1: "31.85 GiB", 0.25: "31.58 GiB", 0.5: "31.24 GiB", 0.75: "30.84 GiB"}
    found = []
    for rate, backend, arm in arms:
        shape = {"length": 4_096, "batch_size": 8}
        conditions = {"rate": rate, "backend": backend, "point": shape, **({"arm": arm} if arm else {})}
        path = ("memory", conditions, "bytes")
        title = f"B=8, {rate:.0%}, peak, GiB"
        found.append(Number(title=title, path=path, paper=peaks[rate], places=2, scale=2**-30))
    return (*speeds, *found)


def _of_contexts() -> tuple[Number, ...]:
    found = []
    for length, size in ((4_096, 8), (8_192, 4), (16_384, 2)):
        for rate in (0.25, 0.5):
            point, title = (length, size), f"{length:,} tokens, {rate:.0%}"
            found.append(speedup(title, rate, point, _quoted(update_speed(("124m", *point), rate))))
            change = _quoted(update_memory(("124m", *point), rate))
            found.append(peak_change(f"{title}, peak, %", rate, point, change))
    return tuple(found)


RECIPE = Recipe(
    title="Updates after freezing",
    source=RATES,
    also=("tab:main-results", "fig:systems-across-stages"),
    measurements=(
        Measurement(
            name="batches",
            does="bench update",
            settings={**LARGE, "points": ("4096x2x60", "4096x4x30", "4096x8x15"), "rates": SHARES},
            scaled={
                "small": {"points": ("4096x2x8", "4096x4x8", "4096x8x4"), "pairs": 4, "seconds": 540.0},
                "smoke": {**SMOKE, "points": ("32x2x2", "32x4x1")},
            },
            numbers=_of_batches(),
        ),
        Measurement(
            name="contexts",
            does="bench update",
            settings={**LARGE, "points": ("4096x8x15", "8192x4x15", "16384x2x15"), "rates": (0.25, 0.5)},
            scaled={
                "small": {"points": ("4096x8x4", "8192x4x4", "16384x2x4"), "pairs": 4, "seconds": 540.0},
                "smoke": {**SMOKE, "points": ("32x4x1", "64x2x1")},
            },
            numbers=_of_contexts(),
            label=MAIN.label,
        ),
    ),
    notes=("The small scale has fewer micro-batches an update, so that clipping and AdamW weigh more.",),
)
