"""The paper's decoder: pre-LayerNorm, no biases, GELU MLP, tied embeddings, rotary or learned positions."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from saf.errors import InputError, shown
from saf.models.attention import Attention, plain_weight
from saf.models.config import GPTConfig
from saf.models.rotary import Rotary
from saf.ops.decoder import gelu_linear, linear_cross_entropy, linear_log_probs
from saf.ops.positions import check_left_pad, left_padding

INIT_STD = 0.02
"""Standard deviation of initial weights, GPT-2's."""


class MLP(nn.Module):
    """Apply two matrices with a GELU between them: `[B, T, C]` to `[B, T, C]`."""

    def __init__(self, hidden_size: int, ratio: int):
        super().__init__()
        self.up = nn.Linear(hidden_size, ratio * hidden_size, bias=False)
        self.down = nn.Linear(ratio * hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply both matrices."""
        return gelu_linear(self.up(x), plain_weight(self.down))


class DecoderLayer(nn.Module):
    """Apply attention and then an MLP, each to the normed residual stream: a decoder layer."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size, bias=False)
        self.attention = Attention(config.hidden_size, config.num_heads)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, bias=False)
        self.mlp = MLP(config.hidden_size, config.mlp_ratio)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, start: Tensor | None) -> Tensor:
        """Add attention's and then the MLP's output to the residual stream `x [B, T, C]`."""
        x = x + self.attention(self.attention_norm(x), rotation, start)
        return x + self.mlp(self.mlp_norm(x))


class _Undrawn(TorchFunctionMode):
    """Leave weights as they come from memory where modules would draw them.

    A model on the device "meta", which draws nothing either, takes code that loads PyTorch's compiler, for seconds.
    """

    def __torch_function__(self, function: Any, _: Any, args: Any = (), named: Any = None) -> Any:
        """Return what is to be drawn as it is; call anything else."""
        named = named or {}
        if function in (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_):
            return named["tensor"] if "tensor" in named else args[0]
        return function(*args, **named)


class GPT(nn.Module):
    """Model text causally with attention heads that can be frozen."""

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
    def undrawn(cls, config: GPTConfig, device: torch.device | str = "cpu") -> "GPT":
        """Return a model whose weights hold anything, for others to be loaded or drawn; nothing is drawn here."""
        with torch.device(device), _Undrawn():
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
                std = residual_std if name.endswith(("o_proj.weight", "down.weight")) else INIT_STD
                nn.init.normal_(parameter, std=std, generator=generator)

    def attention_layers(self) -> list[Attention]:
        """Return the attention modules in order."""
        return [module for module in self.modules() if isinstance(module, Attention)]

    def embedded(self, input_ids: Tensor, start: Tensor | None = None) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Return what the first layer reads of `input_ids [B, T]`: `[B, T, C]`, and the rotation by position."""
        if input_ids.dim() != 2 or input_ids.is_floating_point():
            raise InputError(
                f"input_ids must be whole numbers [batch, positions]; got {input_ids.dtype} {tuple(input_ids.shape)}"
            )
        length = input_ids.shape[1]
        if not 1 <= length <= self.config.max_length:
            raise InputError(f"inputs have 1 to {self.config.max_length} positions; got {length}")
        positions = torch.arange(length, device=input_ids.device)[None]
        if start is not None:
            positions = (positions - start.to(input_ids.device)[:, None]).clamp(min=0)
        x = self.embed(input_ids)
        if self.position is not None:
            x = x + self.position(positions)
        return x, None if self.rotary is None else self.rotary(positions)

    def hidden(
        self, input_ids: Tensor, start: Tensor | None = None, *, activation_checkpointing: bool = False
    ) -> Tensor:
        """Return the normalised final hidden states `[B, T, C]` of `input_ids [B, T]`."""
        x, rotation = self.embedded(input_ids, start)
        for layer in self.blocks:
            x = recomputed(layer, x, rotation, start) if activation_checkpointing else layer(x, rotation, start)
        return self.norm(x)

    def forward(
        self,
        input_ids: Tensor,
        targets: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        start: Tensor | None = None,
        activation_checkpointing: bool = False,
    ) -> Tensor:
        """Return logits `[B, T, V]`, or with `targets [B, T]` the mean loss in nats per token (float32).

        `attention_mask [B, T]` (1 for real tokens) may mark padding at the ends of rows; `start [B]` says the same
        as first real positions. Targets of -100 are left out of the loss. With `activation_checkpointing` the backward
        pass finds only what entered each layer, and computes the layer again.

        Raises InputError for ids, targets or padding that cannot be used, and for padding told twice.
        """
        if attention_mask is not None:
            if start is not None:
                raise InputError("attention_mask and start both tell where rows begin; give one of them")
            if attention_mask.shape != input_ids.shape:
                shapes = f"{list(input_ids.shape)}; got {list(attention_mask.shape)}"
                raise InputError(f"attention_mask must have the shape of input_ids, {shapes}")
            start = left_padding(attention_mask)
        elif start is not None:
            check_left_pad(start, *input_ids.shape, wait=True)
        if targets is not None and (targets.is_floating_point() or targets.dtype == torch.bool):
            raise InputError(f"targets must be whole numbers; got {shown(targets)}")
        hidden = self.hidden(input_ids, start, activation_checkpointing=activation_checkpointing)
        if targets is None:
            return F.linear(hidden, self.embed.weight)
        return linear_cross_entropy(hidden, self.embed.weight, targets)

    @torch.no_grad()
    def token_log_probs(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """Return the log-probability of every target token, `[B, T]` float32, in nats."""
        return linear_log_probs(self.hidden(input_ids), self.embed.weight, targets)


def recomputed(layer: Callable[..., Any], *inputs: Any) -> Any:
    """Return what a layer computes of its inputs, keeping these alone: the backward pass computes the layer again.

    The layer must draw no random numbers; this decoder has no dropout.
    """
    return checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)
