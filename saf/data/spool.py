"""Tokenised documents in reading order, kept on disk until their partition and place are known."""

from array import array
from pathlib import Path

import numpy as np

from saf.data.documents import DIGEST_BYTES, Document


class Spool:
    """Token ids in one temporary file; what is known of each document in memory, some 50 bytes each."""

    def __init__(self, path: Path, dtype: np.dtype, eot_id: int):
        self._path, self._dtype = path, dtype
        self._eot = np.array([eot_id], dtype=dtype).tobytes()
        self._file = open(path, "wb", buffering=2**20)  # noqa: SIM115 (closed by close)
        self._digests = bytearray()
        self._keys, self._tokens, self._bytes, self._heldout = array("Q"), array("q"), array("q"), array("b")

    def add(self, document: Document, ids: np.ndarray):
        """Append a document's tokens and an end-of-text token."""
        self._file.write(ids.astype(self._dtype).tobytes())
        self._file.write(self._eot)
        self._digests += document.digest
        self._keys.append(document.key)
        self._tokens.append(len(ids) + 1)
        self._bytes.append(len(document.data))
        self._heldout.append(document.heldout)

    def close(self):
        """Flush the file and make the columns arrays; nothing can be added after."""
        self._file.close()
        self.keys = np.array(self._keys, dtype=np.uint64)
        self.tokens = np.array(self._tokens, dtype=np.int64)
        self.bytes = np.array(self._bytes, dtype=np.int64)
        self.heldout = np.array(self._heldout, dtype=bool)
        self.digests = np.frombuffer(bytes(self._digests), dtype=np.uint8).reshape(-1, DIGEST_BYTES)
        self._ends = np.cumsum(self.tokens)
        self._map = np.memmap(self._path, dtype=self._dtype, mode="r")

    def document(self, index: int) -> np.ndarray:
        """Return one document's tokens, end-of-text included."""
        end = self._ends[index]
        return self._map[end - self.tokens[index] : end]

    def remove(self):
        """Delete the file."""
        del self._map
        self._path.unlink()
