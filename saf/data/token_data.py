"""A data folder opened for reading: checked, memory-mapped, a partition at a time."""

from hashlib import sha256
from pathlib import Path

import numpy as np

from saf.data.documents import DIGEST_BYTES
from saf.data.index import PARTITIONS, TOKENIZER_FILE, DataIndex, FileInfo
from saf.data.partitions import check_disjoint
from saf.data.shards import ShardedTokens
from saf.data.tokenizer import Tokenizer
from saf.errors import DataError, InputError


class TokenData:
    """The tokens of a prepared data folder.

    Use `TokenData.open(folder)`; `tokens("train")` is then a 1-D array-like of token ids.
    """

    def __init__(self, folder: Path, index: DataIndex):
        self.folder, self.index = folder, index

    @classmethod
    def open(cls, folder: str | Path, *, verify: bool = False) -> "TokenData":
        """Open a data folder, checking every file's size and that no document is in two partitions.

        Args:
            folder: made by `saf.data.prepare`.
            verify: also check every file's SHA-256.

        Raises:
            DataError: when a file is missing, was changed, or belongs to another folder.
        """
        folder = Path(folder)
        index = DataIndex.load(folder)
        _check_tokenizer(folder, index)
        _check_counts(folder, index)
        for info in _files(index):
            _check_file(folder, info, verify=verify)
        data = cls(folder, index)
        _check_disjoint(data)
        return data

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the tokenizer and of every token in order."""
        return self.index.fingerprint

    @property
    def vocab_size(self) -> int:
        """Number of token ids, the end-of-text token included."""
        return self.index.tokenizer.vocab_size

    @property
    def eot_id(self) -> int:
        """Id of the token that ends every document."""
        return self.index.tokenizer.eot_id

    @property
    def calibration_source(self) -> str:
        """The partition that calibration text is drawn from: `calibration` or `train`."""
        return "train" if self.index.calibration_from == "train" else "calibration"

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that made the tokens."""
        return Tokenizer.load(self.folder / TOKENIZER_FILE)

    def num_tokens(self, partition: str) -> int:
        """Return how many tokens a partition has."""
        return self._partition(partition).tokens

    def unigram_entropy(self, partition: str) -> float:
        """Return the entropy of a partition's token frequencies, in nats; raise DataError when it is empty."""
        value = self._partition(partition).unigram_entropy
        if value is None:
            raise DataError(self._why_empty(partition))
        return value

    def tokens(self, partition: str) -> ShardedTokens:
        """Return a partition's tokens as one array-like; raise DataError when it has none."""
        info = self._partition(partition)
        if not info.tokens:
            raise DataError(self._why_empty(partition))
        paths = [self.folder / shard.file for shard in info.shards]
        name = f"the {partition} partition of {self.folder}"
        return ShardedTokens(paths, np.dtype(self.index.dtype).newbyteorder("<"), name=name)

    def digests(self, partition: str) -> np.ndarray:
        """Return the digest of each document of a partition, uint8 `[documents, 16]`."""
        info = self._partition(partition).digests
        data = (self.folder / info.file).read_bytes() if info else b""
        if len(data) % DIGEST_BYTES:
            raise DataError(f"{self.folder}: damaged digests of its {partition} documents; prepare it again")
        return np.frombuffer(data, dtype=np.uint8).reshape(-1, DIGEST_BYTES)

    def _partition(self, name: str):
        if name not in PARTITIONS:
            raise InputError(f"a partition is one of {', '.join(PARTITIONS)}; got {name!r}")
        return self.index.partitions[name]

    def _why_empty(self, partition: str) -> str:
        if partition == "calibration" and self.index.calibration_from == "train":
            return (
                f"{self.folder}: its calibration text is drawn from the training partition "
                f'(calibration_from="train"); use calibration_windows(data, ..., source="train")'
            )
        return f"{self.folder}: its {partition} partition is empty"


def _files(index: DataIndex) -> list[FileInfo]:
    files = [shard for info in index.partitions.values() for shard in info.shards]
    return files + [info.digests for info in index.partitions.values() if info.digests]


def _check_tokenizer(folder: Path, index: DataIndex):
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise DataError(f"{folder}: its {TOKENIZER_FILE} is missing; prepare it again")
    found = sha256(path.read_bytes()).hexdigest()
    if found != index.tokenizer.sha256:
        raise DataError(
            f"{folder}: a data folder made with another tokenizer: {TOKENIZER_FILE} has SHA-256 {found[:12]}, "
            f"its tokens were made with {index.tokenizer.sha256[:12]}; restore that file or prepare it again"
        )


def _check_counts(folder: Path, index: DataIndex):
    for name, info in index.partitions.items():
        held = sum(shard.bytes for shard in info.shards) // np.dtype(index.dtype).itemsize
        if held != info.tokens:
            raise DataError(f"{folder}: damaged index, its {name} shards hold {held} tokens, not {info.tokens}")


def _check_file(folder: Path, info: FileInfo, *, verify: bool):
    path = folder / info.file
    if not path.is_file():
        raise DataError(f"{path}: missing; prepare the folder again")
    size = path.stat().st_size
    if size != info.bytes:
        raise DataError(f"{path}: expected {info.bytes} bytes, got {size}; prepare the folder again")
    if verify:
        with open(path, "rb") as file:
            digest = sha256()
            while chunk := file.read(2**22):
                digest.update(chunk)
        if digest.hexdigest() != info.sha256:
            raise DataError(f"{path}: damaged, its SHA-256 is not the one recorded; prepare the folder again")


def _check_disjoint(data: TokenData):
    owner: dict[str, str] = {}
    for name, info in data.index.partitions.items():
        for shard in info.shards:
            if owner.setdefault(shard.sha256, name) != name:
                raise DataError(f"{data.folder}: {owner[shard.sha256]} and {name} hold the same text; prepare it again")
    digests = [data.digests(name) for name in PARTITIONS]
    check_disjoint(np.concatenate(digests), np.repeat(np.arange(len(PARTITIONS)), [len(part) for part in digests]))


def check_separate(data: TokenData, partition: str, reported: TokenData):
    """Raise DataError if a document of `partition` is also in the report partition of another data folder."""
    mine, theirs = ({bytes(row) for row in part} for part in (data.digests(partition), reported.digests("report")))
    if shared := len(mine & theirs):
        raise DataError(
            f"{shared} documents of the {partition} partition of {data.folder} are also in the report partition of "
            f"{reported.folder}, on which the model is reported; give --data without them"
        )
