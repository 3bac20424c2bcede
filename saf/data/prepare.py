"""Turn text into a data folder: read, tokenise, divide into partitions by document, shuffle, write.

A document's partition depends on its content and the seed. Each document has a seeded key; whole documents are held out
in the order of their keys, balanced by tokens. So nearly all held-out documents stay so when others are added.
"""

import heapq
import platform
import sys
import warnings
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np

from saf.data.loader import PARTITIONS, TOKENIZER_FILE, TokenData, files_of, read_index, write_index
from saf.data.reading import Source
from saf.data.tokenizer import CONFIG_FILE, Tokenizer, train_bpe
from saf.errors import DataError, InputError, SafWarning, check_name
from saf.records.files import file_hash, locked, new_folder, restore_replaced_

HELDOUT_FRACTION = 0.05
"""Chosen, not measured: a corpus of ten million tokens still holds out half a million, 122 windows of 4,096."""
# What is tokenised at once: little, because tokenising takes some 150 times a text's size in memory. That also limits a
# document: a longer one is cut.
_BATCH_CHARACTERS, _BATCH_TEXTS, _LONGEST_DOCUMENT = 2**21, 4096, 2**23
_BLOCK = 2**20
# Longest piece of a document in the tokenizer's sample, and how many times the sample's size is read to draw it from.
_SAMPLE_PIECE, _LOOK_AHEAD = 2**16, 16
# The longest document that is held out, as a share of held-out text, and the same where that leaves too little; the
# share of the requested tokens that is enough. Round numbers, not measured.
_LONGEST_HELD_OUT, _ENOUGH_HELD_OUT = (1 / 8, 1 / 3), 0.9
# With more documents below the key limit than this, chance gives enough of them. For log-normal lengths with sigma 1.5
# (books and notes) a pool of 100 held enough in 300 of 300 draws, one of 20 in 178; with sigma 2 one of 200 in 295.
_MANY_HELD_OUT = 200
# Margin of the pool of few documents: it is measured in bytes, and tokens have more or fewer by document.
_MARGIN = 1.25
_DOCUMENT = np.dtype([("key", "<u8"), ("bytes", "<i8"), ("heldout", "?")])
"""A distinct document: its key in the seeded order, its size, and whether it is of a held-out source."""


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
                raise InputError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if self.tokenizer != "bpe" and self.vocab_size != PrepareConfig.vocab_size:
            raise InputError(f"--vocab-size must be left out with --tokenizer {self.tokenizer}")
        check_name("--calibration-from", self.calibration_from, ("heldout", "train"))
        if self.report_only and (self.tokenizer == "bpe" or self.heldout_fraction is not None):
            raise InputError("--report-only needs the --tokenizer of a model's data, and no --heldout-fraction")
        if self.heldout and self.heldout_fraction is not None:
            raise InputError("--heldout-fraction must be left out with --heldout, got both")
        if self.heldout_fraction is not None and not 0 < self.heldout_fraction <= 0.5:
            raise InputError(f"--heldout-fraction must be in (0, 0.5], got {self.heldout_fraction}")

    @property
    def fraction(self) -> float | None:
        """Share of all tokens to hold out, or None with held-out sources."""
        return None if self.heldout else self.heldout_fraction or HELDOUT_FRACTION

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
    """Make a data folder of tokens from text and return it.

    The four partitions share no document: a repeated one is kept once, and one that is also held out is dropped from
    training. Within a partition documents follow one another in a seeded order, each ended by the end-of-text token.
    The result depends on the text, the settings and the tokenizer alone.

    `sources` are names that `Source` describes, `settings` the fields of `PrepareConfig`. The folder `out` appears only
    once it is complete; `overwrite` replaces a finished one. `progress=None` shows a bar on a terminal alone.
    Raises DataError when text cannot be read or is too little to fill every partition, or `out` is taken.
    """
    from rich.console import Console
    from rich.progress import Progress

    config = PrepareConfig(**{**settings, "heldout": _names(settings.get("heldout") or ())})
    names = _names(sources)
    if config.report_only:
        config, names = replace(config, heldout=names), ()
    out = Path(out).resolve()
    groups = {
        group: [Source(name, text_field=config.text_field) for name in members]
        for group, members in (("heldout", config.heldout), ("train", names))
    }
    bar = Progress(console=Console(stderr=True), disable=not (sys.stderr.isatty() if progress is None else progress))
    busy = DataError(f"{out}: another process is preparing this folder; wait for it or choose another")
    with bar, locked(out.with_name(f".{out.name}.lock"), busy):
        restore_replaced_(out)
        _check_target(out, overwrite=overwrite)
        with new_folder(out, replace=overwrite) as folder:
            index = _prepare(folder, groups, config, bar)
            # Preparing takes hours: something may have been put there meanwhile.
            _check_target(out, overwrite=overwrite)
    return TokenData(out, index)


def _names(names: str | Path | Sequence[str | Path]) -> tuple[str, ...]:
    return tuple(map(str, (names,) if isinstance(names, str | Path) else names))


def _check_target(out: Path, *, overwrite: bool) -> None:
    """Raise DataError unless `out` is absent, empty, or with `overwrite` a data folder that holds nothing else."""
    if not (out.exists() or out.is_symlink()) or (out.is_dir() and not any(out.iterdir())):
        return
    try:
        index = read_index(out)
    except DataError as error:
        raise DataError(f"{out}: something that is not a data folder is there ({error}); choose another") from error
    if not overwrite:
        raise DataError(f"{out}: a finished data folder is there; name another --out, or add --overwrite")
    if foreign := sorted({path.name for path in out.iterdir()} - files_of(index).keys()):
        raise DataError(f"{out} also holds {foreign[0]}, which its index.json does not name; remove such files first")


def _prepare(folder: Path, groups: dict[str, list[Source]], config: PrepareConfig, bar: Any) -> dict[str, Any]:
    """Write the files of a data folder and return its index."""
    bar.add_task("choosing the tokenizer", total=None)
    tokenizer, trained_on = _choose_tokenizer(groups["train"], config)
    tokenizer.save(folder / TOKENIZER_FILE)
    tokenizer.save_config(folder / CONFIG_FILE)
    sources = [source for group in groups.values() for source in group]
    sizes = [source.size for source in sources]
    task = bar.add_task("tokenising", total=None if None in sizes else sum(filter(None, sizes)))
    corpus = _Corpus(folder, tokenizer)
    corpus.read(groups, config, lambda count: bar.advance(task, count))
    bar.add_task("writing", total=None)
    partition = _assign(np.frombuffer(corpus.rows, _DOCUMENT), np.array(corpus.tokens), config)
    partitions = {name: corpus.write(np.flatnonzero(partition == n), name) for n, name in enumerate(PARTITIONS)}
    corpus.spool.unlink()
    kind = config.tokenizer if config.tokenizer in ("bpe", "gpt2") else "given"
    vocabulary = {"vocab_size": tokenizer.vocab_size, "eot_id": tokenizer.eot_id, "trained_on": trained_on}
    index = {
        "dtype": corpus.dtype.name,
        "tokenizer": {"kind": kind, "sha256": tokenizer.fingerprint, **vocabulary},
        "partitions": partitions,
        "calibration_from": config.calibration_from,
        "sources": corpus.sources["train"],
        "heldout": corpus.sources["heldout"],
        "duplicates": dict(corpus.skipped),
        "left_out": [
            {"source": source.name, "file": file, "reason": reason}
            for source in sources
            for file, reason in sorted(source.left_out.items())
        ],
        "settings": {**asdict(config), "heldout_fraction": config.fraction},
        "versions": {name: version(name) for name in ("numpy", "tokenizers")} | {"python": platform.python_version()},
    }
    return write_index(folder, index)


# --- documents


class _Corpus:
    """The distinct documents of all sources: facts of each, and a file of their tokens in reading order."""

    def __init__(self, folder: Path, tokenizer: Tokenizer):
        self.folder, self.spool, self.tokenizer = folder, folder / "spool.bin", tokenizer
        self.dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
        self.sources: dict[str, list[dict[str, Any]]] = {}
        self.skipped = Counter(repeated=0, also_held_out=0, empty=0)
        self.rows = bytearray()
        """A `_DOCUMENT` for each."""
        self.tokens = array("q")
        """Tokens of each, end-of-text included."""

    def read(self, groups: dict[str, list[Source]], config: PrepareConfig, advance: Callable[[int], Any]) -> None:
        """Read and tokenise the documents of all sources; `advance` is called with the bytes of each."""
        with open(self.spool, "wb", buffering=_BLOCK) as file:
            for ids in _encoded(self._texts(groups, config, advance), self.tokenizer):
                file.write(np.array([*ids, self.tokenizer.eot_id], dtype=self.dtype).tobytes())
                self.tokens.append(len(ids) + 1)

    def _texts(
        self, groups: dict[str, list[Source]], config: PrepareConfig, advance: Callable[[int], Any]
    ) -> Iterator[str]:
        seen: dict[bytes, str] = {}
        for group, sources in groups.items():  # held-out text first: a document that is in both stays held out
            self.sources[group] = []
            for text, size in _read(sources, config, self.sources[group], self.skipped):
                advance(size)
                digest = _digest(text)
                if digest in seen:
                    self.skipped["repeated" if seen[digest] == group else "also_held_out"] += 1
                    continue
                seen[digest] = group
                row = (_order_key(digest, config.seed), size, group == "heldout")
                self.rows += np.array(row, _DOCUMENT).tobytes()
                yield text

    def write(self, members: np.ndarray, name: str) -> dict[str, Any]:
        """Write the documents of a partition and return its entries of the index."""
        documents, path = np.frombuffer(self.rows, _DOCUMENT), self.folder / f"{name}.bin"
        members = members[np.argsort(documents["key"][members], kind="stable")]
        sizes, vocabulary = np.array(self.tokens) * self.dtype.itemsize, self.tokenizer.vocab_size
        starts, counts = np.cumsum(sizes) - sizes, np.zeros(vocabulary, dtype=np.int64)
        # Read rather than mapped: mapped pages of a file of gigabytes would count as memory.
        with open(self.spool, "rb", buffering=0) as spool, open(path, "wb") as file:
            for document in members.tolist():
                spool.seek(int(starts[document]))
                file.write(spool.read(int(sizes[document])))
        with open(path, "rb") as file:
            while len(block := np.fromfile(file, self.dtype, _BLOCK)):
                counts += np.bincount(block, minlength=vocabulary)
        share = counts[counts > 0] / max(counts.sum(), 1)
        return {
            "documents": len(members),
            "bytes": int(documents["bytes"][members].sum()),
            "tokens": int(counts.sum()),
            "unigram_entropy": max(0.0, float(-(share * np.log(share)).sum())) if len(share) else None,
            "sha256": file_hash(path),
        }


def _read(
    sources: Sequence[Source], config: PrepareConfig, facts: list[dict[str, Any]], skipped: Counter[str]
) -> Iterator[tuple[str, int]]:
    """Yield documents and their bytes, cut where long, until `max_bytes` is reached; add the facts of each source."""
    longest, left = (
        min(config.split_characters or _LONGEST_DOCUMENT, _LONGEST_DOCUMENT),
        config.max_bytes or sys.maxsize,
    )
    for source in sources:
        facts.append({"source": source.name, "documents": 0, "bytes": 0})
        for whole in source.documents():
            if config.max_bytes is not None and len(data := whole.encode()) > config.max_bytes:
                whole = data[: config.max_bytes].decode(errors="ignore")
            for text in split_text(whole, longest):
                if not text.strip():
                    skipped["empty"] += 1
                    continue
                size = len(text.encode())
                facts[-1]["documents"] += 1
                facts[-1]["bytes"] += size
                yield text, size
                if (left := left - size) <= 0:
                    return


def split_text(text: str, limit: int) -> Iterator[str]:
    """Cut a text into pieces of at most `limit` characters, at a paragraph, line or word.

    >>> list(split_text("one two three", 8))
    ['one two ', 'three']
    """
    start = 0
    while len(text) - start > limit:
        cut = start + limit
        for mark in ("\n\n", "\n", " "):
            if (at := text.rfind(mark, start + limit // 2, cut)) >= 0:
                cut = at + len(mark)
                break
        yield text[start:cut]
        start = cut
    yield text[start:]


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()  # 128 bits: no two documents of a corpus collide


def _order_key(digest: bytes, seed: int) -> int:
    """Return a document's key in the seeded order, uniform in [0, 2^64), from its content alone."""
    return int.from_bytes(blake2b(digest, digest_size=8, salt=seed.to_bytes(16, "little")).digest(), "little")


def _encoded(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yield the token ids of each text, in order; a batch is tokenised on all cores while the next one is read."""
    batch, size = list[str](), 0
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(tokenizer.encode_batch, batch)
        for text in texts:
            batch.append(text)
            size += len(text)
            if size >= _BATCH_CHARACTERS or len(batch) == _BATCH_TEXTS:
                yield from pending.result()
                pending, batch, size = pool.submit(tokenizer.encode_batch, batch), [], 0
        yield from pending.result()
        yield from tokenizer.encode_batch(batch)


# --- partitions


def _assign(documents: np.ndarray, tokens: np.ndarray, config: PrepareConfig) -> np.ndarray:
    """Give each document its partition, an index into PARTITIONS `[documents]`.

    Warns where much less is held out than requested; raises DataError when a partition gets no document.
    """
    keys, heldout = documents["key"], documents["heldout"]
    if config.fraction is not None:
        pool = _may_be_held_out(keys, documents["bytes"], config.fraction)
        heldout = _hold_out(keys, tokens, config.fraction, pool)
    where = np.flatnonzero(heldout)
    partition = np.zeros(len(keys), dtype=np.int8)
    partition[where] = 1 + _divide(keys[where], tokens[where], config.shares)
    counts = np.bincount(partition, minlength=len(PARTITIONS))
    for name, count, share in zip(PARTITIONS, counts, (not config.report_only, *config.shares), strict=True):
        if share > 0 and count == 0:
            few = f"the {name} partition got no document: {len(keys)} documents in all, {len(where)} held out"
            raise DataError(f"{few}; give more (a file of text is one), --split-characters or --heldout-fraction")
    held = tokens[partition > 0].sum() / tokens.sum()
    if config.fraction is not None and held < _ENOUGH_HELD_OUT * config.fraction:
        message = f"{held:.1%} of the tokens are held out instead of {config.fraction:.1%}: long documents stay in "
        message += "training; cut them with --split-characters, or name --heldout sources"
        warnings.warn(message, SafWarning, stacklevel=4)
    return partition


def _key_limit(fraction: float) -> int:
    """Return the key below which a document may be held out: twice the fraction of all keys."""
    return min(int(2 * fraction * 2**64), 2**64 - 1)


def _may_be_held_out(keys: np.ndarray, sizes: np.ndarray, fraction: float) -> np.ndarray:
    """Mask the documents that `_hold_out` chooses from, by keys and bytes of text `[documents]`.

    The tokenizer learns only from the others. The pool is the documents with keys below `_key_limit`. Few documents
    may hold too little text; then the next keys join until it suffices, but for too long documents.
    """
    pool, target = keys < np.uint64(_key_limit(fraction)), fraction * sizes.sum()
    if 2 * fraction * len(keys) < _MANY_HELD_OUT:
        order = np.argsort(keys, kind="stable")
        order = order[_MARGIN * sizes[order] <= _LONGEST_HELD_OUT[-1] * target]
        pool[order[: np.searchsorted(np.cumsum(sizes[order]), _MARGIN * target) + 1]] = True
    return pool


def _hold_out(keys: np.ndarray, tokens: np.ndarray, fraction: float, pool: np.ndarray) -> np.ndarray:
    """Return the documents to hold out: the lowest keys of a pool, up to `fraction` of all tokens.

    A document longer than an eighth of the held-out text stays in training, lest a partition be one document; where
    that leaves too little, the limit is a third. All arrays are `[documents]`.
    """
    target, taken = fraction * tokens.sum(), np.empty(0, dtype=np.int64)
    order = np.argsort(keys, kind="stable")
    order = order[pool[order]]
    for longest in _LONGEST_HELD_OUT:
        short = order[tokens[order] <= longest * target]
        # The document that crosses the target is taken if that lands nearer to it.
        taken = short[np.cumsum(tokens[short]) - tokens[short] / 2 <= target]
        if tokens[taken].sum() >= _ENOUGH_HELD_OUT * target:
            break
    return np.isin(np.arange(len(keys)), taken)


def _divide(keys: np.ndarray, tokens: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Give each document its part, 0 to len(shares) - 1: the longest first, to the part furthest behind.

    So every part gets its share of long and of short documents. A share of zero gets none.
    """
    target = shares * tokens.sum()
    filled = np.zeros(len(shares))
    parts = np.zeros(len(keys), dtype=np.int8)
    for document in np.lexsort((keys, -tokens.astype(np.int64))):
        part = int(np.argmax(np.where(target > 0, target - filled, -np.inf)))
        parts[document] = part
        filled[part] += tokens[document]
    return parts


# --- the tokenizer


def _choose_tokenizer(sources: Sequence[Source], config: PrepareConfig) -> tuple[Tokenizer, dict[str, int] | None]:
    """Load or train the tokenizer that the settings name; also return the size of its training text, if any."""
    name = "openai-community/gpt2" if config.tokenizer == "gpt2" else config.tokenizer
    if name != "bpe":
        on_hub = name.count("/") == 1 and not Path(name).exists()
        return (Tokenizer.from_hub if on_hub else Tokenizer.load)(name), None
    sample = _sample(sources, config)
    facts = {"bytes": sum(len(piece.encode()) for piece in sample), "pieces": len(sample)}
    return train_bpe(sample, vocab_size=config.vocab_size), facts


def _sample(sources: Sequence[Source], config: PrepareConfig) -> list[str]:
    """Draw pieces of training text, at most `tokenizer_bytes`, for the tokenizer to learn from.

    Pieces of 65,536 characters are drawn by seeded content hash from the first `16 * tokenizer_bytes` bytes. A
    document that may be held out is never used; where documents are few, all are read to know which may.
    """
    limit, many = 0, 0.0
    if config.fraction is not None:
        limit, many = _key_limit(config.fraction), _MANY_HELD_OUT / (2 * config.fraction)
    sizes: dict[int, int] = {}  # bytes of documents by their keys, as long as they are few
    heap: list[tuple[int, int, str, int]] = []
    sampled, read, enough = 0, 0, False
    for text, bytes_ in _read(sources, config, [], Counter()):
        document = _order_key(_digest(text), config.seed)
        if len(sizes) < many:
            sizes[document] = bytes_
        read += bytes_
        for piece in split_text(text, _SAMPLE_PIECE) if document >= limit and not enough else ():
            size = len(piece.encode())
            heapq.heappush(heap, (_order_key(_digest(piece), config.seed), size, piece, document))
            sampled += size
            while sampled > config.tokenizer_bytes and len(heap) > 1:
                sampled -= heapq.heappop(heap)[1]
            if enough := read >= _LOOK_AHEAD * config.tokenizer_bytes:
                break
        if enough and len(sizes) >= many:
            break
    excluded = set[int]()
    if config.fraction is not None and len(sizes) < many:
        keys, held = np.fromiter(sizes, dtype=np.uint64), np.fromiter(sizes.values(), dtype=np.int64)
        excluded = set(keys[_may_be_held_out(keys, held, config.fraction)].tolist())
    return [piece for _, _, piece, document in sorted(heap) if document not in excluded]
