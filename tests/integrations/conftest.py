"""The Trainer of transformers."""

from types import SimpleNamespace

import pytest


@pytest.fixture(scope="module")
def hf():
    """Trainer and its arguments."""
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    import saf.integrations.transformers  # noqa: F401

    return SimpleNamespace(Trainer=transformers.Trainer, TrainingArguments=transformers.TrainingArguments)
