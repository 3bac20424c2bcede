"""Flash decoding, kernel "flash_decode": all heads of a layer for few queries after a cache, in one launch.

    live heads    o_i = sum_j softmax_j(scale q_i k_j) v_j
    frozen heads  o_i = sum_j P(i, j) v_j,  P(i, j) = exp(rho(i - j)) exp(alpha(j)) / Z(i)   (Eq. 3)

Keys are cut into parts that are summed at the same time, so that one query of few heads fills a device; a second launch
merges the parts. In plain PyTorch the sums are `live_attention` and `Backend.rows`. The launch serves
decoding and the few tokens of assisted generation; longer passes take PyTorch's kernels. Layers with frozen heads take
it by themselves where it can run, ordinary ones where it is named: with grouped queries after 64K tokens a step takes
2.4 ms, by PyTorch's kernel 17.6 (Qwen3-4B's shape, 12 layers, H200; docs/log.md).
"""

import torch
from torch import Tensor

from saf.ops.backend import Tables, ValueHeads, has_tangent, operator, uses_triton
from saf.ops.live import largest_group, score_scale
from saf.ops.tensors import CachePosition, cached_order, heads_like, unit_stride

# Dtypes of values: in float32 the keys and values read at once exceed a multiprocessor's shared memory.
DTYPES = (torch.bfloat16, torch.float16)
# Most queries of a KV head: the rows of one product, the fewest that tensor cores take. More would read keys again.
MOST_ROWS = 16


def decode_maps(kv_head: ValueHeads, num_frozen: int, device: torch.device) -> Tables:
    """Return which slots read which value head, int32; nothing without `kv_head`, the value head of every slot.

    Live slots read K value heads and frozen slots U, some of them the same; at most G slots of one kind share a head.
    `kv_read [K + U]` are these value heads in the layer's order, `kv_read_cached [K + U]` in that of a cache of fixed
    size (`cached_order`); `kv_readers [K + U, G]` are the slots that read each, then -1.
    """
    if kv_head is None:
        return {}
    # Built with the tables, before any pass: built during one, the maps would lie in the memory of the CUDA graph that
    # captures it, and be overwritten.
    # Live and frozen slots that read one value head are two entries: the former need its keys too, the latter none.
    order, num_live = cached_order(kv_head, num_frozen), len(kv_head) - num_frozen
    read, readers = [], []
    for slots in (range(num_live), range(num_live, len(kv_head))):
        for head in sorted({kv_head[slot] for slot in slots}):
            read.append(head)
            readers.append([slot for slot in slots if kv_head[slot] == head])
    most = max(map(len, readers))
    maps = {
        "kv_read": read,
        "kv_read_cached": [order.index(head) for head in read],
        "kv_readers": [slots + [-1] * (most - len(slots)) for slots in readers],
    }
    return {name: torch.tensor(values, dtype=torch.int32, device=device) for name, values in maps.items()}


def unsupported_reason(
    query: Tensor, key: Tensor, value: Tensor, live_kv: tuple[int, ...], tables: Tables | None
) -> str | None:
    """Return what `flash_decode` needs that a layer with `tables` does not have; None where it can run."""
    operands = (query, key, value)
    if not uses_triton(value.device, value.dtype) or {one.dtype for one in operands} - {*DTYPES}:
        return f"needs a CUDA device and values of 16 bits, got {value.device.type} and {value.dtype}: cast the model"
    # Frozen slots have no such limit: without keys to read, more programs share a value head (BLOCKS).
    if (group := largest_group(live_kv)) > MOST_ROWS:
        return f"takes at most {MOST_ROWS} query heads of a KV head, got {group}"
    if has_tangent(*operands):
        return "gives no derivatives in forward mode: take kernel 'math'"
    if torch.is_grad_enabled() and any(one.requires_grad for one in operands):
        return "gives no gradients: call the model under torch.no_grad()"
    if tables is not None and "kv_readers" not in tables:
        return "takes fixed patterns in tables of one backend, 'toeplitz' or 'linear', and kv_head in from_patterns"
    return None


def _heads_like(query, key, value, maps, patterns, *_) -> Tensor:
    return heads_like(query, query.shape[1] + (patterns[0].shape[0] if patterns else 0))


@operator("flash_decode", fake=_heads_like)
def decode_heads(
    query: Tensor, key: Tensor, value: Tensor, maps: list[Tensor], patterns: list[Tensor], first: Tensor | None,
    host_first: int, left_pad: Tensor | None, scale: float,
) -> Tensor:  # fmt: skip
    """Return live and then frozen heads, `[B, L + F, rows, D]` in the operands' dtype, stored as `[B, rows, ., D]`.

    `maps` are `kv_read` and `kv_readers` of `decode_maps`; without them equally many consecutive live slots read each
    of the first value heads. `patterns` are `distance`, `key_scale` and `row_scale` `[F, >=T]`; none without frozen
    heads. The first query stands at `first` (`[]`, on the device), at `host_first` where that is None.
    """
    from saf.ops.flash_decode_kernels import decode

    out = _heads_like(query, key, value, maps, patterns)
    if out.numel():
        decode(query, key, value, maps, patterns, host_first if first is None else first, left_pad, scale, out)
    return out


def flash_decode(
    query: Tensor, key: Tensor, value: Tensor, tables: Tables | None, position: CachePosition, scale: float | None, *,
    frozen: bool,
) -> Tensor:  # fmt: skip
    """Return live heads and with `frozen` the frozen ones, `[B, L + F, rows, D]`, stored as `[B, rows, L + F, D]`.

    `query [B, L, rows, D]`, `key [B, K, T, D]`, `value [B, H_kv, T, D]`; `tables` are those of the layer, None for an
    ordinary one. Values lie in `cached_order` where the device alone knows the position, in a cache of fixed size, and
    where frozen heads decode from a state instead.
    """
    on_device, on_host = position.first_operands
    maps: list[Tensor] = []
    patterns: list[Tensor] = []
    if tables is not None:
        # Frozen heads that decode from a state store no values, so that the cache is in its own order then, too.
        cached = on_device is not None or not frozen
        maps = [tables["kv_read_cached" if cached else "kv_read"], tables["kv_readers"]]
        patterns = [tables["distance"], tables["key_scale"], tables["row_scale"]] if frozen else []
    operands = map(unit_stride, (query, key, value))
    return decode_heads(
        *operands, maps, patterns, on_device, on_host, position.left_pad, score_scale(scale, query.shape[-1])
    )
