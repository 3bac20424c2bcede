"""The frozen heads of a model as plain data, in the files `saf.json` and `saf.safetensors` of checkpoints and folders.

`description_of` returns these data, `write_description` and `read_description` are their files. `restore_` edits a
model by them, before `load_weights_` loads the saved weights; a model that has its weights is compared with them. Where
another library fills in the weights, `resize_` comes before and `restore_(resized=True)` afterwards.
"""

import hashlib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from saf.errors import CheckpointError, InputError, SafWarning, UnsupportedError
from saf.heads import BIAS, EDITED, HeadLayout, role_of
from saf.models.adapter import ON_META, Adapter, Removed, Site, adapter_for, check_plain_weights, rows_of
from saf.ops.frozen_heads import choose_backend
from saf.patterns import PATTERN_KINDS, Pattern, pattern_from_state
from saf.records.files import check_file, file_hash, read_json, read_tensors, write_json, write_tensors
from saf.surgery import (
    LayerEdit,
    absent_rows,
    apply_edits_,
    editable,
    edited_,
    patterns_of,
    plan_edit,
    replace_data_,
    value_dtypes,
)

STATE_FILE, TENSORS_FILE = "saf.json", "saf.safetensors"
SCHEMA = "saf.heads/1"
OPENS = "import saf.integrations.transformers"
"""The import by which `from_pretrained` opens folders of models with frozen heads."""
_LISTED = 3
"""Layers that a warning lists where weights differ."""

# --- the data and their files


def description_of(adapter: Adapter, *, checksums: bool = False) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the edited heads of every layer as values for JSON, and their tensors for safetensors.

    `trainable` lists the heads whose patterns are trained. Tensors are `layer.head.alpha`, `.rho` (or `.weights`), and
    the removed rows, `layer.head.removed.role.*`, by KV head for keys and values. For a model that another library
    saves, `checksums` adds those of its attention weights (without removed rows, heads in slot order) and its settings.
    """
    layers, tensors = [], {}
    for number, site in enumerate(adapter.sites()):
        patterns = patterns_of(site)
        layer = {
            "num_heads": site.layout.num_heads,
            "num_kv_heads": site.layout.num_kv_heads,
            **{kind: list(getattr(site.layout, kind)) for kind in EDITED},
            "trainable": [head for head, one in patterns.items() if one.trainable],
            "backend": None if site.frozen is None else site.frozen.backend,
        }
        if checksums:
            weights = {role: weight for role, (weight, _) in site.projections().items()}
            dtypes = {role: str(weight.dtype).removeprefix("torch.") for role, weight in weights.items()}
            layer["weights"] = {role: {"dtype": dtypes[role], "sha256": _checksum(weights[role])} for role in weights}
        layers.append(layer)
        for head, pattern in patterns.items():
            tensors |= {f"{number}.{head}.{name}": part.cpu().contiguous() for name, part in pattern.state().items()}
        for role, by_head in site.removed.items():
            for head, rows in by_head.items():
                prefix = f"{number}.{head}.removed.{role}."
                tensors |= {prefix + name: tensor.contiguous() for name, tensor in rows.items()}
    state = {"schema": SCHEMA, "layers": layers}
    return state | ({"attention": adapter.attention_settings()} if checksums else {}), tensors


def check_savable(adapter: Adapter) -> None:
    """Raise UnsupportedError for weights that are not plain, InputError for those on the meta device."""
    for site in adapter.sites():
        check_plain_weights(site)
        if any(weight.is_meta for weight, _ in site.projections().values()):
            raise InputError(ON_META)


def write_description(folder: Path, state: Mapping[str, Any], tensors: Mapping[str, Tensor], *others: Path) -> None:
    """Write `saf.safetensors`, then `saf.json` with its SHA-256 and those of `others`, files of the same folder."""
    written = [write_tensors(folder / TENSORS_FILE, tensors), *others]
    write_json(folder / STATE_FILE, {**state, "sha256": {path.name: file_hash(path) for path in written}})


def read_description(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read what `write_description` wrote and check its checksums; a checkpoint has these in its manifest instead.

    Raises CheckpointError for a file that is missing, damaged or of another schema.
    """
    state = read_json(folder / STATE_FILE, error=CheckpointError)
    if (schema := state.get("schema")) != SCHEMA:
        raise CheckpointError(f"{folder / STATE_FILE}: expected frozen heads of schema {SCHEMA!r}; got {schema!r}")
    for name, expected in state.get("sha256", {}).items():
        check_file(folder / name, sha256=expected, error=CheckpointError)
    return state, read_tensors(folder / TENSORS_FILE, error=CheckpointError)


# --- a model edited by them


@torch.inference_mode(False)
@torch.no_grad()
def restore_(
    model: nn.Module,
    state: dict[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    backend: str | None = None,
    resized: bool = False,
    compare: bool = False,
) -> None:
    """Give a model without frozen heads the layout and patterns of `description_of`, and the saved rows for undoing.

    Rows of its weights move as when heads are frozen, unless `resize_` cut them already. With `compare` the model has
    its weights, and a warning lists attention weights that differ from the saved ones, by the saved rows and by the
    checksums of those that stay (the `weights` of each layer); else load the saved ones afterwards. Without
    `backend` each layer has the one it was saved with, "auto" where that cannot run. Raises CheckpointError, with the
    model unchanged, for a state of another shape of model, or without some pattern.
    """
    edits = _plan(model, state, tensors, backend)
    saved = {number: _saved_rows(number, edit.layout, tensors) for number, edit in edits}
    differing = {number: _differing_rows(number, edit.site, saved[number]) for number, edit in edits if compare}
    if resized:
        edited_([edit.site for _, edit in edits])
    else:
        apply_edits_([edit for _, edit in edits], None)
    for number, edit in edits:
        edit.site.assign(edit.layout, edit.frozen, saved[number])
    if compare:
        for number, site in enumerate(adapter_for(model).sites()):
            sums = _differing_sums(site, state["layers"][number].get("weights", {}))
            differing[number] = differing.get(number, set()) | sums
        _warn_of_other_weights(differing)


@torch.inference_mode(False)
@torch.no_grad()
def resize_(model: nn.Module, state: dict[str, Any]) -> list[tuple[Any, HeadLayout]]:
    """Cut the weights of a model, perhaps on the meta device, to the shapes of `description_of`, for `restore_`.

    Returns the layers with edited heads, with their layouts. Raises CheckpointError as `restore_` does.
    """
    layouts = [(site, _layout(site, layer)) for _, site, layer in _layers(model, state)]
    edited = [(site, layout) for site, layout in layouts if not layout.ordinary]
    for site, layout in edited:
        site.check(layout)
        check_plain_weights(site)
        for name, (parameter, dimension) in site.projections().items():
            rows = len(layout.rows_in(name)) * site.head_dim
            replace_data_(parameter, parameter.data.narrow(dimension, 0, rows).clone())
    return edited


def _warn_of_other_weights(differing: Mapping[int, set[str]]) -> None:
    """Warn of the projections, by layer, that are not those of the frozen heads."""
    if listed := [f"layer {number}: {', '.join(sorted(roles))}" for number, roles in differing.items() if roles]:
        more = [f"and {len(listed) - _LISTED} more"] if len(listed) > _LISTED else []
        warnings.warn(
            f"the model's weights differ from those saved with the frozen heads ({'; '.join(listed[:_LISTED] + more)}):"
            " load the state dict of the frozen model now",
            SafWarning,
            stacklevel=6,  # past two decorators, at the caller of load
        )


def load_weights_(model: nn.Module, weights: dict[str, Tensor], source: Path) -> None:
    """Load the weights of `source` into a model that `restore_` has shaped; raise CheckpointError where they misfit."""
    try:
        model.load_state_dict(weights)
    except (RuntimeError, CheckpointError) as error:
        raise CheckpointError(f"{source} does not fit the model it describes: {error}") from error


def _plan(
    model: nn.Module, state: dict[str, Any], tensors: Mapping[str, Tensor], backend: str | None
) -> list[tuple[int, LayerEdit]]:
    """Return number and edit of every layer with edited heads, all checked."""
    editable(model)
    edits, layers = [], _layers(model, state)
    backends = {} if backend else _saved_backends(layers)
    for number, site, layer in layers:
        layout = _layout(site, layer)
        if not layout.ordinary:
            trained = layer.get("trainable", ())
            patterns = {head: read_pattern(tensors, f"{number}.{head}.", head in trained) for head in layout.frozen}
            edit = plan_edit(site, layout, patterns, backend=backend or backends[number], optimizer=None)
            edits.append((number, edit))
    return edits


def _layers(model: nn.Module, state: dict[str, Any]) -> list[tuple[int, Site, dict[str, Any]]]:
    """Return number, site and state of every layer; raise CheckpointError unless model and state have one shape."""
    sites, layers = adapter_for(model).sites(), state["layers"]
    if len(layers) != len(sites):
        raise CheckpointError(f"frozen heads of a model with {len(layers)} layers; this one has {len(sites)}")
    for number, (site, layer) in enumerate(zip(sites, layers, strict=True)):
        shape, layout = (layer["num_heads"], layer["num_kv_heads"]), site.layout
        if shape != (layout.num_heads, layout.num_kv_heads) or not layout.ordinary:
            raise CheckpointError(
                f"layer {number}: the frozen heads need {shape[0]} query and {shape[1]} KV heads, all live; the model "
                f"has {layout.num_heads} and {layout.num_kv_heads}, {layout.num_live} live"
            )
    return [(number, site, layer) for number, (site, layer) in enumerate(zip(sites, layers, strict=True))]


def _layout(site: Site, layer: Mapping[str, Any]) -> HeadLayout:
    """Return the layout in a layer's description."""
    return replace(site.layout, **{kind: tuple(layer.get(kind, ())) for kind in EDITED})


def _saved_backends(layers: Iterable[tuple[int, Site, dict[str, Any]]]) -> dict[int, str]:
    """Return the backend that each layer's heads were saved with; "auto", with a warning, where it cannot run here."""
    backends = {}
    for number, site, layer in layers:
        name, device = layer.get("backend") or "auto", rows_of(site, "value").parameter.device
        trainable = bool(layer.get("trainable"))
        try:
            backends[number] = choose_backend(name, device=device, dtypes=value_dtypes(site), trainable=trainable)
        except (InputError, UnsupportedError) as error:
            backends[number] = "auto"
            message = f"frozen heads saved with backend {name!r} run with 'auto', other rounding: {error}"
            warnings.warn(message, SafWarning, stacklevel=7)  # past the plan and two decorators, at the caller of load
    return backends


def _saved_rows(number: int, layout: HeadLayout, tensors: Mapping[str, Tensor]) -> Removed:
    """Return the saved rows for undoing, those missing in a layout; after `finalize_` none were saved."""
    whole = HeadLayout(layout.num_heads, layout.num_kv_heads)
    removed: dict[str, dict[int, dict[str, Tensor]]] = {}
    for role, heads in absent_rows(whole, layout).items():
        for head, each in product(heads, (role, role + BIAS)):
            prefix = f"{number}.{head}.removed.{each}."
            rows = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            if "weight" in rows:
                removed.setdefault(each, {})[head] = rows
    return removed


def _differing_rows(number: int, site: Site, saved: Removed) -> set[str]:
    """Return the projections whose rows differ from the saved ones; raise CheckpointError for another shape."""
    differing = set()
    for role, rows in saved.items():
        at = rows_of(site, role)
        for head, tensors in rows.items():
            other = tensors["weight"]
            own = at.of(at.parameter.detach()).narrow(at.dimension, head * site.head_dim, site.head_dim).cpu()
            if own.shape != other.shape:
                raise CheckpointError(
                    f"layer {number}: the frozen heads have {role} rows {list(other.shape)}, the model "
                    f"{list(own.shape)}"
                )
            narrower = min(own.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
            if not torch.equal(own.to(narrower), other.to(narrower)):
                differing.add(role_of(at.name))
    return differing


def _differing_sums(site: Site, sums: Mapping[str, Mapping[str, str]]) -> set[str]:
    """Return the roles whose weights do not have the checksums `sums`, in the dtype of these; narrower ones pass."""
    differing = set()
    for role, recorded in sums.items():
        weight, dtype = site.projections()[role][0], getattr(torch, recorded["dtype"])
        comparable = torch.promote_types(weight.dtype, dtype) == weight.dtype
        if comparable and _checksum(weight.to(dtype)) != recorded["sha256"]:
            differing.add(role_of(role))
    return differing


def _checksum(weight: Tensor) -> str:
    """Return the SHA-256 of a weight's bytes."""
    return hashlib.sha256(weight.detach().cpu().flatten().view(torch.uint8).numpy().data).hexdigest()


def read_pattern(tensors: Mapping[str, Tensor], prefix: str, trainable: bool) -> Pattern:
    """Return the pattern stored under a prefix; raise CheckpointError when it is missing."""
    names = {name for kind in PATTERN_KINDS.values() for name in kind.parts}
    own = {name: tensors[prefix + name] for name in names if prefix + name in tensors}
    try:
        return pattern_from_state(own, trainable=trainable)
    except CheckpointError as error:
        raise CheckpointError(f"the pattern {prefix.rstrip('.')} is missing or incomplete: {error}") from error
