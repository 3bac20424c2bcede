"""Documents as `prepare` sees them: limited, cut, without empty ones or repeats, and each in one partition.

Which partition is a function of content and seed: a document has a seeded key, and whole documents are held out in the
order of their keys, balanced by tokens. So a document that is held out stays so when others are added, but for one at
the border and one that was too long.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from saf.data.config import PrepareConfig
from saf.data.readers import Advance
from saf.data.sources import Source
from saf.data.utf8 import decoded, digest_of, is_blank, loose_digest
from saf.errors import DataError

PARTITIONS = ("train", "calibration", "controller", "report")
TRAIN, CALIBRATION, CONTROLLER, REPORT = range(4)
"""The places of these names in `PARTITIONS`."""
LEFT_OUT = -1
"""In place of a partition: of training documents that are held-out ones but for white space and case."""


@dataclass(frozen=True)
class Document:
    """Hold one document: its UTF-8 bytes, the digest that identifies it, its place in the seeded order.

    `loose` is a digest that it shares with documents equal but for white space and case.
    """

    data: bytes
    digest: bytes
    loose: bytes
    key: int
    heldout: bool


@dataclass
class ReadingCounts:
    """Count what reading took and what it left out."""

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


def split_text(parts: Iterable[str], limit: int) -> Iterator[str]:
    """Cut a text, given in parts, into pieces of at most `limit` characters, at a paragraph, line or word.

    >>> list(split_text(["one two ", "three"], 8))
    ['one two ', 'three']
    """
    text, start = "", 0
    for part in parts:
        text, start = text[start:] + part, 0
        while len(text) - start > limit:
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
) -> Iterator[bytes]:
    """Yield the texts of several sources, cut to pieces if asked, until `max_documents` or `max_bytes` is reached."""
    for source in sources:
        facts = {"source": source.name, **source.facts, "documents": 0, "bytes": 0}
        counts.per_source.append(facts)
        for whole in source.documents(advance):
            for data in _pieces(whole, config.split_characters):
                if is_blank(data):
                    counts.empty += 1
                    continue
                counts.documents, counts.bytes = counts.documents + 1, counts.bytes + len(data)
                facts["documents"], facts["bytes"] = facts["documents"] + 1, facts["bytes"] + len(data)
                yield data
                if counts.documents == config.max_documents:
                    return
                if config.max_bytes is not None and counts.bytes >= config.max_bytes:
                    return


def _pieces(data: bytes, limit: int | None) -> Iterator[bytes]:
    if limit is None:
        yield data
    else:
        yield from (text.encode() for text in split_text(decoded(data), limit))


def distinct_documents(
    texts: Iterator[bytes], *, heldout: bool, seed: int, seen: dict[bytes, bool], counts: ReadingCounts
) -> Iterator[Document]:
    """Yield each text not in `seen` (digest -> held out or not) as a document, and record it there."""
    for data in texts:
        digest = digest_of(data)
        if digest in seen:
            if seen[digest] == heldout:
                counts.repeated += 1
            else:
                counts.also_held_out += 1
            continue
        seen[digest] = heldout
        yield Document(data, digest, loose_digest(data), order_key(digest, seed), heldout)


LONGEST_HELD_OUT = (1 / 8, 1 / 3)
"""The longest document that is held out, as a share of held-out text, and what it is where that leaves too few."""
ENOUGH_HELD_OUT = 0.9
"""The share of the tokens asked for at which no longer documents are taken. Round numbers; none was measured."""
MANY_HELD_OUT = 200
"""Documents that a pool of keys must be expected to have for its size to be left to chance.

Of lengths as different as those of books and notes (log-normal, sigma 1.5) a pool of 100 held enough in 300 of 300
draws, one of 20 in 178, one of 10 in 78; with sigma 2 one of 200 in 295.
"""
TO_SPARE = 1.25
"""What the pool of few documents has of the text asked for, and what is left below the longest document: both are
measured in bytes, of which a token has some more in one document than in another."""


def lowest_keys(fraction: float) -> int:
    """Return the key below which a document may be held out: twice the fraction of all keys."""
    return min(int(2 * fraction * 2**64), 2**64 - 1)


def are_few(documents: int, fraction: float) -> bool:
    """Return whether so few documents have keys below `lowest_keys` that chance may leave too little text there.

    >>> are_few(100, 0.05), are_few(2000, 0.05)
    (True, False)
    """
    return 2 * fraction * documents < MANY_HELD_OUT


def may_be_held_out(keys: np.ndarray, sizes: np.ndarray, fraction: float) -> np.ndarray:
    """Return a mask of the documents that `hold_out` chooses from; the tokenizer learns only from the others.

    Of many documents these are the ones with keys below `lowest_keys`, whatever the others are. Where few leave too
    little text there, those with the next keys are added until it suffices, but for documents that are too long.

    Args:
        keys: seeded keys, uint64 `[documents]`.
        sizes: bytes of text `[documents]`.
        fraction: share of all tokens to hold out.
    """
    pool = keys < np.uint64(lowest_keys(fraction))
    asked = fraction * sizes.sum()
    short = TO_SPARE * sizes <= LONGEST_HELD_OUT[-1] * asked
    if not are_few(len(keys), fraction) or sizes[pool & short].sum() >= TO_SPARE * asked:
        return pool
    order = np.argsort(keys, kind="stable")
    order = order[short[order]]
    reach = np.searchsorted(np.cumsum(sizes[order]), TO_SPARE * asked) + 1
    pool[order[:reach]] = True
    return pool


def hold_out(keys: np.ndarray, tokens: np.ndarray, fraction: float, pool: np.ndarray) -> np.ndarray:
    """Return a mask of the documents held out: the lowest keys of a pool, up to `fraction` of all tokens.

    A document longer than an eighth of the held-out text stays in training, lest a partition be one document; where
    that leaves too few, the limit is a third.

    Args:
        keys: seeded keys, uint64 `[documents]`.
        tokens: token counts `[documents]`.
        fraction: share of all tokens to hold out.
        pool: mask of the documents to choose from, `may_be_held_out`.
    """
    target = fraction * tokens.sum()
    order = np.argsort(keys, kind="stable")
    order = order[pool[order]]
    taken = order[:0]
    for longest in LONGEST_HELD_OUT:
        short = order[tokens[order] <= longest * target]
        # The document that crosses the target is taken if that lands nearer to it.
        taken = short[np.cumsum(tokens[short]) - tokens[short] / 2 <= target]
        if tokens[taken].sum() >= ENOUGH_HELD_OUT * target:
            break
    mask = np.zeros(len(keys), dtype=bool)
    mask[taken] = True
    return mask


def divide(keys: np.ndarray, tokens: np.ndarray, shares: tuple[float, ...]) -> np.ndarray:
    """Return the part, 0 to len(shares) - 1, of each document: the longest first, to the part furthest behind.

    So every part gets its share of long and of short documents. A share of zero gets none.
    """
    wanted = np.asarray(shares) * tokens.sum()
    filled = np.zeros(len(shares))
    parts = np.zeros(len(keys), dtype=np.int8)
    for document in np.lexsort((keys, -tokens.astype(np.int64))):
        part = int(np.argmax(np.where(wanted > 0, wanted - filled, -np.inf)))
        parts[document] = part
        filled[part] += tokens[document]
    return parts


def assign(
    keys: np.ndarray,
    tokens: np.ndarray,
    heldout: np.ndarray,
    *,
    sizes: np.ndarray,
    fraction: float | None,
    shares: tuple[float, float, float],
) -> np.ndarray:
    """Return each document's partition, an index into PARTITIONS.

    Args:
        keys: seeded keys, uint64 `[documents]`.
        tokens: token counts `[documents]`.
        heldout: mask of the documents from held-out sources, bool `[documents]`.
        sizes: bytes of text `[documents]`.
        fraction: share of all tokens to hold out, or None to use `heldout`.
        shares: of calibration, controller and report in the held-out tokens.

    Raises:
        DataError: when a partition that should have text gets no document.
    """
    if fraction is not None:
        heldout = hold_out(keys, tokens, fraction, may_be_held_out(keys, sizes, fraction))
    where = np.flatnonzero(heldout)
    partition = np.full(len(keys), TRAIN, dtype=np.int8)
    partition[where] = divide(keys[where], tokens[where], shares) + CALIBRATION
    counts = np.bincount(partition, minlength=len(PARTITIONS))
    for index, share in enumerate((1.0, *shares)):
        if share > 0 and counts[index] == 0:
            raise DataError(
                f"the {PARTITIONS[index]} partition got no document: {len(keys)} documents in all, {len(where)} "
                f"held out; give more documents, a larger heldout_fraction, or cut long ones with "
                f"split_characters"
            )
    return partition


def leave_out_near_(partition: np.ndarray, loose: np.ndarray) -> int:
    """Take training documents out of `partition` that are held-out ones but for white space and case; return how many.

    Args:
        partition: of each document, an index into PARTITIONS `[documents]`; LEFT_OUT afterwards for those taken out.
        loose: digests that such documents share, uint8 `[documents, 16]`.

    Raises:
        DataError: when no training document is left.
    """
    heldout = {bytes(row) for row in loose[partition != TRAIN]}
    train = np.flatnonzero(partition == TRAIN)
    near = train[[bytes(row) in heldout for row in loose[train]]] if heldout else train[:0]
    if len(near) == len(train):
        raise DataError("every training document is also held out, but for white space and case; give other text")
    partition[near] = LEFT_OUT
    return len(near)


def check_disjoint(digests: np.ndarray, partition: np.ndarray):
    """Raise DataError if a document, known by its digest `[documents, 16]`, lies in two partitions."""
    # As two numbers each, which sort several times faster than sixteen bytes.
    halves = np.ascontiguousarray(digests).view(np.uint64)
    order = np.lexsort(halves.T)
    same = (halves[order][1:] == halves[order][:-1]).all(axis=1)
    clash = np.flatnonzero(same & (partition[order][1:] != partition[order][:-1]))
    if len(clash):
        first, second = (PARTITIONS[partition[order[clash[0] + step]]] for step in (0, 1))
        raise DataError(f"{len(clash)} documents lie in two partitions, one of them in {first} and {second}")
