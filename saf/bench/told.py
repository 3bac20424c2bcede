"""Errors in few words, for notes and lines of progress."""

import re

MOST = 200
_END = re.compile(r"[.!?](?=\s|$)|(?<!:)\n")
"""Of a sentence: a stop, or a line's end unless a colon announces what follows."""


def told(error: BaseException) -> str:
    """Return an exception's type and its first sentence, at most `MOST` characters of it."""
    return f"{type(error).__name__}: {first_sentence(str(error)) or 'no reason given'}"


def first_sentence(text: str) -> str:
    """Return the first sentence of a text on one line, without its stop."""
    sentence = " ".join(_END.split(text.strip(), maxsplit=1)[0].split())
    return sentence if len(sentence) <= MOST else f"{sentence[: MOST - 1]}…"
