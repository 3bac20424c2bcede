"""Streaming a Hugging Face dataset's `text` column."""

from collections.abc import Iterator

from saf.data.readers import text_field
from saf.errors import DataError


def stream_hub(name: str, config: str | None, split: str) -> Iterator[str]:
    """Yield the `text` of each row of a dataset, downloading as it goes.

    Raises DataError when `datasets` is missing, the dataset cannot be reached, or a row has no text.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(f"{name}: streaming a dataset needs a package: pip install datasets") from error
    row = 0
    try:
        for row, record in enumerate(load_dataset(name, config, split=split, streaming=True), 1):
            yield text_field(dict(record), f"{name} ({split}), row {row}")
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"{name}: no such file or folder here, and as a Hugging Face dataset it failed after {row} rows "
            f"({type(error).__name__}: {error}); check the name (owner/name:config:split) and the network"
        ) from error
