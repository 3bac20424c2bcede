"""`frozen_attention`: the frozen heads of one layer, `P V`, left padding included; a backend does the mixing."""

from torch import Tensor

from saf.errors import InputError
from saf.ops.backends import BACKENDS
from saf.ops.frozen_heads import FrozenHeads
from saf.ops.positions import check_start, shift_rows
from saf.ops.slots import put_together, take_heads


def frozen_attention(
    value: Tensor,
    frozen: FrozenHeads,
    *,
    backend: str = "auto",
    start: Tensor | None = None,
    rows: int | None = None,
) -> Tensor:
    """The frozen heads alone, `P V` (Eq. 3): `value [B, H_kv, T, D]` to `[B, F, T, D]`.

    `frozen.kv_head` says which value head each frozen slot reads (in order when `H_kv = F`); `rows` keeps the
    last positions only; `start` is as in `mixed_attention`. Raises InputError as `mixed_attention` does.
    """
    frozen.check_call(value, backend)
    return mix_frozen(take_heads(value, frozen.value_heads(value.shape[1])), frozen, start, rows)


def mix_frozen(value: Tensor, frozen: FrozenHeads, start: Tensor | None, rows: int | None) -> Tensor:
    """`frozen_attention` of values `[B, F, T, D]` that frozen slots read, in their order; calls are checked before."""
    length = value.shape[-2]
    rows = length if rows is None else rows
    if not 0 <= rows <= length:
        raise InputError(f"rows are the last of {length} positions; got {rows}")
    if start is None:
        return _mix(value, frozen, rows)
    check_start(start, value.shape[0], length, wait=False)
    shifted = shift_rows(value, start.to(value.device))
    mixed = shift_rows(_mix(shifted, frozen, length), -start.to(value.device))
    return mixed[:, :, length - rows :]


def _mix(value: Tensor, frozen: FrozenHeads, rows: int) -> Tensor:
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
