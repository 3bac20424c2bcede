"""The model of an evaluation: the precision it ran in, its shape, its edited heads, its origin; and pairs of these.

Two evaluations show what freezing cost if they differ in the freezing alone; `check_pair` compares them.
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from saf.errors import CompareError, InputError, SafWarning
from saf.heads import EDITED
from saf.machine import resolve_precision
from saf.models.adapter import Adapter, language_model, unwrap
from saf.ops import FrozenHeads
from saf.records.events import heads_in_words

PARENT = "parent"
"""Roles of the checkpoints that a model was made from begin with this."""
_SHORT = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_SHAPE = ("architecture", "vocab_size", "hidden_size", "heads_by_layer", "head_dim")


def precision_in_use(model: nn.Module, precision: str) -> str:
    """The precision in which a model runs under `autocast(device, precision)`, as results name it.

    For float32 weights that is "fp32" or "bf16". Other weights are named too, as they run in their own dtype:
    "bf16 weights", or "bf16 weights, bf16 autocast". Patterns of frozen heads are no weights.

    Raises InputError where `precision` is "fp32" and weights are narrower.
    """
    autocast = resolve_precision(language_model(model).device, precision)
    patterns = {
        parameter for module in model.modules() if isinstance(module, FrozenHeads) for parameter in module.parameters()
    }
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter not in patterns}
    names = sorted(_SHORT.get(dtype, str(dtype).removeprefix("torch.")) for dtype in dtypes)
    if names in ([], ["fp32"]):
        return autocast
    weights = f"{' and '.join(names)} weights"
    if precision == "fp32" and any(dtype.itemsize < torch.float32.itemsize for dtype in dtypes):
        raise InputError(
            f"precision fp32 needs a model in float32, got {weights}, which keep their dtype; leave precision out, "
            "or convert it (model.float())"
        )
    return weights if autocast == "fp32" else f"{weights}, {autocast} autocast"


def facts_of(model: nn.Module) -> dict[str, Any]:
    """A model's shape, and how many of its heads are frozen and pruned where its attention is known."""
    language, inner = language_model(model), unwrap(model)
    config = getattr(inner, "config", None)
    facts: dict[str, Any] = {
        "architecture": getattr(config, "model_type", None),
        "vocab_size": language.vocab_size,
        "hidden_size": getattr(config, "hidden_size", None),
    }
    if isinstance(language, Adapter):
        sites = language.sites()
        facts["heads_by_layer"] = [site.layout.num_heads for site in sites]
        facts["head_dim"] = sites[0].head_dim
        facts |= {kind: len(language.heads(kind)) for kind in EDITED}
    return facts


def check_pair(
    records: Sequence[Mapping[str, Any]], folders: Sequence[Path | str], *, allow_differences: bool = False
) -> dict[str, Any]:
    """Compare the models of two evaluations, the ordinary one's and the frozen one's.

    Returns:
        `differences`, a line for each that is not the freezing; `made_from`, whether the frozen model was made from the
        ordinary one, or both from a third, None where no file says; `heads_by_kind`, how many heads of each are frozen
        and pruned, where their attention is known.

    Raises CompareError for differences that are not allowed, and for a second model without frozen or pruned heads.
    """
    ordinary, frozen = (record.get("of") or {} for record in records)
    counts = [{kind: facts[kind] for kind in EDITED if kind in facts} for facts in (ordinary, frozen)]
    edited = [sum(count.values()) for count in counts]
    if "heads_by_layer" in frozen and not edited[1]:
        swapped = f", and that of {folders[0]} has {edited[0]}" if edited[0] else ""
        raise CompareError(
            f"the model of {folders[1]} has no frozen or pruned heads{swapped}; give the ordinary model's evaluation "
            "first and the frozen one's second"
        )
    lines = []
    if ordinary and frozen:
        lines = [
            f"{name}: {ordinary.get(name)} in the ordinary model, {frozen.get(name)} in the frozen one"
            for name in _SHAPE
            if ordinary.get(name) != frozen.get(name)
        ]
    own, origins = (_hashes(record) for record in records)
    origins = {role: value for role, value in origins.items() if role != "model"}
    made_from = bool(set(origins.values()) & set(own.values())) if origins and own else None
    if made_from is False:
        lines.append(
            f"parent: the frozen model was made from {origins[PARENT][:12]}, neither the ordinary model "
            f"({own.get('model', 'not recorded')[:12]}) nor its origin"
        )
    if lines and not allow_differences:
        listed = "\n  ".join(lines)
        raise CompareError(
            f"the models of {folders[0]} and {folders[1]} differ in more than the freezing:\n  {listed}\n"
            "Evaluate the model that heads were frozen in, or allow the differences (--allow-differences)"
        )
    return {"differences": lines, "made_from": made_from, "heads_by_kind": counts}


def pair_words(pair: Mapping[str, Any]) -> list[str]:
    """Sentences on what `check_pair` found that readers of a comparison must know; none where all is well."""
    lines = [f"Difference of the models: {line}." for line in pair["differences"]]
    if pair["made_from"] is None:
        lines.append("No file says whether the frozen model was made from the ordinary one.")
    first = pair.get("heads_by_kind", [{}])[0]  # committed records from before it do not have it
    if any(first.values()):
        before = heads_in_words(first)
        lines.append(f"The first model has {before} heads already: what these cost is not in the change.")
    return lines


def _hashes(record: Mapping[str, Any]) -> dict[str, str]:
    """Hashes of a record's model and of what it was made from, by role."""
    checkpoints = record["provenance"]["checkpoints"]
    return {role: value for role, value in checkpoints.items() if role == "model" or role.startswith(PARENT)}


def both_have(pair: Sequence[Path], name: str) -> bool:
    """Whether both folders of a pair of evaluations have a file; warn where one alone has it."""
    having = [folder for folder in pair if (folder / name).is_file()]
    if len(having) == 1:
        warnings.warn(f"{name} is in {having[0]} alone: it is not compared", SafWarning, stacklevel=3)
    return len(having) == 2


def nothing_to_compare(pair: Sequence[Path]) -> InputError:
    """The error for two evaluations without a file that both have."""
    names = " and ".join(map(str, pair))
    return InputError(f"{names} are evaluations of different things, perplexity and tasks; evaluate both on the same")
