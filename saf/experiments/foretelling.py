"""What a measurement takes, foretold from the rates of runs: benchmarks by their arms and pairs, analyses by passes.

Its memory is that of the largest model that it holds, all heads live; an arm that would need more, as PyTorch's own way
of attention does, is left out of it where that does not fit.

Constants were chosen by what the records of results/bench say that they took; they are within a third of most.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from saf.bench.harness.arms import Comparison, arms_of, default_backends, default_others
from saf.bench.harness.arms import plan as compared
from saf.bench.harness.settings import MICRO_BATCHES, QWEN_POINTS
from saf.bench.harness.shape import ModelShape, shape_of
from saf.bench.model.finetune import TIMED, FinetuneUpdateSettings
from saf.experiments.analyses import ANALYSES
from saf.experiments.examples import LAYOUTS
from saf.experiments.measuring import PlannedMeasurement
from saf.experiments.plan import Plan
from saf.experiments.planned_run import peak_bytes
from saf.experiments.rates import Rates
from saf.models import preset
from saf.models.config import GPTConfig
from saf.records.quantities import gibibytes

CACHED = 0.5
"""Of a compilation, what an arm takes of it that was compiled ahead: building, loading and its kernels' own choice."""
FORWARD_COMPILATION = 0.5
"""Of a compilation for updates, what one of a forward pass takes."""
BLOCK_SECONDS = {"prefill": 0.6, "op": 0.4}
"""Of a timed block: 200 ms of calls after 400 ms of settling; 20 calls of an operator, forward alone and with its
gradients."""
USUAL_RATES = (0.1, 0.25, 0.5, 0.75)
"""Where a benchmark's grid has them."""
PADDED = 2.7
"""How many times as long as the mean example a micro-batch of finetuning is, which its longest one decides."""
ERRORS_SECONDS = 10.0
"""Of a layer against float64, whose record says 6 s with 50 changes of heads left out."""
RECORDS_SECONDS = 5.0
"""Of an analysis that runs no model."""
PROMPT_BYTES = 31
"""Of a forward pass, a token and a channel: 32,768 tokens more of Qwen3-4B took 2.4 GiB (memory-qwen3.json)."""
WEIGHT_BYTES = {"bf16": 2, "autocast": 4, "fp32": 4}
"""Of a parameter of a prompt's model."""
WHOLE = "math"
"""The kernel that holds attention whole: PyTorch's own product."""
PATTERN_BYTES = 8
"""Of an entry of attention that is held whole, as PyTorch's own way does: its logits and its softmax, float32."""


def foretell(each: PlannedMeasurement, plan: Plan, rates: Rates) -> float:
    """Return the seconds that a measurement is expected to take on one GPU, all heads counted as live.

    One with a limit of its own (`seconds`) takes no longer than that, whatever it leaves out.
    """
    kind = each.does.partition(" ")[2]
    seconds = rates.start + (_analysis(kind, each, plan, rates) if kind in ANALYSES else _benchmark(kind, each, rates))
    limit = each.settings.get("seconds")
    return seconds if limit is None else min(seconds, float(limit))


def foretell_bytes(each: PlannedMeasurement, plan: Plan) -> float | None:
    """Return the peak memory that a measurement is expected to have on a GPU; None of one that holds no whole model.

    Attention that is held whole counts where the baseline holds it; of other arms `memory_notes` tells.
    """
    kind, settings = each.does.partition(" ")[2], each.settings
    if kind in ANALYSES:
        read = each.runs_read(plan)
        return forward_bytes(ModelShape.of(read[0].shape), read[0].shape.max_length) if read else None
    if kind not in ("update", "prefill"):
        return None
    whole = WHOLE in (settings.get("kernels") or ())
    found = []
    for length, size in _points(settings):
        shape = shape_of(settings.get("model", "124m"), length, settings.get("num_layers"))
        if kind == "update":
            assert shape.gpt is not None, "models of transformers are not updated"
            found.append(peak_bytes(shape.gpt, length * size))
        else:
            weight = max(WEIGHT_BYTES[precision] for precision in settings.get("precisions") or ("autocast",))
            found.append(forward_bytes(shape, length * size, weight=weight))
        found[-1] += _whole_bytes(shape, length, size) if whole else 0
    return max(found)


def memory_notes(measurements: Iterable[PlannedMeasurement]) -> list[str]:
    """Say of measurements how much more memory arms take that hold attention whole, and that they may be left out."""
    told = []
    for each in measurements:
        if each.does.partition(" ")[2] not in ("update", "prefill") or WHOLE not in (each.settings.get("others") or ()):
            continue
        model, layers = each.settings.get("model", "124m"), each.settings.get("num_layers")
        more = [_whole_bytes(shape_of(model, length, layers), length, size) for length, size in _points(each.settings)]
        told.append(f"{each.title} {gibibytes(max(more))}")
    if not told:
        return []
    return [
        f"PyTorch's own product ({WHOLE}) holds the attention of a layer whole, which takes at the largest points more "
        f"than this memory: {'; '.join(told)}. Where it does not fit, that arm is left out by name."
    ]


def _points(settings: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return the tokens and sequences of a benchmark's points."""
    named = [tuple(map(int, point.split("x")[:2])) for point in settings.get("points", ())]
    return [(length, size) for length, size in named] or list(QWEN_POINTS)


def _whole_bytes(shape: ModelShape, length: int, size: int) -> int:
    """Return the memory of one layer's attention over `size` sequences that is held whole."""
    return PATTERN_BYTES * size * shape.num_heads * length**2


def forward_bytes(shape: ModelShape, tokens: int, *, weight: int = WEIGHT_BYTES["autocast"]) -> float:
    """Return the peak memory of one forward pass of so many tokens, without logits of all of them."""
    entries = shape.num_layers * shape.layer_entries(shape.layout()) + shape.vocab_size * shape.hidden_size
    return float(weight * entries + PROMPT_BYTES * tokens * shape.hidden_size)


def _benchmark(kind: str, each: PlannedMeasurement, rates: Rates) -> float:
    """Return the seconds of a benchmark beside its start."""
    settings = each.settings
    if kind == "finetune":
        return _finetuning(settings, rates)
    if kind not in ("update", *BLOCK_SECONDS):
        return ERRORS_SECONDS + 0.2 * float(settings.get("transitions", 0))
    comparisons = _compared(settings)
    arms, pairs = len(arms_of(comparisons)), int(settings.get("pairs", 8))
    points = [tuple(map(int, point.split("x"))) for point in settings.get("points", ())] or list(QWEN_POINTS)
    compilation = 0.0 if kind == "op" else rates.compilation * (1.0 if kind == "update" else FORWARD_COMPILATION)
    workers, ways = int(settings.get("workers", 1)), 2 if settings.get("graphs") == "both" else 1
    total = 0.0
    for length, size, *micro in points:
        block, warming = BLOCK_SECONDS.get(kind, 0.0), 0.0
        if kind == "update":
            sequences = size * (micro[0] if micro else MICRO_BATCHES) / each.processes
            one = _update_seconds(settings, length, sequences, rates)
            block, warming = int(settings.get("repeats", 2)) * one, int(settings.get("warmup", 2)) * one
        if settings.get("fresh"):
            # Every block is a process that compiles from the cache.
            total += compilation * arms + 2 * pairs * len(comparisons) * (
                rates.start / 4 + CACHED * compilation + block
            )
            continue
        ahead = settings.get("precompile", False)
        if pairs:
            total += (math.ceil(arms / workers) + CACHED * arms if ahead else arms) * compilation
            total += ways * (arms * warming + 2 * pairs * len(comparisons) * block)
        if settings.get("memory"):
            total += math.ceil(arms / workers) * (rates.start / 4 + CACHED * compilation + 2 * block)
    return total


def _compared(settings: Mapping[str, Any]) -> Sequence[Comparison]:
    """Return the arms of a benchmark's point, each with its baseline."""
    device = "cuda"
    return compared(
        kernels=("cudnn",),
        others=default_others(settings.get("others"), device, compiled=True),
        backends=default_backends(settings.get("backends", ()), device),
        rates=settings.get("rates") or USUAL_RATES,
        free=settings.get("free", True),
        pruned=settings.get("pruned", False),
    )


def _finetuning(settings: Mapping[str, Any], rates: Rates) -> float:
    """Return the seconds of updates of finetuning, which are not compiled: orders, pairs and arms of some updates."""
    examples, accumulation = TIMED[settings["task"]]
    sizes = int(settings.get("batch_size") or examples), int(settings.get("accumulation") or accumulation)
    length = int(settings.get("length") or FinetuneUpdateSettings.length)
    longest = min(length, int(settings.get("max_tokens") or length))
    width = round(min(longest, PADDED * LAYOUTS[settings["task"]].tokens))
    one = rates.uncompiled * _update_seconds(settings, width, math.prod(sizes), rates)
    block = int(settings.get("repeats", FinetuneUpdateSettings.repeats)) * max(one, sizes[1] * rates.launching)
    comparisons, pairs = _compared(settings), int(settings.get("pairs", 8))
    arms, ways = len(arms_of(comparisons)), 2 if settings.get("graphs") == "both" else 1
    orders = len(settings.get("orders", FinetuneUpdateSettings.orders))
    timed = ways * orders * (2 * pairs * len(comparisons) + int(settings.get("warmup", 3)) * arms) * block
    return timed + (arms * (rates.start / 4 + 2 * block) if settings.get("memory") else 0.0)


def _update_seconds(settings: Mapping[str, Any], length: int, sequences: float, rates: Rates) -> float:
    """Return the seconds of an ordinary update of a benchmark's model."""
    layers = {} if settings.get("num_layers") is None else {"num_layers": settings["num_layers"]}
    shape = preset(settings.get("model", "124m"), max_length=length, **layers)
    return sequences * length * shape.flops_per_token(length) / rates.flops


def _analysis(kind: str, each: PlannedMeasurement, plan: Plan, rates: Rates) -> float:
    """Return the seconds of an analysis beside its start: of windows that go through its model, three times to measure.

    Patterns of every head, where it fits them, are counted as one more calibration.
    """
    read = each.runs_read(plan)
    if not read:
        return RECORDS_SECONDS
    shape, settings = read[0].shape, each.settings
    length, heads = shape.max_length, shape.num_layers * shape.num_heads
    windows, sequences = int(settings.get("windows", 0)), int(settings.get("sequences", 0))
    passes = {
        "one-head": (heads + 1) * windows + 3 * (2 * sequences + int(settings.get("heldout_sequences", 0))),
        "joint-cost": 4 * windows + 6 * sequences,
        "profiles": windows,
        "distributions": 3 * sequences,
        "geometry": 3 * sequences * len(settings.get("rates", USUAL_RATES)),
    }.get(kind)
    return RECORDS_SECONDS if passes is None else RECORDS_SECONDS + passes * _window_seconds(shape, length, rates)


def _window_seconds(shape: GPTConfig, length: int, rates: Rates) -> float:
    """Return the seconds of a forward pass of one window, not compiled."""
    return length * shape.flops_per_token(length) / 3 / rates.flops * rates.uncompiled
