"""Recipes of speed, memory and errors: updates, prompts, and checks of the implementation.

`experiments.benchmarks` makes the tables of speed and memory, with the paper's numbers.
"""

from collections.abc import Mapping
from typing import Any

from experiments import paper
from experiments.arms import percent
from experiments.measurements import Measurement, Number, checkpoint
from experiments.recipe import Recipe

RECIPES: dict[str, Recipe] = {}

_ALL_RATES, _TWO_RATES = (0.1, 0.25, 0.5, 0.75), (0.25, 0.5)
_UPDATE, _PREFILL = "saf bench update", "saf bench prefill"
_SMALL = {"pairs": 4, "seconds": 540.0}


def _bench(
    name: str, program: str, model: str, points: str, rates: tuple[float, ...], settings: Mapping[str, Any],
    *, quoted_as: Mapping[str, str] = {}, **others: Any,
) -> Measurement:  # fmt: skip
    """Return a measurement that times a model; `others` are further fields of it."""
    settings = {"model": model, "points": points, "rates": rates, **settings}
    return Measurement(name, program, (), settings, quoted_as={"model": model, **quoted_as}, **others)


# --- updates

# Ten or five updates timed after a warm-up, in four pairs (app:scale-up-details).
_ONE_B = {"warmup": 3, "repeats": 10, "pairs": 4, "fresh": True, "memory": True}
_FOUR_GPUS = {"warmup": 10, "repeats": 5, "pairs": 4, "parallel": "ddp", "others": (), "profile": False}

RECIPES["training_systems"] = Recipe(
    title="Updates after freezing",
    source=paper.RATES,
    also=("tab:main-results", "fig:systems-across-stages"),
    measurements=(
        _bench(
            "batches", _UPDATE, "124m", "4096x8x15 4096x2x60 4096x4x30", _ALL_RATES, {"memory": True},
            small={"points": "4096x8x4 4096x2x8 4096x4x8", **_SMALL},
        ),
        _bench(
            "contexts", _UPDATE, "124m", "4096x8x15 8192x4x15 16384x2x15", _TWO_RATES, {"memory": True},
            small={"points": "4096x8x4 8192x4x4 16384x2x4", **_SMALL},
        ),
    ),
    notes=(
        "The small scale has fewer micro-batches an update, so that clipping and AdamW weigh more.",
        "The paper's peak memory at 4096x8 is 32.21 GiB with ordinary attention, and 31.85, 31.58, 31.24 and 30.84 GiB "
        "with 10, 25, 50 and 75% of the heads frozen.",
    ),
)  # fmt: skip

RECIPES["scale_up_systems"] = Recipe(
    title="Updates of 1B",
    source=paper.ONE_B,
    also=("sec:scale-up-results",),
    measurements=(
        # Starting a group takes longer than all other measurements of the smoke scale.
        _bench(
            "1B, 8K, four GPUs", _UPDATE, "1b", "8192x2x32", _TWO_RATES, _FOUR_GPUS, processes=4, smoke=None,
            small={"processes": 2, "points": "8192x2x4", "num_layers": 8, "seconds": 300.0},
        ),
        _bench(
            "1B, 8K", _UPDATE, "1b", "8192x1x16 8192x2x8", _TWO_RATES, _ONE_B,
            small={"points": "8192x1x4 8192x2x2", "num_layers": 8, "seconds": 540.0, "fresh": False},
        ),
    ),
    notes=(
        "The small scale has 8 of the 32 layers, and two GPUs instead of four.",
        "A speedup s saves 1 - 1/s of the time of updates, and replacement halfway saves half of that share: with 25% "
        "of the heads 6.4 and 3.2% in the paper, on four GPUs: 64,000 of a million GPU-hours after replacement.",
    ),
)  # fmt: skip

# --- prompts

# cuDNN is the baseline; other kernels of ordinary attention have rows of their own: math is PyTorch's eager product.
_OTHERS = {"others": ("auto", "flash", "flex", "math"), "pairs": 6}
# Calls of few tokens take one launch for all heads of a layer, unless heads are pinned to a kernel (docs/log.md).
_CALLED = {**_OTHERS, "kernels": ("auto",), "others": ("flash", "flex", "math")}
_SMALL_PROMPTS = {**_SMALL, "settle_ms": 50.0}


def _trained(name: str, rate: float, points: str, settings: Mapping[str, Any]) -> Measurement:
    """Time a model trained at 16K with its own frozen heads; elsewhere weights and heads are random."""
    random = {"model": "124m", "rates": (rate,), "fresh": False, "on": ()}
    return Measurement(
        f"{name}, {rate:.0%}",
        _PREFILL,
        (checkpoint(f"16k-mean-{percent(rate)}", 1.0),),
        {**settings, "points": points, "fresh": True},
        small={**_SMALL_PROMPTS, **random},
        smoke={"on": ()} if rate == 0.5 else None,
        quoted_as={"model": "124m"},
    )


RECIPES["prefill_systems"] = Recipe(
    title="Causal prefill",
    source=paper.PREFILL,
    also=("fig:systems-across-stages", "tab:pruning-prefill", "app:kernel-details"),
    quoted=("tab:pruning-prefill",),
    measurements=(
        *(
            _trained("lengths, 64 sequences", rate, "512x64 1024x64 2048x64 4096x64 8192x64 16384x64", _OTHERS)
            for rate in _TWO_RATES
        ),
        *(_trained("batches at 4K", rate, "4096x2 4096x4 4096x8 4096x16 4096x32", _CALLED) for rate in _TWO_RATES),
        _bench(
            "one sequence, fresh processes", _PREFILL, "124m", "4096x1", _TWO_RATES, {**_CALLED, "fresh": True},
            small=_SMALL_PROMPTS, smoke=None,
        ),
        _bench(
            "one sequence in graphs", _PREFILL, "124m", "4096x1", (0.25, 0.5, 0.75), {**_OTHERS, "graphs": "on"},
            small=_SMALL_PROMPTS,
        ),
        _bench(
            "124M shape, one sequence", _PREFILL, "124m", "16384x1", (0.25, 1.0), _OTHERS, small=_SMALL_PROMPTS,
        ),
        _bench(
            "774M shape, one sequence", _PREFILL, "774m", "8192x1 16384x1", (0.25, 1.0), _OTHERS,
            small=_SMALL_PROMPTS, smoke=None,
        ),
    ),
    notes=(
        "The baseline is cuDNN, the paper's is flash; flash, flex and PyTorch's eager product are rows of their own.",
        "At the paper's scale lengths and batches are timed on checkpoints trained at 16K. Elsewhere models have "
        "random weights and the layers of real head maps.",
    ),
)  # fmt: skip

_QWEN_POINTS = "2048x4 4096x4 8192x4 2048x8 4096x8 8192x8"
_QWEN_RATES = (0.1, 0.2, 0.3, 0.5, 0.75)

RECIPES["qwen_prefill"] = Recipe(
    title="Prefill of Qwen3-4B",
    source=paper.QWEN,
    measurements=(
        _bench(
            "attention", "benchmarks.attention", "qwen3-4b", _QWEN_POINTS, _QWEN_RATES, {"dtype": "bf16"},
            small={"seconds": 540.0, "pairs": 5}, quoted_as={"of": "attention"},
        ),
        _bench(
            "whole model", _PREFILL, "qwen3-4b", _QWEN_POINTS, _QWEN_RATES, {"precisions": ("bf16",), "pairs": 5},
            small={"num_layers": 6, "rates": _TWO_RATES, "seconds": 540.0},
        ),
    ),
    notes=(
        "Weights are random, and which heads are frozen is drawn like measured head maps. The paper times heads by "
        "forward KL, fitted to 128 sequences of 2,048 tokens: `saf freeze Qwen/Qwen3-4B --score forward_kl --rate 0.1 "
        "--sequences 128 --length 2048 --out FOLDER`, then `saf bench prefill FOLDER` for each rate.",
        "The small scale has 6 of 36 layers in the whole model.",
    ),
)  # fmt: skip

# --- frozen against pruned

# As in app:pruning-execution-costs: ten calls of warm-up, forty timed ones, four pairs of fresh processes.
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
"""The paper's speed and peak memory of prompts of 32 sequences, by checkpoint of recipe later_intervention."""


def _trained_later(arm: str, words: str, speed: str, peak: str) -> Measurement:
    """Time 32 sequences on a trained model; elsewhere weights and heads are random."""
    is_pruned, title = words.startswith("pruned"), f"4,096 × 32, 25% {words}"
    random = {"on": (), "fresh": False, "pruned": is_pruned}
    entry = {"backend": "pruned" if is_pruned else "toeplitz", "rate": 0.25}
    return Measurement(
        f"prefill, {words}",
        _PREFILL,
        (checkpoint(arm, 1.0),),
        {**_REPEATS, "points": "4096x32", "memory": True},
        small={**random, "model": "124m", "rates": (0.25,), "seconds": 300.0},
        smoke=random if arm == "later-pruned-25-time" else None,
        numbers=(
            # Refused ratios are those of noisy measurements.
            Number(f"{title}, speedup", ("rows", {**entry, "variant": "call", "refused": False}, "ratio"), speed, 4),
            Number(f"{title}, peak, %", ("memory", entry, "change_percent"), peak, 2, signed=True),
        ),
    )


RECIPES["pruning_costs"] = Recipe(
    title="Costs of freezing against pruning",
    source=paper.NATIVE,
    also=("tab:pruning-prefill", "app:pruning-execution-costs"),
    measurements=(
        _bench(
            "updates at native batches", _UPDATE, "124m", "4096x20x6 8192x10x6 16384x5x6", _TWO_RATES,
            {"memory": True, "pruned": True, "others": ()}, small={"points": "4096x20x2 8192x10x2 16384x5x2", **_SMALL},
        ),
        *(_trained_later(**line) for line in _PREFILLS),
        _bench(
            "prefill of one sequence", _PREFILL, "124m", "4096x1", (0.25,),
            {**_REPEATS, "pruned": True, "kernels": ("auto",)},  # as in _CALLED
            small={"fresh": False, "seconds": 200.0}, smoke=None,
        ),
    ),
    notes=(
        "At the paper's scale prompts are timed on the trained checkpoints, and elsewhere with random weights.",
        "For one sequence the frozen models of this table of the paper reach 0.933× at matched tokens and 0.877× at "
        "matched time.",
    ),
)  # fmt: skip


# --- errors, changes of heads, storage


def _errors() -> list[Number]:
    """Return errors against eager attention in the same precision, as in the paper."""
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
_OF_OUTPUT = ("rows", _OUTPUT, "eager", "max_abs")

RECIPES["implementation"] = Recipe(
    title="Validation of the implementation",
    seeds=1,
    source=paper.IMPLEMENTATION,
    also=("tab:gradient-errors",),
    measurements=(
        Measurement(
            "gradients",
            "benchmarks.accuracy",
            smoke={"backends": ("toeplitz",), "precisions": ("fp32",)},
            numbers=_errors(),
        ),
        Measurement(
            "changes of heads",
            "benchmarks.accuracy",
            (),
            {"transitions": 50, "precisions": ("fp32",)},
            smoke={"transitions": 5, "backends": ("toeplitz",)},
            numbers=(
                Number("logits after 50 changes of heads, max.", _TRANSITIONS, "9.54e-7", scientific=True),
                Number("output of a mixed layer, max. from eager", _OF_OUTPUT, "1.07e-6", scientific=True),
            ),
        ),
        Measurement("storage", "experiments.analyses storage", (checkpoint("4k-mean-25", 1.0),)),
    ),
    notes=("Of a pruned layer the largest error over its seven tensors is shown, from eager attention as all others.",),
)
