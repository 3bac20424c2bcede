from pathlib import Path

import pytest

from saf.data import prepare
from tests.data.texts import corpus, jsonl


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
