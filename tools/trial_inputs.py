"""Wrong input to everything public: the table of what is called, of each argument, and of what may not be accepted.

`attempts` yields one call each. What a call comes to is right when it raises a SafError that names the argument; it is
`silent` when the value is accepted, a `traceback` when another error comes, and `nameless` when the message leaves the
caller to guess. Settings need no row here: their fields and annotations are the table.
"""

import contextlib
import importlib
import io
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import torch
from torch import nn

import saf
from saf.analysis import ANALYSES
from saf.analysis.joint_cost import JointCost
from saf.arguments import shown
from saf.bench.accuracy.errors import ErrorSettings
from saf.bench.freezing.settings import CalibrationSettings
from saf.bench.model.prefill import PrefillSettings
from saf.bench.model.update import UpdateSettings
from saf.bench.operator.case import OpSettings
from saf.calibration import plan_calibration
from saf.cli import COMMANDS, GROUPS
from saf.cli.command import Command, all_flags
from saf.data.config import PrepareConfig
from saf.errors import SafError
from saf.fit import accepted, certify, fit_variants, fit_with_certificate, marginals
from saf.freeze_checkpoint import CheckpointFreezing
from saf.freezing.config import FreezeConfig
from saf.ops import TrainablePattern, choose_backend, explain, split_attention
from saf.patterns import CompactPattern, DensePattern
from saf.schedules import SCHEDULES
from saf.selection import chooser
from saf.settings import OneOf
from saf.train import TrainConfig
from saf.train.config import continue_from

LENGTH = 12
SHAPE = saf.GPTConfig(vocab_size=16, num_layers=2, num_heads=2, hidden_size=8, max_length=LENGTH)

NAN, INF = math.nan, math.inf
STRANGE = (object(), b"bytes", 1j)
"""What nothing takes."""
NUMBER = (*STRANGE, None, "0.5", NAN, INF, -INF, True, [0.5], torch.tensor([0.5, 0.5]))
WHOLE = (*STRANGE, None, "3", 1.5, NAN, INF, True, [3], -1)
TRUTH = (*STRANGE, None, "no", 1, 0.0, [])
TEXT = (*STRANGE, None, 3, 1.5, True, ["mean"])
NAME = (*TEXT, "nope", "")
TENSOR = (*STRANGE, None, "abc", 3, 1.5, True, [1.0, 2.0], {})
PATH = (object(), 1j, 3, 1.5, True, ["a"])
MODEL = (*STRANGE, None, "abc", 3, [], nn.Linear(2, 2))
PAIRS = (
    *STRANGE,
    *("abc", 3, [(1.7, 0)], [(0,)], [(-1, 0)], [("a", 0)], [(0, 0), (0, 0)], [None], [(True, 0)], [(NAN, 0)], [0, 1]),
)
HEADS = (*PAIRS, [(0, 99)], [(99, 0)])
MAPPING = (*STRANGE, "abc", 3, 1.5, True, ["a"])
FUNCTION = (*STRANGE, "abc", 3, True, [])
DTYPE = (*STRANGE, None, "float32", 3, torch.int64)
DEVICE = (object(), 1j, 1.5, "gpu", [])
OPTIMIZER = (*STRANGE, "adam", 3, nn.Linear(2, 2), [])
BATCHES = (
    *STRANGE,
    *(None, "abc", 3, [], torch.zeros(2, LENGTH).long(), [torch.zeros(2, LENGTH)], [torch.zeros(LENGTH).long()]),
    *([None], ["abc"], [torch.full((2, LENGTH), -1)], [torch.full((2, LENGTH), 16)], [torch.zeros(0, LENGTH).long()]),
    [torch.zeros(2, LENGTH).long(), torch.zeros(2, LENGTH - 1).long()],
)


@dataclass(frozen=True)
class Row:
    """Say what is called, with arguments that are right, and for each argument what is not."""

    name: str
    call: Callable[..., Any]
    good: Callable[[], dict[str, Any]]
    """Makes arguments that are right, anew for every call."""
    bad: Mapping[str, tuple[Any, ...]]
    beside: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By argument, what else is given where that one is wrong."""
    also: Mapping[str, str] = field(default_factory=dict)
    """By argument, another word that names it."""


class Attempt(NamedTuple):
    """Hold one call: its name, the argument, the value, the words that name the argument, and the call itself."""

    name: str
    argument: str
    value: Any
    words: tuple[str, ...]
    call: Callable[[], Any]

    @property
    def shown(self) -> str:
        """Return the value in one short line."""
        return shown(self.value)


def outcome(attempt: Attempt) -> str | None:
    """Return what is wrong with what a call comes to; None when a SafError names the argument."""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            attempt.call()
    except SafError as error:
        return None if any(word in str(error) for word in attempt.words) else f"nameless: {error}"
    except SystemExit as stop:
        return None if stop.code == 2 else f"silent: exit code {stop.code}"
    except BaseException as error:  # whatever comes is what is counted
        return f"traceback: {type(error).__name__}: {error}"
    return "silent"


def attempts() -> Iterator[Attempt]:
    """Yield every call of functions, methods and settings that must be refused."""
    for row in rows():
        for argument, values in row.bad.items():
            words = (argument, *((row.also[argument],) if argument in row.also else ()))
            for value in values:
                yield Attempt(row.name, argument, value, words, _calling(row, argument, value))


def _calling(row: Row, argument: str, value: Any) -> Callable[[], Any]:
    def call() -> Any:
        return row.call(**{**row.good(), **row.beside.get(argument, {}), argument: value})

    return call


def model() -> saf.GPT:
    """Return a model with a different head each."""
    made = saf.GPT(SHAPE)
    made.reset_parameters(torch.Generator().manual_seed(0))
    return made


def batches() -> list[torch.Tensor]:
    """Return calibration sequences."""
    return [torch.randint(0, 16, (4, LENGTH), generator=torch.Generator().manual_seed(1))]


def pattern(*shape: int) -> CompactPattern:
    """Return a flat pattern, `[*shape, T]`."""
    return CompactPattern.from_parameters(torch.zeros(*shape, LENGTH), torch.zeros(*shape, LENGTH))


def rows() -> list[Row]:
    """Return the whole table."""
    return [*_of_heads(), *_of_patterns(), *_of_execution(), *_of_models(), *_of_statistics(), *_of_settings()]


def _of_heads() -> list[Row]:
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


def _of_patterns() -> list[Row]:
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


def _of_execution() -> list[Row]:
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


def _of_models() -> list[Row]:
    heads = saf.HeadSet([(0, 1)])
    install = {"model": None, "heads": heads, "patterns": pattern(1)}
    shape = SHAPE.to_dict()

    def frozen() -> saf.GPT:
        made = model()
        saf.install_(made, heads, pattern(1))
        return made

    calibrating = {
        "collect": ("mean", 3, ["nope"], [3], *STRANGE),
        "heads": HEADS,
        "positions": (*STRANGE, "ab", 3, [1.5], [99], [-1], ["a"]),
        "capture_bytes": (*(x for x in WHOLE if x is not None), 0),
        "progress": FUNCTION,
    }
    return [
        Row("GPT", saf.GPT, dict, {"config": (*STRANGE, None, "tiny", 3, shape)}),
        Row("GPT()", lambda **given: model()(**given), lambda: {"input_ids": batches()[0]}, {
            "input_ids": (*TENSOR, torch.zeros(2, 3), torch.zeros(3).long(), torch.zeros(1, LENGTH + 1).long()),
            "targets": (*(x for x in TENSOR if x is not None), torch.zeros(4, 3).long(), torch.zeros(4, LENGTH)),
            "attention_mask": (*(x for x in TENSOR if x is not None), torch.zeros(4, 3)),
            "start": (*(x for x in TENSOR if x is not None), torch.zeros(4), torch.full((4,), 99)),
        }, also={"input_ids": "inputs"}),
        Row("GPT.token_log_probs", lambda **given: model().token_log_probs(**given),
            lambda: {"input_ids": batches()[0], "targets": batches()[0]},
            {"input_ids": TENSOR, "targets": (*TENSOR, torch.zeros(4, 3).long())}),
        Row("GPT.reset_parameters", lambda **given: model().reset_parameters(**given), dict,
            {"generator": (*STRANGE, 3, "a")}),
        Row("preset", saf.preset, lambda: {"name": "tiny"},
            {"name": NAME, "num_layers": (*WHOLE, 0), "position": NAME, "no_such": (1,)},
            also={"name": "preset"}),
        Row("GPTConfig.flops_per_token", SHAPE.flops_per_token, dict, {"length": WHOLE}),
        Row("GPTConfig.from_dict", saf.GPTConfig.from_dict, dict,
            {"values": (*STRANGE, None, 3, "abc", {}, {"a": 1}, {**shape, "num_layers": "2"})},
            also={"values": "num_layers", "a": "'a'"}),
        Row("calibrate", saf.calibrate, lambda: {"model": model(), "batches": batches()}, {
            "model": MODEL, "batches": BATCHES, **calibrating,
            "collect_limit": WHOLE, "folder": PATH, "watch": FUNCTION,
        }, also={"model": "model", "batches": "sequences"}),
        Row("plan_calibration", plan_calibration, lambda: {"model": model(), "batches": batches()},
            {"model": MODEL, **{name: calibrating[name] for name in ("collect", "heads", "capture_bytes")}}),
        Row("QKGradient", saf.QKGradient, lambda: {"model": model()}, {"model": MODEL, "beta": (*NUMBER, 1.0, -0.1)}),
        Row("QKGradient.load_state_dict", saf.QKGradient(model()).load_state_dict, dict,
            {"state": (*STRANGE, None, 3, "abc", {}, {"average": 3, "beta": 0.9, "updates": 1},
                       {"average": [["a", None], [1, 2]], "beta": 0.9, "updates": 1})},
            also={"state": "average"}),
        Row("gate_gradients", saf.gate_gradients, lambda: {"model": model(), "batches": batches()},
            {"model": MODEL, "batches": BATCHES, "loss": FUNCTION},
            also={"batches": "calibration sequences"}),
        Row("freeze_", saf.freeze_, lambda: {"model": model(), "batches": batches()}, {
            "model": MODEL, "batches": BATCHES, "config": (*STRANGE, "abc", 3, {"rate": 0.25}, FreezeConfig),
            "optimizer": OPTIMIZER, "heldout": (*STRANGE, "abc", 3), "needed": MAPPING, "folder": PATH,
            "capture_bytes": (*(x for x in WHOLE if x is not None), 0), "progress": FUNCTION,
        }, also={"batches": "calibration sequences"}),
        Row("fit_heldout", saf.fit_heldout, lambda: {"model": model(), "batches": batches()}, {
            "model": MODEL, "batches": BATCHES, "heads": HEADS, "pattern": NAME, "fitter": NAME,
            "fits": (*MAPPING, {"free": 3}, {"free": {"nope": 1}}, {"free": {"tolerance": NAN}}),
        }, also={"batches": "sequences", "fits": "tolerance"}),
        Row("install_", saf.install_, lambda: {**install, "model": model()}, {
            "model": MODEL, "heads": (*HEADS, [(1, 0), (0, 0)]),
            "patterns": (*TENSOR, [1], [], pattern(2), ["abc"], [pattern(), pattern()]),
            "optimizer": OPTIMIZER, "backend": NAME, "trainable": TRUTH,
        }),
        Row("prune_", saf.prune_, lambda: {"model": model(), "heads": heads},
            {"model": MODEL, "heads": HEADS, "optimizer": OPTIMIZER}),
        Row("uninstall_", saf.uninstall_, lambda: {"model": frozen()},
            {"model": MODEL, "heads": (*HEADS, [(1, 1)]), "optimizer": OPTIMIZER}, also={"heads": "not frozen"}),
        Row("finalize_", saf.finalize_, dict, {"model": MODEL}),
        Row("save", saf.save, lambda: {"model": model(), "folder": "nowhere"},
            {"model": MODEL, "folder": (*PATH, None, str(Path(__file__)))},
            also={"folder": "writes a folder"}),
        Row("load", saf.load, dict, {"model_or_folder": (*PATH, None, "nowhere", str(Path(__file__)))},
            also={"model_or_folder": "expected"}),
        Row("load into", saf.load, lambda: {"model_or_folder": model(), "folder": "nowhere"},
            {"folder": (*PATH, None, "nowhere"), "backend": tuple(x for x in TEXT if x is not None)},
            also={"folder": "expected"}),
        Row("Prefill", saf.Prefill, lambda: {"model": model(), "batch_size": 1, "length": 4},
            {"model": MODEL, "batch_size": (*WHOLE, 0), "length": (*WHOLE, 0, 99), "compile": TRUTH, "autocast": TRUTH},
            also=dict.fromkeys(("batch_size", "length"), "CUDA")),
    ]  # fmt: skip


def _of_statistics() -> list[Row]:
    statistics = saf.calibrate(model(), batches(), collect=("mean", "mean_rows", "row_variance"))
    target = statistics.eta_abs[0], statistics.eta_rel[0]
    goal = {"eta_abs": target[0], "eta_rel": target[1]}
    wrong_goal = (*TENSOR, target[0][:, :3], target[0] * NAN, target[0] * 0, -target[0], target[0] * 2, torch.zeros(()))
    fitted = saf.fit_compact(*target)
    heads = [(0, 1)]
    options = {"tolerance": (*NUMBER, 0.0), "max_sweeps": (*WHOLE, 0), "memory": WHOLE}
    options["alpha_constant_after"] = tuple(x for x in WHOLE if x is not None)
    plain = {each.name: getattr(statistics, each.name) for each in fields(statistics)}
    tensors = ("variance", "forward_kl", "eta_abs", "eta_rel", "row_entropy")
    other = (*STRANGE, None, "abc", 3, {}, [])
    return [
        Row("AttentionStatistics", saf.AttentionStatistics, lambda: plain, {
            **dict.fromkeys(tensors, (*TENSOR, torch.zeros(3), torch.zeros(2, 2).long())),
            "length": (*WHOLE, 3), "num_sequences": WHOLE, "sequences_hash": TEXT,
            "collected": (*MAPPING, {"nope": torch.zeros(2)}, {"mean": 3}, {"mean": torch.zeros(1, 2)}),
            "collected_heads": (*STRANGE, "abc", 3, None), "positions": (3, "ab", (1.5,)),
        }, also={"length": "eta_abs"}),
        Row("AttentionStatistics.take", statistics.take, lambda: {"name": "mean_rows", "heads": heads},
            {"name": NAME, "heads": HEADS}, also={"name": "collect="}),
        Row("AttentionStatistics.join", saf.AttentionStatistics.join, dict,
            {"parts": (*STRANGE, None, "abc", 3, [], [1], [statistics, statistics])},
            also={"parts": "statistics"}),
        Row("AttentionStatistics.save", statistics.save, dict, {"path": (*PATH, None)}),
        Row("AttentionStatistics.load", saf.AttentionStatistics.load, dict,
            {"path": (*PATH, None, "nowhere", __file__)}, also={"path": "expected"}),
        Row("score", saf.score, lambda: {"statistics": statistics},
            {"statistics": other, "name": NAME, "seed": (1.5, "a", -1), "nope": (1,)},
            beside={"seed": {"name": "random"}}, also={"name": "score"}),
        Row("score by gradient", saf.score, lambda: {"statistics": statistics, "name": "qk_gradient"},
            {"gradient": (*TENSOR, torch.zeros(3), torch.full((2, 2), NAN))}),
        Row("score by gates", saf.score, lambda: {"statistics": statistics, "name": "gate_taylor"},
            {"gates": (*TENSOR, torch.zeros(3), torch.full((2, 2), NAN))}, also={"gates": "gate_taylor"}),
        Row("score by outputs", saf.score, lambda: {"statistics": statistics, "name": "redundancy"},
            {"outputs": TENSOR}),
        Row("head_outputs", saf.head_outputs,
            lambda: {"model": model(), "batches": batches(), "statistics": statistics},
            {"model": MODEL, "batches": BATCHES, "statistics": other}, also={"batches": "calibration sequences"}),
        Row("dense_pattern", saf.dense_pattern, lambda: {"statistics": statistics, "heads": heads},
            {"statistics": other, "heads": HEADS, "name": NAME, "dtype": DTYPE, "nope": (1,)},
            also={"name": "pattern", "heads": "head", "dtype": "floating"}),
        Row("dense_pattern by dirichlet", saf.dense_pattern,
            lambda: {"statistics": statistics, "heads": heads, "name": "dirichlet"},
            {"scale": (*NUMBER, 0, -1), "bounds": (3, "ab", (1,), (2, 1), (0, 1), (NAN, 1)), "seed": (1.5, "a", -1)}),
        Row("fit_compact", saf.fit_compact, lambda: goal, {
            "eta_abs": wrong_goal, "eta_rel": wrong_goal, "fitter": NAME, **options, "nope": (1,),
        }),
        Row("fit_compact by adam", saf.fit_compact, lambda: {**goal, "fitter": "adam"},
            {"steps": (*WHOLE, 0), "learning_rate": (*NUMBER, 0.0, -1.0)}),
        Row("fit_with_certificate", fit_with_certificate, lambda: goal, {"eta_abs": wrong_goal, "fitter": NAME}),
        Row("fit_kl", saf.fit_kl, lambda: {"pattern": fitted, **goal, "row_entropy": statistics.row_entropy[0]},
            {"pattern": (*TENSOR, pattern(2, 2)), "eta_abs": wrong_goal, "eta_rel": wrong_goal,
             "row_entropy": (*TENSOR, torch.zeros(3), torch.full((2,), NAN))},
            also={"eta_abs": "marginals", "row_entropy": "row entropy"}),
        Row("fit.accepted", accepted, lambda: {"kl": torch.zeros(2)},
            {"kl": TENSOR, "max_fit_kl": (*NUMBER, 0.0, -1.0)}),
        Row("fit.marginals", marginals, dict, {"pattern": TENSOR}),
        Row("fit.certify", certify, lambda: {"pattern": fitted, **goal, "sweeps": torch.zeros(2)},
            {"pattern": TENSOR, "eta_abs": TENSOR, "eta_rel": TENSOR, "tolerance": NUMBER, "radius": NUMBER}),
        Row("fit.fit_variants", fit_variants, lambda: {"length": 100},
            {"length": WHOLE, "constant_after": (*(x for x in WHOLE if x is not None), 50)},
            also={"length": "T"}),
        Row("OneTime.first_update", saf.OneTime(0.5).first_update, dict, {"updates": WHOLE}),
        Row("OneTime.start", saf.OneTime(0.5).start, lambda: {"updates": 10, "heads": 4, "limit": 9},
            {"updates": WHOLE, "heads": WHOLE[:-1], "limit": WHOLE[:-1]}),
        Row("train.continue_from", continue_from, lambda: {"parent": "nowhere", "out": "nowhere"},
            {"parent": (*PATH, None, "nowhere"), "out": (*PATH, None)}, also={"parent": "a checkpoint"}),
    ]  # fmt: skip


SETTINGS: tuple[type, ...] = (
    *(saf.GPTConfig, FreezeConfig, TrainConfig, PrepareConfig, CheckpointFreezing),
    *(OpSettings, PrefillSettings, UpdateSettings, ErrorSettings, CalibrationSettings),
    *SCHEDULES.values(),
    *dict.fromkeys(analysis.settings for analysis in ANALYSES.values()),
)
REQUIRED: dict[str, Any] = {
    **dict.fromkeys(("num_layers", "num_heads"), 2),
    **{"hidden_size": 8, "max_length": 12, "data": "data", "config": FreezeConfig()},
    **dict.fromkeys(("checkpoint", "model", "first", "second", "one_head"), Path("nowhere")),
}
"""What settings without a default are given; `out` is a path in some classes and text in others."""


def _of_settings() -> Iterator[Row]:
    """Yield a row a class of settings: its fields, and what their annotations do not allow."""
    for kind in SETTINGS:
        hints = get_type_hints(kind, include_extras=True)
        needed = {each.name: REQUIRED.get(each.name) for each in fields(kind) if _is_required(each)}
        if "out" in needed:
            needed["out"] = "out" if hints["out"] is str else Path("out")
        bad = {each.name: tuple(wrong_for(hints[each.name])) for each in fields(kind)}
        if kind is FreezeConfig:
            bad["below"] = bad["below"][:-1]  # a score may be negative
        if kind is JointCost:
            needed |= {"first": ((0, 0),), "second": ((0, 1),)}
        yield Row(kind.__name__, kind, _constant(needed), bad)


def _is_required(each: Any) -> bool:
    return isinstance(each.default, type(fields(Row)[0].default)) and isinstance(
        each.default_factory, type(fields(Row)[0].default)
    )


def _constant(values: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    return lambda: values


def wrong_for(hint: Any) -> list[Any]:
    """Return values that an annotation of a setting does not allow."""
    marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    members = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    named = any(isinstance(mark, OneOf) for mark in marks)
    wrong = next(pool for test, pool in _POOLS if any(test(member, named) for member in members))
    return [value for value in wrong if not (value is None and type(None) in members)]


def _several(member: Any, *items: Any) -> bool:
    return get_origin(member) is tuple and get_args(member)[: len(items)] == items


_POOLS: tuple[tuple[Callable[[Any, bool], bool], tuple[Any, ...]], ...] = (
    (lambda member, named: is_dataclass(member), (*STRANGE, "abc", 3, {})),
    (lambda member, named: member is float, (*NUMBER, -1.0)),
    (lambda member, named: member is bool, TRUTH),
    (lambda member, named: member is int, WHOLE),
    (lambda member, named: get_origin(member) is Literal or (member is str and named), NAME),
    (lambda member, named: member is str, TEXT),
    (lambda member, named: member is Path, PATH),
    (lambda member, named: _several(member, float, float), (*STRANGE, 3, "ab", (0.5,), (NAN, 0.5), ("a", "b"))),
    (lambda member, named: _several(member, float), (*STRANGE, 0.5, "ab", ("a",), (NAN,), (INF,), (True,))),
    (lambda member, named: _several(member, int), (*STRANGE, 3, "ab", ("a",), (1.5,), (True,))),
    (lambda member, named: _several(member, str), (*STRANGE, 3, "ab", (1,), (None,))),
    (lambda member, named: _several(member), PAIRS),
    (lambda member, named: get_origin(member) is dict, MAPPING),
)

WORDS = {float: ("abc", "nan", "inf", "-1"), int: ("abc", "1.5", "nan", "-1")}
"""What a flag of a type may not be given on the command line."""


def commands() -> Iterator[tuple[str, type[Command]]]:
    """Yield every command with its words."""
    for name in COMMANDS:
        module = importlib.import_module(f"saf.cli.{name}")
        if name in GROUPS:
            yield from ((f"{name} {sub}", command) for sub, command in module.COMMANDS.items())
        else:
            yield name, module.COMMAND


def command_attempts(only: Collection[str] = (), flags: Collection[str] = ()) -> Iterator[Attempt]:
    """Yield command lines whose flags have values that they cannot take, and flags that do not exist."""
    for attempt in _command_attempts(only):
        if not flags or attempt.argument in flags:
            yield attempt


def _command_attempts(only: Collection[str]) -> Iterator[Attempt]:
    for name, command in commands():
        if only and name not in only:
            continue
        flags = list(all_flags(command))
        needed = [word for flag in flags if flag.required for word in _needed_words(flag)]
        yield _said(name, command, [*needed, "--no-such-flag", "1"], "no-such-flag")
        for flag in flags:
            members = get_args(flag.kind) if get_origin(flag.kind) in (Union, UnionType) else (flag.kind,)
            literal = any(isinstance(mark, OneOf) for mark in flag.marks) or get_origin(flag.kind) is Literal
            words = next((WORDS[kind] for kind in (float, int) if kind in members), ("nope",) if literal else ())
            for word in words:
                yield _said(name, command, [*needed, f"--{flag.name}", word], flag.name)


def _needed_words(flag: Any) -> list[str]:
    positional = any("Positional" in repr(mark) for mark in flag.marks)
    return ["nowhere"] if positional else [f"--{flag.name}", "nowhere"]


def _said(name: str, command: type[Command], words: list[str], flag: str) -> Attempt:
    named = (flag, flag.rpartition(".")[2], flag.rpartition(".")[2].replace("-", "_"))
    return Attempt(f"saf {name}", f"--{flag}", words[-1], named, lambda: command.from_words(words))
