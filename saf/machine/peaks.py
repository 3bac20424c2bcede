"""What devices reach at most: floating-point operations and bytes a second, by the device's name."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Peak:
    """Say what a device reaches in bf16, and how that is known."""

    flops: float
    """FLOP/s that no version of a benchmark runs above: measured where somebody did, else the data sheet's."""
    bandwidth: float
    """Bytes/s."""
    source: str
    """How `flops` and `bandwidth` are known."""
    rated_flops: float | None = None
    """Dense bf16 FLOP/s of the data sheet, where `flops` is measured: what utilisations of training are shares of."""


PEAKS = {
    "GH200": Peak(989e12, 4.0e12, "data sheet"),
    "H200": Peak(790e12, 4.3e12, "measured: 8192-cube product, 8.6 GB copy", rated_flops=989e12),
    "H100": Peak(989e12, 3.35e12, "data sheet"),
    "A100": Peak(312e12, 2.0e12, "data sheet"),
    "L40S": Peak(362e12, 0.864e12, "data sheet"),
}
"""By a part of the device's name; the first that fits."""


def peak_of(device_name: str) -> Peak | None:
    """Return the peaks of a device; None when they are not known here."""
    return next((peak for part, peak in PEAKS.items() if part in device_name), None)


def rated_flops(device_name: str, precision: str) -> float | None:
    """Return the FLOP/s of the device's data sheet in bf16; None when unknown or another precision is used."""
    peak = peak_of(device_name)
    if precision != "bf16" or peak is None:
        return None
    return peak.flops if peak.rated_flops is None else peak.rated_flops
