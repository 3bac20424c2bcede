"""Wrong input to everything public: the table of what is called, of each argument, and of what may not be accepted.

`attempts` yields one call each. What a call comes to is right when it raises a SafError that names the argument; it is
`silent` when the value is accepted, a `traceback` when another error comes, and `nameless` when the message leaves the
caller to guess. Settings need no row here: their fields and annotations are the table.
"""

from collections.abc import Iterator

from tools.trials.attempt import Attempt, Row, attempts_of
from tools.trials.models import of_models, of_statistics
from tools.trials.operators import of_execution, of_heads, of_patterns
from tools.trials.settings import of_settings


def rows() -> list[Row]:
    """Return the whole table."""
    return [*of_heads(), *of_patterns(), *of_execution(), *of_models(), *of_statistics(), *of_settings()]


def attempts() -> Iterator[Attempt]:
    """Yield every call of functions, methods and settings that must be refused."""
    yield from attempts_of(rows())
