"""A small corpus, its prepared folder, and the documents of a prepared folder."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from saf.data import PARTITIONS, TokenData, prepare

WORDS = ["the", "head", "looks", "back", "at", "every", "token", "before", "it", "and", "mixes", "what"]


def lines(texts) -> bytes:
    """JSON Lines, one object for each text."""
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def jsonl(path: Path, texts) -> Path:
    """Write JSON Lines and return the path."""
    path.write_bytes(lines(texts))
    return path


def partition_documents(data: TokenData, *partitions: str) -> list[str]:
    """The documents of partitions, by default of all, in order."""
    documents, tokenizer = [], data.tokenizer()
    for partition in filter(data.num_tokens, partitions or PARTITIONS):
        ids = np.asarray(data.tokens(partition))
        parts = np.split(ids, np.flatnonzero(ids == data.eot_id) + 1)
        assert len(parts.pop()) == 0, "every document is ended"
        documents += [tokenizer.decode(part[:-1]) for part in parts]
    return documents


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """120 different documents of uneven length."""
    drawn = random.Random(0)
    return [
        f"Document {n}\n" + "\n\n".join(" ".join(drawn.choices(WORDS, k=12)) for _ in range(drawn.randint(1, 12)))
        for n in range(120)
    ]


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
