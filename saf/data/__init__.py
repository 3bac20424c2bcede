"""Text to token files, and token files to windows in an order that is a function of one integer."""

from saf.data.loader import (
    PARTITIONS,
    TextData,
    TokenData,
    calibration_windows,
    check_separate,
    prepend_token,
    random_windows,
    sequential_windows,
    shuffled_windows,
)
from saf.data.prepare import PrepareConfig, prepare
from saf.data.tokenizer import Tokenizer, train_bpe

__all__ = [
    "PARTITIONS", "PrepareConfig", "TextData", "TokenData", "Tokenizer", "calibration_windows", "check_separate",
    "prepare", "prepend_token", "random_windows", "sequential_windows", "shuffled_windows", "train_bpe",
]  # fmt: skip
