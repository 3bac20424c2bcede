"""Text to token shards, and shards to windows in an order that is a function of one integer."""

from saf.data.config import PrepareConfig
from saf.data.index import PARTITIONS, DataIndex
from saf.data.preparation import prepare
from saf.data.sampler import RandomWindows, ShuffledWindows, calibration_windows, sequential_windows
from saf.data.token_data import TokenData
from saf.data.tokenizer import Tokenizer

__all__ = [
    "PARTITIONS",
    "DataIndex",
    "PrepareConfig",
    "RandomWindows",
    "ShuffledWindows",
    "TokenData",
    "Tokenizer",
    "calibration_windows",
    "prepare",
    "sequential_windows",
]
