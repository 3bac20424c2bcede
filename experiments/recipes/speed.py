"""Recipes of speed, memory and errors: updates, prompts, and checks of the implementation.

`_bench` writes a measurement from its points and rates: the settings, and a number for each with the paper's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from experiments import paper
from experiments.arms import percent
from experiments.measurements import Measurement, Number, checkpoint
from experiments.recipe import Recipe

RECIPES: dict[str, Recipe] = {}
COMMANDS = {
    "update": ("saf bench update", "update"),
    "four GPUs": ("saf bench update", "update"),
    "call": ("saf bench prefill", "call"),
    "graph": ("saf bench prefill", "graph"),
    "attention": ("benchmarks.attention", "call"),
}
"""By the paper's measurement (`paper.SPEEDS`): our command, and the variant that its records name."""
Point = tuple[int, int]
"""Tokens of context, sequences."""


def _speedup(
    title: str,
    rate: float,
    point: Point,
    paper: str | None,
    *,
    heads: str = "frozen",
    variant: str = "update",
    mean: bool = False,
) -> Number:
    """Return the accepted ratio, baseline's time over an arm's: the median over pairs, or their mean with its error."""
    # Refused ratios are those of noisy measurements: a table says "not run" rather than show one.
    entry = {"variant": variant, "refused": False, **_entry(rate, point, heads)}
    if mean:
        return Number(title, ("rows", entry, "pair_ms"), paper, 4, of="pairs")
    return Number(title, ("rows", entry, "ratio"), paper)


def _peak_change(title: str, rate: float, point: Point, paper: str | None, *, heads: str = "frozen") -> Number:
    """Return the change of an arm's peak memory against the ordinary one, %."""
    return Number(title, ("memory", _entry(rate, point, heads), "change_percent"), paper, 2, signed=True)


def _entry(rate: float, point: Point, heads: str) -> dict[str, Any]:
    """Return the conditions on the entry of a record."""
    backend = "toeplitz" if heads == "frozen" else "pruned"
    return {"backend": backend, "rate": rate, "point": {"length": point[0], "batch_size": point[1]}}


def _numbers(
    of: str, model: str, points: Sequence[str], rates: Sequence[float], *, heads: str = "frozen", peaks: bool = False
) -> list[Number]:
    """Return the speedup at each point and rate with the paper's; with `peaks` also the change of peak memory.

    `of` names the paper's measurement, as in `paper.SPEEDS`; `points` are those of the command line: CONTEXTxSEQUENCES.
    """
    numbers = []
    for length, size, *_ in (map(int, point.split("x")) for point in points):
        for rate in rates:
            title, place = f"{length:,} × {size}, {rate:.0%} {heads}", (of, model, length, size, rate, heads)
            times, point = paper.number_at(paper.TIMES, *place), (length, size)
            quoted, mean = f"{times} ms" if times else paper.number_at(paper.SPEEDS, *place), of == "four GPUs"
            numbers.append(_speedup(title, rate, point, quoted, heads=heads, variant=COMMANDS[of][1], mean=mean))
            if peaks:
                quoted = paper.number_at(paper.MEMORY, *place)
                numbers.append(_peak_change(f"{title}, peak, %", rate, point, quoted, heads=heads))
    return numbers


def _bench(
    *,
    name: str,
    of: str,
    model: str,
    points: Sequence[str],
    rates: Sequence[float],
    settings: Mapping[str, Any] = {},
    small: Mapping[str, Any] = {},
    peaks: bool = False,
    numbers: Sequence[Number] | None = None,
    processes: int = 1,
    smoke: bool = True,
) -> Measurement:
    """Return a measurement that times a model; `of` names the paper's measurement, as in `COMMANDS`.

    `small` has the settings that differ at the small scale, `numbers` others than those of every point and rate.
    """
    memory = {"memory": True} if peaks else {}
    return Measurement(
        name=name,
        program=COMMANDS[of][0],
        settings={"model": model, "points": points, "rates": rates, **memory, **settings},
        scaled={"small": small},
        numbers=tuple(_numbers(of, model, points, rates, peaks=peaks) if numbers is None else numbers),
        processes=processes,
        smoke=smoke,
    )


# --- updates

_ALL_RATES, _TWO_RATES = (0.1, 0.25, 0.5, 0.75), (0.25, 0.5)
_SMALL = {"pairs": 4, "seconds": 540.0}
_PEAKS = {0.0: "32.21 GiB", 0.1: "31.85 GiB", 0.25: "31.58 GiB", 0.5: "31.24 GiB", 0.75: "30.84 GiB"}


def _peak(rate: float, quoted: str) -> Number:
    """Return the peak memory at a rate: the paper has it for one shape, and changes of it for others."""
    entry: dict[str, Any] = {"rate": rate, "point": {"length": 4_096, "batch_size": 8}}
    entry |= {"backend": "toeplitz"} if rate else {"backend": None, "arm": "ordinary cudnn"}
    return Number(f"4,096 × 8, {rate:.0%}, peak, GiB", ("memory", entry, "bytes"), quoted, 2, scale=2**-30)


_BATCHES = ("4096x8x15", "4096x2x60", "4096x4x30")

RECIPES["training_systems"] = Recipe(
    title="Updates after freezing",
    source=paper.RATES,
    also=("tab:main-results", "fig:systems-across-stages"),
    measurements=(
        _bench(
            name="batches",
            of="update",
            model="124m",
            points=_BATCHES,
            rates=_ALL_RATES,
            settings={"memory": True},
            small={"points": ("4096x8x4", "4096x2x8", "4096x4x8"), **_SMALL},
            numbers=[*_numbers("update", "124m", _BATCHES, _ALL_RATES), *(_peak(*each) for each in _PEAKS.items())],
        ),
        _bench(
            name="contexts",
            of="update",
            model="124m",
            points=("4096x8x15", "8192x4x15", "16384x2x15"),
            rates=_TWO_RATES,
            small={"points": ("4096x8x4", "8192x4x4", "16384x2x4"), **_SMALL},
            peaks=True,
        ),
    ),
    notes=("The small scale has fewer micro-batches an update, so that clipping and AdamW weigh more.",),
)

# The paper estimates that 64,000 of a million GPU-hours after replacement are saved.
_SAVED = replace(_speedup("update time saved at 25%, %", 0.25, (8_192, 2), "6.4"), saved=True, places=1)

RECIPES["scale_up_systems"] = Recipe(
    title="Updates of 1B",
    source=paper.ONE_B,
    also=("sec:scale-up-results",),
    measurements=(
        # Starting a group takes longer than all other measurements of the smoke scale.
        _bench(
            name="1B, 8K, four GPUs",
            of="four GPUs",
            model="1b",
            points=("8192x2x32",),
            rates=_TWO_RATES,
            # Five updates timed after ten of warm-up, in four pairs (app:scale-up-details).
            settings={"parallel": "ddp", "others": (), "warmup": 10, "repeats": 5, "pairs": 4, "profile": False},
            small={"processes": 2, "points": ("8192x2x4",), "num_layers": 8, "seconds": 300.0},
            numbers=[*_numbers("four GPUs", "1b", ["8192x2"], _TWO_RATES), _SAVED],
            processes=4,
            smoke=False,
        ),
        _bench(
            name="1B, 8K",
            of="update",
            model="1b",
            points=("8192x1x16", "8192x2x8"),
            rates=_TWO_RATES,
            # Ten updates timed after three, in four pairs of fresh processes (app:scale-up-details).
            settings={"pairs": 4, "warmup": 3, "repeats": 10, "fresh": True},
            small={"points": ("8192x1x4", "8192x2x2"), "num_layers": 8, "seconds": 540.0, "fresh": False},
            peaks=True,
        ),
    ),
    notes=(
        "The small scale has 8 of the 32 layers, and two GPUs instead of four.",
        "Replacement halfway saves half of that share of all update time: 3.2% in the paper.",
    ),
)

# --- prompts

# cuDNN is the baseline; other kernels of ordinary attention have rows of their own: math is PyTorch's eager product.
_OTHERS = {"others": ("auto", "flash", "flex", "math"), "pairs": 6}
# Calls of few tokens take one launch for all heads of a layer, unless heads are pinned to a kernel (docs/log.md).
_CALLED = {**_OTHERS, "kernels": ("auto",), "others": ("flash", "flex", "math")}
_SMALL_PROMPTS = {**_SMALL, "settle_ms": 50.0}


def _trained(title: str, rate: float, points: Sequence[str], settings: Mapping[str, Any]) -> Measurement:
    """Time a model trained at 16K with its own frozen heads; elsewhere weights and heads are random."""
    random = {"model": "124m", "rates": (rate,), "fresh": False, "on": ()}
    return Measurement(
        name=f"{title}, {rate:.0%}",
        program="saf bench prefill",
        on=(checkpoint(f"16k-mean-{percent(rate)}", 1.0),),
        settings={**settings, "points": points, "fresh": True},
        scaled={"small": {**_SMALL_PROMPTS, **random}, "smoke": {"on": ()}},
        numbers=tuple(_numbers("call", "124m", points, [rate])),
        smoke=rate == 0.5,
    )


def _one_sequence(model: str, all_heads: Mapping[int, str]) -> Measurement:
    """Time one sequence with 25% and with all heads frozen; `all_heads` has the paper's speedups of the latter."""
    numbers: list[Number] = []
    for length, whole in all_heads.items():
        numbers += _numbers("call", model, [f"{length}x1"], [0.25])
        # paper.SPEEDS has no column for all heads.
        numbers.append(_speedup(f"{length:,} × 1, 100% frozen", 1.0, (length, 1), whole, variant="call"))
    return _bench(
        name=f"{model.upper()} shape, one sequence",
        of="call",
        model=model,
        points=[f"{length}x1" for length in all_heads],
        rates=(0.25, 1.0),
        settings=_OTHERS,
        small=_SMALL_PROMPTS,
        numbers=numbers,
        smoke=model == "124m",
    )


_LENGTHS = ("512x64", "1024x64", "2048x64", "4096x64", "8192x64", "16384x64")
_BATCHES_AT_4K = ("4096x2", "4096x4", "4096x8", "4096x16", "4096x32")

RECIPES["prefill_systems"] = Recipe(
    title="Causal prefill",
    source=paper.PREFILL,
    also=("fig:systems-across-stages", "tab:pruning-prefill", "app:kernel-details"),
    quoted=("tab:pruning-prefill",),
    measurements=(
        *(_trained("lengths, 64 sequences", rate, _LENGTHS, _OTHERS) for rate in _TWO_RATES),
        *(_trained("batches at 4K", rate, _BATCHES_AT_4K, _CALLED) for rate in _TWO_RATES),
        _bench(
            name="one sequence, fresh processes",
            of="call",
            model="124m",
            points=("4096x1",),
            rates=_TWO_RATES,
            settings={**_CALLED, "fresh": True},
            small=_SMALL_PROMPTS,
            smoke=False,
        ),
        _bench(
            name="one sequence in graphs",
            of="graph",
            model="124m",
            points=("4096x1",),
            rates=(0.25, 0.5, 0.75),
            settings={**_OTHERS, "graphs": "on"},
            small=_SMALL_PROMPTS,
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

_QWEN_POINTS = ("2048x4", "4096x4", "8192x4", "2048x8", "4096x8", "8192x8")
_QWEN_RATES = (0.1, 0.2, 0.3, 0.5, 0.75)

RECIPES["qwen_prefill"] = Recipe(
    title="Prefill of Qwen3-4B",
    source=paper.QWEN,
    measurements=(
        _bench(
            name="attention",
            of="attention",
            model="qwen3-4b",
            points=_QWEN_POINTS,
            rates=_QWEN_RATES,
            settings={"dtype": "bf16"},
            small={"seconds": 540.0, "pairs": 5},
        ),
        _bench(
            name="whole model",
            of="call",
            model="qwen3-4b",
            points=_QWEN_POINTS,
            rates=_QWEN_RATES,
            settings={"precisions": ("bf16",), "pairs": 5},
            small={"num_layers": 6, "rates": _TWO_RATES, "seconds": 540.0},
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

_NATIVE = ("4096x20x6", "8192x10x6", "16384x5x6")
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
    title, point, heads = f"4,096 × 32, 25% {words}", (4_096, 32), words.split()[0].rstrip(",")
    random = {"on": (), "fresh": False, "pruned": heads == "pruned"}
    return Measurement(
        name=f"prefill, {words}",
        program="saf bench prefill",
        on=(checkpoint(arm, 1.0),),
        settings={**_REPEATS, "points": ("4096x32",), "memory": True},
        scaled={"small": {**random, "model": "124m", "rates": (0.25,), "seconds": 300.0}, "smoke": random},
        numbers=(
            _speedup(f"{title}, speedup", 0.25, point, speed, heads=heads, variant="call", mean=True),
            _peak_change(f"{title}, peak, %", 0.25, point, peak, heads=heads),
        ),
        smoke=arm == "later-pruned-25-time",
    )


RECIPES["pruning_costs"] = Recipe(
    title="Costs of freezing against pruning",
    source=paper.NATIVE,
    also=("tab:pruning-prefill", "app:pruning-execution-costs"),
    measurements=(
        _bench(
            name="updates at native batches",
            of="update",
            model="124m",
            points=_NATIVE,
            rates=_TWO_RATES,
            settings={"pruned": True, "others": ()},
            small={"points": ("4096x20x2", "8192x10x2", "16384x5x2"), **_SMALL},
            peaks=True,
            numbers=[
                number
                for heads in ("frozen", "pruned")
                for number in _numbers("update", "124m", _NATIVE, _TWO_RATES, heads=heads, peaks=True)
            ],
        ),
        *(_trained_later(**line) for line in _PREFILLS),
        _bench(
            name="prefill of one sequence",
            of="call",
            model="124m",
            points=("4096x1",),
            rates=(0.25,),
            settings={**_REPEATS, "pruned": True, "kernels": ("auto",)},  # as in _CALLED
            small={"fresh": False, "seconds": 200.0},
            numbers=[
                _speedup("4,096 × 1, 25% frozen, matched tokens", 0.25, (4_096, 1), "0.933×", variant="call"),
                _speedup("4,096 × 1, 25% frozen, matched time", 0.25, (4_096, 1), "0.877×", variant="call"),
                _speedup("4,096 × 1, 25% pruned", 0.25, (4_096, 1), None, heads="pruned", variant="call"),
            ],
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
_FORMS = {
    "dense_by_layer": "matrices of whole layers",
    "dense_packed": "matrices of frozen heads",
    "allocated": "what execution allocates",
    "compact": "vectors alone",
}

RECIPES["implementation"] = Recipe(
    title="Validation of the implementation",
    seeds=1,
    source=paper.IMPLEMENTATION,
    also=("tab:gradient-errors",),
    measurements=(
        Measurement(
            name="gradients",
            program="benchmarks.accuracy",
            scaled={"smoke": {"backends": ("toeplitz",), "precisions": ("fp32",)}},
            numbers=tuple(_errors()),
        ),
        Measurement(
            name="changes of heads",
            program="benchmarks.accuracy",
            settings={"transitions": 50, "precisions": ("fp32",)},
            scaled={"smoke": {"transitions": 5, "backends": ("toeplitz",)}},
            numbers=(
                Number("logits after 50 changes of heads, max.", _TRANSITIONS, "9.54e-7", scientific=True),
                Number("output of a mixed layer, max. from eager", _OF_OUTPUT, "1.07e-6", scientific=True),
            ),
        ),
        Measurement(
            name="storage",
            program="experiments.analyses storage",
            on=(checkpoint("4k-mean-25", 1.0),),
            numbers=tuple(
                Number(f"{words}, GB", ("bytes", name), paper.STORAGE.get(name), scale=1e-9)
                for name, words in _FORMS.items()
            ),
        ),
    ),
    notes=("Of a pruned layer the largest error over its seven tensors is shown, from eager attention as all others.",),
)
