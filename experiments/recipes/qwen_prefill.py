"""Prefill with grouped queries, attention alone and the whole model: tab:qwen-prefill-details."""

from experiments.measurements import SMOKE_BENCH, Measurement, Number, speedup
from experiments.paper import QWEN, attention_speed, prefill_speed
from experiments.recipe import Recipe

RATES = (0.1, 0.2, 0.3, 0.5, 0.75)
POINTS = tuple((length, size) for size in (4, 8) for length in (2_048, 4_096, 8_192))
SHAPES = tuple(f"{length}x{size}" for length, size in POINTS)


def _attention(point: tuple[int, int], rate: float) -> Number:
    """The attention layers alone, called, projections inside."""
    quoted = attention_speed(*point, rate)
    assert quoted is not None, point
    title = f"attention, {point[0]:,} × {point[1]}, {rate:.0%}"
    return speedup(title, rate, point, quoted.text, way="call")


def _whole(point: tuple[int, int], rate: float) -> Number:
    """The whole model, called."""
    quoted = prefill_speed(("qwen3-4b", *point), rate)
    assert quoted is not None, point
    title = f"whole model, {point[0]:,} × {point[1]}, {rate:.0%}"
    return speedup(title, rate, point, quoted.text, way="call")


RECIPE = Recipe(
    title="Prefill of Qwen3-4B",
    source=QWEN,
    measurements=(
        Measurement(
            name="attention",
            does="benchmarks attention",
            settings={"model": "qwen3-4b", "points": SHAPES, "rates": RATES, "dtype": "bf16"},
            scaled={
                "small": {"seconds": 540.0, "pairs": 5},
                "smoke": {**SMOKE_BENCH, "dtype": "fp32", "points": ("32x1",)},
            },
            numbers=tuple(_attention(point, rate) for point in POINTS for rate in RATES),
        ),
        Measurement(
            name="whole model",
            does="bench prefill",
            settings={"model": "qwen3-4b", "points": SHAPES, "rates": RATES, "precisions": ("bf16",), "pairs": 5},
            scaled={
                "small": {"num_layers": 6, "rates": (0.25, 0.5), "seconds": 540.0},
                "smoke": {**SMOKE_BENCH, "points": ("32x1",), "precisions": ("fp32",)},
            },
            numbers=tuple(_whole(point, rate) for point in POINTS for rate in RATES),
        ),
    ),
    notes=(
        "Weights are random, and which heads are frozen is drawn like measured head maps. The paper times heads by "
        "forward KL, fitted to 128 sequences of 2,048 tokens: `saf freeze Qwen/Qwen3-4B --score forward_kl --rate 0.1 "
        "--sequences 128 --length 2048 --out FOLDER`, then `saf bench prefill FOLDER` for each rate.",
        "The small scale has 6 of 36 layers in the whole model.",
    ),
)
