"""Recipes of speed, memory and errors: updates, prompts, and checks of the implementation.

`_bench` writes a measurement by `saf bench` from its points and rates: the settings, and a number for each.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from experiments import paper
from experiments.measurements import SMOKE_BENCH, Measurement, Number, checkpoint, peak_change, speedup
from experiments.recipe import Recipe

RECIPES: dict[str, Recipe] = {}
Points = Sequence[tuple[int, int]]
"""Tokens of context and sequences."""
NO_MEMORY = {**SMOKE_BENCH, "memory": False}
"""Settings of the smoke scale for benchmarks that else measure memory too."""


def _numbers(
    of: str, model: str, points: Points, rates: Iterable[float], *, heads: str = "frozen", memory: bool = False
) -> tuple[Number, ...]:
    """Return the speedup at each point and rate, with `memory` also the change of peak memory, and the paper's.

    `of` names the paper's measurement, as in `paper.SPEEDS`.
    """
    numbers, edited = [], {"backend": "pruned" if heads == "pruned" else "toeplitz"}
    way = {"graph": "graph", "call": "call", "attention": "call"}.get(of, "update")
    for length, size in points:
        for rate in rates:
            title, place = f"{length:,} × {size}, {rate:.0%} {heads}", (of, model, length, size, rate, heads)
            times = paper.quoted(paper.TIMES, *place)
            speed = f"{times} ms" if times else paper.quoted(paper.SPEEDS, *place)
            numbers.append(speedup(title, rate, (length, size), speed, way=way, mean=of == "four GPUs", **edited))
            if memory:
                peak = paper.quoted(paper.MEMORY, *place)
                numbers.append(peak_change(f"{title}, peak, %", rate, (length, size), peak, **edited))
    return tuple(numbers)


def _points(points: Points, micro_batches: int | None = None) -> tuple[str, ...]:
    """Return points as flags have them."""
    return tuple(f"{length}x{size}" + f"x{micro_batches}" * bool(micro_batches) for length, size in points)


# --- updates

_SHARES, _CONTEXTS = (0.1, 0.25, 0.5, 0.75), ((4_096, 8), (8_192, 4), (16_384, 2))
_SMALL = {"pairs": 4, "seconds": 540.0}


def _peak(rate: float, quoted: str) -> Number:
    """Return the peak itself: the paper has peaks at some rates and changes from the ordinary one at others."""
    entry: dict[str, Any] = {"rate": rate, "point": {"length": 4_096, "batch_size": 8}}
    entry |= {"backend": "toeplitz"} if rate else {"backend": None, "arm": "ordinary cudnn"}
    return Number(f"4,096 × 8, {rate:.0%}, peak, GiB", ("memory", entry, "bytes"), quoted, 2, scale=2**-30)


_PEAKS = {0.0: "32.21 GiB", 0.1: "31.85 GiB", 0.25: "31.58 GiB", 0.5: "31.24 GiB", 0.75: "30.84 GiB"}

RECIPES["training_systems"] = Recipe(
    title="Updates after freezing",
    source=paper.RATES,
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
                "small": {"points": ("4096x2x8", "4096x4x8", "4096x8x4"), **_SMALL},
                "smoke": {**NO_MEMORY, "points": ("32x2x2", "32x4x1")},
            },
            numbers=(
                *_numbers("update", "124m", [(4_096, size) for size in (8, 2, 4)], _SHARES),
                *(_peak(*peak) for peak in _PEAKS.items()),
            ),
        ),
        Measurement(
            name="contexts",
            does="saf bench update",
            settings={"model": "124m", "memory": True, "points": _points(_CONTEXTS, 15), "rates": (0.25, 0.5)},
            scaled={
                "small": {"points": _points(_CONTEXTS, 4), **_SMALL},
                "smoke": {**NO_MEMORY, "points": ("32x4x1", "64x2x1")},
            },
            numbers=_numbers("update", "124m", _CONTEXTS, (0.25, 0.5), memory=True),
        ),
    ),
    notes=("The small scale has fewer micro-batches an update, so that clipping and AdamW weigh more.",),
)

# The paper's estimate of a million GPU-hours after replacement: 64,000 hours saved.
_SAVED = replace(speedup("update time saved at 25%, %", 0.25, (8_192, 2), "6.4"), saved=True, places=1)

RECIPES["scale_up_systems"] = Recipe(
    title="Updates of 1B",
    source=paper.ONE_B,
    also=("sec:scale-up-results",),
    measurements=(
        Measurement(
            name="1B, 8K, four GPUs",
            does="saf bench update",
            processes=4,
            settings={
                **{"model": "1b", "points": ("8192x2x32",), "rates": (0.25, 0.5), "parallel": "ddp", "others": ()},
                **{"warmup": 10, "repeats": 5, "pairs": 4, "profile": False},
            },
            scaled={"small": {"processes": 2, "points": ("8192x2x4",), "num_layers": 8, "seconds": 300.0}},
            numbers=(*_numbers("four GPUs", "1b", [(8_192, 2)], (0.25, 0.5)), _SAVED),
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
            numbers=_numbers("update", "1b", [(8_192, 1), (8_192, 2)], (0.25, 0.5), memory=True),
        ),
    ),
    notes=(
        "The small scale has 8 of the 32 layers, and two GPUs instead of four.",
        "Replacement halfway saves half of that share of all update time: 3.2% in the paper.",
    ),
)

# --- prompts

# cuDNN is the baseline; each other way of ordinary attention is a row of its own: math is PyTorch's eager product.
_OTHERS = {"others": ("auto", "flash", "flex", "math"), "pairs": 6}
# Calls of few tokens take one launch for all heads of a layer, unless heads are pinned to a kernel (docs/log.md).
_CALLED = {"kernels": ("auto",), "others": ("flash", "flex", "math")}
_SMALL_PROMPTS = {"seconds": 540.0, "pairs": 4, "settle_ms": 50.0}
_UNGRAPHED = {**SMOKE_BENCH, "graphs": "off"}


def _prefill(
    name: str, points: Points, rates: Sequence[float], *, of: str = "call", model: str = "124m", **others: Any
) -> Measurement:
    """Time prompts of a shape with random weights; `others` are fields of the measurement."""
    settings = {**_OTHERS, "model": model, "points": _points(points), "rates": rates, **others.pop("settings", {})}
    return Measurement(
        name=name,
        does="saf bench prefill",
        settings=settings,
        scaled={"small": _SMALL_PROMPTS, "smoke": {**_UNGRAPHED, **others.pop("at_smoke", {})}},
        **{"numbers": _numbers(of, model, points, rates), **others},
    )


def _trained(title: str, rate: float, points: Points, settings: Mapping[str, Any] = {}) -> Measurement:
    """Time a model trained at 16K with its own frozen heads; other scales take random weights and drawn heads."""
    return Measurement(
        name=f"{title}, {rate:.0%}",
        does="saf bench prefill",
        on=(checkpoint(f"16k-mean-{100 * rate:g}", 1.0),),
        settings={**_OTHERS, **settings, "points": _points(points), "fresh": True},
        scaled={
            "small": {**_SMALL_PROMPTS, "model": "124m", "rates": (rate,), "fresh": False, "on": ()},
            "smoke": {**_UNGRAPHED, "fresh": False, "on": (), "points": ("16x2", "32x2")},
        },
        numbers=_numbers("call", "124m", points, [rate]),
        smoke=rate == 0.5,
    )


def _one_sequence(model: str, all_heads: Mapping[int, str]) -> Measurement:
    """Time one sequence at a shape, a quarter and all of its heads frozen, by the paper's speedups of the latter."""
    numbers: list[Number] = []
    for length, whole in all_heads.items():
        numbers += _numbers("call", model, [(length, 1)], [0.25])
        numbers.append(speedup(f"{length:,} × 1, 100% frozen", 1.0, (length, 1), whole, way="call"))
    name, points = f"{model.upper()} shape, one sequence", [(length, 1) for length in all_heads]
    at_smoke = {"points": ("64x1",), "rates": (0.5, 1.0)}
    others: dict[str, Any] = {"at_smoke": at_smoke, "numbers": tuple(numbers), "smoke": model == "124m"}
    return _prefill(name, points, (0.25, 1.0), model=model, **others)


_LENGTHS = [(length, 64) for length in (512, 1_024, 2_048, 4_096, 8_192, 16_384)]
_BATCHES = [(4_096, size) for size in (2, 4, 8, 16, 32)]

RECIPES["prefill_systems"] = Recipe(
    title="Causal prefill",
    source=paper.PREFILL,
    also=("fig:systems-across-stages", "tab:pruning-prefill", "app:kernel-details"),
    measurements=(
        *(_trained("lengths, 64 sequences", rate, _LENGTHS) for rate in (0.25, 0.5)),
        *(_trained("batches at 4K", rate, _BATCHES, _CALLED) for rate in (0.25, 0.5)),
        _prefill(
            *("one sequence, fresh processes", [(4_096, 1)], (0.25, 0.5)),
            settings={**_CALLED, "fresh": True},
            smoke=False,
        ),
        _prefill(
            *("one sequence in graphs", [(4_096, 1)], (0.25, 0.5, 0.75)),
            of="graph",
            settings={"graphs": "on"},
            at_smoke={"points": ("32x1",), "rates": (0.75,)},
        ),
        _one_sequence("124m", {16_384: "1.33×"}),
        _one_sequence("774m", {8_192: "1.31×", 16_384: "1.36×"}),
    ),
    notes=(
        "The baseline is cuDNN, the paper's is flash; flash, flex and PyTorch's eager product are rows of their own.",
        "At the paper's scale lengths and batches are timed on checkpoints trained at 16K. Elsewhere models have "
        "random weights and the layers of real head maps.",
    ),
)

_QWEN_RATES = (0.1, 0.2, 0.3, 0.5, 0.75)
_QWEN_POINTS = [(length, size) for size in (4, 8) for length in (2_048, 4_096, 8_192)]
_QWEN = {"model": "qwen3-4b", "points": _points(_QWEN_POINTS), "rates": _QWEN_RATES}

RECIPES["qwen_prefill"] = Recipe(
    title="Prefill of Qwen3-4B",
    source=paper.QWEN,
    measurements=(
        Measurement(
            name="attention",
            does="benchmarks.attention",
            settings={**_QWEN, "dtype": "bf16"},
            scaled={
                "small": {"seconds": 540.0, "pairs": 5},
                "smoke": {**SMOKE_BENCH, "dtype": "fp32", "points": ("32x1",)},
            },
            numbers=_numbers("attention", "qwen3-4b", _QWEN_POINTS, _QWEN_RATES),
        ),
        Measurement(
            name="whole model",
            does="saf bench prefill",
            settings={**_QWEN, "precisions": ("bf16",), "pairs": 5},
            scaled={
                "small": {"num_layers": 6, "rates": (0.25, 0.5), "seconds": 540.0},
                "smoke": {**SMOKE_BENCH, "points": ("32x1",), "precisions": ("fp32",)},
            },
            numbers=_numbers("call", "qwen3-4b", _QWEN_POINTS, _QWEN_RATES),
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

_NATIVE = [(4_096, 20), (8_192, 10), (16_384, 5)]
_REPEATS = {"fresh": True, "pairs": 4, "warmup": 10, "repeats": 40, "others": ()}
_PREFILLS = paper.lines("""
    arm                       | words                                      | speed            | peak
    later-mean-25             | frozen, matched tokens                     | 1.0847 ± 0.0024× | +3.75%
    later-pruned-25           | pruned, matched tokens                     | 1.1636 ± 0.0012× | −4.75%
    later-gate-taylor-25      | pruned by gate-Taylor, matched tokens      | 1.1628 ± 0.0009× | −5.66%
    pruned-from-start         | pruned from initialisation, matched tokens | 1.1631 ± 0.0005× | −4.75%
    later-mean-25-time        | frozen, matched time                       | 1.0846 ± 0.0013× | +3.75%
    later-pruned-25-time      | pruned, matched time                       | 1.1640 ± 0.0007× | −4.75%
    later-gate-taylor-25-time | pruned by gate-Taylor, matched time        | 1.1657 ± 0.0011× | −5.66%
""")
"""Prompts of 32 sequences by checkpoint of recipe later_intervention."""


def _trained_later(arm: str, words: str, speed: str, peak: str) -> Measurement:
    """Time 32 sequences on a trained model; other scales take random weights and drawn heads."""
    title, point, frozen = f"4,096 × 32, 25% {words}", (4_096, 32), words.startswith("frozen")
    backend = "toeplitz" if frozen else "pruned"
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
        smoke=arm == "later-pruned-25-time",
    )


RECIPES["pruning_costs"] = Recipe(
    title="Costs of freezing against pruning",
    source=paper.NATIVE,
    also=("tab:pruning-prefill", "app:pruning-execution-costs"),
    measurements=(
        Measurement(
            name="updates at native batches",
            does="saf bench update",
            settings={
                **{"model": "124m", "points": _points(_NATIVE, 6), "rates": (0.25, 0.5)},
                **{"pruned": True, "memory": True, "others": ()},
            },
            scaled={
                "small": {"points": _points(_NATIVE, 2), **_SMALL},
                "smoke": {**NO_MEMORY, "points": ("32x4x2",)},
            },
            numbers=(
                *_numbers("update", "124m", _NATIVE, (0.25, 0.5), memory=True),
                *_numbers("update", "124m", _NATIVE, (0.25, 0.5), heads="pruned", memory=True),
            ),
        ),
        *(_trained_later(**line) for line in _PREFILLS),
        Measurement(
            name="prefill of one sequence",
            does="saf bench prefill",
            settings={
                **{**_REPEATS, "model": "124m", "points": ("4096x1",), "rates": (0.25,), "pruned": True},
                "kernels": ("auto",),  # as in _CALLED
            },
            scaled={"small": {"fresh": False, "seconds": 200.0}},
            numbers=(
                speedup("4,096 × 1, 25% frozen, matched tokens", 0.25, (4_096, 1), "0.933×", way="call"),
                speedup("4,096 × 1, 25% frozen, matched time", 0.25, (4_096, 1), "0.877×", way="call"),
                speedup("4,096 × 1, 25% pruned", 0.25, (4_096, 1), None, backend="pruned", way="call"),
            ),
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


def _errors() -> list[Number]:
    """Return differences from eager attention in the same precision, as the paper's."""
    numbers = []
    for tensor, texts in paper.GRADIENT_ERRORS.items():
        columns = [(precision, name) for precision in ("fp32", "bf16") for name in ("max_abs", "relative_l2")]
        for (precision, name), text in zip(columns, texts, strict=True):
            row = {"part": "layer", "backend": "toeplitz", "precision": precision, "tensor": tensor}
            title = f"{tensor}, {precision}, {'max.' if name == 'max_abs' else 'relative L2'}"
            numbers.append(Number(title, ("rows", row, "eager", name), text, scientific=True))
    for precision, text in paper.PRUNED_ERRORS.items():
        path = ("rows", {"part": "pruned layer", "precision": precision}, "eager", "relative_l2")
        title = f"of pruning, largest relative L2, {precision}"
        numbers.append(Number(title, path, text, of="max", scientific=True))
    return numbers


_TRANSITIONS = ("rows", {"part": "transitions", "backend": "toeplitz"}, "max_abs")
_OUTPUT = {"part": "layer", "backend": "toeplitz", "precision": "fp32", "tensor": "output"}
_FORMS = {
    **{"dense_by_layer": "matrices of whole layers", "dense_packed": "matrices of frozen heads"},
    **{"allocated": "what execution allocates", "compact": "vectors alone"},
}

RECIPES["implementation"] = Recipe(
    title="Validation of the implementation",
    seeds=1,
    source=paper.IMPLEMENTATION,
    also=("tab:gradient-errors",),
    measurements=(
        Measurement(
            name="gradients",
            does="benchmarks.accuracy",
            scaled={"smoke": {"backends": ("toeplitz",), "precisions": ("fp32",)}},
            numbers=tuple(_errors()),
        ),
        Measurement(
            name="changes of heads",
            does="benchmarks.accuracy",
            settings={"transitions": 50, "precisions": ("fp32",)},
            scaled={"smoke": {"transitions": 5, "backends": ("toeplitz",)}},
            numbers=(
                Number("logits after 50 changes of heads, max.", _TRANSITIONS, "9.54e-7", scientific=True),
                Number(
                    *("output of a mixed layer, max. from eager", ("rows", _OUTPUT, "eager", "max_abs"), "1.07e-6"),
                    scientific=True,
                ),
            ),
        ),
        Measurement(
            name="storage",
            does="experiments.analyses storage",
            on=(checkpoint("4k-mean-25", 1.0),),
            numbers=tuple(
                Number(f"{words}, GB", ("bytes", name), paper.STORAGE.get(name), scale=1e-9)
                for name, words in _FORMS.items()
            ),
        ),
    ),
    notes=("Of a pruned layer the largest error over its seven tensors is shown, from eager attention as all others.",),
)
