"""What a data folder holds, as written in its index.json."""

import json
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path

from saf.errors import DataError

SCHEMA = "saf.data/1"
INDEX_FILE = "index.json"
TOKENIZER_FILE = "tokenizer.json"
PARTITIONS = ("train", "calibration", "controller", "report")


@dataclass(frozen=True)
class FileInfo:
    """One file of a partition: its name in the folder, its size in bytes and its SHA-256."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class PartitionInfo:
    """One partition: tokens (end-of-text included), documents, bytes of text, unigram entropy in nats."""

    tokens: int
    documents: int
    bytes: int
    unigram_entropy: float | None
    shards: tuple[FileInfo, ...] = ()
    digests: FileInfo | None = None


@dataclass(frozen=True)
class TokenizerInfo:
    """The tokenizer: how it came about, SHA-256 of its file, tokens in its vocabulary, end-of-text id."""

    kind: str
    sha256: str
    vocab_size: int
    eot_id: int
    trained_on: dict | None = None


@dataclass(frozen=True)
class DataIndex:
    """Everything known about a data folder without reading its shards."""

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
        """SHA-256 of the tokenizer and of every token in order; paths play no part."""
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
        (folder / INDEX_FILE).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "DataIndex":
        """Read a folder's index.json; raise DataError when it is missing or damaged."""
        path = folder / INDEX_FILE
        if not folder.is_dir():
            raise DataError(f"{folder}: no such data folder here; give --data, or make one with `saf data prepare`")
        if not path.is_file():
            raise DataError(f"{folder}: not a data folder, it has no {INDEX_FILE}; make one with `saf data prepare`")
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise DataError(f"{path}: damaged or from another version ({problem}); prepare it again") from error


def _partition(data: dict) -> PartitionInfo:
    values = dict(data)
    values["shards"] = tuple(FileInfo(**shard) for shard in data["shards"])
    values["digests"] = FileInfo(**data["digests"]) if data["digests"] else None
    return PartitionInfo(**values)
