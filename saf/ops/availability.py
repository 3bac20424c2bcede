"""What is installed here, asked without importing it."""

from functools import cache
from importlib.util import find_spec


@cache
def has_triton() -> bool:
    """Whether Triton is installed; it is imported only when a kernel runs."""
    return find_spec("triton") is not None
