"""How a model is run to be measured, and what a record says of it: its precision, its shape, its edited heads."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from saf.calibration.capture import evaluation_mode
from saf.distributed import map_over_ranks, rank_and_size
from saf.errors import InputError
from saf.heads import EDITED
from saf.machine import autocast, resolve_precision
from saf.models.adapter import Adapter, language_model, unwrap
from saf.ops import FrozenHeads

Batch = TypeVar("Batch")
Result = TypeVar("Result")
Progress = Callable[[int, int], None]
"""Called with (done, all)."""
PARENT = "parent"
"""Roles of the checkpoints that a model was made from begin with this."""
_SHORT = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def run_batches(
    model: nn.Module,
    run: Callable[[Batch], Result],
    batches: Sequence[Batch],
    *,
    precision: str,
    sizes: Sequence[int] = (),
    progress: Progress | None = None,
) -> list[Result]:
    """Run batches in evaluation mode without gradients and return their results in order.

    Processes of a group divide the batches among them, and all get every result. `progress` counts the `sizes` of
    finished batches, by default each as one.
    """
    done = 0

    def run_one(batch: tuple[int, Batch]) -> Result:
        nonlocal done
        result, done = run(batch[1]), done + rank_and_size()[1] * batch[0]
        if progress is not None:
            progress(min(done, sum(sizes)), sum(sizes))
        return result

    sized = list(zip(sizes or [1] * len(batches), batches, strict=True))
    with evaluation_mode(model), torch.no_grad(), autocast(language_model(model).device, precision):
        return map_over_ranks(run_one, sized)


def precision_in_use(model: nn.Module, precision: str) -> str:
    """Name the precision in which a model runs under `autocast(device, precision)`.

    For float32 weights that is "fp32" or "bf16". Weights of another dtype run in it and are named too: "bf16 weights",
    or "bf16 weights, bf16 autocast". Patterns of frozen heads do not count as weights.

    Raises InputError where `precision` is "fp32" and weights are narrower.
    """
    casts = resolve_precision(language_model(model).device, precision)
    patterns = {
        parameter for module in model.modules() if isinstance(module, FrozenHeads) for parameter in module.parameters()
    }
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter not in patterns}
    names = sorted(_SHORT.get(dtype, str(dtype).removeprefix("torch.")) for dtype in dtypes)
    if names in ([], ["fp32"]):
        return casts
    weights = f"{' and '.join(names)} weights"
    if precision == "fp32" and any(dtype.itemsize < torch.float32.itemsize for dtype in dtypes):
        raise InputError(f"precision fp32 needs a model in float32, got {weights}; convert it by model.float()")
    return weights if casts == "fp32" else f"{weights}, {casts} autocast"


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
