"""Measurements of speed, memory and errors: every number beside its baseline and bound."""

from saf.bench.kinds import measure
from saf.bench.model.decode import DecodeSettings
from saf.bench.model.prefill import PrefillSettings
from saf.bench.model.update import UpdateSettings
from saf.bench.operator.case import OpSettings

__all__ = ["DecodeSettings", "OpSettings", "PrefillSettings", "UpdateSettings", "measure"]
