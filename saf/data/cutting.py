"""Where a long document may be cut so that its pieces have the tokens of the whole.

A tokenizer first parts a text into pre-tokens, each of which becomes tokens by itself: a cut between two of them
changes nothing. A cut is looked for after a letter or digit, before white space or a mark other than an apostrophe.
GPT-2's rule, which is that of the default BPE, always parts there: a pre-token is white space alone, or at most one
space and a run of letters, of digits or of other characters, or an apostrophe and letters; none goes on from a letter
or digit to what is neither. The rest is parted like a text of its own, for nothing in the rule looks back, and it looks
ahead from white space alone. Rules of later tokenizers differ within such runs. Of any tokenizer a cut is verified:
around it the pre-tokens are those of its two sides, by the tokenizer's own normaliser and pre-tokenizer.
"""

import unicodedata
from collections.abc import Iterator
from typing import Any

from saf.errors import DataError

PIECE_BYTES = 2**19
"""Longest piece where cuts are found: tokenising takes some 150 times its size in memory."""
UNCUT_BYTES = 2**23
"""Longest piece where none is found, 1.2 GB in memory: longer ones are refused."""
CONTEXT = 1024
"""Characters on each side by which a cut is verified: many pre-tokens, in about a millisecond."""
STRETCH = 2**13
"""Bytes in which places are looked for at once: hundreds of words, in about a millisecond."""
TRIES = 16
"""Places verified in a stretch before one further back is looked at."""


class Cutter:
    """Cut long documents where one tokenizer, the package's own object, is sure to part them."""

    def __init__(self, tokenizer: Any):
        self._normalizer, self._pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
        added = tokenizer.get_added_tokens_decoder().values()
        # Special tokens spelled in a text are text. Others are taken out before it is parted, with what is around them.
        self._sure = self._pre_tokenizer is not None and not any(
            token.rstrip or token.single_word or any(_places(token.content)) for token in added if not token.special
        )

    def pieces(self, data: bytes) -> Iterator[memoryview]:
        """Yield the pieces of a UTF-8 text, which join to it and have its tokens.

        Raises:
            DataError: No place to cut in `UNCUT_BYTES`; the message shows where.
        """
        view, start = memoryview(data), 0
        while start < len(data):
            end = self._end(data, start)
            yield view[start:end]
            start = end

    def _end(self, data: bytes, start: int) -> int:
        """Return where the piece that begins at `start` ends: at the last sure place in it, or the first after it."""
        reach = start + PIECE_BYTES
        while reach < len(data):
            if reach - start > UNCUT_BYTES or (not self._sure and len(data) - start > UNCUT_BYTES):
                shown = bytes(data[start : start + 40]).decode(errors="replace")
                raise DataError(
                    f"a document of {len(data):,} bytes has no place in {UNCUT_BYTES:,} bytes from byte {start:,} "
                    f"({shown!r}) where its tokenizer is sure to part it, and would take some 150 times that in "
                    f"memory; make several documents of it, for example with split_characters"
                )
            if self._sure and (place := self._place(data, max(start, reach - PIECE_BYTES // 2), reach)):
                return place
            reach += PIECE_BYTES // 2
        return len(data)

    def _place(self, data: bytes, low: int, high: int) -> int | None:
        """Return a sure place between two bytes, in the last stretch of text that has one, or None."""
        for end in range(high, low, -STRETCH):
            begin = max(low, end - STRETCH)
            first, last = (_character(data, at) for at in (begin, end))
            left = data[_character(data, max(0, begin - 4 * CONTEXT)) : first].decode("utf-8")
            text = data[first:last].decode("utf-8")
            right = data[last : _character(data, end + 4 * CONTEXT)].decode("utf-8")
            for place in sorted(list(_places(text))[-TRIES:], key=lambda place: (not text[place].isspace(), -place)):
                before = (left + text[:place])[-CONTEXT:]
                after = (text[place : place + CONTEXT] + right)[:CONTEXT]
                if self._parted(before) + self._parted(after) == self._parted(before + after):
                    return first + len(text[:place].encode())
        return None

    def _parted(self, text: str) -> list[str]:
        """Return the pre-tokens of a text."""
        if self._normalizer is not None:
            text = self._normalizer.normalize_str(text)
        return [part for part, _ in self._pre_tokenizer.pre_tokenize_str(text)]


def _character(data: bytes, at: int) -> int:
    """Return the first byte of the character that byte `at` belongs to, the end of the text past it."""
    at = min(at, len(data))
    while 0 < at < len(data) and data[at] & 0xC0 == 0x80:
        at -= 1
    return at


def _places(text: str) -> Iterator[int]:
    """Yield the places after a letter or digit and before what is neither, and neither an apostrophe nor an accent."""
    inside = False
    for place, character in enumerate(text):
        if character.isalnum():
            inside = True
        else:
            if inside and character not in "'\u2019" and not unicodedata.category(character).startswith("M"):
                yield place
            inside = False
