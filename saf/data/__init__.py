"""Text to token shards, and shards to windows in an order that is a function of one integer."""

from saf.data.config import PrepareConfig
from saf.data.documents import PARTITIONS
from saf.data.preparation import prepare
from saf.data.token_data import DataIndex, TokenData
from saf.data.tokenizer import Tokenizer
from saf.data.windows import RandomWindows, ShuffledWindows, begun_with, calibration_windows, sequential_windows

__all__ = [
    "PARTITIONS",
    "DataIndex",
    "PrepareConfig",
    "RandomWindows",
    "ShuffledWindows",
    "TokenData",
    "Tokenizer",
    "begun_with",
    "calibration_windows",
    "prepare",
    "sequential_windows",
]
