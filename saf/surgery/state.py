"""The frozen heads of a model as plain data: what checkpoints and sidecars store beside the weights."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from saf.adapters import Site, adapter_for
from saf.errors import CheckpointError
from saf.patterns import KINDS, Pattern, pattern_from_state
from saf.surgery.editing import editing
from saf.surgery.layout import prepare_heads
from saf.surgery.rows import replace_data_

SCHEMA = "saf.heads/1"


def state_of(model: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what `restore_` needs: values for JSON, and tensors for safetensors.

    The heads of a layer whose patterns are trained are listed as `trainable`; their logits are those of this moment.
    Tensors are `layer.head.alpha`, `.rho` (or `.weights`) and the rows kept for undoing, `layer.head.removed.*`.
    """
    layers, tensors = [], {}
    for number, site in enumerate(adapter_for(model).sites()):
        frozen = site.frozen
        patterns = dict(zip(site.layout.frozen, [] if frozen is None else frozen.patterns, strict=True))
        layers.append(
            {
                "num_heads": site.layout.num_heads,
                "num_kv_heads": site.layout.num_kv_heads,
                "frozen": list(site.layout.frozen),
                "trainable": [head for head, one in patterns.items() if one.trainable],
                "backend": None if frozen is None else frozen.backend,
            }
        )
        for head, pattern in patterns.items():
            tensors |= {f"{number}.{head}.{name}": part.cpu().contiguous() for name, part in pattern.state().items()}
        for head, rows in site.removed.items():
            tensors |= {f"{number}.{head}.removed.{name}": tensor.contiguous() for name, tensor in rows.items()}
    return {"schema": SCHEMA, "layers": layers}, tensors


@editing
def restore_(model: nn.Module, state: dict[str, Any], tensors: Mapping[str, Tensor], *, backend: str = "auto") -> None:
    """Give a model with no frozen heads the layout and patterns of `state_of`, before its weights are loaded.

    Weights are only resized to the layout, so load them afterwards, and make the optimiser then. Raises
    CheckpointError when the state is of another schema or of another shape of model, or lacks a pattern; the model is
    unchanged then.
    """
    changes = []
    for number, site, layer in matching_layers(model, state):
        if not layer["frozen"]:
            continue
        layout = replace(site.layout, frozen=tuple(layer["frozen"]))
        trained = layer.get("trainable", ())
        patterns = {head: read_pattern(tensors, f"{number}.{head}.", head in trained) for head in layout.frozen}
        changes.append((number, site, layout, prepare_heads(site, layout, patterns, backend)))
    for number, site, layout, heads in changes:
        for role in ("query",) if layout.grouped else ("query", "key"):
            parameter, dimension = site.projections()[role]
            replace_data_(parameter, parameter.data.narrow(dimension, 0, layout.num_live * site.head_dim).clone())
        site.assign(layout, heads)
        restore_removed_(number, site, tensors)


def restore_removed_(number: int, site: Site, tensors: Mapping[str, Tensor]) -> None:
    """Keep for undoing, of a layer's frozen heads, the rows that were saved and no others: none of a final freeze."""
    site.removed.clear()
    for head in site.layout.frozen:
        prefix = f"{number}.{head}.removed."
        rows = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        if rows:
            site.removed[head] = rows


def matching_layers(model: nn.Module, state: dict[str, Any]) -> list[tuple[int, Site, dict[str, Any]]]:
    """Return number, site and state of every layer.

    Raises CheckpointError unless the model is of that shape, with no heads frozen.
    """
    sites = adapter_for(model).sites()
    if state.get("schema") != SCHEMA:
        raise CheckpointError(f"expected frozen heads of schema {SCHEMA!r}; got {state.get('schema')!r}")
    if not isinstance(state.get("layers"), list) or not all(map(_is_layer, state["layers"])):
        raise CheckpointError(
            "the description of the frozen heads is damaged: layers, or what each must say, is missing"
        )
    if len(state["layers"]) != len(sites):
        raise CheckpointError(f"frozen heads of a model with {len(state['layers'])} layers; this one has {len(sites)}")
    for number, (site, layer) in enumerate(zip(sites, state["layers"], strict=True)):
        shape = (layer["num_heads"], layer["num_kv_heads"])
        if shape != (site.layout.num_heads, site.layout.num_kv_heads) or site.layout.frozen:
            raise CheckpointError(
                f"layer {number}: the frozen heads belong to {shape[0]} query and {shape[1]} KV heads with none "
                f"frozen yet; the model has {site.layout}"
            )
    return [(number, site, layer) for number, (site, layer) in enumerate(zip(sites, state["layers"], strict=True))]


def _is_layer(layer: Any) -> bool:
    return isinstance(layer, dict) and layer.keys() >= {"num_heads", "num_kv_heads", "frozen"}


def read_pattern(tensors: Mapping[str, Tensor], prefix: str, trainable: bool) -> Pattern:
    """Return the pattern stored under a prefix; raise CheckpointError when it is missing."""
    names = {name for kind in KINDS.values() for name in kind.parts}
    own = {name: tensors[prefix + name] for name in names if prefix + name in tensors}
    try:
        return pattern_from_state(own, trainable=trainable)
    except CheckpointError as error:
        raise CheckpointError(f"the pattern {prefix.rstrip('.')} is missing or incomplete: {error}") from error
