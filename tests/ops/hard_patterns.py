"""Patterns on which execution could go wrong, by name, for tests on any device."""

from collections.abc import Sequence

import torch

from saf.fit import fit_compact
from saf.patterns import CompactPattern

NAMES = (
    "decay", "ripple", "sink", "hollow", "late", "local", "rising", "sink and local", "tilted", "bump", "noisy"
)  # fmt: skip


def hard_pattern(name: str, length: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return alpha and rho `[length]` float64; `generator` lives on the CPU."""
    position = torch.arange(length, dtype=torch.float64)
    noise = torch.randn(length, dtype=torch.float64, generator=generator)
    flat, soft = torch.zeros(length, dtype=torch.float64), -0.5 * torch.log1p(position)
    first = torch.where(position == 0, 1.0, 0.0).double()
    return {
        "decay": (0.2 * noise + 3 * first, -0.9 * torch.log1p(position)),
        "ripple": (0.1 * noise + 3 * first, soft + 0.4 * torch.cos(0.37 * position)),
        "sink": (25 * first, soft),
        "hollow": (-25 * first, soft),
        "late": (torch.where(position < 100, -20.0, flat), soft),
        "local": (flat, -position / 4),
        "rising": (flat, position / 4),
        "sink and local": (20 * first, -position / 30),
        "tilted": (3 * position, soft + 3 * position),
        "bump": (flat, torch.where(position < 150, position / 4, 75 - position / 4)),
        "noisy": (3 * noise, soft),
    }[name]


def hard_patterns(names: Sequence[str], length: int, device: torch.device | str = "cpu") -> CompactPattern:
    """Return one pattern a name, `[len(names), length]`, made from a fixed seed."""
    generator = torch.Generator().manual_seed(11)
    pairs = [hard_pattern(name, length, generator) for name in names]
    return CompactPattern.from_parameters(*(torch.stack(part).to(device) for part in zip(*pairs, strict=True)))


def random_pattern(heads: int, length: int, generator: torch.Generator) -> CompactPattern:
    alpha, rho = torch.randn(2, heads, length, generator=generator, dtype=torch.float64)
    return CompactPattern.from_parameters(alpha, rho)


def real_patterns(
    real_heads: dict[str, torch.Tensor], count: int, length: int, device: torch.device | str = "cpu"
) -> CompactPattern:
    """Return the first `length <= 4096` positions of patterns fitted to heads of a trained RoPE model."""
    eta = [real_heads[name][:count].double() for name in ("eta_abs", "eta_rel")]
    return fit_compact(*eta, tolerance=0.1).prefix(length).to(device=device)
