"""A data folder: its index, and its tokens opened for reading, checked and memory-mapped, a partition at a time."""

import json
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path

import numpy as np

from saf.data.documents import DIGEST_BYTES, PARTITIONS, check_disjoint
from saf.data.shards import FileInfo, PartitionInfo, ShardedTokens
from saf.data.tokenizer import Tokenizer
from saf.errors import DataError, InputError
from saf.records.files import check_file, file_hash, read_json, write_json

SCHEMA = "saf.data/1"
INDEX_FILE = "index.json"
TOKENIZER_FILE = "tokenizer.json"
_AGAIN = "prepare it again"


@dataclass(frozen=True)
class TokenizerInfo:
    """Describe the tokenizer: how it came about, SHA-256 of its file, tokens in its vocabulary, end-of-text id."""

    kind: str
    sha256: str
    vocab_size: int
    eot_id: int
    trained_on: dict | None = None


@dataclass(frozen=True)
class DataIndex:
    """Hold everything known about a data folder without reading its shards."""

    dtype: str
    tokenizer: TokenizerInfo
    partitions: dict[str, PartitionInfo]
    calibration_from: str = "heldout"
    sources: list[dict] = field(default_factory=list)
    heldout: list[dict] = field(default_factory=list)
    duplicates: dict = field(default_factory=dict)
    settings: dict = field(default_factory=dict)
    versions: dict = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 of the tokenizer and of every token in order; paths play no part."""
        facts = {name: info.shards for name, info in self.partitions.items()}
        hashes = {name: [shard.sha256 for shard in shards] for name, shards in facts.items()}
        text = json.dumps([SCHEMA, self.tokenizer.sha256, self.dtype, hashes], sort_keys=True)
        return sha256(text.encode()).hexdigest()

    def to_dict(self) -> dict:
        """Return plain JSON types, as in index.json."""
        facts = {"schema": SCHEMA, "fingerprint": self.fingerprint, **asdict(self)}
        return json.loads(json.dumps(facts))

    @classmethod
    def from_dict(cls, data: dict) -> "DataIndex":
        """Build from `to_dict`'s output; raise KeyError, TypeError or ValueError on anything else."""
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']!r}, this version reads {SCHEMA!r}")
        names = cls.__dataclass_fields__
        values = {name: value for name, value in data.items() if name in names}
        values["tokenizer"] = TokenizerInfo(**data["tokenizer"])
        values["partitions"] = {name: _partition(data["partitions"][name]) for name in PARTITIONS}
        return cls(**values)

    def save(self, folder: Path):
        """Write index.json into a folder."""
        write_json(folder / INDEX_FILE, self.to_dict())

    @classmethod
    def load(cls, folder: Path) -> "DataIndex":
        """Read a folder's index.json; raise DataError when it is missing or damaged."""
        path = folder / INDEX_FILE
        if not folder.is_dir():
            raise DataError(f"{folder}: no such data folder here; give --data, or make one with `saf data prepare`")
        if not path.is_file():
            raise DataError(f"{folder}: not a data folder, it has no {INDEX_FILE}; make one with `saf data prepare`")
        record = read_json(path, error=DataError, advice=_AGAIN)
        try:
            return cls.from_dict(record)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise DataError(f"{path}: damaged or from another version ({problem}); {_AGAIN}") from error


def _partition(data: dict) -> PartitionInfo:
    values = dict(data)
    values["shards"] = tuple(FileInfo(**shard) for shard in data["shards"])
    values["digests"] = FileInfo(**data["digests"]) if data["digests"] else None
    return PartitionInfo(**values)


class TokenData:
    """Open the tokens of a prepared data folder.

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
            expected = info.sha256 if verify else None
            check_file(folder / info.file, size=info.bytes, sha256=expected, error=DataError, advice=_AGAIN)
        data = cls(folder, index)
        _check_disjoint(data)
        return data

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 of the tokenizer and of every token in order."""
        return self.index.fingerprint

    @property
    def vocab_size(self) -> int:
        """Return the number of token ids, the end-of-text token included."""
        return self.index.tokenizer.vocab_size

    @property
    def eot_id(self) -> int:
        """Return the id of the token that ends every document."""
        return self.index.tokenizer.eot_id

    @property
    def calibration_source(self) -> str:
        """Return the partition that calibration text is drawn from: `calibration` or `train`."""
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
        raise DataError(f"{folder}: its {TOKENIZER_FILE} is missing; {_AGAIN}")
    found = file_hash(path)
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
