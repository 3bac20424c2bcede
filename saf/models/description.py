"""The frozen heads of a model as plain data, in the files `saf.json` and `saf.safetensors`."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from saf.errors import CheckpointError, InputError, UnsupportedError
from saf.heads import EDITED, HeadLayout
from saf.models.adapter import ON_META, Adapter, Site
from saf.records.files import check_file, file_hash, read_json, read_tensors, write_json, write_tensors

STATE_FILE, TENSORS_FILE = "saf.json", "saf.safetensors"
SCHEMA = "saf.heads/1"
OPENS = "import saf.integrations.transformers"
"""The import by which `from_pretrained` opens folders of models with frozen heads."""
Sums = dict[str, dict[str, str]]
"""dtype and SHA-256 of one layer's projections, by role."""


def described(sites: Sequence[Site]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the edited heads of every layer as values for JSON, and their tensors for safetensors.

    `trainable` lists the heads whose patterns are trained. Tensors are `layer.head.alpha`, `.rho` (or `.weights`), and
    the removed rows, `layer.head.removed.role.*`, by KV head for keys and values.
    """
    layers, tensors = [], {}
    for number, site in enumerate(sites):
        frozen = site.frozen
        patterns = dict(zip(site.layout.frozen, [] if frozen is None else frozen.patterns, strict=True))
        layers.append(
            {
                "num_heads": site.layout.num_heads,
                "num_kv_heads": site.layout.num_kv_heads,
                **{kind: list(getattr(site.layout, kind)) for kind in EDITED},
                "trainable": [head for head, one in patterns.items() if one.trainable],
                "backend": None if frozen is None else frozen.backend,
            }
        )
        for head, pattern in patterns.items():
            tensors |= {f"{number}.{head}.{name}": part.cpu().contiguous() for name, part in pattern.state().items()}
        for role, of in site.removed.items():
            for head, rows in of.items():
                prefix = f"{number}.{head}.removed.{role}."
                tensors |= {prefix + name: tensor.contiguous() for name, tensor in rows.items()}
    return {"schema": SCHEMA, "layers": layers}, tensors


def recorded_layouts(state: Mapping[str, Any]) -> list[HeadLayout]:
    """Return the layouts of the layers that `described` recorded, in order."""
    return [
        HeadLayout(layer["num_heads"], layer["num_kv_heads"], **{kind: tuple(layer[kind]) for kind in EDITED})
        for layer in state["layers"]
    ]


def described_beside(adapter: Adapter) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return `described` with checksums of the weights, for a model that another library saves.

    Raises what `check_savable` raises.
    """
    check_savable(adapter)
    state, tensors = described(adapter.sites())
    for layer, site in zip(state["layers"], adapter.sites(), strict=True):
        layer["weights"] = sums_of(site)
    return state | {"attention": adapter.attention_settings()}, tensors


def check_savable(adapter: Adapter) -> None:
    """Raise UnsupportedError for weights that are not plain, InputError for those on the meta device."""
    for site in adapter.sites():
        check_plain_weights(site)
        if any(weight.is_meta for weight, _ in site.projections().values()):
            raise InputError(ON_META)


def check_plain_weights(site: Site) -> None:
    """Raise UnsupportedError for projections whose weights are no plain parameters of their own modules.

    Quantised and sharded weights have no rows to move; weights that a pass computes, as pruning masks and norms of
    `torch.nn.utils` do, would come back in the old order of heads.
    """
    own = {id(parameter) for module in site.attention.modules() for parameter in module._parameters.values()}
    for role, (weight, _) in site.projections().items():
        check_unsharded(role, weight)
        if type(weight) is not nn.Parameter or id(weight) not in own:
            raise UnsupportedError(
                f"weights of a layer's {role} must be a parameter of its own, got {type(weight).__name__}: freeze and "
                "save before weights are quantised, after pruning masks and norms are made permanent"
            )


def check_unsharded(role: str, weight: Tensor) -> None:
    """Raise UnsupportedError for a weight of which each process holds a share (fully_shard, tensor parallelism)."""
    if type(weight).__name__ == "DTensor":
        raise UnsupportedError(
            f"the weights of a layer's {role} must be whole, got a process's share (DTensor): calibrate, freeze and "
            "save before fully_shard or tensor parallelism"
        )


def write_description(folder: Path, state: Mapping[str, Any], tensors: Mapping[str, Tensor], *others: Path) -> None:
    """Write `saf.safetensors`, then `saf.json` with its SHA-256 sum and those of `others`, files of the same folder."""
    written = [write_tensors(folder / TENSORS_FILE, tensors), *others]
    write_json(folder / STATE_FILE, {**state, "sha256": {path.name: file_hash(path) for path in written}})


def read_description(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read what `write_description` wrote, checked against its sums, which a checkpoint has in its manifest instead.

    Raises CheckpointError for a file that is missing, damaged or of another schema.
    """
    state = read_json(folder / STATE_FILE, error=CheckpointError)
    if (schema := state.get("schema")) != SCHEMA:
        raise CheckpointError(f"{folder / STATE_FILE}: expected frozen heads of schema {SCHEMA!r}; got {schema!r}")
    for name, expected in state.get("sha256", {}).items():
        check_file(folder / name, sha256=expected, error=CheckpointError)
    return state, read_tensors(folder / TENSORS_FILE, error=CheckpointError)


def sums_of(site: Site) -> Sums:
    """Return the checksums of a layer's present projections: without removed rows, heads in slot order."""
    return {
        role: {"dtype": str(weight.dtype).removeprefix("torch."), "sha256": weight_sum(weight)}
        for role, (weight, _) in site.projections().items()
    }


def weight_sum(weight: Tensor) -> str:
    """Return the SHA-256 of a weight's bytes."""
    return hashlib.sha256(weight.detach().cpu().flatten().view(torch.uint8).numpy().data).hexdigest()
