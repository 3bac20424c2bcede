"""Small corpora, and the documents of a prepared folder."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from saf.data import PARTITIONS, TokenData, prepare

WORDS = ["the", "head", "looks", "back", "at", "every", "token", "before", "it", "and", "mixes", "what"]


def corpus(count: int = 120, seed: int = 0) -> list[str]:
    """Different documents of uneven length."""
    drawn = random.Random(seed)
    return [
        f"Document {n}\n" + "\n\n".join(" ".join(drawn.choices(WORDS, k=12)) for _ in range(drawn.randint(1, 12)))
        for n in range(count)
    ]


def lines(texts, **fields) -> bytes:
    """JSON Lines, one object for each text."""
    return b"".join(json.dumps({"text": text, **fields}).encode() + b"\n" for text in texts)


def jsonl(path: Path, texts) -> Path:
    """Write JSON Lines and return the path."""
    path.write_bytes(lines(texts))
    return path


def partition_documents(data: TokenData, partition: str) -> list[str]:
    """The documents of a partition in order."""
    if not data.num_tokens(partition):
        return []
    ids, tokenizer = np.asarray(data.tokens(partition)), data.tokenizer()
    parts = np.split(ids, np.flatnonzero(ids == data.eot_id) + 1)
    assert len(parts.pop()) == 0, "every document is ended"
    return [tokenizer.decode(part[:-1]) for part in parts]


def documents(source, out: Path, **settings) -> list[str]:
    """Prepare a source and return the documents of all partitions, sorted."""
    options = {"heldout_fraction": 0.4, "vocab_size": 257, **settings}
    prepare(str(source), out, **options)
    data = TokenData.open(out)
    return sorted(text for name in PARTITIONS for text in partition_documents(data, name))


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """120 different documents of uneven length."""
    return corpus()


@pytest.fixture(scope="session")
def source(texts, tmp_path_factory) -> Path:
    """A JSON Lines file of the documents."""
    return jsonl(tmp_path_factory.mktemp("corpus") / "text.jsonl", texts)


@pytest.fixture(scope="session")
def settings() -> dict:
    return {"vocab_size": 300, "heldout_fraction": 0.3}


@pytest.fixture(scope="session")
def prepared(source, settings, tmp_path_factory) -> Path:
    """A small finished data folder; do not change it."""
    folder = tmp_path_factory.mktemp("prepared") / "data"
    prepare(source, folder, **settings)
    return folder
