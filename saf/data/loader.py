"""`TokenData` opens a prepared data folder and checks it; the functions below it read windows of its tokens.

The order of training windows follows from the seed and their number alone: a run resumes by one integer.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saf.data.reading import Source
from saf.data.tokenizer import CONFIG_FILE, TOKENIZER_FILE, Tokenizer
from saf.errors import DataError, InputError, check_name
from saf.records.files import check_file, entries_hash, read_json, restore_replaced_, write_json

PARTITIONS = ("train", "calibration", "controller", "report")
SCHEMA = "saf.data/3"
INDEX_FILE = "index.json"
_AGAIN = "prepare it again"
# The independent random streams of one seed; `saf.tasks` has others.
_SHUFFLED, _RANDOM, _CALIBRATION = range(3)


# --- the folder


class TokenData:
    """The tokens of a prepared data folder; `TokenData.open(folder).tokens("train")` is an array of token ids."""

    def __init__(self, folder: Path, index: dict[str, Any]):
        self.folder, self.index = folder, index
        self.fingerprint: str = index["fingerprint"]
        self.tokenizer_hash: str = index["tokenizer"]["sha256"]
        self.vocab_size: int = index["tokenizer"]["vocab_size"]
        self.eot_id: int = index["tokenizer"]["eot_id"]
        """Id of the token that ends every document."""
        self.calibration_source = "train" if index["calibration_from"] == "train" else "calibration"
        """The partition that calibration text is drawn from."""
        self._tokens = dict[str, np.ndarray]()

    @classmethod
    def open(cls, folder: str | Path, *, verify: bool = False) -> "TokenData":
        """Open a data folder and check the size of each file; raise DataError for a missing or changed one.

        The content of a file is checked when the file is first used, with `verify` that of all files now.
        """
        data = cls(Path(folder), read_index(Path(folder)))
        for name, size in file_sizes(data.index).items():
            check_file(data.folder / name, size=size, error=DataError, advice=_AGAIN)
        if verify:
            data.tokenizer()
            for partition in filter(data.num_tokens, PARTITIONS):
                data.tokens(partition)
        return data

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer that produced the tokens; raise DataError where its files were changed."""
        tokenizer = Tokenizer.load(self.folder)
        if (tokenizer.fingerprint, tokenizer.eot_id) != (self.tokenizer_hash, self.eot_id):
            raise DataError(f"{self.folder}: {TOKENIZER_FILE} or {CONFIG_FILE} was changed; {_AGAIN}")
        return tokenizer

    def num_tokens(self, partition: str) -> int:
        check_name("partition", partition, PARTITIONS)
        return self.index["partitions"][partition]["tokens"]

    def tokens(self, partition: str) -> np.ndarray:
        """Return a partition's tokens, memory-mapped unsigned integers `[N]`; raise DataError when it has none."""
        if not self.num_tokens(partition):
            advice = '; its calibration text is drawn from source="train"' if partition == "calibration" else ""
            raise DataError(f"{self.folder}: its {partition} partition is empty{advice}")
        # Once: a gigabyte takes seconds, and where data are prepared again in this folder during a run, the run keeps
        # the tokens that were checked.
        if partition not in self._tokens:
            path, sha256 = self.folder / f"{partition}.bin", self.index["partitions"][partition]["sha256"]
            check_file(path, sha256=sha256, error=DataError, advice=_AGAIN)
            dtype = np.dtype(self.index["dtype"]).newbyteorder("<")  # as it was written, on any machine
            self._tokens[partition] = np.memmap(path, dtype, mode="r")
        return self._tokens[partition]


class TextData(TokenData):
    """The tokens of one file of text, for measurements without a prepared folder: every partition is all of them."""

    def __init__(self, file: Path, tokenizer: Tokenizer):
        """Read and tokenise the file; raise DataError as `saf.data.prepare` would."""
        texts = Source(str(file)).documents()
        rows = [token for text in texts for token in (*tokenizer.encode(text), tokenizer.eot_id)]
        ids = np.asarray(rows, dtype="<i8")
        facts = {"sha256": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size, "eot_id": tokenizer.eot_id}
        fingerprint = sha256(tokenizer.fingerprint.encode() + ids.tobytes()).hexdigest()
        index = {"fingerprint": fingerprint, "tokenizer": facts, "calibration_from": "heldout"}
        super().__init__(file, {**index, "partitions": {name: {"tokens": len(ids)} for name in PARTITIONS}})
        self._tokenizer, self._tokens = tokenizer, dict.fromkeys(PARTITIONS, ids)

    def tokenizer(self) -> Tokenizer:
        return self._tokenizer


def check_separate(data: TokenData, partition: str, reported: TokenData) -> None:
    """Raise DataError if a document of `partition` is also in the report partition of data with the same tokenizer."""

    def documents(tokens: np.ndarray) -> set[bytes]:
        # By tokens: a data folder holds no text.
        parts = np.split(tokens, np.flatnonzero(tokens == data.eot_id) + 1)
        return {sha256(part.tobytes()).digest() for part in parts if len(part)}

    if shared := len(documents(data.tokens(partition)) & documents(reported.tokens("report"))):
        where = f"{data.folder} ({partition}) must have no document of the report partition of {reported.folder}"
        raise DataError(f"{where}, got {shared}; give --data without them")


def write_index(folder: Path, index: dict[str, Any]) -> None:
    """Write index.json with its schema, fingerprint and a hash of all of it.

    The fingerprint is the SHA-256 of the tokenizer and of every token in order; paths play no part.
    """
    sums = {name: [info["sha256"]] if info["tokens"] else [] for name, info in index["partitions"].items()}
    # A constant, not SCHEMA: checkpoints and results name data by this fingerprint, which a new schema must not change.
    text = json.dumps(["saf.data/1", index["tokenizer"]["sha256"], index["dtype"], sums], sort_keys=True)
    index = {"schema": SCHEMA, "fingerprint": sha256(text.encode()).hexdigest(), **index}
    write_json(folder / INDEX_FILE, index | {"hash": entries_hash(index)})


def read_index(folder: Path) -> dict[str, Any]:
    """Read a data folder's index.json; raise DataError when it is missing or was changed."""
    path = folder / INDEX_FILE
    restore_replaced_(folder)
    if not path.is_file():
        problem = f"not a data folder, it has no {INDEX_FILE}" if folder.exists() else "no such file or data folder"
        remedy = "give --data a folder that `saf data prepare` wrote; a Hugging Face model takes a file of text too"
        raise DataError(f"{folder}: {problem}; {remedy}")
    index = read_json(path, schema=SCHEMA, error=DataError, advice=_AGAIN)
    if index.get("hash") != entries_hash(index):
        raise DataError(f"{path}: damaged, its entries were changed; restore it or {_AGAIN}")
    return index


def file_sizes(index: dict[str, Any]) -> dict[str, int | None]:
    """Return the size in bytes of each file of a data folder by name, None where the index does not record it."""
    size, partitions = np.dtype(index["dtype"]).itemsize, index["partitions"]
    sizes = {f"{name}.bin": facts["tokens"] * size for name, facts in partitions.items()}
    return {INDEX_FILE: None, TOKENIZER_FILE: None, CONFIG_FILE: None, **sizes}


# --- windows


def shuffled_windows(tokens: np.ndarray, position: int, size: int, *, length: int, seed: int) -> Tensor:
    """Read windows number `position` to `position + size - 1` of training, int64 `[size, length + 1]`.

    Every epoch visits each window once, in an order drawn from (seed, epoch). Inputs are `w[:, :-1]`, targets
    `w[:, 1:]`. Windows start every `length` tokens, so neighbours share a token: a target once, and an input once.

    >>> shuffled_windows(np.arange(9), 0, 3, length=2, seed=0).shape
    torch.Size([3, 3])
    """
    numbers = shuffled_numbers(_SHUFFLED, seed, position, size, total=_count_windows(tokens, length))
    return _read(tokens, [number * length for number in numbers], length + 1)


def random_windows(tokens: np.ndarray, position: int, size: int, *, length: int, seed: int) -> Tensor:
    """Read windows that start anywhere, each start drawn from (seed, number); otherwise as `shuffled_windows`."""
    _count_windows(tokens, length)
    numbers, starts = range(position, position + size), len(tokens) - length
    return _read(tokens, [int(generator(_RANDOM, seed, number).integers(starts)) for number in numbers], length + 1)


def sequential_windows(tokens: np.ndarray, length: int, limit: int | None = None) -> Tensor:
    """Read the first `limit` windows in order, or all, int64 `[windows, length + 1]`; DataError for a shorter text."""
    windows = _count_windows(tokens, length)
    if limit is not None and limit < 1:
        raise InputError(f"limit must be at least 1, got {limit}")
    return _read(tokens, np.arange(windows)[:limit] * length, length + 1)


def calibration_windows(data: TokenData, *, length: int, count: int, seed: int, source: str | None = None) -> Tensor:
    """Draw `count` non-overlapping windows without replacement, int64 `[count, length]`.

    `source` is "calibration" or "train"; None takes the one that the folder was prepared for. The draw has a random
    stream of its own, so training keeps its order. Raises DataError when the partition has fewer windows.
    """
    source = data.calibration_source if source is None else source
    check_name("source of calibration windows", source, ("calibration", "train"))
    tokens = data.tokens(source)
    if (windows := len(tokens) // length) < count:
        few = f"the {source} partition has {windows} of its {len(tokens):,} tokens"
        fewer = "use fewer (--sequences, of a run --calibration-sequences) or more text"
        raise DataError(f"calibration needs {count} windows of length {length}, {few}; {fewer}")
    return _read(tokens, generator(_CALIBRATION, seed, 0).permutation(windows)[:count] * length, length)


def prepend_token(windows: Tensor, token: int) -> Tensor:
    """Put a token, such as BOS, before windows `[N, n]` and drop their last one.

    Where neighbours share a token, every token of the text is still a target once.

    >>> prepend_token(torch.tensor([[5, 6, 7], [7, 8, 9]]), 1)
    tensor([[1, 5, 6],
            [1, 7, 8]])
    """
    return torch.cat([torch.full_like(windows[:, :1], token), windows[:, :-1]], dim=1)


def generator(stream: int, seed: int, number: int) -> np.random.Generator:
    """Return a counter-based generator: one stream, seed and number always give the same numbers."""
    # Philox jumps to any number at once, so checkpoints hold no state of a generator.
    key, counter = np.array([seed, number], dtype=np.uint64), np.array([0, 0, 0, stream], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def shuffled_numbers(stream: int, seed: int, position: int, count: int, *, total: int) -> list[int]:
    """Return `count` items of `total` from `position` on, where each epoch goes through all in an order of its own."""
    places = (divmod(number, total) for number in range(position, position + count))
    return [int(_order(stream, seed, epoch, total)[place]) for epoch, place in places]


@lru_cache(maxsize=2)  # a batch may span two epochs; each order has 8 bytes an item, 20 MB for 10B tokens at 4K
def _order(stream: int, seed: int, epoch: int, total: int) -> np.ndarray:
    return generator(stream, seed, epoch).permutation(total)


def _count_windows(tokens: np.ndarray, length: int) -> int:
    """Count the windows of `length + 1` tokens that start every `length` tokens; raise DataError for none."""
    if length < 1:
        raise InputError(f"length must be at least 1, got {length}")
    if (windows := (len(tokens) - 1) // length) < 1:
        name = getattr(tokens, "filename", "the text")
        least = f"a window of length {length} needs {length + 1} tokens, {name} has {len(tokens):,}"
        raise DataError(f"{least}; give more text, or a length of {max(len(tokens) - 1, 1)} at most")
    return windows


def _read(tokens: np.ndarray, starts: Sequence[int] | np.ndarray, size: int) -> Tensor:
    """Read windows of `size` tokens, `[starts, size]` int64."""
    # Row by row: gathering by an array of all indices takes twice as long at 4K.
    out = np.empty((len(starts), size), dtype=np.int64)
    for row, start in enumerate(starts):
        out[row] = tokens[start : start + size]
    return torch.from_numpy(out)
