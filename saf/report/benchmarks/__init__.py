"""Tables of benchmark records: of one, as its command prints it, and of many, as the document of results has them."""

from saf.report.benchmarks.other import CALIBRATION, COMPILE, ERRORS, NANOGPT, OtherKind
from saf.report.benchmarks.speed import SPEED_KINDS, SpeedKind

KINDS: dict[str, SpeedKind | OtherKind] = {
    "update": SPEED_KINDS["update"],
    **{kind.name: kind for kind in (NANOGPT, COMPILE)},
    **SPEED_KINDS,
    **{kind.name: kind for kind in (CALIBRATION, ERRORS)},
}
"""Kinds of benchmark records, in the order of documents."""
