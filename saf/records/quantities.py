"""Quantities as text for people: numbers, changes, durations, memory; a dash for what is missing."""

MISSING = "–"


def number(value: float | None, digits: int = 4) -> str:
    """Return a number at `digits` significant digits, with thousands separators."""
    if value is None:
        return MISSING
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    rounded = f"{value:.{digits}g}"
    return (rounded if "e" in rounded else f"{float(rounded):,}".removesuffix(".0")).replace("-", "\u2212")


def signed(value: float | None, decimals: int = 2, unit: str = "%") -> str:
    """Return a change with its sign, "+0.21%"; the minus is the typographic one."""
    if value is None:
        return MISSING
    shown = f"{abs(value):.{decimals}f}"
    sign = "" if float(shown) == 0 else "+" if value > 0 else "\u2212"
    return f"{sign}{shown}{unit}"


def percent(share: float | str) -> str:
    """Return a share in percent, "25%"; JSON's keys have it as text."""
    return f"{100 * float(share):g}%"


def correlation(value: float | None) -> str:
    """Return a correlation at three decimals."""
    return MISSING if value is None else f"{value:.3f}".replace("-", "\u2212")


def highest_first(value: float | None) -> tuple[bool, float]:
    """Return what numbers are sorted by, the highest first and what has none last."""
    return value is None, -(value or 0.0)


def seconds(value: float | None) -> str:
    """Return a duration in the unit that suits it, from seconds."""
    if value is None:
        return MISSING
    if value < 1e-3:
        return f"{value * 1e6:.3g} µs"
    if value < 1:
        return f"{value * 1e3:.4g} ms"
    if value < 120:
        return f"{value:.3g} s"
    return f"{value / 60:.3g} min" if value < 7200 else f"{value / 3600:.3g} h"


def byte_size(value: float | None) -> str:
    """Return a size in GiB, MiB, KiB or bytes, from bytes.

    >>> byte_size(4_830_000_000), byte_size(45_000_000), byte_size(65_536), byte_size(512)
    ('4.50 GiB', '43 MiB', '64 KiB', '512 bytes')
    """
    if value is None:
        return MISSING
    if value >= 2**30:
        return f"{value / 2**30:.2f} GiB"
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if value >= unit:
            return f"{value / unit:.{0 if value >= 10 * unit else 2}f} {name}"
    return f"{value:.0f} bytes"


def change_percent(before: float | None, after: float | None) -> float | None:
    """Return 100 (after / before - 1), None when one is missing."""
    return None if not before or after is None else 100.0 * (after / before - 1.0)
