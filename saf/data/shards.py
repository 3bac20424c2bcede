"""Token shards: raw little-endian integers on disk, one array to the reader."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np

CHUNK_TOKENS = 2**20
"""Tokens that are counted and hashed at once: enough that a call costs nothing beside its work, at most 4 MiB."""


@dataclass(frozen=True)
class FileInfo:
    """Describe one file of a partition: its name in the folder, its size in bytes and its SHA-256."""

    file: str
    bytes: int
    sha256: str

    def __post_init__(self):
        """Raise ValueError for a name that leads out of the folder, or a size or sum that is none."""
        if not isinstance(self.file, str) or self.file in ("", ".", "..") or set(self.file) & set("/\\\0"):
            raise ValueError(f"{self.file!r} is not the name of a file in the folder")
        if not _is_count(self.bytes) or not isinstance(self.sha256, str):
            raise ValueError(f"{self.file}: bytes {self.bytes!r}, SHA-256 {self.sha256!r}")


@dataclass(frozen=True)
class PartitionInfo:
    """Describe one partition: tokens (end-of-text included), documents, bytes of text, unigram entropy in nats."""

    tokens: int
    documents: int
    bytes: int
    unigram_entropy: float | None
    shards: tuple[FileInfo, ...] = ()
    digests: FileInfo | None = None

    def __post_init__(self):
        """Raise ValueError for counts that are none."""
        for name in ("tokens", "documents", "bytes"):
            if not _is_count(getattr(self, name)):
                raise ValueError(f"{name} must be a whole number, not negative; got {getattr(self, name)!r}")
        if not (self.unigram_entropy is None or isinstance(self.unigram_entropy, int | float)):
            raise ValueError(f"unigram_entropy must be a number; got {self.unigram_entropy!r}")


def _is_count(value: object) -> bool:
    """Return whether a value is a whole number from 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest shard type that holds every token id: uint16 up to 65,536 of them, else uint32."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


class ShardedTokens:
    """Show a partition's tokens as one read-only 1-D array over memory-mapped shards; slices come out as int64."""

    def __init__(self, paths: Sequence[Path], dtype: np.dtype, *, name: str = "the partition"):
        self.name = name
        self._shards = [np.memmap(path, dtype=dtype, mode="r") for path in paths]
        self._starts = np.cumsum([0, *(len(shard) for shard in self._shards)])
        self.dtype = np.dtype(np.int64)
        self.shape = (int(self._starts[-1]),)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: slice | int) -> np.ndarray | int:
        """Return tokens `[start:stop]` (step 1) as int64, or one token as int."""
        if not isinstance(key, slice):
            at = key + len(self) if key < 0 else key
            if not 0 <= at < len(self):
                raise IndexError(f"token {key} of {len(self)}")
            return int(self.read(at, at + 1)[0])
        start, stop, step = key.indices(len(self))
        if step != 1:
            raise IndexError(f"token slices have step 1; got {step}")
        return self.read(start, stop)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        """Return all tokens, int64 unless asked otherwise."""
        return self.read(0, len(self)).astype(dtype or np.int64, copy=False)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens from `start` up to `stop` as int64, across shard boundaries."""
        out = np.empty(max(stop - start, 0), dtype=np.int64)
        done = 0
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        while done < len(out):
            first = start + done - self._starts[shard]
            part = self._shards[shard][first : first + len(out) - done]
            out[done : done + len(part)] = part
            done, shard = done + len(part), shard + 1
        return out


class ShardWriter:
    """Write one partition's tokens to `NAME-00000.bin`, `NAME-00001.bin`, ..., counting and hashing them."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype, *, vocab_size: int, shard_tokens: int):
        self._folder, self._name, self._dtype, self._limit = folder, name, dtype, shard_tokens
        self._counts = np.zeros(vocab_size, dtype=np.int64)
        self._shards: list[FileInfo] = []
        self._file, self._hash, self._room = None, sha256(), 0

    def write(self, tokens: np.ndarray):
        """Append tokens, opening a new shard when one is full."""
        while len(tokens):
            if self._file is None:
                path = self._folder / f"{self._name}-{len(self._shards):05d}.bin"
                self._file, self._hash, self._room = path.open("wb"), sha256(), self._limit
            part, tokens = tokens[: self._room], tokens[self._room :]
            data = np.ascontiguousarray(part, dtype=self._dtype)
            self._file.write(data.data)
            self._hash.update(data.data)
            self._counts += np.bincount(data, minlength=len(self._counts))
            self._room -= len(part)
            if self._room == 0:
                self._finish_shard()

    def _finish_shard(self):
        """Close the shard that is open, if any, and record its size and hash."""
        if self._file is not None:
            name, size = Path(self._file.name).name, self._file.tell()
            self._file.close()
            self._shards.append(FileInfo(name, size, self._hash.hexdigest()))
            self._file = None

    def finish(self, *, documents: int, text_bytes: int, digests: np.ndarray) -> PartitionInfo:
        """Close the last shard, write the documents' digests `[documents, 16]`, return what was written."""
        self._finish_shard()
        data = digests.tobytes()
        path = self._folder / f"{self._name}-documents.bin"
        path.write_bytes(data)
        return PartitionInfo(
            tokens=int(self._counts.sum()),
            documents=documents,
            bytes=text_bytes,
            unigram_entropy=entropy(self._counts),
            shards=tuple(self._shards),
            digests=FileInfo(path.name, len(data), sha256(data).hexdigest()),
        )


def entropy(counts: np.ndarray) -> float | None:
    """Return the entropy in nats of a distribution given by counts, or None without any."""
    if not counts.sum():
        return None
    share = counts[counts > 0] / counts.sum()
    return max(0.0, float(-(share * np.log(share)).sum()))


def chunks(documents: Iterable[np.ndarray], dtype: np.dtype) -> Iterable[np.ndarray]:
    """Join documents, or parts of them, to arrays of about a million tokens: each is counted and hashed in one go."""
    waiting: list[np.ndarray] = []
    size = 0
    for part in documents:
        waiting.append(part)
        size += len(part)
        if size >= CHUNK_TOKENS:
            yield np.concatenate(waiting, dtype=dtype)
            waiting, size = [], 0
    if waiting:
        yield np.concatenate(waiting, dtype=dtype)
