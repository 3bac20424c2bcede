"""Facts about an evaluated model that its record holds: the precision it ran in, its shape, its edited heads."""

from typing import Any

import torch
from torch import nn

from saf.errors import InputError
from saf.heads import EDITED
from saf.machine import resolve_precision
from saf.models.adapter import Adapter, language_model, unwrap
from saf.ops import FrozenHeads

PARENT = "parent"
"""Roles of the checkpoints that a model was made from begin with this."""
_SHORT = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def precision_in_use(model: nn.Module, precision: str) -> str:
    """Name the precision in which a model runs under `autocast(device, precision)`.

    For float32 weights that is "fp32" or "bf16". Weights of another dtype run in it and are named too: "bf16 weights",
    or "bf16 weights, bf16 autocast". Patterns of frozen heads do not count as weights.

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
        raise InputError(f"precision fp32 needs a model in float32, got {weights}; convert it by model.float()")
    return weights if autocast == "fp32" else f"{weights}, {autocast} autocast"


def model_facts(model: nn.Module) -> dict[str, Any]:
    """Describe a model's shape and, where its attention is known, count its frozen and pruned heads."""
    language, config = language_model(model), getattr(unwrap(model), "config", None)
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
