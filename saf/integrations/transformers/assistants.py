"""Models with frozen heads that assist ordinary ones in `generate`: refused first where their patterns end too early.

Only what proposes tokens knows how long the output may become: an assistant is asked for a few tokens at a time, and
would refuse those beyond its patterns in the middle of the text. A model with frozen heads asks its assistant itself.
"""

from functools import cache, wraps
from typing import Any

from saf.adapters.transformers.generation import CANDIDATES, check_assistant


@cache
def ask_assistants() -> None:
    """Let `generate` of every model of transformers ask assistants with frozen heads, from now on, before it begins."""
    from transformers import GenerationMixin

    ordinary = vars(GenerationMixin)[CANDIDATES]

    @wraps(ordinary)
    def candidate_generator(self: Any, *arguments: Any, **options: Any) -> Any:
        """Return what proposes tokens; raise InputError for an assistant whose patterns end before the last of them."""
        if not arguments:
            check_assistant(**options)
        return ordinary(self, *arguments, **options)

    setattr(GenerationMixin, CANDIDATES, candidate_generator)
