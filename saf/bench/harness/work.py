"""Floating-point operations and bytes that a measurement cannot do without, and the time they take at least."""

from collections.abc import Iterable
from dataclasses import dataclass

from saf.heads import HeadLayout
from saf.machine.peaks import Peak


@dataclass(frozen=True)
class Work:
    """Hold FLOPs and bytes, a lower limit of both."""

    flops: float
    bytes: float

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, times: float) -> "Work":
        return Work(self.flops * times, self.bytes * times)

    def floor_ms(self, peak: Peak | None) -> float | None:
        """Return the milliseconds that no version runs below: the larger of arithmetic and traffic."""
        return None if peak is None else 1e3 * max(self.flops / peak.flops, self.bytes / peak.bandwidth)

    def tflops(self, milliseconds: float) -> float:
        """Return the TFLOP/s reached."""
        return self.flops / milliseconds / 1e9


def layers_work(
    layouts: Iterable[HeadLayout],
    *,
    batch: int,
    length: int,
    dim: int,
    kv_heads: int | None = None,
    backward: bool,
    free: bool,
) -> Work:
    """Return the work of mixing in layers of these layouts; see `attention_work`."""
    each = [
        attention_work(
            batch=batch,
            length=length,
            dim=dim,
            live=layout.num_live,
            frozen=layout.num_frozen,
            kv_heads=kv_heads,
            backward=backward,
            free=free,
        )
        for layout in layouts
    ]
    return sum(each, Work(0.0, 0.0))


def attention_work(
    *,
    batch: int,
    length: int,
    dim: int,
    live: int,
    frozen: int,
    kv_heads: int | None = None,
    backward: bool,
    element: int = 2,
    free: bool = False,
) -> Work:
    """Return the work of one layer's mixing, each tensor read or written once.

    A live head does two causal products forward and five backward (scores are computed again), a frozen head one
    and one: 2/7 of it. `kv_heads` is how many key heads live heads use; `free` leaves out the frozen heads.
    """
    product = batch * length * (length + 1) * dim
    tensor = batch * length * dim * element
    keys = live if kv_heads is None else kv_heads
    mixed = 0 if free else frozen
    flops = product * (live * (7 if backward else 2) + mixed * (2 if backward else 1))
    # Forward: q, k, v in, output out. Backward: all four and the output's gradient in, three gradients out.
    moved = live * (6 if backward else 2) + keys * (6 if backward else 2) + mixed * (4 if backward else 2)
    return Work(float(flops), float(tensor * moved))
