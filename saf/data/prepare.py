"""`prepare` turns text into a data folder: it reads, trains the tokenizer, tokenises, divides, shuffles and writes.

A document's partition depends on its content and the seed. Each document has a seeded key; whole documents are held out
in the order of their keys, balanced by tokens. So nearly all held-out documents stay so when others are added.
"""

import heapq
import os
import platform
import sys
import warnings
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import blake2b, sha256
from importlib.metadata import version
from itertools import chain, groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np

from saf.data.loader import PARTITIONS, TokenData, file_sizes, read_index, write_index
from saf.data.reading import Source
from saf.data.tokenizer import Tokenizer, train_bpe
from saf.errors import DataError, InputError, SafWarning, check_name
from saf.records.files import locked, new_folder, restore_replaced_

# Chosen, not measured: a corpus of ten million tokens still holds out half a million, 122 windows of 4,096.
_HELDOUT_FRACTION = 0.05
# Bytes that are tokenised at once, and characters at which a document is cut: tokenising takes some 150 times a text's
# size in memory.
_BATCH_BYTES, _LONGEST_DOCUMENT = 2**21, 2**23
_BLOCK = 2**21  # bytes of tokens that are counted at once
# Characters of the longest piece in the tokenizer's sample; how many times the sample's size is read to draw it from.
_SAMPLE_PIECE, _LOOK_AHEAD = 2**16, 16
# Length of the longest document that is held out, as a share of the text to hold out; the second share applies where
# the first leaves too little. Round numbers, not measured.
_LONGEST_HELD_OUT = (1 / 8, 1 / 3)
# Share of the requested tokens that is enough, a round number too.
_ENOUGH_HELD_OUT = 0.9
# A pool of so many documents nearly always has enough text. For log-normal lengths with sigma 1.5 (books and notes) a
# pool of 100 had enough in 300 of 300 draws, one of 20 in 178; with sigma 2 one of 200 in 295.
_LARGE_POOL = 200
# A smaller pool gets this many times the bytes that it should need: bytes a token differ between documents.
_MARGIN = 1.25


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """How text becomes a data folder."""

    heldout: tuple[str, ...] = ()
    """Take held-out text from these sources; by default a fraction of the documents is held out."""
    heldout_fraction: float | None = None
    """Hold out this share of all tokens, in (0, 0.5]; by default 0.05, without held-out sources."""
    report_only: bool = False
    """Put all text into the report partition: to evaluate models on it, with the --tokenizer of their data."""
    calibration_from: Literal["heldout", "train"] = "heldout"
    """Draw calibration windows from held-out or from training text; train leaves the calibration partition empty."""
    tokenizer: str = "bpe"
    """Tokenise with bpe (trained on the training text), gpt2 (downloaded), the tokenizer.json or GPT-2 files of this
    folder, or the tokenizer of a model on the Hugging Face hub, OWNER/NAME."""
    vocab_size: int = 4096
    """Train bpe to this size of vocabulary, end-of-text token included."""
    tokenizer_bytes: int = 16 * 2**20
    """Train bpe on at most this many bytes of text."""
    max_bytes: int | None = None
    """Stop reading the sources, and the held-out sources, after this many bytes of text; one longer document is cut
    there."""
    text_field: str = "text"
    """Read the text from this field of JSON Lines, column of a table, or feature of a dataset."""
    split_characters: int | None = None
    """Cut documents into pieces of at most this many characters, each a document of its own."""
    seed: int = 0
    """Random seed for the order of documents and for the choice of those held out."""

    def __post_init__(self):
        for name in ("max_bytes", "split_characters"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InputError(f"{name} must be at least 1, got {value}")
        if self.tokenizer != "bpe" and self.vocab_size != PrepareConfig.vocab_size:
            raise InputError(f"vocab_size must be left out with tokenizer={self.tokenizer!r}")
        if self.vocab_size < 257:
            raise InputError(f"vocab_size must be at least 257 (256 bytes and end-of-text), got {self.vocab_size}")
        check_name("calibration_from", self.calibration_from, ("heldout", "train"))
        if self.report_only and (self.tokenizer == "bpe" or self.heldout_fraction is not None):
            raise InputError("report_only needs the tokenizer of a model's data, and no heldout_fraction")
        if self.heldout and self.heldout_fraction is not None:
            raise InputError("heldout_fraction must be left out with heldout, got both")
        if self.heldout_fraction is not None and not 0 < self.heldout_fraction <= 0.5:
            raise InputError(f"heldout_fraction must be in (0, 0.5], got {self.heldout_fraction}")

    @property
    def fraction(self) -> float | None:
        """Share of all tokens to hold out, or None with held-out sources."""
        return None if self.heldout else self.heldout_fraction or _HELDOUT_FRACTION

    @property
    def shares(self) -> np.ndarray:
        """Shares of held-out tokens for calibration, controller and report, summing to one."""
        uses = np.array([self.calibration_from != "train" and not self.report_only, not self.report_only, True])
        return uses / uses.sum()


def prepare(
    sources: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    overwrite: bool = False,
    progress: bool | None = None,
    **settings: Any,
) -> TokenData:
    """Write a data folder of tokens from text and return it.

    The four partitions share no document: a repeated one is written once, and one that is also held out is dropped from
    training. Within a partition documents follow one another in a seeded order, each ended by the end-of-text token.
    The result depends on the text, the settings and the tokenizer alone.

    `sources` are names that `Source` describes, `settings` the fields of `PrepareConfig`. The folder `out` appears only
    once it is complete; `overwrite` replaces a finished one. `progress=None` shows a bar on a terminal alone.
    Raises DataError when text cannot be read or is too little to fill every partition, or `out` is taken.
    """
    from rich.console import Console
    from rich.progress import Progress

    names, out = _as_tuple(sources), Path(out).resolve()
    config = PrepareConfig(heldout=_as_tuple(settings.pop("heldout", None) or ()), **settings)
    if config.report_only:  # all text is held out, and `shares` gives it to the report
        config, names = replace(config, heldout=config.heldout + names), ()
    # Held-out sources are read first: a document that is in training sources too stays held out.
    members = {"heldout": config.heldout, "train": names}
    groups = {group: [Source(name, text_field=config.text_field) for name in members[group]] for group in members}
    shown = sys.stderr.isatty() if progress is None else progress
    bar = Progress(console=Console(stderr=True), disable=not shown)
    busy = DataError(f"{out}: another process is preparing this folder; wait for it or choose another")
    with bar, locked(out.with_name(f".{out.name}.lock"), busy):
        _check_target(out, overwrite=overwrite)
        with new_folder(out, replace=overwrite) as folder:
            _prepare(folder, groups, config, bar)
    return TokenData.open(out)


def _as_tuple(names: str | Path | Sequence[str | Path]) -> tuple[str, ...]:
    return (str(names),) if isinstance(names, str | Path) else tuple(map(str, names))


def _check_target(out: Path, *, overwrite: bool) -> None:
    """Raise DataError unless `out` is absent, empty, or with `overwrite` a data folder that holds nothing else."""
    restore_replaced_(out)
    if not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir())):
        return
    try:
        index = read_index(out)
    except DataError as error:
        raise DataError(f"{out}: something that is not a data folder is there ({error}); choose another") from error
    if not overwrite:
        raise DataError(f"{out}: a finished data folder is there; name another --out, or add --overwrite")
    # Overwriting removes the whole folder, and with it whatever a user has put there.
    if foreign := sorted({path.name for path in out.iterdir()} - file_sizes(index).keys()):
        raise DataError(f"{out} also holds {foreign[0]}, which its index.json does not name; remove such files first")


def _prepare(folder: Path, groups: dict[str, list[Source]], config: PrepareConfig, bar: Any) -> None:
    # Loaded before the text is read: a wrong name should not be found after hours of reading.
    tokenizer = None if config.tokenizer == "bpe" else Tokenizer.named(config.tokenizer)
    bar.add_task("reading", total=None)
    corpus = Corpus(folder / "text.spool", groups, config)
    pool = _heldout_pool(corpus.keys, corpus.sizes, config.fraction)
    trained_on = None
    if tokenizer is None:
        bar.add_task("training the tokenizer", total=None)
        sample = _sample(corpus, config, pool)
        trained_on = {"bytes": sum(len(piece.encode()) for piece in sample), "pieces": len(sample)}
        tokenizer = train_bpe(sample, vocab_size=config.vocab_size)
    tokenizer.save(folder)
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
    task = bar.add_task("tokenising", total=len(corpus.keys))
    ids = folder / "tokens.spool"
    tokens = _tokenise(corpus, tokenizer, ids, dtype, partial(bar.advance, task))
    corpus.file.unlink()  # now, so that the disk need not hold the text, its tokens and the partitions at once
    bar.add_task("writing", total=None)
    partition, partitions = _assign(corpus, tokens, pool, config), {}
    order = np.argsort(corpus.keys, kind="stable")
    for number, name in enumerate(PARTITIONS):
        members = order[partition[order] == number]
        written = _write(folder / f"{name}.bin", ids, members, tokens, dtype, tokenizer.vocab_size)
        partitions[name] = {"documents": len(members), "bytes": int(corpus.sizes[members].sum()), **written}
    ids.unlink()
    kind = config.tokenizer if config.tokenizer in ("bpe", "gpt2") else "loaded"
    vocabulary = {"vocab_size": tokenizer.vocab_size, "eot_id": tokenizer.eot_id, "trained_on": trained_on}
    index = {
        "dtype": dtype.name,
        "tokenizer": {"kind": kind, "sha256": tokenizer.fingerprint, **vocabulary},
        "partitions": partitions,
        "calibration_from": config.calibration_from,
        "sources": corpus.facts["train"],
        "heldout": corpus.facts["heldout"],
        "duplicates": dict(corpus.skipped),
        "left_out": [
            {"source": source.name, "file": file, "reason": reason}
            for source in chain(*groups.values())
            for file, reason in sorted(source.left_out.items())
        ],
        "settings": {**asdict(config), "heldout_fraction": config.fraction},
        "versions": {name: version(name) for name in ("numpy", "tokenizers")} | {"python": platform.python_version()},
    }
    write_index(folder, index)


# --- documents


class Corpus:
    """The distinct documents of all sources in the order of reading: their text in a file, all else in memory."""

    def __init__(self, file: Path, groups: dict[str, list[Source]], config: PrepareConfig):
        """Read the sources of each group once, so that they may be pipes; a repeated document is dropped."""
        self.file, self.skipped = file, Counter(repeated=0, also_held_out=0, empty=0)
        self.facts: dict[str, list[dict[str, Any]]] = {group: [] for group in groups}
        """Name, documents and bytes of each source, by group."""
        self.training = array("q")
        """Numbers of the documents of training sources, in order; a repeated one has its number again."""
        # Arrays take 16 bytes a document, a tuple of numbers 130: a corpus may have millions of documents.
        keys, sizes, seen = array("Q"), array("q"), dict[bytes, int]()
        with open(file, "wb") as spool:
            for group, sources in groups.items():
                first = len(seen)
                for data in self._read(sources, config, self.facts[group]):
                    digest = _digest(data)
                    if digest in seen:
                        self.skipped["repeated" if seen[digest] >= first else "also_held_out"] += 1
                    else:
                        seen[digest] = len(seen)
                        keys.append(_key(digest, config.seed))
                        sizes.append(len(data))
                        spool.write(data)
                    if group == "train":
                        self.training.append(seen[digest])
        self.keys, self.sizes = np.array(keys), np.array(sizes)
        """The key of each document in the seeded order, and its size in bytes."""
        self.heldout = np.arange(len(seen)) < first
        """Whether each is of a held-out source; those were read before."""

    def _read(self, sources: Sequence[Source], config: PrepareConfig, facts: list[dict[str, Any]]) -> Iterator[bytes]:
        """Yield documents, cut where long, until `max_bytes` is reached; count those of each source."""
        longest = min(config.split_characters or _LONGEST_DOCUMENT, _LONGEST_DOCUMENT)
        remaining = config.max_bytes or sys.maxsize
        for source in sources:
            facts.append({"source": source.name, "documents": 0, "bytes": 0})
            for document in source.documents():
                start = document.encode()[: config.max_bytes].decode(errors="ignore")
                for text in split_text(start, longest):
                    if not text.strip():
                        self.skipped["empty"] += 1
                        continue
                    data = text.encode()
                    facts[-1]["documents"] += 1
                    facts[-1]["bytes"] += len(data)
                    yield data
                    if (remaining := remaining - len(data)) <= 0:
                        return

    def texts(self, numbers: Iterable[int]) -> Iterator[str]:
        return (piece.decode() for piece in _pieces(self.file, self.sizes, numbers))


def _pieces(path: Path, sizes: np.ndarray, numbers: Iterable[int]) -> Iterator[bytes]:
    """Yield pieces by their numbers from a file in which pieces of these sizes, in bytes, lie end to end."""
    starts = np.cumsum(sizes) - sizes
    # Read rather than mapped: mapped pages of a file of gigabytes would count as memory.
    with open(path, "rb", buffering=0) as file:
        for number in numbers:
            file.seek(int(starts[number]))
            yield file.read(int(sizes[number]))


def split_text(text: str, limit: int) -> Iterator[str]:
    """Cut a text into pieces of at most `limit` characters, at a paragraph, line or word.

    >>> list(split_text("one two three", 8))
    ['one two ', 'three']
    """
    start = 0
    while len(text) - start > limit:
        cut = start + limit
        for mark in ("\n\n", "\n", " "):  # a mark in the first half would leave a short piece
            if (at := text.rfind(mark, start + limit // 2, cut)) >= 0:
                cut = at + len(mark)
                break
        yield text[start:cut]
        start = cut
    yield text[start:]


def _digest(data: bytes) -> bytes:
    # In 128 bits no two documents of a corpus collide, and a set of them is much smaller than the texts.
    return blake2b(data, digest_size=16).digest()


def _key(digest: bytes, seed: int) -> int:
    """Return a document's key in the seeded order, uniform in [0, 2^64), from its content alone."""
    return int.from_bytes(blake2b(digest, digest_size=8, salt=seed.to_bytes(16, "little")).digest(), "little")


def _tokenise(
    corpus: Corpus, tokenizer: Tokenizer, ids: Path, dtype: np.dtype, advance: Callable[[int], Any]
) -> np.ndarray:
    """Write the token ids of all documents and return the number of each, end-of-text included, `[documents]`."""
    counts, batches = list[int](), np.cumsum(corpus.sizes) // _BATCH_BYTES
    texts = zip(batches, corpus.texts(range(len(batches))), strict=True)
    with open(ids, "wb") as file:
        for _, batch in groupby(texts, key=itemgetter(0)):
            rows = tokenizer.encode_batch([text for _, text in batch])
            for row in rows:
                file.write(np.array([*row, tokenizer.eot_id], dtype=dtype).tobytes())
                counts.append(len(row) + 1)
            advance(len(rows))
    return np.array(counts)


def _write(
    path: Path, ids: Path, members: np.ndarray, tokens: np.ndarray, dtype: np.dtype, vocabulary: int
) -> dict[str, Any]:
    """Write the tokens of a partition's documents, `members` in order, and return its entries of the index."""
    with open(path, "wb") as file:
        file.writelines(_pieces(ids, tokens * dtype.itemsize, members))
    # By blocks, not by documents: each count of a block goes through the whole vocabulary.
    digest, counts = sha256(), np.zeros(vocabulary, dtype=np.int64)
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            counts += np.bincount(np.frombuffer(block, dtype), minlength=vocabulary)
    share = counts[counts > 0] / max(counts.sum(), 1)
    entropy = max(0.0, float(-(share * np.log(share)).sum())) if len(share) else None  # 0.0 in place of -0.0
    return {"tokens": int(counts.sum()), "unigram_entropy": entropy, "sha256": digest.hexdigest()}


# --- partitions


def _assign(corpus: Corpus, tokens: np.ndarray, pool: np.ndarray, config: PrepareConfig) -> np.ndarray:
    """Choose the partition of each document, an index into PARTITIONS `[documents]`.

    Warns where much less is held out than requested; raises DataError when a partition gets no document.
    """
    keys, heldout = corpus.keys, corpus.heldout
    if config.fraction is not None:
        heldout = _hold_out(keys, tokens, config.fraction, pool)
    where = np.flatnonzero(heldout)
    partition = np.zeros(len(keys), dtype=np.int8)
    partition[where] = 1 + _divide(keys[where], tokens[where], config.shares)
    counts = np.bincount(partition, minlength=len(PARTITIONS))
    needed = (not config.report_only, *(config.shares > 0))
    for name, count, is_needed in zip(PARTITIONS, counts, needed, strict=True):
        if is_needed and count == 0:
            few = f"the {name} partition got no document: {len(keys)} documents in all, {len(where)} held out"
            raise DataError(f"{few}; give more (a file of text is one), --split-characters or --heldout-fraction")
    held = tokens[partition > 0].sum() / tokens.sum()
    if config.fraction is not None and held < _ENOUGH_HELD_OUT * config.fraction:
        few = f"{held:.1%} of the tokens are held out instead of {config.fraction:.1%}: long documents stay in training"
        warnings.warn(f"{few}; cut them with --split-characters, or name --heldout sources", SafWarning, stacklevel=4)
    return partition


def _key_limit(fraction: float | None) -> int:
    """Return the key below which a document is in the pool: twice `fraction` of all keys lie there."""
    return 0 if fraction is None else min(int(2 * fraction * 2**64), 2**64 - 1)


def _heldout_pool(keys: np.ndarray, sizes: np.ndarray, fraction: float | None) -> np.ndarray:
    """Mask the pool of documents that `_hold_out` chooses from, by keys and bytes of text `[documents]`.

    The pool has the documents with keys below `_key_limit`. Few documents may have too little text: then documents join
    in the order of their keys until there is enough, except those too long to be held out.
    """
    # Bytes stand for tokens, which do not exist yet: the tokenizer learns from the documents outside the pool alone.
    pool = keys < np.uint64(_key_limit(fraction))
    if fraction is not None and 2 * fraction * len(keys) < _LARGE_POOL:
        target, order = fraction * sizes.sum(), np.argsort(keys, kind="stable")
        order = order[_MARGIN * sizes[order] <= _LONGEST_HELD_OUT[-1] * target]
        pool[order[: np.searchsorted(np.cumsum(sizes[order]), _MARGIN * target) + 1]] = True
    return pool


def _hold_out(keys: np.ndarray, tokens: np.ndarray, fraction: float, pool: np.ndarray) -> np.ndarray:
    """Mask the documents to hold out: the lowest keys of a pool, up to `fraction` of all tokens.

    A document longer than an eighth of the held-out text stays in training, so that no partition is one document. Where
    that leaves too little, the limit is a third. All arrays are `[documents]`.
    """
    target, heldout = fraction * tokens.sum(), np.zeros(len(keys), dtype=bool)
    order = np.argsort(keys, kind="stable")
    order = order[pool[order]]
    for longest in _LONGEST_HELD_OUT:
        short = order[tokens[order] <= longest * target]
        heldout[:] = False
        # The document that crosses the target is held out if that lands nearer to it.
        heldout[short[np.cumsum(tokens[short]) - tokens[short] / 2 <= target]] = True
        if tokens[heldout].sum() >= _ENOUGH_HELD_OUT * target:
            break
    return heldout


def _divide(keys: np.ndarray, tokens: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Choose the part of each document, 0 to len(shares) - 1: the longest first, to the part furthest behind.

    A share of zero gets none.
    """
    # Greedy, longest first: shorter documents even out what a long one has put ahead.
    target = shares * tokens.sum()
    filled = np.zeros(len(shares))
    parts = np.zeros(len(keys), dtype=np.int8)
    for document in np.lexsort((keys, -tokens.astype(np.int64))):
        part = int(np.argmax(np.where(target > 0, target - filled, -np.inf)))
        parts[document] = part
        filled[part] += tokens[document]
    return parts


# --- the tokenizer


def _sample(corpus: Corpus, config: PrepareConfig, pool: np.ndarray) -> list[str]:
    """Draw pieces of training text, at most `tokenizer_bytes`, for the tokenizer to learn from.

    Pieces of up to 65,536 characters are drawn from the first `16 * tokenizer_bytes` bytes: those with the highest
    seeded keys. None is of a document in `pool`, which may be held out.
    """
    heap, sampled, read = list[tuple[int, int, str, int]](), 0, 0
    limit = _key_limit(config.fraction)
    for number, text in zip(corpus.training, corpus.texts(corpus.training), strict=True):
        read += int(corpus.sizes[number])
        if corpus.keys[number] < limit:
            continue
        enough = read >= _LOOK_AHEAD * config.tokenizer_bytes  # this document is the last, by its first piece alone
        for piece in islice(split_text(text, _SAMPLE_PIECE), 1 if enough else None):
            data = piece.encode()
            heapq.heappush(heap, (_key(_digest(data), config.seed), len(data), piece, number))
            sampled += len(data)
            while sampled > config.tokenizer_bytes and len(heap) > 1:  # drop the lowest key
                sampled -= heapq.heappop(heap)[1]
        if enough:
            break
    # A small pool has keys above the limit, too.
    return [piece for _, _, piece, number in sorted(heap) if not pool[number]]
