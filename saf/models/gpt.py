"""The paper's decoder: pre-LayerNorm, no biases, GELU MLP, tied embeddings, rotary or learned positions.

Its attention heads may be frozen or pruned; rows of the projections are in slot order, live heads first.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from saf.errors import InputError, UnsupportedError, check_name, shown
from saf.heads import HeadLayout
from saf.models.frozen_layout import LayoutMixin
from saf.ops import FrozenHeads, attention_products, frozen_attention, live_attention, summed
from saf.ops.loss_and_gelu import gelu_linear, linear_cross_entropy, linear_log_probs
from saf.ops.tensors import flat_heads, left_padding

Position = Literal["rope", "learned"]
BASE = 10_000.0
"""Base of the rotary frequencies (theta in RoPE), the usual choice."""
INIT_STD = 0.02
"""Standard deviation of initial weights, GPT-2's."""


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a pre-LayerNorm decoder without biases; raises InputError when it does not fit together."""

    vocab_size: int = 50_304
    """Rows of the embedding, tied with the output."""
    num_layers: int
    num_heads: int
    hidden_size: int
    max_length: int
    """Longest input, in tokens."""
    position: Position = "rope"
    """Rotary positions (base 10,000) or learned absolute ones."""
    mlp_ratio: int = 4

    def __post_init__(self):
        check_name("position", self.position, get_args(Position))
        for name, value in asdict(self).items():
            if name != "position" and value < 1:
                raise InputError(f"{name} must be at least 1, got {value!r}")
        parts = 2 * self.num_heads if self.position == "rope" else self.num_heads  # RoPE rotates pairs of channels
        if self.hidden_size % parts:
            raise InputError(f"hidden_size must be a multiple of {parts}, got {self.hidden_size}")

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.hidden_size // self.num_heads

    @property
    def num_parameters(self) -> int:
        """Trained parameters of a model whose heads are all live; the tied embedding counts once."""
        width = self.hidden_size
        # A layer has four projections of attention, two of the MLP, and two norms.
        layers = self.num_layers * ((4 + 2 * self.mlp_ratio) * width**2 + 2 * width)
        positions = self.max_length if self.position == "learned" else 0
        return layers + (self.vocab_size + positions + 1) * width

    def flops_per_token(self, length: int) -> float:
        """Return the FLOPs of forward and backward per token for inputs of `length` tokens.

        Matrix products take 6 per weight (the tied embedding counts once, as the output), causal attention 6 * length
        per channel and layer. Frozen heads count as live, so that a faster update shows as a higher MFU.
        """
        width = self.hidden_size
        weights = self.num_layers * (4 + 2 * self.mlp_ratio) * width**2 + self.vocab_size * width
        return 6.0 * weights + 6.0 * self.num_layers * width * length

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "GPTConfig":
        """Build from `to_dict`'s form; raise InputError for unknown or missing fields."""
        try:
            return cls(**values)
        except TypeError as error:
            raise InputError(f"values are not a model configuration: {error}") from error


# 124m and 774m are the sizes of GPT-2 small and large, 1b is the paper's 1B model. Contexts are the paper's. The
# vocabulary is GPT-2's 50,257 tokens, padded to 50,304 = 393 x 128 for matrix units. tiny trains in minutes on two CPU
# cores, for the demo.
PRESETS = {
    "tiny": GPTConfig(vocab_size=2_048, num_layers=4, num_heads=4, hidden_size=128, max_length=256),
    "124m": GPTConfig(num_layers=12, num_heads=12, hidden_size=768, max_length=4_096),
    "124m-learned": GPTConfig(num_layers=12, num_heads=12, hidden_size=768, max_length=4_096, position="learned"),
    "774m": GPTConfig(num_layers=36, num_heads=20, hidden_size=1_280, max_length=4_096),
    "1b": GPTConfig(num_layers=32, num_heads=16, hidden_size=1_536, max_length=8_192),
}


def preset(name: str, **overrides: Any) -> GPTConfig:
    """Return a preset with some fields changed; raise InputError for an unknown name.

    >>> preset("124m", max_length=1024).head_dim
    64
    """
    check_name("model preset", name, PRESETS)
    return replace(PRESETS[name], **overrides)


class GPT(nn.Module):
    """The paper's decoder, whose attention heads can be frozen."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = nn.Embedding(config.max_length, config.hidden_size) if config.position == "learned" else None
        self.rotary = Rotary(config.head_dim, config.max_length) if config.position == "rope" else None
        self.blocks = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden_size, bias=False)
        self.reset_parameters()

    @classmethod
    def skip_init(cls, config: GPTConfig, device: torch.device | str = "cpu") -> "GPT":
        """Return a model with uninitialised weights, to be loaded or drawn later; no random numbers are drawn."""
        with torch.device(device), _SkipInit():
            return cls(config)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw all weights anew: normal with std 0.02, residual projections divided by sqrt(2 layers); norms are one.

        Raises InputError when trainable patterns are installed, which have no distribution to be drawn from.
        """
        if any(layer.frozen is not None and layer.frozen.trainable for layer in self.attention_layers()):
            raise InputError("trainable patterns cannot be drawn anew; take them out first: saf.uninstall_(model)")
        residual_std = INIT_STD / math.sqrt(2 * self.config.num_layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                nn.init.ones_(parameter)
            else:
                # Freezing 25% of a small Llama costs 0.08 to 0.5 nats at once without this scaling, 0.005 with it.
                std = residual_std if name.endswith(("o_proj.weight", "down.weight")) else INIT_STD
                nn.init.normal_(parameter, std=std, generator=generator)

    def attention_layers(self) -> "list[Attention]":
        """Return the attention modules in order."""
        return [module for module in self.modules() if isinstance(module, Attention)]

    def embeddings(
        self, input_ids: Tensor, left_pad: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Return the first layer's input for `input_ids [B, T]`: `[B, T, C]`, and the rotation by position."""
        if input_ids.dim() != 2 or input_ids.is_floating_point():
            raise InputError(
                f"input_ids must be whole numbers [batch, positions]; got {input_ids.dtype} {tuple(input_ids.shape)}"
            )
        length = input_ids.shape[1]
        if not 1 <= length <= self.config.max_length:
            raise InputError(f"inputs must have 1 to {self.config.max_length} positions; got {length}")
        positions = torch.arange(length, device=input_ids.device)[None]
        if left_pad is not None:  # positions count from a row's first real token
            positions = (positions - left_pad.to(input_ids.device)[:, None]).clamp(min=0)
        x = self.embed(input_ids)
        if self.position is not None:
            x = x + self.position(positions)
        return x, None if self.rotary is None else self.rotary(positions)

    def hidden(
        self, input_ids: Tensor, left_pad: Tensor | None = None, *, activation_checkpointing: bool = False
    ) -> Tensor:
        """Return the normalised final hidden states `[B, T, C]` of `input_ids [B, T]`."""
        x, rotation = self.embeddings(input_ids, left_pad)
        for layer in self.blocks:
            inputs = (x, rotation, left_pad)
            x = recompute_in_backward(layer, *inputs) if activation_checkpointing else layer(*inputs)
        return self.norm(x)

    def forward(
        self, input_ids: Tensor, targets: Tensor | None = None, *, attention_mask: Tensor | None = None,
        activation_checkpointing: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return logits `[B, T, V]`, or with `targets [B, T]` the mean loss in nats per token (float32).

        `attention_mask [B, T]` (1 for real tokens) may mark padding at the ends of rows. Targets of -100 are left out
        of the loss. With `activation_checkpointing` the backward pass computes each layer again. Raises InputError for
        ids, targets or padding that cannot be used.
        """
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            shapes = f"{list(input_ids.shape)}, got {list(attention_mask.shape)}"
            raise InputError(f"attention_mask must have the shape of input_ids, {shapes}")
        left_pad = None if attention_mask is None else left_padding(attention_mask)
        if targets is not None and (targets.is_floating_point() or targets.dtype == torch.bool):
            raise InputError(f"targets must be whole numbers; got {shown(targets)}")
        hidden = self.hidden(input_ids, left_pad, activation_checkpointing=activation_checkpointing)
        if targets is None:
            return F.linear(hidden, self.embed.weight)
        # In chunks: the logits of 8 sequences of 4,096 tokens would take 6.6 GB in float32.
        return linear_cross_entropy(hidden, self.embed.weight, targets)

    @torch.no_grad()
    def token_log_probs(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """Return the log-probability of every target token, `[B, T]` float32, in nats."""
        return linear_log_probs(self.hidden(input_ids), self.embed.weight, targets)


class _SkipInit(TorchFunctionMode):
    """Skip weight initialisation, as the "meta" device does too, but without importing PyTorch's compiler."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), named: Any = None) -> Any:
        named = named or {}
        if function in (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_):
            return named["tensor"] if "tensor" in named else args[0]
        return function(*args, **named)


def recompute_in_backward(layer: Callable[..., Any], *inputs: Any) -> Any:
    """Return a layer's output with activation checkpointing: only its inputs are stored for the backward pass."""
    # Without dropout a layer draws nothing, so there is no random state to restore.
    return checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)


class DecoderLayer(nn.Module):
    """Add attention and then an MLP, each of the normalised residual stream, to the stream `[B, T, C]`."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size, bias=False)
        self.attention = Attention(config.hidden_size, config.num_heads)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, bias=False)
        self.mlp = MLP(config.hidden_size, config.mlp_ratio)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, left_pad: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation, left_pad)
        return x + self.mlp(self.mlp_norm(x))


class MLP(nn.Module):
    """Apply two matrices with a GELU between them: `[B, T, C]` to `[B, T, C]`."""

    def __init__(self, hidden_size: int, ratio: int):
        super().__init__()
        self.up = nn.Linear(hidden_size, ratio * hidden_size, bias=False)
        self.down = nn.Linear(ratio * hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # Stores the GELU's input alone for the backward pass: 12.5 GiB in place of 14.8, and 3.5 ms less (124M, 4K).
        return gelu_linear(self.up(x), plain_weight(self.down))


class Attention(LayoutMixin):
    """Multi-head attention. Frozen heads have no rows in `q_proj` and `k_proj`; pruned heads have none anywhere."""

    frozen: FrozenHeads | None

    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__()
        self.layout = HeadLayout(num_heads, num_heads)
        self.head_dim = hidden_size // num_heads
        projections = (nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(4))
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = projections
        self.live = LiveAttention()
        self.register_module("frozen", None)  # so code compiled before heads froze is valid again after `uninstall_`
        self.removed: Mapping[str, Mapping[int, Mapping[str, Tensor]]] = {}

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, left_pad: Tensor | None) -> Tensor:
        """Return the attention output `[B, T, C]` of `x [B, T, C]`."""
        return summed(self.products(x, rotation, left_pad))

    def products(
        self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, left_pad: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return one or two products `[B, T, C]` whose sum is the output: of live and of frozen heads.

        Callers fuse the sum with the residual addition. One matrix product computes queries, keys and values, so that
        its backward pass is one product too. Heads stay in the memory order `[B, T, H, D]`: no transposed copies.
        """
        # Heads are counted by weight rows: compiled code that read the layout would recompile for each set of heads.
        num_live, num_slots = (len(plain_weight(each)) // self.head_dim for each in (self.q_proj, self.v_proj))
        # The empty weight is detached, as clip_grad_norm_ fails on empty gradients; x still gets a gradient of zeros.
        if num_slots == 0:
            return (F.linear(x[..., :0], plain_weight(self.o_proj).detach()),)
        # Frozen heads have values alone (paper, section 3.3).
        read = (self.q_proj, self.k_proj, self.v_proj) if num_live else (self.v_proj,)
        # Joined in each pass: a stored copy would be stale after an optimiser's step. One product, with
        # heads in memory order, makes an update of 331.5 ms take 322.8 (124M, 4K, H200).
        weight = torch.cat([plain_weight(each) for each in read])
        packed = F.linear(x, weight).unflatten(-1, (-1, self.head_dim))
        query, key, value = packed.split([num_live, num_live, num_slots], dim=2)
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
        # Of many tokens, live and frozen heads are projected separately: 1.7 to 9.2% less memory in an update.
        if num_live and self.frozen is not None:
            return self.live(query, key, value, left_pad, self.frozen, plain_weight(self.o_proj))
        if self.frozen is None:
            (mixed,) = self.live(query, key, value, left_pad, None)
        else:
            mixed = frozen_attention(value, self.frozen, left_pad=left_pad)
        return (self.o_proj(flat_heads(mixed)),)


class LiveAttention(nn.Module):
    """Attention of live heads, and the output projection where frozen heads share it.

    It is a module so that a forward pre-hook can capture queries and keys.
    """

    def __init__(self):
        super().__init__()
        self.kernel = "auto"

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, left_pad: Tensor | None, frozen: FrozenHeads | None,
        projection: Tensor | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Compute attention of rotated `query`, `key` `[B, L, T, D]` and `value [B, H, T, D]`.

        Without frozen heads, returns the heads' outputs `[B, H, T, D]`. With them, returns one or two tensors
        `[B, T, C]` whose sum is the output projection, by `projection [C, H * D]`, of all heads.
        """
        if frozen is None or projection is None:
            return (live_attention(query, key, value, left_pad=left_pad, kernel=self.kernel),)
        return attention_products(query, key, value, frozen, projection, left_pad=left_pad, kernel=self.kernel)


def plain_weight(projection: nn.Module) -> Tensor:
    """Return a projection's weight `[out, in]`; raise UnsupportedError where its forward pass is more than that."""
    if type(projection) is not nn.Linear:
        raise UnsupportedError(
            f"projections' weights must be of nn.Linear, got {type(projection).__name__}: merge adapters"
        )
    hooks = projection._forward_hooks or projection._forward_pre_hooks or projection._backward_hooks
    # accelerate replaces `forward` of the instance. Dynamo does not trace this test.
    replaced = not torch.compiler.is_compiling() and "forward" in projection.__dict__
    if hooks or replaced:
        raise UnsupportedError(
            "projections are computed together: hooks and forwards of one would not run; remove them"
        )
    return projection.weight


class Rotary(nn.Module):
    """Tables of cosines and sines of every position, `[max_length, D/2]`, in float32 whatever the model's dtype.

    They are computed in float64 on the CPU, so that all devices have the same values.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_length: int):
        super().__init__()
        exact = {"dtype": torch.float64, "device": "cpu"}
        frequency = BASE ** (-torch.arange(0, head_dim, 2, **exact) / head_dim)
        angle = torch.arange(max_length, **exact)[:, None] * frequency
        for name, table in (("cos", angle.cos()), ("sin", angle.sin())):
            # Not persistent: they follow from the configuration, and checkpoints hold weights alone.
            self.register_buffer(name, table.float().to(torch.get_default_device()), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rotary":
        """Move the tables to another device but not to another dtype: 16 bits are too few for late positions."""
        for name, table in list(self._buffers.items()):
            assert table is not None
            moved = fn(table)
            self._buffers[name] = moved if moved.dtype == table.dtype else table.to(moved.device)
        return self

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines `[B or 1, T, 1, D/2]` of `positions [B or 1, T]`."""
        return self.cos[positions][:, :, None], self.sin[positions][:, :, None]


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Return queries or keys `x [B, T, H, D]` rotated by position, computed in at least float32."""
    return _Rotate.apply(x, *rotation)


class _Rotate(torch.autograd.Function):
    """The rotation; compiled, autograd's own backward pass would scatter slices and write a float32 copy.

    That takes 179 us a layer, this one 73 (124M, 4K, H200).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(gradients[0], cos, -sin), None, None  # a rotation's transpose rotates back


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat([half.to(x.dtype) for half in turned], dim=-1)
