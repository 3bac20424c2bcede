"""Which parts of this package are for models of another library; each is imported where such a model is first met.

Importing transformers takes seconds, and it is optional. So only saf/hf, whatever builds on it, and this table name it.
"""

from pkgutil import resolve_name
from typing import Any

TRANSFORMERS = {
    "adapter": "saf.hf.adapter:TransformersAdapter",  # of a model in memory: a `saf.models.adapter.Adapter`
    "folder": "saf.hf.folders:TransformersFolder",  # of a model's files: a `saf.opening.ModelFiles`
    "freezing": "saf.hf.folders:open_folder_source",  # of files whose heads `saf freeze` freezes
}


def transformers_part(part: str) -> Any:
    """Import and return a part of the table."""
    return resolve_name(TRANSFORMERS[part])
