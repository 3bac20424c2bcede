"""Measuring a model: attention in one exact pass, and what scores need beyond it, each by its own collector."""

from saf.calibration.collect import collection_bytes, latter_half
from saf.calibration.dense import dense_collection, dense_statistics
from saf.calibration.driver import calibrate
from saf.calibration.gradients import QKGradient, gate_gradients
from saf.calibration.outputs import head_outputs
from saf.calibration.plan import CalibrationPlan, heads_at_a_time, plan_calibration

__all__ = [
    "CalibrationPlan",
    "QKGradient",
    "calibrate",
    "collection_bytes",
    "dense_collection",
    "dense_statistics",
    "gate_gradients",
    "head_outputs",
    "heads_at_a_time",
    "latter_half",
    "plan_calibration",
]
