"""Does freezing pay on this device, for this model, at these lengths? Four benchmarks by one paired protocol.

    >>> record = saf.bench.prefill("path/to/folder", points=("4096x8",))  # doctest: +SKIP
    >>> [(row["arm"], row["ratio"]) for row in record["rows"] if not row["refused"]]  # doctest: +SKIP

`update`, `prefill`, `decode` and `op` take a preset or a folder with its own frozen heads, and the fields of `Update`,
`Prefill`, `Decode` and `Op`; they return the record that `saf.bench.protocol` describes.
"""

from pathlib import Path
from typing import Any

from saf.bench.layer import Op
from saf.bench.speed import Speed, measure
from saf.bench.whole import Decode, Prefill, Update

__all__ = ["KINDS", "Decode", "Op", "Prefill", "Speed", "Update", "decode", "measure", "op", "prefill", "update"]

KINDS: dict[str, type[Speed]] = {cls.kind: cls for cls in (Update, Prefill, Decode, Op)}


def op(model: str = Op.model, *, out: Path | None = None, **settings: Any) -> dict[str, Any]:
    """Time one layer's attention; see `Op` for the settings and `measure` for errors."""
    return measure(Op(model=model, **settings), out=out)


def update(model: str = Update.model, *, out: Path | None = None, **settings: Any) -> dict[str, Any]:
    """Time whole optimiser updates; see `Update` for the settings and `measure` for errors."""
    return measure(Update(model=model, **settings), out=out)


def prefill(model: str = Prefill.model, *, out: Path | None = None, **settings: Any) -> dict[str, Any]:
    """Time whole prompts; see `Prefill` for the settings and `measure` for errors."""
    return measure(Prefill(model=model, **settings), out=out)


def decode(model: str = Decode.model, *, out: Path | None = None, **settings: Any) -> dict[str, Any]:
    """Time one more token after a filled cache; see `Decode` for the settings and `measure` for errors."""
    return measure(Decode(model=model, **settings), out=out)
