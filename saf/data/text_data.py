"""Plain text as data: files tokenised by a model's own tokenizer, for measuring without a prepared folder."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from saf.data.sources import resolve
from saf.data.token_data import TokenData
from saf.data.tokenizer import Tokenizer


class TextData(TokenData):
    """Show the tokens of text files, one after another with an end-of-text token behind each, as every partition.

    All of the text is there whatever partition is asked for, as nothing was held out of it.
    """

    def __init__(self, files: Sequence[Path], tokenizer: Tokenizer):
        """Read and tokenise the files.

        Raises:
            DataError: A file cannot be read as `saf data prepare` would, or has no text.
        """
        self.folder = files[0] if len(files) == 1 else files[0].parent
        self._tokenizer = tokenizer
        ids: list[int] = []
        for file in files:
            for document in resolve(str(file)).documents():
                ids += [*tokenizer.encode(document.decode()), tokenizer.eot_id]
        self._tokens = np.asarray(ids, dtype=np.int64)

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 of the tokenizer and of every token in order."""
        return hashlib.sha256(self._tokenizer.fingerprint.encode() + self._tokens.astype("<i8").tobytes()).hexdigest()

    @property
    def vocab_size(self) -> int:
        """Return the number of token ids, the end-of-text token included."""
        return self._tokenizer.vocab_size

    @property
    def eot_id(self) -> int:
        """Return the id of the token that ends every document."""
        return self._tokenizer.eot_id

    @property
    def calibration_source(self) -> str:
        """Return a partition's name: any of them is all of the text."""
        return "calibration"

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that made the tokens."""
        return self._tokenizer

    def num_tokens(self, partition: str) -> int:
        """Return how many tokens the text has."""
        return len(self._tokens)

    def tokens(self, partition: str) -> np.ndarray:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return all tokens, `[N]` int64."""
        return self._tokens
