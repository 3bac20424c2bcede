"""How a calibration goes, and what it holds in memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from saf.heads import HeadSet


@dataclass(frozen=True, kw_only=True)
class CalibrationPlan:
    """How a calibration will go and what it holds at once, in bytes; `str` is a sentence for people.

    `forward_bytes` and `statistics_bytes` are estimates, the others exact.
    """

    heads: HeadSet
    sequences: int
    length: int
    groups: list[list[int]]
    """Layers whose queries and keys are kept at the same time; the model runs once for each group."""
    layer_bytes: dict[int, int]
    """Queries and keys of each layer."""
    forward_bytes: int
    """Activations of one forward pass of the largest batch."""
    statistics_bytes: int
    """Working memory of the tile loop."""
    collected_bytes: int
    """What `collect` keeps, on the CPU."""
    free_bytes: int | None
    """Free memory of the device; None where nothing tells."""
    device: torch.device

    @property
    def layers(self) -> list[int]:
        """The layers to measure, in order."""
        return [layer for group in self.groups for layer in group]

    @property
    def capture_bytes(self) -> int:
        """Queries and keys of the largest group."""
        return max((sum(map(self.layer_bytes.__getitem__, group)) for group in self.groups), default=0)

    @property
    def device_bytes(self) -> int:
        """All that is held on the model's device at once; passes and tile loops alternate."""
        return self.capture_bytes + max(self.forward_bytes, self.statistics_bytes)

    def without(self, done: Sequence[int]) -> "CalibrationPlan":
        """Return the plan of what is left when some layers are there already."""
        groups = [[layer for layer in group if layer not in done] for group in self.groups]
        return replace(self, groups=[group for group in groups if group])

    def __str__(self) -> str:
        layers = max(map(len, self.groups), default=0)
        free = "" if self.free_bytes is None else f" of {readable(self.free_bytes)} free"
        kept = f"; {readable(self.collected_bytes)} collected on the CPU" if self.collected_bytes else ""
        return (
            f"calibration of {len(self.heads)} heads on {self.sequences} x {self.length:,} tokens: about "
            f"{readable(self.device_bytes)}{free} on {self.device} (queries and keys of {layers} layers at a time "
            f"{readable(self.capture_bytes)}, a forward pass {readable(self.forward_bytes)}, the tile loop "
            f"{readable(self.statistics_bytes)}), model runs {len(self.groups)} x{kept}"
        )


def readable(size: int) -> str:
    """Return bytes as people say them.

    >>> readable(512), readable(4_830_000_000)
    ('512 bytes', '4.83 GB')
    """
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if size >= unit:
            return f"{size / unit:,.2f} {name}"
    return f"{size} bytes"
