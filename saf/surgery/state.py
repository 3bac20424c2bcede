"""The frozen heads of a model as plain data: what checkpoints and sidecars store beside the weights, and its way back.

`state_of` makes it. `restore_` shapes a model for the saved weights, which `load_weights_` loads; `apply_` freezes a
model that has its weights. `weight_sums` tell the weights that were saved from others.
"""

import hashlib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from saf.adapters import Site, adapter_for
from saf.errors import CheckpointError, InputError, SafWarning, UnsupportedError
from saf.heads import Head, HeadSet
from saf.ops.backends import choose_backend
from saf.ops.frozen_layout import with_layout
from saf.patterns import KINDS, Pattern, pattern_from_state
from saf.surgery.edit import editing, heads_with_rows, plan_edit, value_dtypes
from saf.surgery.install import install_, uninstall_
from saf.surgery.rows import replace_data_

SCHEMA = "saf.heads/1"
Sums = dict[str, dict[str, str]]
"""dtype and SHA-256 of one layer's projections, by role."""


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
def restore_(
    model: nn.Module, state: dict[str, Any], tensors: Mapping[str, Tensor], *, backend: str | None = None
) -> None:
    """Give a model with no frozen heads the layout and patterns of `state_of`, before its weights are loaded.

    Weights are only resized to the layout, so load them afterwards, and make the optimiser then. Without `backend` each
    layer has the one that it was saved with, see `recorded_backends`. Raises
    CheckpointError when the state is of another schema or of another shape of model, or lacks a pattern; the model is
    unchanged then.
    """
    edits, layers = {}, matching_layers(model, state)
    backends = {} if backend else recorded_backends(layers)
    for number, site, layer in layers:
        if not layer["frozen"]:
            continue
        layout = replace(site.layout, frozen=tuple(layer["frozen"]))
        trained = layer.get("trainable", ())
        patterns = {head: read_pattern(tensors, f"{number}.{head}.", head in trained) for head in layout.frozen}
        edits[number] = plan_edit(site, layout, patterns, backend=backend or backends[number], optimizer=None)
    for number, edit in edits.items():
        site = edit.site
        for role, heads in heads_with_rows(edit.layout).items():
            parameter, dimension = site.projections()[role]
            replace_data_(parameter, parameter.data.narrow(dimension, 0, len(heads) * site.head_dim).clone())
        site.assign(edit.layout, edit.frozen, _saved_rows(number, edit.layout.frozen, tensors))


def load_weights_(model: nn.Module, weights: dict[str, Tensor], source: Path) -> None:
    """Load the weights of `source` into a model that `restore_` has shaped; raise CheckpointError for what misfits.

    Weights of earlier files do not tell which heads are frozen; the state that shaped the model told it.
    """
    try:
        model.load_state_dict(with_layout(weights, model))
    except (RuntimeError, CheckpointError) as error:
        raise CheckpointError(f"{source} does not fit the model it describes: {error}") from error


def apply_(
    model: nn.Module, state: dict[str, Any], tensors: Mapping[str, Tensor], *, backend: str | None = None
) -> None:
    """Install the frozen heads of `state_of` in a model that has all its weights, as `install_` does.

    Without `backend` each layer has the one that it was saved with, see `recorded_backends`.

    Rows kept for undoing are those that were saved. The model's attention weights should be the saved ones, too. Where
    those rows, or the sums of the weights that stay (`weight_sums`, as `weights` of each layer; earlier files have
    none), tell that they are not, a warning names them and says to load the others. Raises CheckpointError for another
    schema or shape of model; it is unchanged then.
    """
    layers = matching_layers(model, state)
    differing = {number: _other_rows(number, site, layer["frozen"], tensors) for number, site, layer in layers}
    alike: dict[tuple[str, bool], list[Head]] = {}
    backends = {} if backend else recorded_backends(layers)
    for number, _, layer in layers:
        for head in layer["frozen"]:
            which = backend or backends[number], head in layer.get("trainable", ())
            alike.setdefault(which, []).append((number, head))
    events = []
    for (name, trainable), heads in sorted(alike.items(), key=lambda each: each[0][1]):
        # As stored, without training yet: `install_` makes them trainable.
        patterns = [read_pattern(tensors, f"{number}.{head}.", False) for number, head in sorted(heads)]
        events.append((HeadSet(heads), patterns, name, trainable))
    for heads, patterns, name, trainable in events:
        try:
            install_(model, heads, patterns, backend=name, trainable=trainable)
        except Exception:
            uninstall_(model)
            raise
    for number, site, layer in layers:
        if layer["frozen"]:  # rows that were saved, not this model's: undoing gives back what was frozen
            site.assign(site.layout, site.frozen, _saved_rows(number, site.layout.frozen, tensors))
        differing[number] |= differing_roles(site, layer.get("weights", {}))
    if listed := _listed(differing):
        warnings.warn(
            f"the model's weights differ from those saved with the frozen heads ({listed}): load the state dict of the "
            "frozen model now",
            SafWarning,
            stacklevel=3,
        )


def recorded_backends(layers: Iterable[tuple[int, Site, dict[str, Any]]]) -> dict[int, str]:
    """Return the backend that each layer's heads were saved with; "auto", with a warning, where it cannot run here.

    Earlier files may name none, which is "auto" too.
    """
    found, missed = {}, {}
    for number, site, layer in layers:
        name, device = layer.get("backend") or "auto", site.projections()["value"][0].device
        trainable = bool(layer.get("trainable"))
        try:
            found[number] = choose_backend(name, device=device, dtypes=value_dtypes(site), trainable=trainable)
        except (InputError, UnsupportedError) as error:
            found[number], missed[name] = "auto", error
    for name, error in missed.items():
        warnings.warn(
            f"the frozen heads were saved with backend {name!r}, which is not used here: {error}. 'auto' takes its "
            "place, whose results differ by rounding",
            SafWarning,
            stacklevel=4,
        )
    return found


def _other_rows(number: int, site: Site, heads: list[int], tensors: Mapping[str, Tensor]) -> set[str]:
    """Return {"query"} when a layer's rows are not those kept for undoing; raise CheckpointError for another shape."""
    weight = site.projections()["query"][0].detach().cpu()
    found = set()
    for head in heads:
        kept = tensors.get(f"{number}.{head}.removed.query.weight")
        if kept is None:
            continue
        own = weight[head * site.head_dim : (head + 1) * site.head_dim]
        if own.shape != kept.shape:
            raise CheckpointError(
                f"layer {number}: the frozen heads have query rows {list(kept.shape)}, this model's are "
                f"{list(own.shape)}"
            )
        narrower = min(own.dtype, kept.dtype, key=lambda dtype: dtype.itemsize)
        if not torch.equal(own.to(narrower), kept.to(narrower)):
            found.add("query")
    return found


def _listed(differing: dict[int, set[str]], most: int = 3) -> str:
    """Return "layer 0: query, value; ...": the first layers, and how many more; nothing when none differs."""
    listed = [f"layer {number}: {', '.join(sorted(roles))}" for number, roles in differing.items() if roles]
    more = [f"and {len(listed) - most} more"] if len(listed) > most else []
    return "; ".join(listed[:most] + more)


def weight_sums(model: nn.Module) -> list[Sums]:
    """Return the sums of every layer's projections as they are: without removed rows, heads in slot order."""
    return [
        {
            role: {"dtype": str(weight.dtype).removeprefix("torch."), "sha256": _sum(weight)}
            for role, (weight, _) in site.projections().items()
        }
        for site in adapter_for(model).sites()
    ]


def differing_roles(site: Site, sums: Sums) -> set[str]:
    """Return the roles whose weights are not those of `sums`, compared in the dtype that these were taken in.

    Weights of a narrower dtype cannot be compared, and are not named.
    """
    found = set()
    for role, recorded in sums.items():
        weight, dtype = site.projections()[role][0], getattr(torch, recorded["dtype"])
        comparable = torch.promote_types(weight.dtype, dtype) == weight.dtype
        if comparable and _sum(weight.to(dtype)) != recorded["sha256"]:
            found.add(role)
    return found


def _sum(weight: Tensor) -> str:
    """Return the SHA-256 of a weight's bytes."""
    return hashlib.sha256(weight.detach().cpu().flatten().view(torch.uint8).numpy().data).hexdigest()


def _saved_rows(number: int, heads: Iterable[int], tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Return the rows of a layer's frozen heads that were saved for undoing, by head: none of a final freeze."""
    rows: dict[int, dict[str, Tensor]] = {}
    for head in heads:
        prefix = f"{number}.{head}.removed."
        found = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        if found:
            rows[head] = found
    return rows


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
    """Return whether a layer's description says what every layer must."""
    return isinstance(layer, dict) and layer.keys() >= {"num_heads", "num_kv_heads", "frozen"}


def read_pattern(tensors: Mapping[str, Tensor], prefix: str, trainable: bool) -> Pattern:
    """Return the pattern stored under a prefix; raise CheckpointError when it is missing."""
    names = {name for kind in KINDS.values() for name in kind.parts}
    own = {name: tensors[prefix + name] for name in names if prefix + name in tensors}
    try:
        return pattern_from_state(own, trainable=trainable)
    except CheckpointError as error:
        raise CheckpointError(f"the pattern {prefix.rstrip('.')} is missing or incomplete: {error}") from error
