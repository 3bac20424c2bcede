"""Choosing the tokenizer: loading a given one, or training one on a capped sample of the training text."""

import heapq
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from saf.data.config import PrepareConfig
from saf.data.documents import DIGEST_BYTES, ReadingCounts, limited_texts, order_key, split_text
from saf.data.partitions import held_out_pool
from saf.data.sources import Source
from saf.data.tokenizer import Tokenizer, train_bpe

PIECE_CHARACTERS = 2**16
# A sample is drawn from the beginning of a large source, not from all of it: this many times its own size.
LOOK_AHEAD = 16


def choose_tokenizer(sources: Sequence[Source], config: PrepareConfig) -> tuple[Tokenizer, dict | None]:
    """Return the tokenizer that the settings ask for, and what it was trained on (None for a given one)."""
    if config.tokenizer == "gpt2":
        return Tokenizer.from_hub(), None
    if config.tokenizer != "bpe":
        return Tokenizer.load(config.tokenizer), None
    sample, facts = sample_text(sources, config)
    return train_bpe(sample, vocab_size=config.vocab_size), facts


def sample_text(sources: Sequence[Source], config: PrepareConfig) -> tuple[list[str], dict]:
    """Return pieces of training text, at most `tokenizer_bytes`, and how they were drawn.

    Pieces of 65,536 characters are drawn by seeded content hash from the first `16 * tokenizer_bytes` bytes. A
    document that may be held out is never used.
    """
    counts = ReadingCounts()
    texts = limited_texts(sources, config, counts, lambda count: None)
    lowest = held_out_pool(config.fraction) if config.fraction is not None else 0
    heap: list[tuple[int, int, str]] = []
    total = 0
    for key, piece in _pieces(texts, lowest, config.seed):
        size = len(piece.encode())
        heapq.heappush(heap, (key, size, piece))
        total += size
        while total > config.tokenizer_bytes and len(heap) > 1:
            total -= heapq.heappop(heap)[1]
        if counts.bytes >= LOOK_AHEAD * config.tokenizer_bytes:
            break
    pieces = [piece for _, _, piece in sorted(heap)]
    facts = {"bytes": total, "pieces": len(pieces), "drawn_from_bytes": counts.bytes}
    return pieces, facts


def _pieces(texts: Iterable[str], lowest: int, seed: int) -> Iterable[tuple[int, str]]:
    for text in texts:
        digest = blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
        if order_key(digest, seed) < lowest:
            continue
        for piece in split_text(text, PIECE_CHARACTERS):
            yield order_key(blake2b(piece.encode(), digest_size=DIGEST_BYTES).digest(), seed), piece
