"""Calibration measures a model: attention in one exact pass, and what scores read beyond it, each by its own collector.

`driver` holds `calibrate`. It reads the batches (`sequences`), plans memory (`plan`), runs the model and copies queries
and keys (`capture`), and measures them layer by layer (`strips`; on GPUs `tiles` with its `kernels`). `collect` keeps
more in that pass; `dense` is the float64 oracle. `gradients` and `outputs` measure what some scores read.
"""

from saf.calibration.collect import collection_bytes, latter_half
from saf.calibration.dense import dense_collection, dense_statistics
from saf.calibration.driver import calibrate, calibrate_together
from saf.calibration.gradients import QKGradient, gate_gradients
from saf.calibration.outputs import head_outputs
from saf.calibration.plan import CalibrationPlan, heads_at_a_time, plan_calibration
from saf.calibration.sequences import Batch, Sequences, read_batches, read_sequences

__all__ = [
    "Batch",
    "CalibrationPlan",
    "QKGradient",
    "Sequences",
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
    "read_batches",
    "read_sequences",
]
