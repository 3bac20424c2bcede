"""Recipes of speed, memory and errors: updates, prompts, and checks of the implementation."""

from dataclasses import replace
from typing import Any

from experiments.measurements import SMOKE_BENCH, Measurement, Number, checkpoint, peak_change, speedup
from experiments.paper import (
    FOUR_GPUS,
    GRADIENT_ERRORS,
    GRADIENTS,
    IMPLEMENTATION,
    MAIN,
    NATIVE,
    NATIVE_TIMES,
    ONE_B,
    ORDINARY_PEAK,
    PREFILL,
    PREFILL_CONTROL,
    PREFILL_TEXT,
    PRUNED_ERRORS,
    PRUNED_TIMES,
    QWEN,
    RATES,
    STORAGE,
    attention_speed,
    prefill_speed,
    update_memory,
    update_speed,
)
from experiments.recipe import Recipe

RECIPES: dict[str, Recipe] = {}
PRUNED = "pruned"
NO_MEMORY = {**SMOKE_BENCH, "memory": False}
"""Settings of the smoke scale for benchmarks that else measure memory too."""


# --- updates

_SHARES = (0.1, 0.25, 0.5, 0.75)


def _of_batches() -> tuple[Number, ...]:
    point, model = (4_096, 8), ("124m", 4_096, 8)
    speeds = [speedup(f"B=8, {rate:.0%}", rate, point, update_speed(model, rate)) for rate in _SHARES]
    speeds += [speedup(f"B={size}, {rate:.0%}", rate, (4_096, size), "plotted") for size in (2, 4) for rate in _SHARES]
    # The paper has peaks at some rates and changes from the ordinary one at others; here all are peaks.
    peaks = {0.0: ORDINARY_PEAK[model], 0.1: "31.85 GiB", 0.25: "31.58 GiB", 0.5: "31.24 GiB", 0.75: "30.84 GiB"}
    for rate, quoted in peaks.items():
        entry: dict[str, Any] = {"rate": rate, "point": {"length": 4_096, "batch_size": 8}}
        entry |= {"backend": "toeplitz"} if rate else {"backend": None, "arm": "ordinary cudnn"}
        speeds.append(Number(f"B=8, {rate:.0%}, peak, GiB", ("memory", entry, "bytes"), quoted, 2, scale=2**-30))
    return tuple(speeds)


def _of_contexts() -> tuple[Number, ...]:
    numbers = []
    for point in ((4_096, 8), (8_192, 4), (16_384, 2)):
        for rate in (0.25, 0.5):
            title, model = f"{point[0]:,} tokens, {rate:.0%}", ("124m", *point)
            numbers.append(speedup(title, rate, point, update_speed(model, rate)))
            numbers.append(peak_change(f"{title}, peak, %", rate, point, update_memory(model, rate)))
    return tuple(numbers)


RECIPES["training_systems"] = Recipe(
    title="Updates after freezing",
    source=RATES,
    also=("tab:main-results", "fig:systems-across-stages"),
    measurements=(
        Measurement(
            name="batches",
            does="saf bench update",
            settings={
                **{"model": "124m", "memory": True, "points": ("4096x2x60", "4096x4x30", "4096x8x15")},
                "rates": _SHARES,
            },
            scaled={
                "small": {"points": ("4096x2x8", "4096x4x8", "4096x8x4"), "pairs": 4, "seconds": 540.0},
                "smoke": {**NO_MEMORY, "points": ("32x2x2", "32x4x1")},
            },
            numbers=_of_batches(),
        ),
        Measurement(
            name="contexts",
            does="saf bench update",
            settings={
                **{"model": "124m", "memory": True, "points": ("4096x8x15", "8192x4x15", "16384x2x15")},
                "rates": (0.25, 0.5),
            },
            scaled={
                "small": {"points": ("4096x8x4", "8192x4x4", "16384x2x4"), "pairs": 4, "seconds": 540.0},
                "smoke": {**NO_MEMORY, "points": ("32x4x1", "64x2x1")},
            },
            numbers=_of_contexts(),
            label=MAIN.label,
        ),
    ),
    notes=("The small scale has fewer micro-batches an update, so that clipping and AdamW weigh more.",),
)


# The paper's estimate of a million GPU-hours after replacement: 64,000 hours saved.
_SAVED = replace(speedup("B=2, 25%, update time saved, %", 0.25, (8_192, 2), "6.4"), saved=True, places=1)


def _together(rate: float) -> Number:
    """Return an update that four GPUs share."""
    quoted = update_speed(("1b", 8_192, 2), rate, together=True)
    return speedup(f"B=2, {rate:.0%}", rate, (8_192, 2), quoted, mean=True)


def _alone(size: int, rate: float) -> tuple[Number, Number]:
    point, title = (8_192, size), f"B={size}, {rate:.0%}"
    speed, memory = (quoted(("1b", *point), rate) for quoted in (update_speed, update_memory))
    return speedup(title, rate, point, speed), peak_change(f"{title}, peak, %", rate, point, memory)


RECIPES["scale_up_systems"] = Recipe(
    title="Updates of 1B",
    source=ONE_B,
    also=("sec:scale-up-results",),
    measurements=(
        Measurement(
            name="1B, 8K, four GPUs",
            does="saf bench update",
            label=FOUR_GPUS.label,
            processes=4,
            settings={
                **{"model": "1b", "points": ("8192x2x32",), "rates": (0.25, 0.5), "parallel": "ddp", "others": ()},
                **{"warmup": 10, "repeats": 5, "pairs": 4, "profile": False},
            },
            scaled={"small": {"processes": 2, "points": ("8192x2x4",), "num_layers": 8, "seconds": 300.0}},
            numbers=(*map(_together, (0.25, 0.5)), _SAVED),
            # Starting a group takes longer than all other measurements of that scale.
            smoke=False,
        ),
        Measurement(
            name="1B, 8K",
            does="saf bench update",
            settings={
                **{"model": "1b", "points": ("8192x1x16", "8192x2x8"), "rates": (0.25, 0.5), "memory": True},
                **{"pairs": 4, "warmup": 3, "repeats": 10, "fresh": True},
            },
            scaled={
                "small": {"points": ("8192x1x4", "8192x2x2"), "num_layers": 8, "seconds": 540.0, "fresh": False},
                "smoke": {**NO_MEMORY, "points": ("64x1x2",), "fresh": False},
            },
            numbers=tuple(number for size in (1, 2) for rate in (0.25, 0.5) for number in _alone(size, rate)),
        ),
    ),
    notes=(
        "The small scale has 8 of the 32 layers, and two GPUs instead of four.",
        "Replacement halfway saves half of that share of all update time: 3.2% in the paper.",
    ),
)

# --- prompts

# cuDNN is the baseline; each other way of ordinary attention is a row of its own: math is PyTorch's eager product.
_HOW = {"others": ("auto", "flash", "flex", "math"), "pairs": 6}
# Calls of few tokens take one launch for all heads of a layer, unless heads are pinned to a kernel (docs/log.md).
_CALLED = {"kernels": ("auto",), "others": ("flash", "flex", "math")}
_SMALL = {"seconds": 540.0, "pairs": 4, "settle_ms": 50.0}
_UNGRAPHED = {**SMOKE_BENCH, "graphs": "off"}


def _trained(title: str, rate: float, points: tuple[tuple[int, int], ...], **settings: Any) -> Measurement:
    """Time a model trained at 16K with its own frozen heads; other scales take random weights and drawn heads."""
    return Measurement(
        name=f"{title}, {rate:.0%}",
        does="saf bench prefill",
        on=(checkpoint(f"16k-mean-{100 * rate:g}", 1.0),),
        settings={**_HOW, **settings, "points": tuple(f"{length}x{size}" for length, size in points), "fresh": True},
        scaled={
            "small": {**_SMALL, "model": "124m", "rates": (rate,), "fresh": False, "on": ()},
            "smoke": {**_UNGRAPHED, "fresh": False, "on": (), "points": ("16x2", "32x2")},
        },
        numbers=tuple(
            speedup(
                *(f"{point[0]:,} × {point[1]}, {rate:.0%}", rate, point),
                prefill_speed(("124m", *point), rate),
                way="call",
            )
            for point in points
        ),
        smoke=rate == 0.5,
    )


def _one_sequence(model: str, speeds: dict[int, tuple[str, str]]) -> Measurement:
    """Time one sequence at a shape, a quarter and all of its heads frozen."""
    return Measurement(
        name=f"{model.upper()} shape, one sequence",
        does="saf bench prefill",
        settings={**_HOW, "model": model, "points": tuple(f"{t}x1" for t in speeds), "rates": (0.25, 1.0)},
        scaled={"small": _SMALL, "smoke": {**_UNGRAPHED, "points": ("64x1",), "rates": (0.5, 1.0)}},
        numbers=tuple(
            speedup(f"{model.upper()}, {length:,} × 1, {rate:.0%}", rate, (length, 1), quoted, way="call")
            for length, texts in speeds.items()
            for rate, quoted in zip((0.25, 1.0), texts, strict=True)
        ),
        label=PREFILL_TEXT.label,
        smoke=model == "124m",
    )


def _at_4k(rate: float, way: str) -> Number:
    """Return the speedup of one sequence of 4,096 tokens, called in fresh processes or replayed as a graph."""
    words = {"call": "fresh processes", "graph": "replayed"}[way]
    quoted = prefill_speed(("124m", 4_096, 1), rate, graph=way == "graph")
    return speedup(f"4,096 × 1, {words}, {rate:.0%}", rate, (4_096, 1), quoted, way=way)


_LENGTHS = tuple((length, 64) for length in (512, 1_024, 2_048, 4_096, 8_192, 16_384))
_BATCHES = tuple((4_096, size) for size in (2, 4, 8, 16, 32))

RECIPES["prefill_systems"] = Recipe(
    title="Causal prefill",
    source=PREFILL,
    also=("fig:systems-across-stages", "tab:pruning-prefill", "app:kernel-details"),
    measurements=(
        *(_trained("lengths, 64 sequences", rate, _LENGTHS) for rate in (0.25, 0.5)),
        *(_trained("batches at 4K", rate, _BATCHES, **_CALLED) for rate in (0.25, 0.5)),
        Measurement(
            name="one sequence, fresh processes",
            does="saf bench prefill",
            settings={
                **{**_HOW, "model": "124m", **_CALLED, "points": ("4096x1",), "rates": (0.25, 0.5)},
                "fresh": True,
            },
            scaled={"small": _SMALL},
            numbers=tuple(_at_4k(rate, "call") for rate in (0.25, 0.5)),
            label=PREFILL_TEXT.label,
            smoke=False,
        ),
        Measurement(
            name="one sequence in graphs",
            does="saf bench prefill",
            settings={**_HOW, "model": "124m", "points": ("4096x1",), "rates": (0.25, 0.5, 0.75), "graphs": "on"},
            scaled={"small": _SMALL, "smoke": {**_UNGRAPHED, "points": ("32x1",), "rates": (0.75,)}},
            numbers=tuple(_at_4k(rate, "graph") for rate in (0.25, 0.5, 0.75)),
            label=PREFILL_TEXT.label,
        ),
        _one_sequence("124m", {16_384: ("1.08×", "1.33×")}),
        _one_sequence("774m", {8_192: ("1.07×", "1.31×"), 16_384: ("1.08×", "1.36×")}),
    ),
    notes=(
        "The baseline is cuDNN, the paper's is flash; flash, flex and PyTorch's eager product are rows of their own.",
        "At the paper's scale lengths and batches are timed on checkpoints trained at 16K. Elsewhere models have "
        "random weights and the layers of real head maps.",
    ),
)

_QWEN_RATES = (0.1, 0.2, 0.3, 0.5, 0.75)
_QWEN_POINTS = tuple((length, size) for size in (4, 8) for length in (2_048, 4_096, 8_192))
_QWEN_BENCH = {
    **{"model": "qwen3-4b", "points": tuple(f"{length}x{size}" for length, size in _QWEN_POINTS)},
    "rates": _QWEN_RATES,
}


def _qwen(words: str) -> tuple[Number, ...]:
    """Return the speedups of attention alone, projections inside, or of the whole model, called."""

    def quoted(point: tuple[int, int], rate: float) -> str | None:
        if words == "attention":
            return attention_speed(*point, rate)
        return prefill_speed(("qwen3-4b", *point), rate)

    return tuple(
        speedup(f"{words}, {point[0]:,} × {point[1]}, {rate:.0%}", rate, point, quoted(point, rate), way="call")
        for point in _QWEN_POINTS
        for rate in _QWEN_RATES
    )


RECIPES["qwen_prefill"] = Recipe(
    title="Prefill of Qwen3-4B",
    source=QWEN,
    measurements=(
        Measurement(
            name="attention",
            does="benchmarks.attention",
            settings={**_QWEN_BENCH, "dtype": "bf16"},
            scaled={
                "small": {"seconds": 540.0, "pairs": 5},
                "smoke": {**SMOKE_BENCH, "dtype": "fp32", "points": ("32x1",)},
            },
            numbers=_qwen("attention"),
        ),
        Measurement(
            name="whole model",
            does="saf bench prefill",
            settings={**_QWEN_BENCH, "precisions": ("bf16",), "pairs": 5},
            scaled={
                "small": {"num_layers": 6, "rates": (0.25, 0.5), "seconds": 540.0},
                "smoke": {**SMOKE_BENCH, "points": ("32x1",), "precisions": ("fp32",)},
            },
            numbers=_qwen("whole model"),
        ),
    ),
    notes=(
        "Weights are random, and which heads are frozen is drawn like measured head maps. The paper times heads by "
        "forward KL, fitted to 128 sequences of 2,048 tokens: `saf freeze Qwen/Qwen3-4B --score forward_kl --rate 0.1 "
        "--sequences 128 --length 2048 --out FOLDER`, then `saf bench prefill FOLDER` for each rate.",
        "The small scale has 6 of 36 layers in the whole model.",
    ),
)

# --- frozen against pruned


def _native() -> tuple[Number, ...]:
    """Return speedups of updates beside the paper's times, whose ratios two machines can be compared by."""
    numbers = []
    for (_, length, size), rates in NATIVE_TIMES.items():
        for rate in rates:
            for words, backend, times in (("frozen", "toeplitz", NATIVE_TIMES), ("pruned", PRUNED, PRUNED_TIMES)):
                ordinary, arm, change = times["124m", length, size][rate]
                title, point = f"{length:,} × {size}, {rate:.0%} {words}", (length, size)
                quoted = f"{ordinary:.2f}/{arm:.2f} ms"
                numbers.append(speedup(f"{title}, speedup", rate, point, quoted, backend=backend))
                numbers.append(peak_change(f"{title}, peak, %", rate, point, change, backend=backend))
    return tuple(numbers)


# By checkpoint of recipe later_intervention: words, speedup and change of peak memory of 32 sequences.
_PREFILLS = {
    "later-mean-25": ("frozen, matched tokens", "1.0847 ± 0.0024×", "+3.75%"),
    "later-pruned-25": ("pruned, matched tokens", "1.1636 ± 0.0012×", "−4.75%"),
    "later-gate-taylor-25": ("pruned by gate-Taylor, matched tokens", "1.1628 ± 0.0009×", "−5.66%"),
    "pruned-from-start": ("pruned from initialisation, matched tokens", "1.1631 ± 0.0005×", "−4.75%"),
    "later-mean-25-time": ("frozen, matched time", "1.0846 ± 0.0013×", "+3.75%"),
    "later-pruned-25-time": ("pruned, matched time", "1.1640 ± 0.0007×", "−4.75%"),
    "later-gate-taylor-25-time": ("pruned by gate-Taylor, matched time", "1.1657 ± 0.0011×", "−5.66%"),
}
_REPEATS = {"fresh": True, "pairs": 4, "warmup": 10, "repeats": 40, "others": ()}


def _prefill(arm: str, words: str, speed: str, peak: str) -> Measurement:
    """Time 32 sequences on a trained model; other scales take random weights and drawn heads."""
    title, point, frozen = f"4,096 × 32, 25% {words}", (4_096, 32), words.startswith("frozen")
    backend = "toeplitz" if frozen else PRUNED
    random = {"on": (), "fresh": False, "pruned": not frozen}
    return Measurement(
        name=f"prefill, {words}",
        does="saf bench prefill",
        on=(checkpoint(arm, 1.0),),
        settings={**_REPEATS, "points": ("4096x32",), "memory": True},
        scaled={
            "small": {**random, "model": "124m", "rates": (0.25,), "seconds": 300.0},
            "smoke": {**NO_MEMORY, **random, "points": ("32x4",)},
        },
        numbers=(
            speedup(f"{title}, speedup", 0.25, point, speed, backend=backend, way="call", mean=True),
            peak_change(f"{title}, peak, %", 0.25, point, peak, backend=backend),
        ),
        label=PREFILL_CONTROL.label,
        smoke=arm == "later-pruned-25-time",
    )


RECIPES["pruning_costs"] = Recipe(
    title="Costs of freezing against pruning",
    source=NATIVE,
    also=("tab:pruning-prefill", "app:pruning-execution-costs"),
    measurements=(
        Measurement(
            name="updates at native batches",
            does="saf bench update",
            settings={
                **{"model": "124m", "points": ("4096x20x6", "8192x10x6", "16384x5x6"), "rates": (0.25, 0.5)},
                **{"pruned": True, "memory": True, "others": ()},
            },
            scaled={
                "small": {"points": ("4096x20x2", "8192x10x2", "16384x5x2"), "pairs": 4, "seconds": 540.0},
                "smoke": {**NO_MEMORY, "points": ("32x4x2",)},
            },
            numbers=_native(),
        ),
        *(_prefill(arm, *quoted) for arm, quoted in _PREFILLS.items()),
        Measurement(
            name="prefill of one sequence",
            does="saf bench prefill",
            # Calls of few tokens take one launch for all heads of a layer, unless heads are pinned to a kernel.
            settings={
                **{**_REPEATS, "model": "124m", "points": ("4096x1",), "rates": (0.25,), "pruned": True},
                "kernels": ("auto",),
            },
            scaled={"small": {"fresh": False, "seconds": 200.0}},
            numbers=(
                *(
                    speedup(f"4,096 × 1, 25% frozen, {words}, speedup", 0.25, (4_096, 1), quoted, way="call")
                    for words, quoted in (("matched tokens", "0.933×"), ("matched time", "0.877×"))
                ),
                speedup("4,096 × 1, 25% pruned, speedup", 0.25, (4_096, 1), None, backend=PRUNED, way="call"),
            ),
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

# --- errors, changes of heads, storage


def _errors() -> tuple[Number, ...]:
    """Return differences from eager attention in the same precision, as the paper's."""
    numbers = []
    for tensor, quoted in GRADIENT_ERRORS.items():
        for place, (precision, words, name) in enumerate(
            (precision, words, name)
            for precision in ("fp32", "bf16")
            for words, name in (("max.", "max_abs"), ("relative L2", "relative_l2"))
        ):
            row = {"part": "layer", "backend": "toeplitz", "precision": precision, "tensor": tensor}
            path = ("rows", row, "eager", name)
            numbers.append(Number(f"{tensor}, {precision}, {words}", path, quoted[place], scientific=True))
    for precision, text in PRUNED_ERRORS.items():
        path = ("rows", {"part": "pruned layer", "precision": precision}, "eager", "relative_l2")
        title = f"of pruning, largest relative L2, {precision}"
        numbers.append(Number(title, path, text, of="max", scientific=True))
    return tuple(numbers)


_TRANSITIONS = ("rows", {"part": "transitions", "backend": "toeplitz"}, "max_abs")
_OUTPUT = {"part": "layer", "backend": "toeplitz", "precision": "fp32", "tensor": "output"}
_LAYER_OUTPUT = ("rows", _OUTPUT, "eager", "max_abs")

RECIPES["implementation"] = Recipe(
    title="Validation of the implementation",
    seeds=1,
    source=IMPLEMENTATION,
    also=("tab:gradient-errors",),
    measurements=(
        Measurement(
            name="gradients",
            does="benchmarks.accuracy",
            scaled={"smoke": {"backends": ("toeplitz",), "precisions": ("fp32",)}},
            numbers=_errors(),
            label=GRADIENTS.label,
        ),
        Measurement(
            name="changes of heads",
            does="benchmarks.accuracy",
            settings={"transitions": 50, "precisions": ("fp32",)},
            scaled={"smoke": {"transitions": 5, "backends": ("toeplitz",)}},
            numbers=(
                Number("logits after 50 changes of heads, max.", _TRANSITIONS, "9.54e-7", scientific=True),
                Number("output of a mixed layer, max. from eager", _LAYER_OUTPUT, "1.07e-6", scientific=True),
            ),
        ),
        Measurement(
            name="storage",
            does="experiments.analyses storage",
            on=(checkpoint("4k-mean-25", 1.0),),
            numbers=tuple(
                Number(f"{words}, GB", ("bytes", name), STORAGE.get(name), scale=1e-9)
                for name, words in (
                    ("dense_by_layer", "matrices of whole layers"),
                    ("dense_packed", "matrices of frozen heads"),
                    ("allocated", "what execution allocates"),
                    ("compact", "vectors alone"),
                )
            ),
        ),
    ),
    notes=("Of a pruned layer the largest error over its seven tensors is shown, from eager attention as all others.",),
)
