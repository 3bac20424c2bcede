"""Calibration measures the attention of a model in one exact pass, and the other inputs of scores by collectors.

`calibrate` (`driver`) reads the batches (`sequences`), runs the model and copies queries and keys (`capture`), and
measures them layer by layer: in plain PyTorch (`streaming`) or by Triton kernels (`tiles`). `collectors` measure the
further inputs of some scores.
"""

from saf.calibration.collectors import QKGradient, gate_gradients, head_outputs
from saf.calibration.driver import (
    CalibrationPlan,
    calibrate,
    calibrate_together,
    free_bytes,
    heads_at_a_time,
    plan_calibration,
)
from saf.calibration.sequences import Batch, Sequences, read_batches, read_sequences
from saf.calibration.streaming import collection_bytes, latter_half

__all__ = [
    "Batch",
    "CalibrationPlan",
    "QKGradient",
    "Sequences",
    "calibrate",
    "calibrate_together",
    "collection_bytes",
    "free_bytes",
    "gate_gradients",
    "head_outputs",
    "heads_at_a_time",
    "latter_half",
    "plan_calibration",
    "read_batches",
    "read_sequences",
]
