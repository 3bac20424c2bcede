"""A data folder: its index, and its tokens opened for reading, checked and memory-mapped, a partition at a time."""

import json
import warnings
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from saf.data.documents import PARTITIONS, check_disjoint
from saf.data.shards import FileInfo, PartitionInfo, ShardedTokens
from saf.data.sources import LEFT_OUT_FILE
from saf.data.tokenizer import CONFIG_FILE, Tokenizer
from saf.data.utf8 import DIGEST_BYTES
from saf.data.verification import AGAIN, check_content, is_remembered, marks, remember
from saf.errors import DataError, InputError, SafWarning
from saf.records.files import check_file, entries_hash, file_hash, read_json, write_json

SCHEMA = "saf.data/2"
UNSEALED = "saf.data/1"
"""The schema before, whose index has no hash of its own: readable, and told to be less well checked."""
INDEX_FILE = "index.json"
TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True)
class TokenizerInfo:
    """Describe the tokenizer: how it came about, SHA-256 of its file, tokens in its vocabulary, end-of-text id."""

    kind: str
    sha256: str
    vocab_size: int
    eot_id: int
    trained_on: dict | None = None

    def __post_init__(self):
        """Raise ValueError for what no tokenizer has."""
        if not isinstance(self.vocab_size, int) or not isinstance(self.eot_id, int):
            raise ValueError(f"vocab_size {self.vocab_size!r} and eot_id {self.eot_id!r} must be whole numbers")
        if not 0 <= self.eot_id < self.vocab_size:
            raise ValueError(f"eot_id {self.eot_id} is none of {self.vocab_size} ids")


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
    left_out: FileInfo | None = None
    """The list of what was not read of the sources; None where all was, or an earlier version wrote it."""

    def __post_init__(self):
        """Raise ValueError for what no prepared folder has."""
        if self.dtype not in ("uint16", "uint32") or self.calibration_from not in ("heldout", "train"):
            raise ValueError(f"dtype {self.dtype!r}, calibration_from {self.calibration_from!r}")

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 of the tokenizer and of every token in order; paths play no part."""
        facts = {name: info.shards for name, info in self.partitions.items()}
        hashes = {name: [shard.sha256 for shard in shards] for name, shards in facts.items()}
        # The schema's first name stays in it: checkpoints and results name data by their fingerprint.
        text = json.dumps([UNSEALED, self.tokenizer.sha256, self.dtype, hashes], sort_keys=True)
        return sha256(text.encode()).hexdigest()

    @property
    def calibration_source(self) -> str:
        """Return the partition that calibration text is drawn from: `calibration` or `train`."""
        return "train" if self.calibration_from == "train" else "calibration"

    @property
    def file_names(self) -> set[str]:
        """Return the names of all files of the folder."""
        return {INDEX_FILE, TOKENIZER_FILE, CONFIG_FILE, LEFT_OUT_FILE, *(info.file for info in _files(self))}

    def to_dict(self) -> dict:
        """Return plain JSON types, as in index.json, with a hash of all of them."""
        facts = json.loads(json.dumps({"schema": SCHEMA, "fingerprint": self.fingerprint, **asdict(self)}))
        return {**facts, "hash": entries_hash(facts)}

    @classmethod
    def from_dict(cls, data: dict) -> "DataIndex":
        """Build from `to_dict`'s output; raise KeyError, TypeError or ValueError on anything else."""
        schema = data["schema"]
        if schema not in (SCHEMA, UNSEALED):
            raise ValueError(f"schema {schema!r}, this version reads {SCHEMA!r}")
        if schema == SCHEMA and data["hash"] != entries_hash(data):
            raise ValueError(f"its entries were changed: its hash is {data['hash']}, theirs {entries_hash(data)}")
        names = cls.__dataclass_fields__
        values = {name: value for name, value in data.items() if name in names}
        values["tokenizer"] = TokenizerInfo(**data["tokenizer"])
        values["left_out"] = FileInfo(**data["left_out"]) if data.get("left_out") else None
        values["partitions"] = {name: _partition(data["partitions"][name]) for name in PARTITIONS}
        index = cls(**values)
        if data["fingerprint"] != index.fingerprint:
            raise ValueError(f"its fingerprint is {data['fingerprint']}, its sums give {index.fingerprint}")
        return index

    def save(self, folder: Path):
        """Write index.json into a folder."""
        write_json(folder / INDEX_FILE, self.to_dict())

    @classmethod
    def load(cls, folder: Path) -> "DataIndex":
        """Read a folder's index.json; raise DataError when it is missing or damaged."""
        path = folder / INDEX_FILE
        if folder.is_file():
            raise DataError(f"{folder} is a file; expected a folder made by `saf data prepare`")
        if not folder.is_dir():
            raise DataError(f"{folder}: no such data folder here; give --data, or make one with `saf data prepare`")
        if not path.is_file():
            raise DataError(f"{folder}: not a data folder, it has no {INDEX_FILE}; make one with `saf data prepare`")
        record = read_json(path, error=DataError, advice=AGAIN)
        try:
            index = cls.from_dict(record)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise DataError(f"{path}: damaged or from another version ({problem}); restore it or {AGAIN}") from error
        if record["schema"] == UNSEALED:
            warnings.warn(
                f"{path} is of a version that kept no hash of it: tokens, tokenizer and vocabulary are checked, what "
                f"else it tells (sources, settings, entropies) cannot be; {AGAIN} to have it checked whole",
                SafWarning,
                stacklevel=3,
            )
        return index


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
        """Open a data folder and check that it is what was prepared; a second time only what changed since is read.

        Every file's SHA-256, every token against the vocabulary, the vocabulary and end-of-text id against the
        tokenizer, and that no document is in two partitions.

        Args:
            folder: made by `saf.data.prepare`.
            verify: read everything, also what was found whole before and has not changed.

        Raises:
            DataError: when a file is missing, was changed, or belongs to another folder.
        """
        folder = _path(folder)
        index = DataIndex.load(folder)
        data = cls(folder, index)
        files = _files(index)
        found = marks(folder, [INDEX_FILE, TOKENIZER_FILE, *(info.file for info in files)])
        if verify or not is_remembered(folder, found):
            try:
                _check_tokenizer(folder, index)
                _check_counts(folder, index)
                _check_files(folder, index)
                _check_disjoint(data)
            except OSError as error:
                raise DataError(f"{error.filename or folder} cannot be read ({error.strerror}); {AGAIN}") from error
            remember(folder, found)
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
        return self.index.calibration_source

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
        return np.frombuffer(data, dtype=np.uint8).reshape(-1, DIGEST_BYTES)

    def _partition(self, name: str):
        if name not in PARTITIONS:
            raise InputError(f"a partition is one of {', '.join(PARTITIONS)}; got {name!r}")
        return self.index.partitions[name]

    def _why_empty(self, partition: str) -> str:
        """Return why a partition has no tokens, with what to do where it is meant to be so."""
        if partition == "calibration" and self.index.calibration_from == "train":
            return (
                f"{self.folder}: its calibration text is drawn from the training partition "
                f'(calibration_from="train"); use calibration_windows(data, ..., source="train")'
            )
        return f"{self.folder}: its {partition} partition is empty"


def _files(index: DataIndex) -> list[FileInfo]:
    files = [shard for info in index.partitions.values() for shard in info.shards]
    files += [info.digests for info in index.partitions.values() if info.digests]
    return [*files, index.left_out] if index.left_out else files


def _path(folder: Any) -> Path:
    """Return a folder's name as a path; raise InputError for what is no name."""
    if not isinstance(folder, str | Path):
        raise InputError(f"a data folder is named by a string or a Path; got {folder!r}")
    return Path(folder)


def _check_tokenizer(folder: Path, index: DataIndex):
    """Compare the tokenizer with its sum and, where an index may have been changed, with what it says of it."""
    path, recorded = folder / TOKENIZER_FILE, index.tokenizer
    found = file_hash(path)
    if found != recorded.sha256:
        raise DataError(
            f"{folder}: a data folder made with another tokenizer: {TOKENIZER_FILE} has SHA-256 {found[:12]}, "
            f"its tokens were made with {recorded.sha256[:12]}; restore that file or {AGAIN}"
        )
    tokenizer = Tokenizer.load(path)
    if tokenizer.fingerprint != found:
        raise DataError(
            f"{folder}: {TOKENIZER_FILE} cuts texts short or pads them, and an earlier version obeyed it: its "
            f"documents are not whole; {AGAIN}"
        )
    if (tokenizer.vocab_size, tokenizer.eot_id) != (recorded.vocab_size, recorded.eot_id):
        raise DataError(
            f"{folder / INDEX_FILE} tells of {recorded.vocab_size:,} ids and end-of-text {recorded.eot_id}, "
            f"{TOKENIZER_FILE} has {tokenizer.vocab_size:,} and {tokenizer.eot_id}; {AGAIN}"
        )


def _check_counts(folder: Path, index: DataIndex):
    """Raise an error when the tokens or documents of a partition are not what the sizes of its files say."""
    for name, info in index.partitions.items():
        held = sum(shard.bytes for shard in info.shards) / np.dtype(index.dtype).itemsize
        if held != info.tokens:
            raise DataError(f"{folder}: damaged index, its {name} shards hold {held:,.0f} tokens, not {info.tokens:,}")
        kept = info.digests.bytes / DIGEST_BYTES if info.digests else 0
        if kept != info.documents:
            raise DataError(
                f"{folder}: damaged index, its {name} digests are of {kept:g} documents, not {info.documents}"
            )


def _check_files(folder: Path, index: DataIndex):
    """Check sizes of all files first, which costs nothing, then their content."""
    for info in _files(index):
        check_file(folder / info.file, size=info.bytes, error=DataError, advice=AGAIN)
    for partition in index.partitions.values():
        for shard in partition.shards:
            dtype = np.dtype(index.dtype).newbyteorder("<")
            check_content(folder / shard.file, shard, dtype=dtype, vocab_size=index.tokenizer.vocab_size)
        if partition.digests:
            check_content(folder / partition.digests.file, partition.digests)
    if index.left_out:
        check_content(folder / index.left_out.file, index.left_out)


def _check_disjoint(data: TokenData):
    """Raise an error when two partitions share a shard or a document."""
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
