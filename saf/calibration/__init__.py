"""Measuring attention: one exact pass over the calibration sequences."""

from saf.calibration.dense import dense_statistics
from saf.calibration.driver import calibrate

__all__ = ["calibrate", "dense_statistics"]
