"""UTF-8 bytes a block at a time, so that a document of gigabytes is never there as a string too."""

import codecs
from collections.abc import Iterator
from hashlib import blake2b

BLOCK_BYTES = 2**20
"""Bytes decoded at once: little beside the document, and few turns of a loop. A round number; nothing was measured."""
DIGEST_BYTES = 16
"""128 bits of BLAKE2: two documents of a corpus never share them, and a million take 16 MB."""
_SPACES = bytes(code for code in range(128) if chr(code).isspace())
_LOWER = bytes(range(128)).lower() + bytes(range(128, 256))


def decoded(data: bytes) -> Iterator[str]:
    """Yield a text in blocks; one of up to a mebibyte in one."""
    if len(data) <= BLOCK_BYTES:
        yield data.decode("utf-8")
        return
    decoder, view = codecs.getincrementaldecoder("utf-8")(), memoryview(data)
    for start in range(0, len(data), BLOCK_BYTES):
        yield decoder.decode(view[start : start + BLOCK_BYTES], final=start + BLOCK_BYTES >= len(data))


def first_bad_byte(data: bytes, *, whole: bool) -> int | None:
    """Return the first byte that is not UTF-8, or None; a cut last character is one only in a `whole` text."""
    if data.isascii():
        return None
    decoder, view = codecs.getincrementaldecoder("utf-8")(), memoryview(data)
    for start in range(0, len(data), BLOCK_BYTES):
        waiting = len(decoder.getstate()[0])
        try:
            decoder.decode(view[start : start + BLOCK_BYTES], final=whole and start + BLOCK_BYTES >= len(data))
        except UnicodeDecodeError as error:
            return start - waiting + error.start
    return None


def cut_to(data: bytes, most: int) -> bytes:
    """Return the longest beginning of a text of at most `most` bytes that ends with a whole character."""
    while 0 < most < len(data) and data[most] & 0xC0 == 0x80:
        most -= 1
    return data[:most]


def is_blank(data: bytes) -> bool:
    """Say that a text has nothing but white space in it."""
    return not any(block.strip() for block in decoded(data))


def digest_of(data: bytes) -> bytes:
    """Return the digest that identifies a text."""
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def loose_digest(data: bytes) -> bytes:
    r"""Return a digest that texts share which are equal but for white space and case.

    >>> loose_digest(b"One\ntwo ") == loose_digest("\u3000one TWO".encode())
    True
    """
    digest = blake2b(digest_size=DIGEST_BYTES)
    if data.isascii():
        for start in range(0, len(data), BLOCK_BYTES):
            digest.update(data[start : start + BLOCK_BYTES].translate(_LOWER, _SPACES))
    else:
        for block in decoded(data):
            digest.update("".join(block.split()).casefold().encode())
    return digest.digest()
