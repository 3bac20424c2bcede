"""Documents as `prepare` sees them: limited, cut, without empty ones or repeats, each with a seeded key."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from saf.data.compression import Advance
from saf.data.config import PrepareConfig
from saf.data.sources import Source

DIGEST_BYTES = 16


@dataclass(frozen=True)
class Document:
    """One document: its UTF-8 bytes, the digest that identifies it, its place in the seeded order."""

    data: bytes
    digest: bytes
    key: int
    heldout: bool


@dataclass
class ReadingCounts:
    """What reading took and what it left out."""

    documents: int = 0
    bytes: int = 0
    empty: int = 0
    repeated: int = 0
    also_held_out: int = 0
    per_source: list[dict] = field(default_factory=list)


def order_key(digest: bytes, seed: int) -> int:
    """Return a document's place in the seeded order, uniform in [0, 2^64), from its content alone."""
    salt = seed.to_bytes(16, "little")
    return int.from_bytes(blake2b(digest, digest_size=8, salt=salt).digest(), "little")


def split_text(text: str, limit: int | None) -> Iterator[str]:
    """Cut a text into pieces of at most `limit` characters, at a paragraph, line or word where there is one.

    >>> list(split_text("one two three", 8))
    ['one two ', 'three']
    """
    start = 0
    while limit is not None and len(text) - start > limit:
        cut = start + limit
        for mark in ("\n\n", "\n", " "):
            at = text.rfind(mark, start + limit // 2, cut)
            if at >= 0:
                cut = at + len(mark)
                break
        yield text[start:cut]
        start = cut
    yield text[start:]


def limited_texts(
    sources: Sequence[Source], config: PrepareConfig, counts: ReadingCounts, advance: Advance
) -> Iterator[str]:
    """Yield the pieces of text of several sources until `max_documents` or `max_bytes` is reached."""
    for source in sources:
        facts = {"source": source.name, **source.facts, "documents": 0, "bytes": 0}
        counts.per_source.append(facts)
        for whole in source.documents(advance):
            for text in split_text(whole, config.split_characters):
                if not text.strip():
                    counts.empty += 1
                    continue
                size = len(text) if text.isascii() else len(text.encode())
                counts.documents, counts.bytes = counts.documents + 1, counts.bytes + size
                facts["documents"], facts["bytes"] = facts["documents"] + 1, facts["bytes"] + size
                yield text
                if counts.documents == config.max_documents:
                    return
                if config.max_bytes is not None and counts.bytes >= config.max_bytes:
                    return


def distinct_documents(
    texts: Iterator[str], *, heldout: bool, seed: int, seen: dict[bytes, bool], counts: ReadingCounts
) -> Iterator[Document]:
    """Yield each text not in `seen` (digest -> held out or not) as a document, and record it there."""
    for text in texts:
        data = text.encode()
        digest = blake2b(data, digest_size=DIGEST_BYTES).digest()
        if digest in seen:
            if seen[digest] == heldout:
                counts.repeated += 1
            else:
                counts.also_held_out += 1
            continue
        seen[digest] = heldout
        yield Document(data, digest, order_key(digest, seed), heldout)
