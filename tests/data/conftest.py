import json
import random
from pathlib import Path

import pytest

from saf.data import prepare


def sentences(rng: random.Random, count: int) -> str:
    words = ["the", "head", "looks", "back", "at", "every", "token", "before", "it", "and", "mixes", "what"]
    return "\n\n".join(" ".join(rng.choices(words, k=12)) for _ in range(count))


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """120 different documents of uneven length."""
    rng = random.Random(0)
    return [f"Document {number}\n" + sentences(rng, rng.randint(1, 12)) for number in range(120)]


@pytest.fixture(scope="session")
def corpus(texts, tmp_path_factory) -> Path:
    """A JSONL file of the documents."""
    path = tmp_path_factory.mktemp("corpus") / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def settings() -> dict:
    return {"vocab_size": 300, "heldout_fraction": 0.3, "workers": 1}


@pytest.fixture(scope="session")
def prepared(corpus, settings, tmp_path_factory) -> Path:
    """A small finished data folder; do not change it."""
    folder = tmp_path_factory.mktemp("prepared") / "data"
    prepare(corpus, folder, **settings)
    return folder
