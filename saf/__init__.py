"""Selective Attention Freezing: fix the attention of heads whose pattern does not depend on the input."""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from saf.public import *  # noqa: F403
else:

    def __getattr__(name: str):
        """Load every public name when the first is used: `saf --help` needs none, and PyTorch takes seconds."""
        # Python itself asks for names such as __path__ and __wrapped__, which need no PyTorch either.
        if not name.startswith("_") or name == "__all__":
            public = import_module("saf.public")
            globals().update({one: getattr(public, one) for one in ("__all__", *public.__all__)})
        if name not in globals():
            from saf.errors import did_you_mean

            near = did_you_mean(name, globals().get("__all__", ()))
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{near}")
        return globals()[name]

    def __dir__() -> list[str]:
        """Return the public names, loaded or not."""
        return ["__version__", *import_module("saf.public").__all__]
