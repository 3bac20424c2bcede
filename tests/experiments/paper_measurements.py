"""Where the paper has the numbers that stand beside measurements, found by what each reads of our record."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from experiments.measurements import Measurement, Number
from tests.paper_source import Cell, Place, Said

LENGTHS = {512: "512", 1024: "1K", 2048: "2K", 4096: "4K", 8192: "8K", 16384: "16K"}
Found = Place | tuple[Place, ...]


def _row(number: Number) -> Mapping[str, Any]:
    """Return the conditions on the entries of a record's list."""
    return next(step for step in number.path if isinstance(step, Mapping))


def _shape(number: Number) -> tuple[str, int, int]:
    """Return the rate, in percent, and the point: tokens of context, sequences."""
    row = _row(number)
    point = row.get("point", {})
    return f"{row['rate']:.0%}", point.get("length", 0), point.get("batch_size", 0)


def training_systems(_: Measurement, number: Number) -> Found:
    rate, length, size = _shape(number)
    what = number.path[-1]
    if what == "bytes":
        return Cell("tab:training-systems-details", (rate,), 2)
    if rate in ("10%", "75%"):
        return Cell("tab:training-systems-details", (rate,), 1)
    return Cell("tab:main-results", (f"{LENGTHS[length]} ({size})", rate), {"ratio": 6, "change_percent": 7}[what])


def downstream(each: Measurement, number: Number) -> Found:
    task = {"updates on QuALITY": "QuALITY 16K"}.get(each.name, each.name.removeprefix("updates on "))
    rate, what = f"{_row(number)['rate']:.0%}", number.path[-1]
    row = f"{task}, ordinary attn." if what == "baseline_ms" else f"{task}, fixed {rate}"
    column = {"arm_ms": 4, "baseline_ms": 4, "ratio": 5, "change_percent": 6}[what]
    return Cell("tab:downstream-details", (row,), column)


def scale_up_systems(each: Measurement, number: Number) -> Found:
    rate, _, size = _shape(number)
    column = {"ratio": 4, "change_percent": 5}[number.path[-1]]
    return Cell("tab:scale-up-systems", (f"{each.processes} / {size}", rate), column)


def pruning_costs(each: Measurement, number: Number) -> Found:
    if each.name == "updates at native batches":
        rate, length, size = _shape(number)
        pruned = _row(number)["backend"] == "pruned"
        row = (LENGTHS[length], str(size), rate)
        if number.path[-1] == "change_percent":
            return Cell("tab:pruning-native-systems", row, 6 + pruned)
        return tuple(Cell("tab:pruning-native-systems", row, column) for column in (3, 4 + pruned))
    found = re.fullmatch(r".+, 25% (.+), matched (tokens|time), (speedup|peak, %)", number.title)
    assert found is not None, number.title
    row, panel = found[1], ("tokens", "time").index(found[2])
    if each.name == "prefill of one sequence":
        said = ("{}× and 0.877× for the token-", "0.933× and {}× for the token- and time-matched groups")
        return Said(f"mean replacement is slower, with speedups of {said[panel]}")
    name = "Mean + variance" if row == "frozen" else PRUNED[row]
    return Cell("tab:pruning-prefill", (name,), 3 if found[3] == "speedup" else 4, panel)


PRUNED = {"pruned": "Pruning + variance", "pruned by gate-Taylor": "Pruning + gate-Taylor"}
PRUNED["pruned from initialisation"] = "Pruning from initialisation"


def prefill_systems(each: Measurement, number: Number) -> Found:
    rate, length, size = _shape(number)
    if "fresh processes" in each.name:
        said = {"25%": "{}× and 0.972× at 25% and 50%", "50%": "0.969× and {}× at 25% and 50% replacement"}
        return Said(f"the median paired speedups are {said[rate]}")
    if "graphs" in each.name:
        said = {"25%": "{}×, 1.220×", "50%": "1.113×, {}×, and", "75%": "1.113×, 1.220×, and {}× speedup, respectively"}
        return Said(f"at batch size one, 25%, 50%, and 75% replacement reach {said[rate]}")
    if each.name == "124M shape, one sequence":
        said = {
            "25%": "{}× causal-prefill",
            "100%": "1.08× causal-prefill speedup with 25% replacement and {}× with full",
        }
        return Said(f"the 124M shape at 16K reaches {said[rate]}")
    if each.name == "774M shape, one sequence":
        said = {("25%", 8192): "{}× at 8K and", ("25%", 16384): "1.07× at 8K and {}× at 16K"}
        full = "1.07× at 8K and 1.08× at 16K, while full replacement reaches"
        said |= {("100%", 8192): f"{full} {{}}× and 1.36×", ("100%", 16384): f"{full} 1.31× and {{}}×"}
        return Said(f"For a 774M shape, the 25% speedup is {said[rate, length]}")
    if size == 32:
        return Cell("tab:pruning-prefill", ("Mean + variance",), 3)
    if length < 4096:
        said = {"25%": "{}× at 25% replacement", "50%": "1.092 to 1.116× at 25% replacement and {}× at 50%"}
        return Said(f"The measured ranges are {said[rate]}")
    return Cell("tab:prefill-latency", (LENGTHS[length], str(size), rate), 5)


def qwen_prefill(each: Measurement, number: Number) -> Found:
    rate, length, size = _shape(number)
    column = 2 + ("10%", "20%", "30%", "50%", "75%").index(rate)
    return Cell("tab:qwen-prefill-details", (str(size), str(length)), column, part=int(each.name == "attention"))


QWEN_TASKS = {"hellaswag": "HellaSwag", "piqa": "PIQA", "arc_easy": "ARC-Easy", "sst2": "SST-2", "boolq": "BoolQ"}
QWEN_SAID = {
    ("overlap", "0.1"): "selected sets overlap in {}% of heads at 10%",
    ("overlap", "0.3"): "overlap in 31% of heads at 10% replacement and {}% at 30%",
    ("forward_kl", 0.1, 0): "13 to 24, and 25 to 36 are {}/18/47 for forward KL",
    ("forward_kl", 0.1, 1): "are 50/{}/47 for forward KL",
    ("forward_kl", 0.1, 2): "are 50/18/{} for forward KL",
    ("variance", 0.1, 0): "for forward KL and {}/31/47 for variance",
    ("variance", 0.1, 1): "for forward KL and 37/{}/47 for variance",
    ("variance", 0.1, 2): "for forward KL and 37/31/{} for variance",
    ("variance", 0.1, "forward_kl_median"): "median per-input forward-KL score, {} versus",
    ("forward_kl", 0.1, "forward_kl_median"): "forward-KL score, 0.578 versus {} nats at 10%",
    ("variance", 0.3, "fit_kl_median"): "similar, at {} nats for variance-selected heads",
    ("forward_kl", 0.3, "fit_kl_median"): "variance-selected heads and {} nats for forward-KL-selected heads",
    ("ordinary", "0"): "change from {}/393 in the ordinary-attention model",
    ("ordinary", "1"): "change from 479/{} in the ordinary-attention model",
    ("forward_kl", 0.2, "0"): "ordinary-attention model to {}/151 at 20%",
    ("forward_kl", 0.2, "1"): "ordinary-attention model to 721/{} at 20%",
    ("forward_kl", 0.3, "0"): "at 20% and {}/292 at 30%",
    ("forward_kl", 0.3, "1"): "at 20% and 580/{} at 30%",
}


def qwen_zeroshot(_: Measurement, number: Number) -> Found:
    first, last = number.path[0], number.path[-1]
    if first == "overlap":
        return Said(QWEN_SAID["overlap", str(last)])
    arm = ("ordinary",) if first == "ordinary" else (_row(number)["score"], _row(number)["rate"])
    if last not in ("accuracy", "mean_difference"):
        return Said(QWEN_SAID[(*arm, last)])
    task = "Mean change" if last == "mean_difference" else QWEN_TASKS[str(number.path[-2])]
    column = 1 if first == "ordinary" else {"variance": 1, "forward_kl": 4}[arm[0]] + round(10 * arm[1])
    return Cell("tab:qwen-zeroshot", (task,), column)


SCORES = {
    "variance": "Attention variance, s^var",
    "residual_cosine": "Residual cosine, s^cos",
    "relative_output_change": "Relative attention-output change, s^rel",
    "output_magnitude": "Projected-output magnitude, s^mag",
    "redundancy": "Projected-output redundancy, s^red",
}
ONE_HEAD_SAID = {
    ("matched", "entropy", 0): "their mean normalised entropy is {} versus",
    ("matched", "entropy", 1): "their mean normalised entropy is 0.837 versus {}, and",
    ("matched", "local_mass", 0): "recent 64 tokens, including the current token, is {}% versus",
    ("matched", "local_mass", 1): "including the current token, is 19.0% versus {}%",
    ("matched", "first_token", 0): "Only {}% of their attention falls on the first token",
    ("correlations", "variance", "spearman"): "correlation is {} before adjustment",
    ("correlations", "variance", "layer"): "before adjustment, {} after controlling for layer",
    ("correlations", "variance", "layer_entropy"): "for layer, and {} after also controlling for entropy",
    ("correlations", "variance", "with_entropy"): "variance and normalised entropy have Spearman correlation {}.",
}


def one_head(_: Measurement, number: Number) -> Found:
    if number.path[0] == "quality":
        column = {"spearman": 1, "0.25": 2, "0.5": 3}[str(number.path[-1])]
        return Cell("tab:selector-diagnostic", (SCORES[str(number.path[1])],), column)
    return Said(ONE_HEAD_SAID[number.path])


def rates_and_patterns(_: Measurement, number: Number) -> Found:
    rows = {"squared_error": "Squared error", "kl": r"\KL(\meanattn\|\prior)", "hellinger": "Squared Hellinger"}
    rows["total_variation"] = "Total variation"
    column = {"0.1": 1, "0.25": 2, "0.5": 3, "0.75": 4, "1": 5}[str(number.path[-1])]
    return Cell("tab:prior-geometry-correlation", (rows[str(number.path[1])],), column)


TENSORS = {"output": "Output", "input": "Input gradient dX", "value": "Value gradient dV"}


def implementation(each: Measurement, number: Number) -> Found:
    checks = "tab:implementation-validation"
    if each.name == "gradients":
        row, low = _row(number), _row(number)["precision"] == "bf16"
        if row["part"] == "pruned layer":
            sentence = "L_2 errors of 7.48e−7 in FP32 and {} under BF16" if low else "L_2 errors of {} in FP32 and"
            return Said(f"for pruning gives maximum relative {sentence}")
        tensor = str(row["tensor"])
        column = 1 + 2 * low + (number.path[-1] == "relative_l2")
        return Cell("tab:gradient-errors", (TENSORS.get(tensor, tensor.capitalize()),), column)
    if each.name == "changes of heads":
        of_layer = _row(number)["part"] == "layer"
        return Cell(checks, ("Mixed-head forward" if of_layer else "State transitions",), 3)
    if number.path[-1] == "dense_packed":
        return Said("containing only the 36 selected matrices would occupy {} GB")
    return Cell(checks, ("Prior buffers",), 3, part=int(number.path[-1] == "allocated"))


def representation(each: Measurement, _: Number) -> Found:
    return Cell("tab:representation-details", ({"storage, learned": "Absolute"}.get(each.name, "RoPE"),), 4)


def _said(sentences: Mapping[tuple, str]) -> Callable[[Measurement, Number], Found]:
    """Return the place of numbers that stand in sentences, by measurement and path."""
    return lambda each, number: Said(sentences[(each.name, *number.path)])


GAP, END = "the smoothed train-NLL gap is", "by the final update, the corresponding gaps are"
MEASUREMENTS: dict[str, Callable[[Measurement, Number], Found]] = {
    places.__name__: places
    for places in (
        *(downstream, implementation, one_head, prefill_systems, pruning_costs, qwen_prefill, qwen_zeroshot),
        *(rates_and_patterns, representation, scale_up_systems, training_systems),
    )
} | {
    "distributions": _said(
        {
            ("rows and entries", "medians", "resampled"): "distances are {} for whole-row resampling",
            ("rows and entries", "medians", "gaussian"): "calibration set, {} for Gaussian sampling",
            ("rows and entries", "medians", "dirichlet"): "and {} for Dirichlet sampling at concentration scale 4",
        }
    ),
    "joint_cost": _said(
        {
            ("at once", "first", "delta_ppl_percent"): "PPL increases on 16 new common validation windows are {}% and",
            ("at once", "second", "delta_ppl_percent"): "common validation windows are 4.136% and {}%, respectively",
            ("at once", "overlap"): "The sets share {} of 36 heads",
        }
    ),
    "recovery": _said(
        {
            ("gaps", "runs", 0, "at_once"): r"immediate replacement cost increases from {}% at \tau=0.25",
            ("gaps", "runs", 5, "at_once"): r"from 2.72% at \tau=0.25 to {}% at \tau=1",
            ("gaps", "runs", 0, "gap_after"): rf"{GAP} {{}} nats at \tau=0.25",
            ("gaps", "runs", 4, "gap_after"): rf"{GAP} 0.0061 nats at \tau=0.25 and {{}} nats at \tau=0.75",
            ("gaps", "runs", 0, "gap_at_end"): f"{END} {{}} and",
            ("gaps", "runs", 4, "gap_at_end"): f"{END} 0.0062 and {{}} nats",
        }
    ),
    "stability": _said(
        {
            ("stability", "overlap"): "the quarter-training and midpoint sets share {} heads",
            ("stability", "expected"): "compared with an expected {} for independent selections",
            (
                "stability",
                "rank_correlation",
            ): "variance rankings have Spearman correlations of {} between these stages",
            ("a quarter and the end", "rank_correlation"): "their final ordering at {} at quarter-training",
            ("half and the end", "rank_correlation"): "at quarter-training and {} at the midpoint",
        }
    ),
}
