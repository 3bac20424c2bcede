"""Which value head each live slot reads; `FrozenHeads.value_heads` answers the same for frozen slots."""

from torch import Tensor

from saf.errors import InputError
from saf.ops.frozen_heads import FrozenHeads


def live_value_heads(query: Tensor, key: Tensor, value: Tensor, frozen: FrozenHeads | None) -> tuple[int, ...]:
    """Return the value head of each live slot; raise InputError for heads that do not fit together."""
    num_live, num_value_heads = query.shape[1], value.shape[1]
    slots = None if frozen is None else frozen.kv_head
    num_heads = num_live + (0 if frozen is None else frozen.num_frozen)
    if slots is None:
        group = 1 if num_value_heads == num_heads else num_live // num_value_heads if num_value_heads else 0
        if num_value_heads != num_heads and (frozen is not None or group * num_value_heads != num_live):
            raise InputError(
                f"{num_live} live heads and {num_heads - num_live} frozen ones over {num_value_heads} value heads need "
                "kv_head; pass it to FrozenHeads.from_patterns"
            )
        slots = tuple(slot // group for slot in range(num_heads))
    if len(slots) != num_heads:
        raise InputError(
            f"kv_head has {len(slots)} slots, live and frozen heads make {num_live} + {num_heads - num_live}"
        )
    live = slots[:num_live]
    if num_live and key.shape[1] != len(set(live)):
        raise InputError(f"key holds the {len(set(live))} KV heads that live heads use, ascending; got {key.shape[1]}")
    return live
