"""What updates and prefill cost with heads frozen or pruned: tab:pruning-native-systems and tab:pruning-prefill."""

from saf.bench.harness.arms import PRUNED
from saf.experiments.measurement import Measurement, Number, peak_change, speedup
from saf.experiments.recipe import Recipe
from saf.records.paper import NATIVE, NATIVE_TIMES, PREFILL_CONTROL, PRUNED_TIMES

SMOKE = {
    **{"model": "tiny", "rates": (0.5,), "pairs": 2, "warmup": 1, "repeats": 1, "tolerance": 10.0},
    **{"profile": False, "memory": False},
}


def _native() -> tuple[Number, ...]:
    """The paper gives times; ratios of times are what two machines can be compared by."""
    found = []
    for (_, length, size), rates in NATIVE_TIMES.items():
        for rate in rates:
            for words, way, times in (("frozen", "toeplitz", NATIVE_TIMES), ("pruned", PRUNED, PRUNED_TIMES)):
                ordinary, arm, change = times["124m", length, size][rate]
                title, point = f"{length:,} × {size}, {rate:.0%} {words}", (length, size)
                paper = f"{ordinary:.2f}/{arm:.2f} ms"
                found.append(speedup(f"{title}, speedup", rate, point, paper, backend=way))
                found.append(peak_change(f"{title}, peak, %", rate, point, change, backend=way))
    return tuple(found)


def _prefill(size: int, frozen: str, pruned: str | None) -> tuple[Number, ...]:
    point = (4_096, size)
    return (
        speedup(f"4,096 × {size}, 25% frozen, speedup", 0.25, point, frozen, way="call"),
        speedup(f"4,096 × {size}, 25% pruned, speedup", 0.25, point, pruned, backend=PRUNED, way="call"),
    )


RECIPE = Recipe(
    title="Costs of freezing against pruning",
    source=NATIVE,
    also=("tab:pruning-prefill", "app:pruning-execution-costs"),
    measurements=(
        Measurement(
            name="updates at native batches",
            does="bench update",
            settings={
                **{"model": "124m", "points": ("4096x20x6", "8192x10x6", "16384x5x6"), "rates": (0.25, 0.5)},
                **{"pruned": True, "memory": True, "precompile": True, "workers": 2, "others": ()},
            },
            scaled={
                "small": {"points": ("4096x20x2", "8192x10x2", "16384x5x2"), "pairs": 4, "seconds": 540.0},
                "smoke": {**SMOKE, "points": ("32x4x2",), "precompile": False, "workers": 1},
            },
            numbers=_native(),
        ),
        Measurement(
            name="prefill",
            does="bench prefill",
            settings={
                **{"model": "124m", "points": ("4096x32", "4096x1"), "rates": (0.25,), "pruned": True},
                **{"memory": True, "fresh": True, "pairs": 4, "warmup": 10, "repeats": 40, "others": ()},
            },
            scaled={
                "small": {"fresh": False, "seconds": 300.0},
                "smoke": {**SMOKE, "fresh": False, "points": ("32x4",)},
            },
            numbers=(
                *_prefill(32, "1.0847 ± 0.0024×", "1.1636 ± 0.0012×"),
                peak_change("4,096 × 32, 25% frozen, peak, %", 0.25, (4_096, 32), "+3.75%"),
                peak_change("4,096 × 32, 25% pruned, peak, %", 0.25, (4_096, 32), "−4.75%", backend=PRUNED),
                *_prefill(1, "0.933×", None),
            ),
            source=PREFILL_CONTROL,
        ),
    ),
    notes=(
        "The paper gives the times of updates, ordinary and with fewer heads; ours is their ratio.",
        "Frozen and pruned models have the same heads; the paper's sets by gate-Taylor are not timed here.",
    ),
)
