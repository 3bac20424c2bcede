"""Tokens of all documents in the order in which they were read, until it is known in which order they are written."""

from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from saf.data.documents import Document
from saf.data.shards import CHUNK_TOKENS
from saf.data.utf8 import DIGEST_BYTES

# Bytes of tokens that are written at once; a round number, and disks are not what preparing waits for.
_SPOOL_BYTES = 2**20


class Spool:
    """Keep token ids in one temporary file; what is known of each document in memory, some 66 bytes each."""

    def __init__(self, path: Path, dtype: np.dtype, eot_id: int):
        self._path, self._dtype = path, dtype
        self._eot = np.array([eot_id], dtype=dtype).tobytes()
        self._file = open(path, "wb", buffering=_SPOOL_BYTES)  # noqa: SIM115 (closed by close)
        self._digests, self._loose = bytearray(), bytearray()
        self._waiting = 0
        self._keys, self._tokens, self._bytes, self._heldout = array("Q"), array("q"), array("q"), array("b")

    def add(self, ids: np.ndarray):
        """Append tokens of the document that ends next."""
        self._file.write(ids.astype(self._dtype).tobytes())
        self._waiting += len(ids)

    def end(self, document: Document):
        """End a document with an end-of-text token."""
        self._file.write(self._eot)
        self._digests += document.digest
        self._loose += document.loose
        self._keys.append(document.key)
        self._tokens.append(self._waiting + 1)
        self._waiting = 0
        self._bytes.append(len(document.data))
        self._heldout.append(document.heldout)

    def close(self):
        """Flush the file and make the columns arrays; nothing can be added after."""
        self._file.close()
        self.keys = np.array(self._keys, dtype=np.uint64)
        self.tokens = np.array(self._tokens, dtype=np.int64)
        self.bytes = np.array(self._bytes, dtype=np.int64)
        self.heldout = np.array(self._heldout, dtype=bool)
        self.digests, self.loose = (
            np.frombuffer(bytes(kept), dtype=np.uint8).reshape(-1, DIGEST_BYTES)
            for kept in (self._digests, self._loose)
        )
        self._ends = np.cumsum(self.tokens)

    def parts(self, documents: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the tokens of documents in the order given, end-of-text included, a long one in parts.

        They are read rather than mapped: what is mapped of a file of gigabytes would count as memory.
        """
        width = self._dtype.itemsize
        with open(self._path, "rb", buffering=0) as file:
            for index in documents:
                end = int(self._ends[index])
                for start in range(end - int(self.tokens[index]), end, CHUNK_TOKENS):
                    file.seek(start * width)
                    yield np.frombuffer(file.read(min(CHUNK_TOKENS, end - start) * width), dtype=self._dtype)

    def remove(self):
        """Delete the file."""
        self._path.unlink()
