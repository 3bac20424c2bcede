"""`capture` runs a model over calibration sequences, unchanged, and copies queries and keys of some layers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from saf.errors import InputError, UnsupportedError
from saf.heads import Head, HeadSet
from saf.models.adapter import ON_META, Adapter, Site, check_unsharded, rows_of


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


def check_vocabulary(adapter: Adapter, ids: Iterable[Tensor]) -> None:
    """Raise InputError for a token id without an embedding, which on a device would be an assertion.

    Also for a model on the meta device; raises UnsupportedError for sharded weights.
    """
    for site in adapter.sites():
        check_unsharded("query", rows_of(site, "query").parameter)
    if adapter.device.type == "meta":
        raise InputError(ON_META)
    known = adapter.vocab_size
    extremes = [each.aminmax() for each in ids if each.numel()]
    low, high = min(int(each.min) for each in extremes), max(int(each.max) for each in extremes)
    if low < 0 or (known is not None and high >= known):
        raise InputError(f"token ids of batches must lie in [0, {known}); got {low if low < 0 else high}")


def measurable_heads(adapter: Adapter, heads: Iterable[Head] | None = None) -> HeadSet:
    """Return the heads to measure, for None all live ones of layers that can be frozen.

    Raises InputError for a head that is not live, UnsupportedError for one whose layer stays ordinary, or where all do.
    """
    live, sites = adapter.heads("live"), adapter.sites()
    reasons = {layer: reason for layer, site in enumerate(sites) if (reason := site.stays_ordinary) is not None}
    if reasons and len(reasons) == len(sites):
        raise UnsupportedError(f"no head of this model can be frozen: {reasons[0]}")
    ordinary = HeadSet(head for head in live if head[0] in reasons)
    chosen = live - ordinary if heads is None else HeadSet(heads)
    if len(missing := chosen - live):
        raise InputError(f"only live heads can be measured; these are frozen or do not exist: {missing.to_list()}")
    if len(refused := chosen & ordinary):
        raise UnsupportedError(f"heads {refused.to_list()} cannot be measured: {reasons[next(iter(refused))[0]]}")
    return chosen


class CapturedSlots(NamedTuple):
    """The live queries and keys of a layer to copy, and the copied key that each copied query reads."""

    queries: list[int]
    keys: list[int]
    kv_head: list[int]

    @classmethod
    def of(cls, site: Site, heads: Sequence[int]) -> "CapturedSlots":
        """Return the slots for measuring `heads` of a layer."""
        queries = [site.layout.live.index(head) for head in heads]
        read = [site.layout.key_head[slot] for slot in queries]
        keys = sorted(set(read))
        return cls(queries, keys, [keys.index(key) for key in read])


def capture(
    adapter: Adapter, slots: Mapping[int, CapturedSlots], ids: Sequence[Tensor]
) -> dict[int, tuple[Tensor, Tensor]]:
    """Run the model over all batches; return rotated queries `[N, heads, T, D]` and keys `[N, K, T, D]` by layer.

    Each is copied to its place at once, so that no more is held than the result and one forward pass. T is the
    first batch's, the longest; zeros follow shorter ones.
    """
    sites, count, length = adapter.sites(), sum(map(len, ids)), ids[0].shape[1]
    copies: dict[tuple[int, int], Tensor] = {}
    filled = dict.fromkeys(slots, 0)

    def receive(layer: int, query: Tensor, key: Tensor) -> None:
        start, end = filled[layer], filled[layer] + len(query)
        filled[layer] = end
        if end > count:
            return
        for number, (part, heads) in enumerate(((query, slots[layer].queries), (key, slots[layer].keys))):
            if (layer, number) not in copies:
                # Positions lie outside heads in memory, as models store them.
                copies[layer, number] = part.new_empty(count, length, len(heads), part.shape[3]).transpose(1, 2)
            place = copies[layer, number][start:end]
            place[:, :, part.shape[2] :] = 0
            place[:, :, : part.shape[2]].copy_(part if len(heads) == part.shape[1] else part[:, heads])

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
    return {layer: (copies[layer, 0], copies[layer, 1]) for layer in slots}
