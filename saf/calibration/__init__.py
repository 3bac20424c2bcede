"""Measuring a model: attention in one exact pass, and what scores need beyond it, each by its own collector.

`driver` holds `calibrate`: it plans (`plan`), runs the model and keeps queries and keys (`capture`), and measures them
layer by layer (`layer`, by the Triton kernels of `tiles` and `kernels` where they run). `collect` keeps more in that
pass, `dense` is the oracle, `together` shares heads out over processes. `gradients` and `outputs` measure what some
scores read; what `outputs` sees of a layer is told by `watch`.
"""

from saf.calibration.collect import collection_bytes, latter_half
from saf.calibration.dense import dense_collection, dense_statistics
from saf.calibration.driver import calibrate
from saf.calibration.gradients import QKGradient, gate_gradients
from saf.calibration.outputs import head_outputs
from saf.calibration.plan import CalibrationPlan, heads_at_a_time, plan_calibration
from saf.calibration.together import calibrate_together

__all__ = [
    "CalibrationPlan",
    "QKGradient",
    "calibrate",
    "calibrate_together",
    "collection_bytes",
    "dense_collection",
    "dense_statistics",
    "gate_gradients",
    "head_outputs",
    "heads_at_a_time",
    "latter_half",
    "plan_calibration",
]
