"""What is installed here, asked without importing it."""

from importlib.util import find_spec

_TRITON = find_spec("triton") is not None


def has_triton() -> bool:
    """Whether Triton is installed; it is imported only when a kernel runs.

    Asked once, at import: compiled code calls this while it is traced, where a search for a module breaks the graph.
    """
    return _TRITON
