"""`capture` runs a model over calibration sequences, unchanged, and copies queries and keys of some layers."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from saf.errors import InputError, UnsupportedError
from saf.heads import Head, HeadSet
from saf.models.adapter import ON_META, Adapter, Site, check_unsharded, rows_of


class CapturedLayer(NamedTuple):
    """Rotated queries and keys of a layer over all sequences; zeros follow shorter sequences."""

    query: Tensor
    """`[N, heads, T, D]`."""
    key: Tensor
    """`[N, K, T, D]`, the keys that these queries read."""
    kv_head: list[int]
    """The key that each query reads."""


def capture(adapter: Adapter, heads: HeadSet, layers: Iterable[int], ids: Sequence[Tensor]) -> dict[int, CapturedLayer]:
    """Run the model over all batches, the longest first, and return the queries and keys of `heads` in some layers.

    Each is copied to its place at once, so that no more is held than the result and one forward pass.
    """
    sites, count, length = adapter.sites(), sum(map(len, ids)), ids[0].shape[1]
    slots = {layer: read_slots(sites[layer], heads.in_layer(layer)) for layer in layers}
    captured: dict[int, CapturedLayer] = {}
    filled = dict.fromkeys(slots, 0)

    def space(part: Tensor, own: int) -> Tensor:
        # Positions lie outside heads in memory, as models store them.
        return part.new_empty(count, length, own, part.shape[3]).transpose(1, 2)

    def receive(layer: int, query: Tensor, key: Tensor) -> None:
        queries, keys, kv_head = slots[layer]
        if layer not in captured:
            captured[layer] = CapturedLayer(space(query, len(queries)), space(key, len(keys)), kv_head)
        start, end = filled[layer], filled[layer] + len(query)
        filled[layer] = end
        if end <= count:
            _copy(captured[layer].query[start:end], query, queries)
            _copy(captured[layer].key[start:end], key, keys)

    with ExitStack() as stack:
        for layer in slots:
            stack.enter_context(sites[layer].capture(partial(receive, layer)))
        for tokens in ids:
            adapter.run(tokens.to(adapter.device))
    for layer, number in filled.items():
        if number != count:
            raise UnsupportedError(
                f"layer {layer} must attend once in a pass, got {number} sequences of {count}; restore the forward "
                "pass and configuration of transformers"
            )
    return captured


def _copy(space: Tensor, part: Tensor, heads: list[int]) -> None:
    """Copy some heads of one batch to their space, which may be longer."""
    length = part.shape[2]
    space[:, :, length:] = 0
    space[:, :, :length].copy_(part if len(heads) == part.shape[1] else part[:, heads])


def read_slots(site: Site, heads: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Return the query slots of some live heads, the key slots that they read, and which of these each head reads."""
    queries = [site.layout.live.index(head) for head in heads]
    read = [site.layout.key_head[slot] for slot in queries]
    keys = sorted(set(read))
    return queries, keys, [keys.index(key) for key in read]


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch every module to evaluation mode, and back to its own mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def check_vocabulary(adapter: Adapter, ids: Sequence[Tensor]) -> None:
    """Raise InputError for a token id that the model does not know; on a GPU it would end the process.

    A model without numbers (on the meta device) raises InputError too, sharded weights UnsupportedError.
    """
    for site in adapter.sites():
        check_unsharded("query", rows_of(site, "query").parameter)
    if adapter.device.type == "meta":
        raise InputError(ON_META)
    size = adapter.vocab_size
    low, high = min(int(each.min()) for each in ids), max(int(each.max()) for each in ids)
    if low < 0 or (size is not None and high >= size):
        raise InputError(f"token ids of batches must lie in [0, {size}); got {low if low < 0 else high}")


def measurable_heads(adapter: Adapter, heads: Iterable[Head] | None = None) -> HeadSet:
    """Return the heads to measure: by default all live ones of layers that can be frozen.

    Raises InputError for a head that is not live, UnsupportedError for one in a layer that stays ordinary, or where
    every layer does.
    """
    live, sites = adapter.heads("live"), adapter.sites()
    reasons = {
        layer: site.unsupported_reason for layer, site in enumerate(sites) if site.unsupported_reason is not None
    }
    if reasons and len(reasons) == len(sites):
        raise UnsupportedError(f"no head of this model can be frozen: {reasons[0]}")
    ordinary = HeadSet(head for head in live if head[0] in reasons)
    chosen = live - ordinary if heads is None else HeadSet(heads)
    if len(missing := chosen - live):
        raise InputError(f"only live heads can be measured; these are frozen or do not exist: {missing.to_list()}")
    if len(refused := chosen & ordinary):
        raise UnsupportedError(f"heads {refused.to_list()} cannot be measured: {reasons[next(iter(refused))[0]]}")
    return chosen
