"""The frozen heads of a model as plain data, in the files `saf.json` and `saf.safetensors` of checkpoints and folders.

`description_of` returns these data, `write_description` and `read_description` write and read their files. `restore_`
edits a model by them before `load_weights_` loads the saved weights. Where another library loads the weights, `resize_`
comes before it and `restore_` afterwards. `storage_report` counts bytes.
"""

import hashlib
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from saf.errors import CheckpointError, InputError, SafWarning, UnsupportedError
from saf.heads import BIAS, EDITED, Head, HeadLayout
from saf.models.adapter import ON_META, Adapter, Removed, Site, adapter_for, find_rows, rows_of
from saf.ops import choose_backend
from saf.patterns import PATTERN_KINDS, Pattern, pattern_from_state
from saf.records.files import check_file, file_hash, read_json, read_tensors, write_json, write_tensors
from saf.surgery import (
    LayerEdit,
    apply_edits_,
    check_plain_weights,
    editable,
    patterns_of,
    plan_edit,
    record_edit,
    replace_data_,
    values_of,
)

STATE_FILE, TENSORS_FILE = "saf.json", "saf.safetensors"
SCHEMA = "saf.heads/1"
IMPORT_LINE = "import saf.integrations.transformers"  # lets `from_pretrained` open folders with frozen heads

# --- the data and their files


def description_of(adapter: Adapter, *, checksums: bool = False) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the edited heads of every layer as values for JSON, and their tensors for safetensors.

    `trainable` lists the heads whose patterns are trained. Tensors are `layer.head.alpha`, `.rho` (or `.weights`), and
    the removed rows, `layer.head.removed.role.*`, by KV head for keys and values. For a model that another library
    saves, `checksums` adds the settings of its attention and the checksums of the weights as they are: without removed
    rows, heads in slot order.
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
            layer["weights"] = {
                role: {"dtype": str(weight.dtype).removeprefix("torch."), "sha256": _checksum(weight)}
                for role, (weight, _) in site.projections().items()
            }
        layers.append(layer)
        for head, pattern in patterns.items():
            tensors |= {f"{number}.{head}.{name}": part.cpu().contiguous() for name, part in pattern.state().items()}
        for role, by_head in site.removed.items():
            for head, rows in by_head.items():
                prefix = f"{number}.{head}.removed.{role}."
                tensors |= {prefix + name: tensor.contiguous() for name, tensor in rows.items()}
    state: dict[str, Any] = {"schema": SCHEMA, "layers": layers}
    if checksums:
        state["attention"] = adapter.attention_settings()
    return state, tensors


def check_savable(adapter: Adapter) -> None:
    """Raise UnsupportedError for weights that are not plain, InputError for those on the meta device."""
    for site in adapter.sites():
        check_plain_weights(site)
        if any(weight.is_meta for weight, _ in site.projections().values()):
            raise InputError(ON_META)


def write_description(folder: Path, state: Mapping[str, Any], tensors: Mapping[str, Tensor], *others: Path) -> None:
    """Write `saf.safetensors`, then `saf.json` with its SHA-256 and those of `others`, files of the same folder."""
    # The JSON last, as it has the checksums of the others.
    written = [write_tensors(folder / TENSORS_FILE, tensors), *others]
    write_json(folder / STATE_FILE, {**state, "sha256": {path.name: file_hash(path) for path in written}})


def read_description(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read what `write_description` wrote and check its checksums; a checkpoint has these in its manifest instead.

    Raises CheckpointError for a file that is missing, damaged or of another schema.
    """
    state = read_json(folder / STATE_FILE, schema=SCHEMA, error=CheckpointError)
    for name, expected in state.get("sha256", {}).items():
        check_file(folder / name, sha256=expected, error=CheckpointError)
    return state, read_tensors(folder / TENSORS_FILE, error=CheckpointError)


# --- restoring a model's heads


@torch.inference_mode(False)
@torch.no_grad()
def restore_(
    model: nn.Module,
    state: dict[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    backend: str | None = None,
    compare: bool = False,
) -> None:
    """Give a model without frozen heads the layout and patterns of `description_of`, and the saved rows for undoing.

    Its weights are cut to the saved shapes, unless `resize_` did that: load the saved ones afterwards. With `compare`
    the model has its weights already: rows move as when heads are frozen. A warning then lists attention weights that
    differ from the saved ones, by the removed rows and by the checksums of the rows that stay. Without `backend` each
    layer has the one it was saved with, "auto" where that cannot run. Raises CheckpointError, with the model unchanged,
    for a state of another shape of model, or without some pattern.
    """
    edits = _plan_edits(model, state, tensors, backend)
    saved = _saved_rows(edits, tensors)
    if compare:
        apply_edits_([*edits.values()], None)
        checksums = [layer.get("weights", {}) for layer in state["layers"]]
        _warn_of_other_weights(adapter_for(model), saved, checksums)
    for number, edit in edits.items():
        if not compare:
            _cut_(edit.site, edit.layout)
        edit.site.assign(edit.layout, edit.frozen, saved[number])
    record_edit([edit.site for edit in edits.values()])


@torch.inference_mode(False)
@torch.no_grad()
def resize_(model: nn.Module, state: dict[str, Any]) -> list[tuple[Any, HeadLayout]]:
    """Cut the weights of a model, perhaps on the meta device, to the shapes of `description_of`, for `restore_`.

    Returns the layers with edited heads, with their layouts. Raises CheckpointError as `restore_` does.
    """
    edited = [(site, layout) for _, site, layout, _ in _layers(model, state) if not layout.ordinary]
    for site, layout in edited:
        site.check(layout)
        check_plain_weights(site)
        _cut_(site, layout)  # without moving rows: on the meta device there is nothing to move
    return edited


def _cut_(site: Site, layout: HeadLayout) -> None:
    """Cut projections to the shapes of a layout; what they hold is overwritten later."""
    for name, (parameter, dimension) in site.projections().items():
        if (rows := len(layout.rows_in(name)) * site.head_dim) != parameter.shape[dimension]:
            replace_data_(parameter, parameter.data.narrow(dimension, 0, rows).clone())


def load_weights_(model: nn.Module, weights: dict[str, Tensor], source: Path) -> None:
    """Load the weights of `source` into a model that `restore_` has cut; raise CheckpointError if they do not fit."""
    try:
        model.load_state_dict(weights)
    except (RuntimeError, CheckpointError) as error:
        raise CheckpointError(f"{source} does not fit the model it describes: {error}") from error


def _layers(model: nn.Module, state: dict[str, Any]) -> list[tuple[int, Site, HeadLayout, dict[str, Any]]]:
    """Return number, site, saved layout and state of every layer; raise CheckpointError for another shape of model."""
    sites, layers = adapter_for(model).sites(), state["layers"]
    if len(layers) != len(sites):
        raise CheckpointError(f"frozen heads of a model with {len(layers)} layers; this one has {len(sites)}")
    described = []
    for number, (site, layer) in enumerate(zip(sites, layers, strict=True)):
        shape, layout = (layer["num_heads"], layer["num_kv_heads"]), site.layout
        if shape != (layout.num_heads, layout.num_kv_heads) or not layout.ordinary:
            raise CheckpointError(
                f"layer {number}: the frozen heads need {shape[0]} query and {shape[1]} KV heads, all live; the model "
                f"has {layout.num_heads} and {layout.num_kv_heads}, {layout.num_live} live"
            )
        edited = {kind: tuple(layer.get(kind, ())) for kind in EDITED}
        described.append((number, site, replace(layout, **edited), layer))
    return described


def _plan_edits(
    model: nn.Module, state: dict[str, Any], tensors: Mapping[str, Tensor], backend: str | None
) -> dict[int, LayerEdit]:
    """Return the edits of the layers with edited heads, by number, all checked."""
    editable(model)
    edits = {}
    for number, site, layout, layer in _layers(model, state):
        if layout.ordinary:
            continue
        trained, name = layer.get("trainable", ()), backend or layer.get("backend") or "auto"
        # If the backend that the caller names cannot run, `plan_edit` raises. The saved one may be of another machine.
        if backend is None:
            device, dtypes = values_of(site)
            try:
                choose_backend(name, device=device, dtypes=dtypes, trainable=bool(trained))
            except (InputError, UnsupportedError) as error:
                message = f"frozen heads saved with backend {name!r} run with 'auto', other rounding: {error}"
                warnings.warn(message, SafWarning, stacklevel=6)  # past two decorators, at the caller of load
                name = "auto"
        patterns = {head: read_pattern(tensors, (number, head), head in trained) for head in layout.frozen}
        edits[number] = plan_edit(site, layout, patterns, backend=name, optimizer=None)
    return edits


def read_pattern(tensors: Mapping[str, Tensor], head: Head, trainable: bool) -> Pattern:
    """Return the stored pattern of a head; raise CheckpointError when it is missing."""
    layer, number = head
    names = {name: f"{layer}.{number}.{name}" for kind in PATTERN_KINDS.values() for name in kind.parts}
    own = {name: tensors[key] for name, key in names.items() if key in tensors}
    try:
        return pattern_from_state(own, trainable=trainable)
    except CheckpointError as error:
        raise CheckpointError(f"layer {layer} head {number} must have a whole pattern: {error}") from error


def _saved_rows(edits: Mapping[int, LayerEdit], tensors: Mapping[str, Tensor]) -> Mapping[int, Removed]:
    """Return the saved rows for undoing, by layer; a model was saved without any after `finalize_`.

    Raises CheckpointError for rows of another shape than the model's.
    """
    saved: dict[int, dict[str, dict[int, dict[str, Tensor]]]] = {number: {} for number in edits}
    for key, rows in tensors.items():
        number, head, part, *names = key.split(".", 4)
        if part != "removed":
            continue
        role, name = names
        site = edits[int(number)].site
        own = find_rows(site, role)
        shape: list[int] = []  # the model has no such rows, perhaps no biases
        if own is not None:
            shape = list(own.parameter.shape)
            shape[own.dimension] = site.head_dim
        if name == "weight" and list(rows.shape) != shape:
            raise CheckpointError(
                f"layer {number}: the frozen heads have {role} rows {list(rows.shape)}, the model {shape}"
            )
        saved[int(number)].setdefault(role, {}).setdefault(int(head), {})[name] = rows
    return saved


def _warn_of_other_weights(
    adapter: Adapter, saved: Mapping[int, Removed], checksums: list[Mapping[str, Mapping[str, str]]]
) -> None:
    """Warn of projections, by layer, whose removed rows or checksums differ from the saved ones."""
    listed = []
    for number, site in enumerate(adapter.sites()):
        differing = set()
        for role, rows in saved.get(number, {}).items():
            for head, tensors in rows.items():
                own, other = site.removed[role][head]["weight"], tensors["weight"]
                # In the narrower dtype: a model in bfloat16 has the rounded rows of a file in float32.
                narrower = min(own.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
                if not torch.equal(own.to(narrower), other.to(narrower)):
                    differing.add(rows_of(site, role).name.removesuffix(BIAS))
        for role, recorded in checksums[number].items():
            weight, dtype = site.projections()[role][0], getattr(torch, recorded["dtype"])
            # Checksums are of the saved dtype's bits, which a model in a narrower dtype no longer has.
            comparable = torch.promote_types(weight.dtype, dtype) == weight.dtype
            if comparable and _checksum(weight.to(dtype)) != recorded["sha256"]:
                differing.add(role.removesuffix(BIAS))
        if differing:
            listed.append(f"layer {number}: {', '.join(sorted(differing))}")
    if listed:
        if len(listed) > 3:
            listed[3:] = [f"and {len(listed) - 3} more"]
        warnings.warn(
            f"the model's weights differ from those saved with the frozen heads ({'; '.join(listed)}): load the state "
            "dict of the frozen model now",
            SafWarning,
            stacklevel=6,  # past two decorators, at the caller of load
        )


def _checksum(weight: Tensor) -> str:
    return hashlib.sha256(weight.detach().cpu().flatten().view(torch.uint8).numpy().data).hexdigest()


# --- bytes of patterns: as matrices, as vectors, and as a backend holds them


@dataclass(frozen=True)
class StorageReport:
    """The bytes of one set of patterns in each form, in float32; printed in GB (1e9 bytes)."""

    dense_by_layer: int  # a `[H, T, T]` buffer in each layer with a frozen head, as in the paper's dense implementation
    dense_packed: int  # the frozen heads' matrices alone
    compact: int  # key logits, distance logits and normalisers of the frozen heads
    parameters: int | None = None  # the patterns as they are saved: of exponential ones alpha, band and poles
    # Tables of a model's layers for every dtype of values, and trained logits. The patterns and the rows for undoing
    # are on the CPU and not counted.
    allocated: int | None = None

    @property
    def ratio(self) -> float:
        """How many times the bytes of `compact` `dense_packed` has."""
        return self.dense_packed / self.compact if self.compact else 1.0

    def __str__(self) -> str:
        sizes = ((name, size / 1e9) for name, size in vars(self).items() if size is not None)
        return ", ".join(f"{name.replace('_', ' ')} {size:.3g} GB" for name, size in sizes)


def storage_report(model: nn.Module) -> StorageReport:
    """Return the storage of the patterns of a model's frozen heads."""
    adapter = adapter_for(model)
    frozen = [site.frozen for site in adapter.sites() if site.frozen is not None]
    length = max((one.max_length for one in frozen), default=1)
    report = storage_of(list(adapter.heads("frozen")), length=length, num_heads=adapter.sites()[0].layout.num_heads)
    states = [pattern.state() for one in frozen for pattern in one.patterns]
    parameters = sum(tensor.nbytes for state in states for tensor in state.values())
    return replace(report, parameters=parameters, allocated=sum(one.allocated for one in frozen))


def storage_of(heads: Collection[Head], *, length: int, num_heads: int) -> StorageReport:
    """Return the storage of patterns over `length` tokens for these heads, in layers of `num_heads` heads.

    >>> storage_of([(0, 1), (0, 2), (3, 0)], length=1024, num_heads=12).dense_packed
    12582912
    """
    matrix = 4 * length * length  # the paper's buffers hold the zeros above the diagonal, too
    return StorageReport(
        dense_by_layer=len({layer for layer, _ in heads}) * num_heads * matrix,
        dense_packed=len(heads) * matrix,
        compact=len(heads) * 3 * 4 * length,
    )
