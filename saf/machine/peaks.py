"""Floating-point work of the model and how much of the device's peak it reaches."""

from saf.models import GPTConfig

PEAK_BF16 = {"H200": 989e12, "H100": 989e12, "GH200": 989e12, "A100": 312e12}
"""Dense bf16 FLOP/s by a part of the device's name."""


def flops_per_token(config: GPTConfig, length: int) -> float:
    """Return FLOPs of forward and backward per token of a model whose heads are all live.

    6 per weight of every matrix product (the tied embedding counts once, as the output), and 6 * length per
    channel and layer for causal attention. Frozen heads count as live, so that a faster update shows as a higher
    utilisation.
    """
    width = config.hidden_size
    weights = config.num_layers * (4 + 2 * config.mlp_ratio) * width**2 + config.vocab_size * width
    return 6.0 * weights + 6.0 * config.num_layers * width * length


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the device's peak FLOP/s in bf16; None when unknown or another precision is used."""
    if precision != "bf16":
        return None
    return next((peak for part, peak in PEAK_BF16.items() if part in device_name), None)
