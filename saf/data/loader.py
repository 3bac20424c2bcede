"""A prepared data folder opened for reading, and windows of its tokens in an order that one integer determines."""

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from saf.data.reading import resolve
from saf.data.tokenizer import CONFIG_FILE, Tokenizer
from saf.errors import DataError, InputError, SafError
from saf.records.files import check_file, entries_hash, read_json, write_json

PARTITIONS = ("train", "calibration", "controller", "report")
SCHEMA = "saf.data/3"
INDEX_FILE = "index.json"
TOKENIZER_FILE = "tokenizer.json"
DIGEST_BYTES = 16
"""128 bits of BLAKE2: two documents of a corpus never share them, and a million take 16 MB."""
_AGAIN = "prepare it again"
# Seconds since its last change after which a file is remembered: some file systems keep times in steps of two seconds.
_AT_REST = 2.0


def fingerprint_of(index: dict[str, Any]) -> str:
    """Return the SHA-256 of a data folder's tokenizer and of every token in order; paths play no part."""
    sums = {name: [info["sha256"]] if info["tokens"] else [] for name, info in index["partitions"].items()}
    # The list's first entry is a constant: checkpoints and results name data by their fingerprint.
    text = json.dumps(["saf.data/1", index["tokenizer"]["sha256"], index["dtype"], sums], sort_keys=True)
    return sha256(text.encode()).hexdigest()


def write_index(folder: Path, index: dict[str, Any]) -> dict[str, Any]:
    """Write index.json with its schema, fingerprint and a hash of all of it, and return what was written."""
    index = json.loads(json.dumps({"schema": SCHEMA, "fingerprint": fingerprint_of(index), **index}))
    index["hash"] = entries_hash(index)
    write_json(folder / INDEX_FILE, index)
    return index


def read_index(folder: Path) -> dict[str, Any]:
    """Return a data folder's index.json; raise DataError when it is missing or damaged."""
    path = folder / INDEX_FILE
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "no such data folder here"
        raise DataError(f"{folder}: {what}; give --data a folder, or make one with `saf data prepare`")
    if not path.is_file():
        raise DataError(f"{folder}: not a data folder, it has no {INDEX_FILE}; make one with `saf data prepare`")
    index = read_json(path, error=DataError, advice=_AGAIN)
    if index.get("schema") != SCHEMA:
        raise DataError(f"{path}: schema must be {SCHEMA!r}, got {index.get('schema')!r}; {_AGAIN}")
    if index.get("hash") != entries_hash(index):
        raise DataError(f"{path}: damaged, its entries were changed; restore it or {_AGAIN}")
    return index


def files_of(index: dict[str, Any]) -> dict[str, tuple[int | None, str | None]]:
    """Return size and SHA-256 of a data folder's files by name, where they are known."""
    files: dict[str, tuple[int | None, str | None]] = {INDEX_FILE: (None, None), CONFIG_FILE: (None, None)}
    files[TOKENIZER_FILE] = (None, index["tokenizer"]["sha256"])
    for name, info in index["partitions"].items():
        files[tokens_file(name)] = (info["tokens"] * np.dtype(index["dtype"]).itemsize, info["sha256"])
        files[digests_file(name)] = (info["documents"] * DIGEST_BYTES, info["digests_sha256"])
    return files


def tokens_file(partition: str) -> str:
    """Return the name of the file with a partition's tokens, little-endian integers."""
    return f"{partition}.bin"


def digests_file(partition: str) -> str:
    """Return the name of the file with the digests of a partition's documents, 16 bytes each."""
    return f"{partition}.digests"


class Tokens(Protocol):
    """Token ids in one dimension: anything with a length whose slices turn into NumPy arrays."""

    def __len__(self) -> int: ...
    def __getitem__(self, key: slice, /) -> Any: ...


class MappedTokens:
    """A partition's tokens `[N]` on disk; what is taken of them is int64."""

    def __init__(self, mapped: np.ndarray, name: str):
        self.name, self._mapped = name, mapped

    def __len__(self) -> int:
        return len(self._mapped)

    def __getitem__(self, key: slice | int) -> Any:
        return self._mapped[key].astype(np.int64)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self._mapped.astype(dtype or np.int64)


class TokenData:
    """The tokens of a prepared data folder; `TokenData.open(folder).tokens("train")` is an array of token ids."""

    def __init__(self, folder: Path, index: dict[str, Any]):
        """Take what `read_index` returns."""
        self.folder, self.index = folder, index
        self.fingerprint: str = index["fingerprint"]
        """SHA-256 of the tokenizer and of every token in order."""
        self.tokenizer_hash: str = index["tokenizer"]["sha256"]
        self.vocab_size: int = index["tokenizer"]["vocab_size"]
        """Number of token ids, the end-of-text token included."""
        self.eot_id: int = index["tokenizer"]["eot_id"]
        """Id of the token that ends every document."""
        self.calibration_source = "train" if index["calibration_from"] == "train" else "calibration"
        """The partition that calibration text is drawn from."""

    @classmethod
    def open(cls, folder: str | Path, *, verify: bool = False) -> "TokenData":
        """Open a data folder and check size and SHA-256 of each file.

        What was found whole is remembered in the user's cache folder by the files' sizes, times and inodes, and is not
        read again until one of these changes.

        Args:
            folder: made by `saf.data.prepare`.
            verify: read everything, also what was found whole before.

        Raises:
            DataError: A file is missing or was changed.
        """
        folder = Path(folder)
        data = cls(folder, read_index(folder))
        files = files_of(data.index)
        for name in files:
            check_file(folder / name, error=DataError, advice=_AGAIN)
        state = {name: _state(folder / name) for name in files}
        memory = _memory(folder)
        if verify or _remembered(memory) != state:
            for name, (size, digest) in files.items():
                check_file(folder / name, size=size, sha256=digest, error=DataError, advice=_AGAIN)
            if (found := data.tokenizer().eot_id) != data.eot_id:  # named by a file without a sum
                raise DataError(
                    f"{folder}: end-of-text must have id {data.eot_id}, {CONFIG_FILE} names {found}; {_AGAIN}"
                )
            if time.time_ns() - max(max(times) for _, _, _, *times in state.values()) >= _AT_REST * 1e9:
                with suppress(OSError):  # where nothing can be written, it is read again
                    write_json(memory, {"folder": str(folder.resolve()), "files": state})
        return data

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that made the tokens."""
        return Tokenizer.load(self.folder / TOKENIZER_FILE)

    def num_tokens(self, partition: str) -> int:
        """Return how many tokens a partition has."""
        return self._info(partition)["tokens"]

    def unigram_entropy(self, partition: str) -> float:
        """Return the entropy of a partition's token frequencies, in nats; raise DataError when it is empty."""
        return self._info(partition, filled=True)["unigram_entropy"]

    def tokens(self, partition: str) -> Tokens:
        """Return a partition's tokens, memory-mapped; raise DataError when it has none."""
        self._info(partition, filled=True)
        dtype = np.dtype(self.index["dtype"]).newbyteorder("<")
        mapped = np.memmap(self.folder / tokens_file(partition), dtype, mode="r")
        return MappedTokens(mapped, f"the {partition} partition of {self.folder}")

    def digests(self, partition: str) -> np.ndarray:
        """Return the digest of each document of a partition, uint8 `[documents, 16]`."""
        self._info(partition)
        return np.fromfile(self.folder / digests_file(partition), np.uint8).reshape(-1, DIGEST_BYTES)

    def _info(self, partition: str, *, filled: bool = False) -> dict[str, Any]:
        """Return what the index has of a partition; with `filled`, raise DataError when it is empty."""
        if partition not in PARTITIONS:
            raise InputError(f"partition must be one of {', '.join(PARTITIONS)}, got {partition!r}")
        info = self.index["partitions"][partition]
        if filled and not info["tokens"]:
            advice = '; its calibration text is drawn from source="train"' if partition == "calibration" else ""
            raise DataError(f"{self.folder}: its {partition} partition is empty{advice}")
        return info


def _state(path: Path) -> list[int]:
    """Return what identifies the state of a file without reading it."""
    status = path.stat()
    return [status.st_size, status.st_ino, status.st_dev, status.st_mtime_ns, status.st_ctime_ns]


def _memory(folder: Path) -> Path:
    """Return the file of the user's cache that remembers a folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")).absolute()
    return cache / "saf" / "data" / f"{sha256(os.fsencode(folder.resolve())).hexdigest()[:32]}.json"


def _remembered(memory: Path) -> Any:
    """Return the state of files that were found whole; None where nothing is remembered."""
    with suppress(SafError):
        return read_json(memory).get("files")


class TextData(TokenData):
    """The tokens of files of text, for measurements without a prepared folder: every partition is all of them."""

    def __init__(self, files: Sequence[Path], tokenizer: Tokenizer):
        """Read and tokenise the files; raise DataError as `saf.data.prepare` would."""
        ids: list[int] = []
        for file in files:
            for text in resolve(str(file)).documents():
                ids += [*tokenizer.encode(text), tokenizer.eot_id]
        self._tokenizer, self._ids = tokenizer, np.asarray(ids, dtype="<i8")
        facts = {"sha256": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size, "eot_id": tokenizer.eot_id}
        fingerprint = sha256(tokenizer.fingerprint.encode() + self._ids.tobytes()).hexdigest()
        index = {"fingerprint": fingerprint, "tokenizer": facts, "calibration_from": "heldout"}
        index["partitions"] = {name: {"tokens": len(ids)} for name in PARTITIONS}
        super().__init__(files[0] if len(files) == 1 else files[0].parent, index)

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that made the tokens."""
        return self._tokenizer

    def tokens(self, partition: str) -> Tokens:
        """Return all tokens, `[N]` int64."""
        return self._ids


def check_separate(data: TokenData, partition: str, reported: TokenData) -> None:
    """Raise DataError if a document of `partition` is also in the report partition of another data folder."""
    mine, theirs = ({bytes(row) for row in part} for part in (data.digests(partition), reported.digests("report")))
    if shared := len(mine & theirs):
        raise DataError(
            f"{shared} documents of the {partition} partition of {data.folder} are also in the report partition of "
            f"{reported.folder}, on which the model is reported; give --data without them"
        )


# The separate random streams of one seed.
_SHUFFLED, _RANDOM, _CALIBRATION = range(3)


def _generator(stream: int, seed: int, number: int) -> np.random.Generator:
    """Return the generator of one stream, seed and number: counter-based, the same numbers wherever it is made."""
    key, counter = np.array([seed, number], dtype=np.uint64), np.array([0, 0, 0, stream], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def _count_windows(tokens: Tokens, length: int) -> int:
    """Return how many windows of `length + 1` tokens there are, starting every `length`; raise for none."""
    if length < 1:
        raise InputError(f"length must be at least 1, got {length}")
    if (windows := (len(tokens) - 1) // length) < 1:
        name = getattr(tokens, "name", "the text")
        raise DataError(
            f"a window of length {length} needs {length + 1} tokens, {name} has {len(tokens):,}; give more text or a "
            "smaller length"
        )
    return windows


def _read(tokens: Tokens, starts: np.ndarray, size: int) -> Tensor:
    """Return windows of `size` tokens from these starts, `[N, size]` int64."""
    out = np.empty((len(starts), size), dtype=np.int64)
    for row, start in enumerate(starts.tolist()):
        out[row] = np.asarray(tokens[start : start + size])
    return torch.from_numpy(out)


class ShuffledWindows:
    """Non-overlapping windows, each once an epoch, in an order drawn from (seed, epoch).

    A window has `length + 1` tokens: inputs are `w[:, :-1]`, targets `w[:, 1:]`. Windows start every `length` tokens,
    so a token shared by two neighbours is a target once and an input once.

    >>> windows = ShuffledWindows(torch.arange(9), length=2, seed=0)
    >>> windows.num_windows, windows.batch(0, 3).shape
    (4, torch.Size([3, 3]))
    """

    def __init__(self, tokens: Tokens, *, length: int, seed: int):
        """Raise DataError when there are fewer tokens than one window."""
        self.num_windows = _count_windows(tokens, length)
        self.tokens, self.length, self.seed = tokens, length, seed
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def batch(self, position: int, size: int) -> Tensor:
        """Return windows number `position` to `position + size - 1`, int64 `[size, length + 1]`.

        `position` counts windows since the beginning of training, over all epochs.
        """
        starts = []
        for number in range(position, position + size):
            epoch, place = divmod(number, self.num_windows)
            if epoch != self._epoch:
                self._epoch = epoch
                self._order = _generator(_SHUFFLED, self.seed, epoch).permutation(self.num_windows)
            starts.append(self._order[place] * self.length)
        return _read(self.tokens, np.array(starts, dtype=np.int64), self.length + 1)


class RandomWindows:
    """Windows that start anywhere, each start drawn from (seed, position); an epoch is only a count of tokens."""

    def __init__(self, tokens: Tokens, *, length: int, seed: int):
        """Raise DataError when there are fewer tokens than one window."""
        self.num_windows = _count_windows(tokens, length)
        self.tokens, self.length, self.seed = tokens, length, seed

    def batch(self, position: int, size: int) -> Tensor:
        """Return windows number `position` to `position + size - 1`, int64 `[size, length + 1]`."""
        most = len(self.tokens) - self.length
        starts = [_generator(_RANDOM, self.seed, position + step).integers(most) for step in range(size)]
        return _read(self.tokens, np.array(starts, dtype=np.int64), self.length + 1)


def sequential_windows(tokens: Tokens, length: int, limit: int | None = None) -> Tensor:
    """Return the first `limit` (all when None) windows in order, int64 `[windows, length + 1]`.

    Raises DataError when there are fewer tokens than one window.
    """
    windows = _count_windows(tokens, length)
    if limit is not None and limit < 1:
        raise InputError(f"limit must be at least 1, got {limit}")
    return _read(tokens, np.arange(windows)[:limit] * length, length + 1)


def begun_with(windows: Tensor, token: int) -> Tensor:
    """Return windows `[N, n]` that begin with a token, as models find one at the beginning of a text; same size.

    Each loses its last token. Where neighbours share a token, every token of the text is a target once all the same.

    >>> begun_with(torch.tensor([[5, 6, 7], [7, 8, 9]]), 1)
    tensor([[1, 5, 6],
            [1, 7, 8]])
    """
    return torch.cat([torch.full_like(windows[:, :1], token), windows[:, :-1]], dim=1)


def calibration_windows(
    data: TokenData,
    *,
    length: int,
    count: int,
    seed: int,
    source: str | None = None,
    setting: str = "count",
    shorter: str = "",
) -> Tensor:
    """Return `count` non-overlapping windows for calibration, int64 `[count, length]`.

    They are drawn without replacement by a generator of their own, so the order of training is unchanged.

    Args:
        data: an opened data folder.
        length: tokens of a window.
        count: number of windows.
        seed: of the draw.
        source: the partition to draw from, `calibration` or `train`; what the folder was prepared for if None.
        setting: what the caller's user knows `count` as, for the message.
        shorter: what the caller's user asks for shorter windows with, for the message.

    Raises:
        DataError: when the partition has fewer than `count` windows.
    """
    source = data.calibration_source if source is None else source
    if source not in ("calibration", "train"):
        raise InputError(f"calibration windows come from 'calibration' or 'train', got {source!r}")
    if length < 1 or count < 1:
        raise InputError(f"length and count must be at least 1, got {length} and {count}")
    tokens = data.tokens(source)
    if (windows := len(tokens) // length) < count:
        raise DataError(
            f"calibration needs {count} windows of length {length} = {count * length:,} tokens, "
            f"the {source} partition has {len(tokens):,}, {windows} windows; "
            f"ask for fewer with {setting}, for shorter ones{shorter and f' with {shorter}'}, or prepare more text"
        )
    order = _generator(_CALIBRATION, seed, 0).permutation(windows)
    return _read(tokens, order[:count] * length, length)
