"""The two fits that analyses compare: every key logit free, or one value for all keys after the first few."""

from typing import Any

from saf.errors import InputError

CONSTANT_AFTER = 16
"""The first keys, sinks among them, keep logits of their own; how later ones differ is mostly sampling noise: on 143 of
144 heads a constant is closer to unseen sequences (docs/log.md)."""


def check_constant_after(after: int, length: int, *, name: str = "alpha_constant_after") -> None:
    """Raise InputError unless alpha can be held constant from key `after` on in patterns of `length` tokens."""
    # Up to a quarter of the keys, the canonical gauge keeps a constant tail constant.
    if not (after == 0 or 0 < 4 * after < length):
        raise InputError(f"{name} must lie in [0, T/4), T = {length}; got {after}: give {(length - 1) // 4} or less")


def fit_variants(length: int, *, constant_after: int | None = CONSTANT_AFTER) -> dict[str, dict[str, Any]]:
    """Return the fitter's options of the `free` and of the `structured` fit, by name; None leaves the second out.

    Raises InputError for a tail that patterns of `length` tokens do not have.
    """
    variants: dict[str, dict[str, Any]] = {"free": {}}
    if constant_after is not None:
        check_constant_after(constant_after, length, name="constant_after (--structured-after)")
        variants["structured"] = {"alpha_constant_after": constant_after}
    return variants
