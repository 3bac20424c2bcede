"""Causal prefill by length, batch, way of calling and shape: tab:prefill-latency, fig:systems-across-stages (c, d)."""

from typing import Any

from experiments.measurements import SMOKE_BENCH, Checkpoint, Measurement, speedup
from experiments.paper import PREFILL, PREFILL_TEXT, prefill_speed
from experiments.recipe import Recipe

LENGTHS = (512, 1_024, 2_048, 4_096, 8_192, 16_384)
SIZES = (1, 2, 4, 8, 16, 32, 64)
# cuDNN is the baseline; each other way of ordinary attention is a row of its own: math is PyTorch's eager product.
HOW = {"others": ("auto", "flash", "flex", "math"), "pairs": 6}
MODEL = {**HOW, "model": "124m"}
# Calls of few tokens take one launch for all heads of a layer, unless heads are pinned to a kernel (docs/log.md).
CALLED = {"kernels": ("auto",), "others": ("flash", "flex", "math")}
SMALL = {"seconds": 540.0, "pairs": 4, "settle_ms": 50.0}
SMOKE = {**SMOKE_BENCH, "graphs": "off"}


def _trained(title: str, rate: float, points: tuple[tuple[int, int], ...], **settings: Any) -> Measurement:
    """Time a model trained at 16K with its own frozen heads; other scales take random weights and drawn heads."""
    numbers = []
    for length, size in points:
        quoted = prefill_speed(("124m", length, size), rate)
        paper = None if quoted is None else quoted.text
        numbers.append(speedup(f"{length:,} × {size}, {rate:.0%}", rate, (length, size), paper, way="call"))
    return Measurement(
        name=f"{title}, {rate:.0%}",
        does="bench prefill",
        on=(Checkpoint(f"16k-mean-{100 * rate:g}", 1.0),),
        settings={**HOW, **settings, "points": tuple(f"{length}x{size}" for length, size in points), "fresh": True},
        scaled={
            "small": {**SMALL, "model": "124m", "rates": (rate,), "fresh": False, "on": ()},
            "smoke": {**SMOKE, "fresh": False, "on": (), "points": ("16x2", "32x2")},
        },
        numbers=tuple(numbers),
        smoke=rate == 0.5,
    )


def _shape(model: str, speeds: dict[int, tuple[str | None, str | None]]) -> Measurement:
    """One sequence at a shape, a quarter and all of its heads."""
    return Measurement(
        name=f"{model.upper()} shape, one sequence",
        does="bench prefill",
        settings={**MODEL, "model": model, "points": tuple(f"{t}x1" for t in speeds), "rates": (0.25, 1.0)},
        scaled={"small": SMALL, "smoke": {**SMOKE, "points": ("64x1",), "rates": (0.5, 1.0)}},
        numbers=tuple(
            speedup(f"{model.upper()}, {length:,} × 1, {rate:.0%}", rate, (length, 1), paper, way="call")
            for length, papers in speeds.items()
            for rate, paper in zip((0.25, 1.0), papers, strict=True)
        ),
        label=PREFILL_TEXT.label,
        smoke=model == "124m",
    )


RECIPE = Recipe(
    title="Causal prefill",
    source=PREFILL,
    also=("fig:systems-across-stages", "tab:pruning-prefill", "app:kernel-details"),
    measurements=(
        *(_trained("lengths, 64 sequences", rate, tuple((t, 64) for t in LENGTHS)) for rate in (0.25, 0.5)),
        *(_trained("batches at 4K", rate, tuple((4_096, b) for b in SIZES[1:-1]), **CALLED) for rate in (0.25, 0.5)),
        Measurement(
            name="one sequence, fresh processes",
            does="bench prefill",
            settings={**MODEL, **CALLED, "points": ("4096x1",), "rates": (0.25, 0.5), "fresh": True},
            scaled={"small": SMALL},
            numbers=(
                speedup("4,096 × 1, fresh processes, 25%", 0.25, (4_096, 1), "0.969×", way="call"),
                speedup("4,096 × 1, fresh processes, 50%", 0.5, (4_096, 1), "0.972×", way="call"),
            ),
            label=PREFILL_TEXT.label,
            smoke=False,
        ),
        Measurement(
            name="one sequence in graphs",
            does="bench prefill",
            settings={**MODEL, "points": ("4096x1",), "rates": (0.25, 0.5, 0.75), "graphs": "on"},
            scaled={"small": SMALL, "smoke": {**SMOKE, "points": ("32x1",), "rates": (0.75,)}},
            numbers=tuple(
                speedup(f"4,096 × 1, replayed, {rate:.0%}", rate, (4_096, 1), paper, way="graph")
                for rate, paper in ((0.25, "1.113×"), (0.5, "1.220×"), (0.75, "1.377×"))
            ),
            label=PREFILL_TEXT.label,
        ),
        _shape("124m", {16_384: ("1.08×", "1.33×")}),
        _shape("774m", {8_192: ("1.07×", "1.31×"), 16_384: ("1.08×", "1.36×")}),
    ),
    notes=(
        "The baseline is cuDNN, the paper's is flash; flash, flex and PyTorch's eager product are rows of their own.",
        "At the paper's scale lengths and batches are timed on checkpoints trained at 16K. Elsewhere models have "
        "random weights and the layers of real head maps.",
    ),
)
