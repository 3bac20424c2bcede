"""What updates and prefill cost with heads frozen or pruned: tab:pruning-native-systems and tab:pruning-prefill."""

from experiments.measurements import SMOKE_BENCH, Checkpoint, Measurement, Number, peak_change, speedup
from experiments.paper import NATIVE, NATIVE_TIMES, PREFILL_CONTROL, PRUNED_TIMES
from experiments.recipe import Recipe

PRUNED = "pruned"
SMOKE = {**SMOKE_BENCH, "memory": False}


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


# By checkpoint of recipe later_intervention: words, speedup and change of peak memory of 32 sequences.
PREFILLS = {
    "later-mean-25": ("frozen, matched tokens", "1.0847 ± 0.0024×", "+3.75%"),
    "later-pruned-25": ("pruned, matched tokens", "1.1636 ± 0.0012×", "−4.75%"),
    "later-gate-taylor-25": ("pruned by gate-Taylor, matched tokens", "1.1628 ± 0.0009×", "−5.66%"),
    "pruned-from-start": ("pruned from initialisation, matched tokens", "1.1631 ± 0.0005×", "−4.75%"),
    "later-mean-25-time": ("frozen, matched time", "1.0846 ± 0.0013×", "+3.75%"),
    "later-pruned-25-time": ("pruned, matched time", "1.1640 ± 0.0007×", "−4.75%"),
    "later-gate-taylor-25-time": ("pruned by gate-Taylor, matched time", "1.1657 ± 0.0011×", "−5.66%"),
}
ONE = {"matched tokens": "0.933×", "matched time": "0.877×"}


def _prefill(arm: str, words: str, speed: str, peak: str) -> Measurement:
    """Time 32 sequences on a trained model; other scales take random weights and drawn heads."""
    title, point, frozen = f"4,096 × 32, 25% {words}", (4_096, 32), words.startswith("frozen")
    backend = "toeplitz" if frozen else PRUNED
    return Measurement(
        name=f"prefill, {words}",
        does="bench prefill",
        on=(Checkpoint(arm, 1.0),),
        settings={
            **{"points": ("4096x32",), "memory": True, "fresh": True, "pairs": 4, "warmup": 10, "repeats": 40},
            "others": (),
        },
        scaled={
            "small": {
                **{"on": (), "model": "124m", "rates": (0.25,), "pruned": not frozen},
                **{"fresh": False, "seconds": 300.0},
            },
            "smoke": {**SMOKE, "on": (), "fresh": False, "points": ("32x4",), "pruned": not frozen},
        },
        numbers=(
            speedup(f"{title}, speedup", 0.25, point, speed, backend=backend, way="call", mean=True),
            peak_change(f"{title}, peak, %", 0.25, point, peak, backend=backend),
        ),
        label=PREFILL_CONTROL.label,
        smoke=arm == "later-pruned-25-time",
    )


def _one_sequence() -> tuple[Number, ...]:
    frozen = (
        speedup(f"4,096 × 1, 25% frozen, {checkpoint}, speedup", 0.25, (4_096, 1), speed, way="call")
        for checkpoint, speed in ONE.items()
    )
    return (*frozen, speedup("4,096 × 1, 25% pruned, speedup", 0.25, (4_096, 1), None, backend=PRUNED, way="call"))


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
                **{"pruned": True, "memory": True, "others": ()},
            },
            scaled={
                "small": {"points": ("4096x20x2", "8192x10x2", "16384x5x2"), "pairs": 4, "seconds": 540.0},
                "smoke": {**SMOKE, "points": ("32x4x2",)},
            },
            numbers=_native(),
        ),
        *(_prefill(arm, *quoted) for arm, quoted in PREFILLS.items()),
        Measurement(
            name="prefill of one sequence",
            does="bench prefill",
            # Calls of few tokens take one launch for all heads of a layer, unless heads are pinned to a kernel.
            settings={
                **{"model": "124m", "points": ("4096x1",), "rates": (0.25,), "pruned": True, "kernels": ("auto",)},
                **{"fresh": True, "pairs": 4, "warmup": 10, "repeats": 40, "others": ()},
            },
            scaled={"small": {"fresh": False, "seconds": 200.0}},
            numbers=_one_sequence(),
            label=PREFILL_CONTROL.label,
            smoke=False,
        ),
    ),
    notes=(
        "The paper gives the times of updates, ordinary and with fewer heads; ours is their ratio.",
        "At the paper's scale prompts are timed on the trained checkpoints, and elsewhere with random weights. "
        "The paper's batches are the largest that fit its GPU; they are taken over, so that shapes are the same.",
    ),
)
