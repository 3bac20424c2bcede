"""Multi-head attention whose heads may be frozen or pruned; weights lie in slot order, live heads first."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saf.errors import UnsupportedError
from saf.heads import HeadLayout
from saf.models.rotary import rotate
from saf.ops import FrozenHeads, attention_products, frozen_attention, live_attention, summed
from saf.ops.heads import flat_heads
from saf.ops.layout import LayoutMixin


class LiveAttention(nn.Module):
    """Mix a layer's values by its live heads; a module of its own so that hooks can see queries and keys."""

    def __init__(self):
        super().__init__()
        self.kernel = "auto"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        start: Tensor | None,
        frozen: FrozenHeads | None,
        projection: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Attend: `query`, `key` `[B, L, T, D]`, rotated, `value [B, H, T, D]`.

        Returns the heads, `[B, H, T, D]`, of a layer without frozen ones; of one with them what `projection [C, H * D]`
        makes of all its heads, in one or two products `[B, T, C]`.
        """
        if frozen is None or projection is None:
            return (live_attention(query, key, value, left_pad=start, kernel=self.kernel),)
        return attention_products(query, key, value, frozen, projection, left_pad=start, kernel=self.kernel)


class Attention(LayoutMixin):
    """Project and mix one layer's heads. Frozen ones have no rows in `q_proj` and `k_proj`, pruned ones nowhere."""

    frozen: FrozenHeads | None

    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__()
        self.layout = HeadLayout(num_heads, num_heads)
        self.head_dim = hidden_size // num_heads
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.live = LiveAttention()
        # A module from the start: programs compiled before any head was frozen serve after all are live again.
        self.register_module("frozen", None)
        self.removed: Mapping[str, Mapping[int, Mapping[str, Tensor]]] = {}

    def weights(self) -> dict[str, Tensor]:
        """Return the projections' weights by role."""
        projections = {"query": self.q_proj, "key": self.k_proj, "value": self.v_proj, "output": self.o_proj}
        return {role: plain_weight(projection) for role, projection in projections.items()}

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, start: Tensor | None) -> Tensor:
        """Mix positions: `x [B, T, C]` to `[B, T, C]`."""
        return summed(self.products(x, rotation, start))

    def products(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, start: Tensor | None) -> tuple[Tensor, ...]:
        """Return one or two products `[B, T, C]` whose sum is the forward pass, for whoever adds more to it.

        One product makes queries, keys and values, so that its backward pass is one product too. Heads stay in the
        memory order `[B, T, H, D]` throughout: nothing is transposed in memory.
        """
        # Counted by rows: a compiler that reads the layout has a program for each choice of heads.
        num_live, num_slots = (len(plain_weight(each)) // self.head_dim for each in (self.q_proj, self.v_proj))
        # Empty weights get no gradient: clip_grad_norm_ finds no largest element in one. What comes before gets zeros.
        if num_slots == 0:
            return (F.linear(x[..., :0], plain_weight(self.o_proj).detach()),)
        read = (self.q_proj, self.k_proj, self.v_proj) if num_live else (self.v_proj,)
        weight = torch.cat([plain_weight(each) for each in read])
        packed = F.linear(x, weight).unflatten(-1, (-1, self.head_dim))
        query, key, value = packed.split([num_live, num_live, num_slots], dim=2)
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
        if num_live == 0 and self.frozen is not None:
            return (self._project(frozen_attention(value, self.frozen, left_pad=start)),)
        if self.frozen is None:
            return (self._project(*self.live(query, key, value, start, None)),)
        return self.live(query, key, value, start, self.frozen, plain_weight(self.o_proj))

    def _project(self, mixed: Tensor) -> Tensor:
        """Project all heads, `[B, H, T, D]` to `[B, T, C]`."""
        return self.o_proj(flat_heads(mixed))


def plain_weight(projection: nn.Module) -> Tensor:
    """Return a projection's weight `[O, I]`.

    Raises UnsupportedError for what would be passed over without its own forward pass: a wrapper in place of the
    projection, hooks on it, and another forward pass put in the place of its own, as accelerate does to move weights.
    """
    if type(projection) is not nn.Linear:
        raise UnsupportedError(
            f"a projection must be a plain nn.Linear, got {type(projection).__module__}.{type(projection).__name__}; "
            "merge adapters into the weights"
        )
    if projection._forward_hooks or projection._forward_pre_hooks or projection._backward_hooks:
        raise UnsupportedError(
            "projections are computed together with others: its hooks would not run; hook the layer instead"
        )
    if not torch.compiler.is_compiling() and "forward" in projection.__dict__:  # which compilers do not look into
        raise UnsupportedError(
            "projections are computed together with others: the forward pass put in the place of this one's would not "
            "run; remove accelerate's hooks (remove_hook_from_module), and keep the weights on one device"
        )
    return projection.weight
