"""Wrong input to models, and to what is measured of them and fitted: a row a call."""

from dataclasses import fields
from pathlib import Path

import torch

import saf
from saf.calibration import plan_calibration
from saf.fit import accepted, certify, fit_variants, fit_with_certificate, marginals
from saf.freezing.config import FreezeConfig
from saf.train.run_config import continue_from
from tools.trials.attempt import (
    BATCHES,
    DTYPE,
    FUNCTION,
    HEADS,
    LENGTH,
    MAPPING,
    MODEL,
    NAME,
    NAN,
    NUMBER,
    ONE_LENGTH,
    OPTIMIZER,
    PATH,
    SHAPE,
    STRANGE,
    TENSOR,
    TEXT,
    TRUTH,
    WHOLE,
    Row,
    batches,
    model,
    pattern,
)


def of_models() -> list[Row]:
    """Return the rows of models and of everything that takes one."""
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
            "model": MODEL, "batches": ONE_LENGTH, "heads": HEADS, "pattern": NAME, "fitter": NAME,
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


def of_statistics() -> list[Row]:
    """Return the rows of statistics, scores, fits and schedules."""
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
            {"model": MODEL, "batches": ONE_LENGTH, "statistics": other}, also={"batches": "calibration sequences"}),
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
