"""Multi-head attention whose heads may be frozen; weights lie in slot order, live heads first."""

from torch import Tensor, nn
from torch.nn import functional as F

from saf.heads import HeadLayout
from saf.models.rotary import rotate
from saf.ops import FrozenHeads, frozen_attention, live_attention


class LiveAttention(nn.Module):
    """Ordinary attention of the live heads; a module of its own so that hooks can see queries and keys."""

    def __init__(self):
        super().__init__()
        self.kernel = "auto"

    def forward(self, query: Tensor, key: Tensor, value: Tensor, start: Tensor | None) -> Tensor:
        """Attend: `[B, L, T, D]` each, rotated; returns `[B, L, T, D]`."""
        return live_attention(query, key, value, start=start, kernel=self.kernel)


class Attention(nn.Module):
    """Projections and mixing. Frozen heads have no rows in `q_proj` and `k_proj`."""

    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__()
        self.layout = HeadLayout(num_heads, num_heads)
        self.head_dim = hidden_size // num_heads
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.live = LiveAttention()
        self.frozen: FrozenHeads | None = None
        self.removed: dict[int, dict[str, Tensor]] = {}

    def weights(self) -> dict[str, Tensor]:
        """Return the projections' weights by role."""
        return {
            "query": self.q_proj.weight,
            "key": self.k_proj.weight,
            "value": self.v_proj.weight,
            "output": self.o_proj.weight,
        }

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, start: Tensor | None) -> Tensor:
        """Mix positions: `x [B, T, C]` to `[B, T, C]`.

        Live and frozen outputs meet in the output projection, split by columns, so nothing is copied together.
        """
        value = self._heads(self.v_proj(x))
        num_live = self.layout.num_live
        if self.frozen is None:
            return self.o_proj(self._live(x, value, rotation, start))
        mixed = frozen_attention(value, self.frozen, start=start).transpose(1, 2).flatten(2)
        columns = num_live * self.head_dim
        output = F.linear(mixed, self.o_proj.weight[:, columns:])
        if num_live:
            live = self._live(x, value[:, :num_live], rotation, start)
            output = output + F.linear(live, self.o_proj.weight[:, :columns])
        return output

    def _live(self, x: Tensor, value: Tensor, rotation: tuple[Tensor, Tensor] | None, start: Tensor | None) -> Tensor:
        query, key = self._heads(self.q_proj(x)), self._heads(self.k_proj(x))
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        return self.live(query, key, value, start).transpose(1, 2).flatten(2)
