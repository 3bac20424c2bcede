"""Shapes of the paper's decoder."""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

from saf.errors import InputError, check_name, did_you_mean

Position = Literal["rope", "learned"]


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Hold the shape of a pre-LayerNorm decoder without biases; raises InputError when it does not fit together."""

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
        """Check that every size is positive and heads divide the hidden size."""
        check_name("position", self.position, get_args(Position))
        for name, value in asdict(self).items():
            if name != "position" and value < 1:
                raise InputError(f"{name} must be a whole number, at least 1; got {value!r}")
        if self.hidden_size % self.num_heads:
            raise InputError(f"hidden_size {self.hidden_size} does not divide into {self.num_heads} heads")
        if self.position == "rope" and self.head_dim % 2:
            raise InputError(f"rotary positions need an even head dimension; got {self.head_dim}")

    @property
    def head_dim(self) -> int:
        """Return the channels of one head."""
        return self.hidden_size // self.num_heads

    @property
    def num_parameters(self) -> int:
        """Return the trained parameters of a model whose heads are all live; the tied embedding counts once."""
        width = self.hidden_size
        layers = self.num_layers * ((4 + 2 * self.mlp_ratio) * width**2 + 2 * width)
        positions = self.max_length if self.position == "learned" else 0
        return layers + (self.vocab_size + positions + 1) * width

    def flops_per_token(self, length: int) -> float:
        """Return FLOPs of forward and backward per token of a model whose heads are all live, at so many tokens.

        6 per weight of every matrix product (the tied embedding counts once, as the output), and 6 * length per
        channel and layer for causal attention. Frozen heads count as live, so that a faster update shows as a higher
        utilisation.
        """
        width = self.hidden_size
        weights = self.num_layers * (4 + 2 * self.mlp_ratio) * width**2 + self.vocab_size * width
        return 6.0 * weights + 6.0 * self.num_layers * width * length

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "GPTConfig":
        """Build from `to_dict`'s form; raise InputError naming unknown or missing fields."""
        try:
            return cls(**values)
        except TypeError as error:
            raise InputError(f"values are not a model configuration: {error}") from error


# 124m and 774m: GPT-2's small and large model, the paper's 124M and 774M. 1b: the paper's 1B (appendix on scale), 8K of
# context. The paper's contexts of 4K otherwise; others are made by `max_length`. GPT-2's 50,257 tokens, rounded up to
# 50,304 = 393 x 128 for matrix units. tiny: chosen so that a demo trains in minutes on two CPU cores.
PRESETS = {
    "tiny": GPTConfig(vocab_size=2_048, num_layers=4, num_heads=4, hidden_size=128, max_length=256),
    "124m": GPTConfig(num_layers=12, num_heads=12, hidden_size=768, max_length=4_096),
    "124m-learned": GPTConfig(num_layers=12, num_heads=12, hidden_size=768, max_length=4_096, position="learned"),
    "774m": GPTConfig(num_layers=36, num_heads=20, hidden_size=1_280, max_length=4_096),
    "1b": GPTConfig(num_layers=32, num_heads=16, hidden_size=1_536, max_length=8_192),
}


def preset(name: str, **overrides: Any) -> GPTConfig:
    """Return a preset with some fields changed; raise InputError for an unknown name or field.

    >>> preset("124m", max_length=1024).head_dim
    64
    """
    if name not in PRESETS:
        near = did_you_mean(name, PRESETS)
        raise InputError(f"unknown model preset {name!r}; expected one of {sorted(PRESETS)}{near}")
    known = [f.name for f in fields(GPTConfig)]
    if unknown := [field for field in overrides if field not in known]:
        raise InputError(f"preset {name!r} has no field {', '.join(unknown)}; its fields are {', '.join(known)}")
    return replace(PRESETS[name], **overrides)
