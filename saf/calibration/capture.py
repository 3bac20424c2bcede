"""Running a model over the calibration sequences without a trace, and keeping queries and keys of some layers."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from saf.adapters import Adapter, Site
from saf.errors import InputError

CAPTURE_BYTES = {"cpu": 4 << 30, "cuda": 24 << 30}

Batch = Tensor | Mapping[str, Tensor]


def read_batches(batches: Iterable[Batch]) -> list[Tensor]:
    """Return the token ids of batches on the CPU; raise InputError unless they are integer `[B, T]` of one T."""
    ids = []
    for batch in batches:
        tokens = batch["input_ids"] if isinstance(batch, Mapping) else batch
        if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.is_floating_point():
            raise InputError(f"batches must be integer tensors [B, T]; got {getattr(tokens, 'shape', type(tokens))}")
        if isinstance(batch, Mapping) and not bool(torch.as_tensor(batch.get("attention_mask", 1)).all()):
            raise InputError("calibration sequences must not be padded; give sequences of one full length")
        ids.append(tokens.cpu())
    if not ids or not sum(map(len, ids)):
        raise InputError("calibration needs at least one sequence; got none")
    if len(lengths := {tokens.shape[1] for tokens in ids}) > 1:
        raise InputError(f"calibration sequences must have one length; got {sorted(lengths)}")
    return ids


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch every module to evaluation mode and give each its own mode back afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def layer_groups(
    sites: Sequence[Site], layers: Sequence[int], tokens: int, capture_bytes: int | None
) -> list[list[int]]:
    """Split `layers` into consecutive groups whose queries and keys of `tokens` tokens fit into `capture_bytes`."""
    weight = sites[0].projections()["query"][0]
    budget = CAPTURE_BYTES.get(weight.device.type, CAPTURE_BYTES["cpu"]) if capture_bytes is None else capture_bytes
    heads = sites[0].layout.num_heads + sites[0].layout.num_kv_heads
    each = tokens * heads * sites[0].head_dim * weight.element_size()
    size = max(1, budget // each)
    return [list(layers[first : first + size]) for first in range(0, len(layers), size)]


def capture(adapter: Adapter, layers: list[int], ids: list[Tensor]) -> dict[int, tuple[Tensor, Tensor]]:
    """Run the model over all sequences and return queries and keys `[N, heads, T, D]` of some layers."""
    sites = adapter.sites()
    device = sites[0].projections()["query"][0].device
    kept: dict[int, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in layers}
    handles = [
        sites[layer].capture(lambda query, key, kept=kept[layer]: kept.append((query.detach(), key.detach())))
        for layer in layers
    ]
    try:
        for tokens in ids:
            adapter.run(tokens.to(device))
    finally:
        for handle in handles:
            handle.remove()
    joined = {}
    for layer in layers:
        parts = kept.pop(layer)
        if parts:
            joined[layer] = (torch.cat([query for query, _ in parts]), torch.cat([key for _, key in parts]))
    return joined


def live_kv_index(site: Site) -> list[int]:
    """For each live slot, which of the captured key heads it reads."""
    used = site.layout.kv_head[: site.layout.num_live]
    order = sorted(set(used))
    return [order.index(head) for head in used]


def hash_of(ids: Tensor) -> str:
    """Return the SHA-256 of token ids."""
    return hashlib.sha256(ids.long().contiguous().numpy().tobytes()).hexdigest()
