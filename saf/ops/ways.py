"""Which way a layer with live and frozen heads is computed: one table, and each of its ways.

The first way whose condition holds is taken (`WAYS`, at the end):

| way | when | what runs |
| --- | --- | --- |
| split | few rows on a GPU, with frozen heads or where kernel "split" is asked for; no gradients | `saf::split_rows` |
| ordinary | no head is frozen | attention |
| one launch | the backend mixes live heads too (`fused`), and there are some | the backend's launch of all heads |
| whole layer | no gradients, whole sequences, fixed patterns, a backend that infers | `saf::inference` |
| few rows | queries of a cache of fixed size, or few beside their keys; fixed patterns, a backend that decodes | each |
| frozen alone | no head is live | the backend's product |
| apart | otherwise | attention for live heads, the backend's product for frozen ones |

Frozen heads' patterns are fixed, trainable, or some of either: then each kind is mixed by itself (`_mix`).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from saf.ops.backend import Call
from saf.ops.backends import BACKENDS
from saf.ops.heads import even_queries, live_keys, part_heads, put_together, read_heads, take_heads
from saf.ops.live import live_attention
from saf.ops.positions import Rows, shift_rows
from saf.ops.rows.split import split, splits

if TYPE_CHECKING:  # heads are asked, not made, here: this file and theirs stand side by side
    from saf.ops.frozen_heads import FrozenHeads

WHOLE_SHARE = 4
"""The whole product is computed and cut where more than one row in so many is asked for; fewer make weights."""


def _has_no_frozen(call: Call) -> bool:
    """Return whether the layer is ordinary."""
    return call.frozen is None


def _attend(call: Call) -> tuple[Tensor, ...]:
    """Return live heads, `[B, L, Tq, D]`."""
    return (_live(call),)


def _live(call: Call) -> Tensor:
    """Return live heads, `[B, L, Tq, D]`, of keys and values as they lie where queries are fewer."""
    visible = None if call.places is None else call.places.visible
    options = {"scale": call.scale, "start": call.start, "visible": visible, "kernel": call.kernel}
    return live_heads(call.query, call.key, call.value, call.live_slots, **options)


def live_heads(query: Tensor, key: Tensor, value: Tensor, slots: tuple[int, ...], **options: Any) -> Tensor:
    """Return `live_attention` of live slots, `[B, L, Tq, D]`: `key [B, K, T, D]` of the value heads that they read.

    Uneven groups take expanded keys where sequences are whole; of fewer rows some queries are computed twice instead,
    and no keys are copied. `options` are those of `live_attention`.
    """
    if query.shape[-2] == key.shape[-2]:
        key, read = live_keys(key, slots)
        return live_attention(query, key, take_heads(value, read), **options)
    even, own = even_queries(query, slots)
    mixed = live_attention(even, key, take_heads(value, tuple(sorted(set(slots)))), **options)
    return mixed if own is None else take_heads(mixed, own)


def _mixes_live(call: Call) -> bool:
    """Return whether the backend computes live heads too, and there are some."""
    return call.frozen is not None and len(call.live_slots) > 0 and BACKENDS[call.frozen.backend].mixes_live


def _mix_all(call: Call) -> tuple[Tensor, ...]:
    """Return all heads from one launch of a backend; its maps know the value heads that slots read, and no others."""
    assert call.frozen is not None
    value = read_heads(call.value, call.live_slots, call.frozen_slots)
    query, key = call.query.to(value.dtype), call.key.to(value.dtype)  # as autocast does for SDPA: they may be wider
    tables = call.frozen.tables(value.dtype)
    return (BACKENDS[call.frozen.backend].mixed(query, key, value, tables, call.scale),)


def _infers(call: Call) -> bool:
    """Return whether a backend computes the layer at once: values have the dtype that autocast would give them."""
    frozen, value = call.frozen, call.value
    if frozen is None or call.apart or frozen.trainable or torch.is_grad_enabled() or _autocasts(value):
        return False
    if call.start is not None or not call.live_slots or call.query.shape[-2] != value.shape[-2] or call.places:
        return False
    backend = BACKENDS[frozen.backend]
    return backend.infers and backend.can_infer(value.device, value.dtype, frozen.tables(value.dtype))


def _infer(call: Call) -> tuple[Tensor, ...]:
    """Return all heads, projected where the call has a projection, from one operator."""
    assert call.frozen is not None
    return (BACKENDS[call.frozen.backend].infer(call, call.frozen.tables(call.value.dtype)),)


def are_few(frozen: "FrozenHeads", rows: int, length: int, start: Tensor | None) -> bool:
    """Return whether `rows` of so many positions are computed by themselves: fewer, and few or none of a whole product.

    A whole product of padded rows would have to move their values first.
    """
    able = BACKENDS[frozen.backend].decodes and not frozen.trainable
    return able and rows < length and (start is not None or rows * WHOLE_SHARE <= length)


def _has_few_rows(call: Call) -> bool:
    """Return whether frozen rows are computed where the device says they are, or where they are few."""
    if call.frozen is None:
        return False
    rows, length = call.query.shape[-2], call.value.shape[-2]
    return call.places is not None or are_few(call.frozen, rows, length, call.start)


def _mix_rows(call: Call) -> tuple[Tensor, ...]:
    """Return all heads, of few rows."""
    assert call.frozen is not None
    count, length = call.query.shape[-2], call.value.shape[-2]
    rows = Rows(length - count, count, call.start)
    if call.places is not None:
        rows = Rows(call.places.first, count, call.places.start)
    live = _live(call) if call.live_slots else None
    return (forward_rows(call.value, call.frozen_slots, call.frozen, rows, live),)


def forward_rows(
    value: Tensor, slots: tuple[int, ...], frozen: "FrozenHeads", rows: Rows, live: Tensor | None
) -> Tensor:
    """Return what the backend's `forward_rows` does."""
    return BACKENDS[frozen.backend].forward_rows(value, slots, frozen.tables(value.dtype), rows, live)


def _autocasts(value: Tensor) -> bool:
    """Return whether matrix products would compute in another dtype than that of `value`."""
    kind = value.device.type
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != value.dtype


def _has_no_live(call: Call) -> bool:
    """Return whether every head is frozen."""
    return not call.live_slots


def _mix_alone(call: Call) -> tuple[Tensor, ...]:
    """Return frozen heads, `[B, F, Tq, D]`."""
    assert call.frozen is not None
    value = take_heads(call.value, call.frozen_slots)
    return (mix_padded(value, call.frozen, call.start, call.query.shape[-2]),)


def _always(call: Call) -> bool:
    """Return True: the last way takes every call."""
    return True


def _attend_and_mix(call: Call) -> tuple[Tensor, ...]:
    """Return live heads, `[B, L, Tq, D]`, and frozen ones, `[B, F, Tq, D]`."""
    assert call.frozen is not None
    if call.query.shape[-2] < call.value.shape[-2]:
        live, selected = _live(call), take_heads(call.value, call.frozen_slots)
    else:
        key, slots = live_keys(call.key, call.live_slots)
        value, selected = part_heads(call.value, slots, call.frozen_slots)
        live = live_attention(call.query, key, value, scale=call.scale, start=call.start, kernel=call.kernel)
    return live, mix_padded(selected, call.frozen, call.start, call.query.shape[-2])


def mix_padded(value: Tensor, frozen: "FrozenHeads", start: Tensor | None, rows: int) -> Tensor:
    """Return the last `rows` of frozen heads, of values `[B, F, T, D]` that their slots read, in their order."""
    if start is None:
        return _mix(value, frozen, rows)
    length = value.shape[-2]
    shifted = shift_rows(value, start.to(value.device))
    mixed = shift_rows(_mix(shifted, frozen, length), -start.to(value.device))
    return mixed[:, :, length - rows :]


def _mix(value: Tensor, frozen: "FrozenHeads", rows: int) -> Tensor:
    """Mix `value [B, F, T, D]` by the backend, fixed and trainable patterns apart, and keep the last `rows`."""
    backend, tables = BACKENDS[frozen.backend], frozen.tables(value.dtype)
    if not frozen.trainable:
        return backend.forward(value, tables, rows)
    alpha, rho = frozen.logits()
    if not frozen.fixed:
        return backend.forward_trainable(value, alpha, rho, rows)
    fixed = backend.forward(take_heads(value, frozen.fixed), tables, rows)
    trained = backend.forward_trainable(take_heads(value, frozen.trainable), alpha, rho, rows)
    return put_together([(frozen.fixed, fixed), (frozen.trainable, trained)])


class Way(NamedTuple):
    """Compute a layer in one way, where it is the first that can.

    Attributes:
        name: as in the table above.
        when: whether a call goes this way, if none before did.
        run: returns all heads in one part, or live and frozen ones in two, `[B, n, Tq, D]`, in slot order.
        projects: whether `run` does the output product too, and returns `[B, T, C]`, where the call has one.
    """

    name: str
    when: Callable[[Call], bool]
    run: Callable[[Call], tuple[Tensor, ...]]
    projects: bool = False


WAYS = (
    Way("split", splits, split),
    Way("ordinary", _has_no_frozen, _attend),
    Way("one launch", _mixes_live, _mix_all),
    Way("whole layer", _infers, _infer, projects=True),
    Way("few rows", _has_few_rows, _mix_rows),
    Way("frozen alone", _has_no_live, _mix_alone),
    Way("apart", _always, _attend_and_mix),
)


def way_of(call: Call) -> Way:
    """Return the first way whose condition holds."""
    for way in WAYS:
        if way.when(call):
            return way
    raise AssertionError("the last way takes every call")
