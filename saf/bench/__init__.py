"""Measurements of speed and memory: operators, whole updates, prefill; every number beside its baseline and bound."""

from saf.bench.measure import measure
from saf.bench.settings import OpSettings, PrefillSettings, UpdateSettings

__all__ = ["OpSettings", "PrefillSettings", "UpdateSettings", "measure"]
