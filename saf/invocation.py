"""The words that the `saf` command was called with, for the record of a result."""

from contextvars import ContextVar

invocation: ContextVar[tuple[str, ...] | None] = ContextVar("invocation", default=None)
"""Arguments of the `saf` command that runs in this context; None when the library is called from elsewhere."""
