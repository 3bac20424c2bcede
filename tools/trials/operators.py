"""Wrong input to heads, patterns and what executes them: a row a call."""

import torch
from torch import nn

import saf
from saf.ops import TrainablePattern, choose_backend, explain, split_attention
from saf.patterns import CompactPattern, DensePattern
from saf.selection import chooser
from tools.trials.attempt import (
    DEVICE,
    DTYPE,
    HEADS,
    INF,
    LENGTH,
    NAME,
    NAN,
    NUMBER,
    PAIRS,
    STRANGE,
    TENSOR,
    TEXT,
    TRUTH,
    WHOLE,
    Row,
    pattern,
)


def of_heads() -> list[Row]:
    """Return the rows of sets of heads and of choosing them."""
    made = saf.HeadSet([(0, 1), (1, 0)])
    layout = {"num_heads": 4, "num_kv_heads": 2, "frozen": (1,)}
    scores = torch.arange(8.0).reshape(2, 4)
    wrong_scores = (*TENSOR, torch.zeros(4), torch.zeros(2, 4).long(), torch.full((2, 4), INF))
    limits = {
        "count": (*STRANGE, "3", 1.5, NAN, True, [3], -1, 99),
        "exclude": HEADS,
        "only": tuple(one for one in HEADS if one is not None),
        "max_per_layer": (*STRANGE, "a", 1.5, True, -1, {0: "a"}, {"a": 1}, {9: 1}, {0: -1}),
        "match": HEADS,
        "group_size": (*WHOLE, 0, 3),
    }
    named = {"count": "heads asked for", **dict.fromkeys(("exclude", "only", "match"), "heads")}
    no_rate = {"rate": None}
    return [
        Row("HeadSet", saf.HeadSet, dict, {"heads": PAIRS}),
        Row("HeadSet.from_list", saf.HeadSet.from_list, dict, {"pairs": PAIRS}, also={"pairs": "heads"}),
        Row("HeadSet.in_order", saf.HeadSet.in_order, dict, {"heads": (*PAIRS, [(1, 0), (0, 0)])}),
        Row("HeadSet.in_layer", made.in_layer, dict, {"layer": WHOLE[:-1]}),
        Row("HeadSet.index", made.index, dict, {"head": (*TEXT, (9, 9))}),
        Row("HeadSet |", made.__or__, dict, {"other": PAIRS}, also={"other": "heads"}),
        Row("HeadSet &", made.__and__, dict, {"other": PAIRS[:-5]}, also={"other": "heads"}),
        Row("HeadSet -", made.__sub__, dict, {"other": PAIRS[:-5]}, also={"other": "heads"}),
        Row(
            "HeadLayout",
            saf.HeadLayout,
            lambda: layout,
            {"num_heads": (*WHOLE, 3), "num_kv_heads": (*WHOLE, 3), "frozen": (3, "1", (1.5,), (9,), (2, 1), (-1,))},
        ),
        Row(
            "select",
            saf.select,
            lambda: {"scores": scores, "rate": 0.25},
            {"scores": wrong_scores, "rate": (*(x for x in NUMBER if x is not None), -0.1, 1.1), **limits},
            beside={"count": no_rate, "match": no_rate},
            also=named,
        ),
        Row("chooser", chooser, lambda: {"scores": scores, "rate": 0.25}, {"rate": (-0.1, 1.1)}),
        Row(
            "storage_report",
            saf.storage_report,
            lambda: {"heads": [(0, 1)], "length": 8, "num_heads": 4},
            {"heads": (*PAIRS, [(0, 9)]), "length": (*WHOLE, 0), "num_heads": (*WHOLE, 0), "dtype": DTYPE[:-1]},
        ),
    ]


def of_patterns() -> list[Row]:
    """Return the rows of patterns, compact, dense and trained."""
    flat, single, dense = pattern(2), pattern(), DensePattern(torch.eye(4)[None])
    zeros = torch.zeros(LENGTH)
    logits = (*TENSOR, zeros.long(), torch.zeros(LENGTH - 1), zeros + NAN, zeros + INF, torch.zeros(0), torch.zeros(()))
    weights = (*TENSOR, torch.eye(3)[:2], torch.eye(3).long(), torch.eye(3) * 2, torch.eye(3) * NAN, -torch.eye(3))
    return [
        Row(
            "CompactPattern",
            CompactPattern,
            lambda: dict(single.vectors()),
            {"alpha": logits, "rho": logits, "log_z": (*logits, torch.zeros(3))},
        ),
        Row(
            "CompactPattern.from_parameters",
            CompactPattern.from_parameters,
            lambda: {"alpha": zeros, "rho": zeros},
            {"alpha": (*logits, zeros.double()), "rho": (*logits, zeros.double())},
        ),
        Row(
            "CompactPattern.stack",
            CompactPattern.stack,
            dict,
            {"patterns": (*STRANGE, None, "abc", 3, [], [1], [single, flat], [dense])},
            also={"patterns": "stack"},
        ),
        Row("CompactPattern[]", flat.__getitem__, dict, {"index": (9, "a", 1.5, (0, 0))}),
        Row("CompactPattern.prefix", flat.prefix, dict, {"length": (*WHOLE, 0, LENGTH + 1)}),
        Row(
            "CompactPattern.to",
            flat.to,
            dict,
            {"dtype": [x for x in DTYPE if x is not None], "device": DEVICE},
        ),
        Row("DensePattern", DensePattern, dict, {"weights": (*weights, torch.ones(3, 3) / 3)},
            also={"weights": "weight"}),
        Row("DensePattern.stack", DensePattern.stack, dict, {"patterns": (*STRANGE, None, 3, [], [1], [single])},
            also={"patterns": "stack"}),
        Row("DensePattern[]", dense.__getitem__, dict, {"index": (9, "a", 1.5, (0, 0))}),
        Row("DensePattern.prefix", dense.prefix, dict, {"length": (*WHOLE, 0, 5)}),
        Row("DensePattern.to", dense.to, dict, {"dtype": [x for x in DTYPE if x is not None], "device": DEVICE}),
        Row(
            "TrainablePattern",
            TrainablePattern,
            lambda: {"alpha": zeros, "rho": zeros},
            {"alpha": (*logits, zeros.bfloat16()), "rho": logits},
        ),
        Row("TrainablePattern.of", TrainablePattern.of, lambda: {"pattern": single},
            {"pattern": (*TENSOR, dense), "dtype": DTYPE, "device": DEVICE}),
    ]  # fmt: skip


def of_execution() -> list[Row]:
    """Return the rows of frozen heads and of attention."""
    frozen = saf.FrozenHeads.from_patterns(pattern(2))
    value = torch.zeros(1, 4, LENGTH, 4)
    layer = {"query": value[:, :2], "key": value[:, :2], "value": value, "frozen": frozen}
    wrong = (*TENSOR, value[0], torch.zeros(1, 4, LENGTH, 3), torch.zeros(2, 4, LENGTH, 4))
    values = (*TENSOR, value[0], value.long(), value.double(), torch.zeros(1, 4, LENGTH + 1, 4))
    start = (*(x for x in TENSOR if x is not None), torch.zeros(1), torch.zeros(3).long(), torch.tensor([99]))
    mixing = {
        "query": wrong,
        "key": wrong,
        "value": values,
        "frozen": (*STRANGE, "abc", 3, pattern(2), nn.Linear(2, 2)),
        "scale": (*(x for x in NUMBER if x is not None),),
        "backend": (*TEXT, "nope", "fused"),
        "start": start,
        "kernel": (*TEXT, "nope"),
    }
    unnamed = {"value": "positions", "key": "key", "start": "start", "query": "query", "backend": "kv_head"}
    return [
        Row("mixed_attention", saf.mixed_attention, lambda: layer, mixing, also=unnamed),
        Row("split_attention", split_attention, lambda: layer, mixing, also=unnamed),
        Row(
            "frozen_attention",
            saf.frozen_attention,
            lambda: {"value": value, "frozen": frozen},
            {
                "value": values,
                "frozen": (*STRANGE, None, "abc", 3, pattern(2)),
                "backend": (*TEXT, "nope"),
                "start": start,
                "rows": (*(x for x in WHOLE if x is not None), LENGTH + 1),
            },
            also={"value": "positions"},
        ),
        Row(
            "FrozenHeads.from_patterns",
            saf.FrozenHeads.from_patterns,
            lambda: {"pattern": pattern(2)},
            {
                "pattern": (*TENSOR, [1], [], [pattern(), "abc"], [pattern(), pattern().prefix(3)], pattern(2, 2)),
                "backend": NAME,
                "dtype": (*DTYPE, [], ["float32"]),
                "device": (*DEVICE, None),
                "kv_head": (*STRANGE, "ab", 3, [0], [0, -1], [0, 1.5], [0, "a"], [True, False], torch.zeros(2)),
            },
            also={"dtype": "values"},
        ),
        Row("choose_backend", choose_backend,
            lambda: {"name": "auto", "device": torch.device("cpu"), "dtypes": [torch.float32]},
            {"name": NAME, "device": (*DEVICE, None), "dtypes": (*STRANGE, 3, "abc", ["a"], [torch.int64]),
             "trainable": TRUTH}, also={"name": "backend", "dtypes": "values"}),
        Row("explain", explain, dict, {"device": (*DEVICE, None), "dtype": DTYPE}, also={"dtype": "dtype"}),
    ]  # fmt: skip
