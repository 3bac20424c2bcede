"""Text in, a data folder out: read, tokenise, divide into partitions by document, shuffle, write, publish.

Which partition is a function of content and seed: a document has a seeded key, and whole documents are held out in the
order of their keys, balanced by tokens. So a document that is held out stays so when others are added, but for one at
the border and one that was too long.
"""

import heapq
import os
import platform
import sys
import warnings
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import blake2b, sha256
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from saf.data.loader import (
    DIGEST_BYTES,
    PARTITIONS,
    TOKENIZER_FILE,
    TokenData,
    digests_file,
    files_of,
    read_index,
    tokens_file,
    write_index,
)
from saf.data.reading import Advance, Source, is_blank, resolve
from saf.data.tokenizer import CONFIG_FILE, Tokenizer, train_bpe
from saf.errors import DataError, InputError, SafWarning
from saf.records.folders import locked_beside, new_folder, restore_replaced_

if TYPE_CHECKING:
    from rich.progress import Progress

HELDOUT_FRACTION = 0.05
"""Chosen, not measured: a corpus of ten million tokens still keeps half a million apart, 122 windows of 4,096."""
# What one thread tokenises at once: shared out evenly, and small because it takes 150 times its size in memory.
_BATCH_CHARACTERS, _BATCH_TEXTS = 2**19, 1024
_BLOCK = 2**20
# Longest piece that the tokenizer's sample has of a document, and how many times its size is read to draw it from.
_SAMPLE_PIECE, _LOOK_AHEAD = 2**16, 16
# The longest document that is held out, as a share of held-out text, and what it is where that leaves too few; the
# share of the tokens asked for at which no longer documents are taken. Round numbers; none was measured.
_LONGEST_HELD_OUT, _ENOUGH_HELD_OUT = (1 / 8, 1 / 3), 0.9
# Documents that a pool of keys must be expected to have for its size to be left to chance. Of lengths as different as
# those of books and notes (log-normal, sigma 1.5) a pool of 100 held enough in 300 of 300 draws, one of 20 in 178, one
# of 10 in 78; with sigma 2 one of 200 in 295.
_MANY_HELD_OUT = 200
# What the pool of few documents has of the text asked for, and what is left below the longest document: both are
# measured in bytes, of which a token has some more in one document than in another.
_TO_SPARE = 1.25


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Say how text becomes a data folder. Raises InputError on a setting out of range."""

    heldout: tuple[str, ...] = ()
    """Sources of held-out text. Without any, a fraction of the documents is held out."""
    heldout_fraction: float | None = None
    """Share of all tokens to hold out, in (0, 0.5]; 0.05 when `heldout` is empty."""
    heldout_shares: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """How held-out tokens are divided over calibration, controller and report."""
    calibration_from: Literal["heldout", "train"] = "heldout"
    """Where calibration windows come from; `train` leaves the calibration partition empty."""
    tokenizer: str = "bpe"
    """`bpe` (trained on the training text), `gpt2` (downloaded), a folder with tokenizer.json or GPT-2's files, or the
    name of a model on the Hugging Face hub, OWNER/NAME, whose tokenizer is downloaded."""
    vocab_size: int = 4096
    """Size of the vocabulary trained by `bpe`, end-of-text token included."""
    tokenizer_bytes: int = 16 * 2**20
    """Most bytes of training text that `bpe` learns from."""
    max_documents: int | None = None
    """Stop reading the sources, and likewise the held-out sources, after this many documents."""
    max_bytes: int | None = None
    """Stop reading the sources, and likewise the held-out sources, once this many bytes of text are read; a document
    longer than that by itself is cut there."""
    text_field: str = "text"
    """The field of JSON Lines, column of CSV or Parquet, or feature of a dataset that is the text."""
    split_characters: int | None = None
    """Cut longer documents into pieces of at most this many characters, each then a document of its own."""
    seed: int = 0
    """Seed of the order of documents and of what is held out."""
    workers: int | None = None
    """Tokenising threads; the number of usable CPU cores when not given. Never changes the result."""

    def __post_init__(self):
        for name in ("vocab_size", "tokenizer_bytes", "max_documents", "max_bytes", "split_characters", "workers"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InputError(f"{name} must be at least 1, got {value}")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"seed must be in [0, 2^63), got {self.seed}")
        if self.calibration_from not in ("heldout", "train"):
            raise InputError(f"calibration_from must be 'heldout' or 'train', got {self.calibration_from!r}")
        if self.heldout and self.heldout_fraction is not None:
            raise InputError("heldout_fraction must be left out with held-out sources, got both")
        if self.heldout_fraction is not None and not 0 < self.heldout_fraction <= 0.5:
            raise InputError(f"heldout_fraction must be in (0, 0.5], got {self.heldout_fraction}")
        if len(self.heldout_shares) != 3 or not all(0 < share < float("inf") for share in self.heldout_shares):
            raise InputError(f"heldout_shares must be three positive numbers, got {self.heldout_shares}")

    @property
    def fraction(self) -> float | None:
        """Return the share of all tokens to hold out, or None when held-out sources are given."""
        return None if self.heldout else self.heldout_fraction or HELDOUT_FRACTION

    @property
    def shares(self) -> tuple[float, float, float]:
        """Return the shares of held-out tokens for calibration, controller and report, summing to one."""
        calibration, controller, report = self.heldout_shares
        calibration = 0.0 if self.calibration_from == "train" else calibration
        total = calibration + controller + report
        return (calibration / total, controller / total, report / total)


def usable_cores() -> int:
    """Return how many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prepare(
    sources: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    overwrite: bool = False,
    progress: bool | None = None,
    **settings: Any,
) -> TokenData:
    """Make a data folder of tokens from text and return it.

    The four partitions share no document; repeated documents are kept once, and one that is also held out, or differs
    from one held out in white space and case alone, is dropped from training. Within a partition documents follow one
    another in a seeded order, each ended by the end-of-text token. The result depends on the text, the settings and
    the tokenizer alone.

    Args:
        sources: `python` (text that every Python installation carries), files or folders of text (UTF-8 without NUL
            bytes), JSON Lines, .csv, .tsv or .parquet, a folder saved by `datasets`, or `owner/name[:config[:split]]`
            of a Hugging Face dataset; one or several. The index lists what was not read of a folder.
        out: folder to make; it appears only once it is complete.
        overwrite: replace a finished data folder.
        progress: show a progress bar; None means only on a terminal.
        **settings: the fields of `PrepareConfig`: `heldout`, `tokenizer`, `vocab_size`, `seed`, ...

    Raises:
        DataError: Text cannot be read or is too little to fill every partition, or `out` is taken.
        InputError: A setting is out of range, or there is no source.
    """
    config = PrepareConfig(**{**settings, "heldout": _names(settings.get("heldout") or ())})
    if not (names := _names(sources)):
        raise InputError("prepare needs at least one source of text, got none")
    for name in ("vocab_size", "tokenizer_bytes"):
        if config.tokenizer != "bpe" and getattr(config, name) != getattr(PrepareConfig, name):
            raise InputError(f"{name} must be left out with a given tokenizer, got {getattr(config, name)}")
    out = Path(out).resolve()
    _check_target(out, overwrite=overwrite)
    groups = {
        group: [resolve(name, text_field=config.text_field, max_bytes=config.max_bytes) for name in members]
        for group, members in (("heldout", config.heldout), ("train", names))
    }
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), disable=not (sys.stderr.isatty() if progress is None else progress))
    busy = DataError(f"{out}: another process is preparing this folder; wait for it or choose another")
    with bar, locked_beside(out, busy):
        restore_replaced_(out)
        _check_target(out, overwrite=overwrite)
        with new_folder(out, replace=overwrite) as folder:
            index = _prepare(folder, groups, config, bar)
            # Preparing takes hours: something may have been put there meanwhile.
            _check_target(out, overwrite=overwrite)
    return TokenData(out, index)


def _names(names: str | Path | Sequence[str | Path]) -> tuple[str, ...]:
    """Return the names of sources as a tuple of strings; one name alone stands for itself."""
    return tuple(map(str, (names,) if isinstance(names, str | Path) else names))


def _check_target(out: Path, *, overwrite: bool) -> None:
    """Raise DataError unless a folder may be written: it is not there, is empty, or with `overwrite` was prepared.

    A prepared folder that holds anything else besides is left alone: overwriting removes what was written, no more.
    """
    if not (out.exists() or out.is_symlink()) or (out.is_dir() and not any(out.iterdir())):
        return
    try:
        index = read_index(out)
    except DataError as error:
        raise DataError(f"{out}: something that is not a data folder is there ({error}); choose another") from error
    if not overwrite:
        raise DataError(f"{out}: a finished data folder is there; name another, or replace it (overwrite, --overwrite)")
    if foreign := sorted({path.name for path in out.iterdir()} - files_of(index).keys()):
        named = ", ".join(foreign[:5]) + ", ..." * (len(foreign) > 5)
        raise DataError(f"{out} also holds what `saf data prepare` did not write: {named}; move it, or choose another")


def _prepare(folder: Path, groups: dict[str, list[Source]], config: PrepareConfig, bar: "Progress") -> dict[str, Any]:
    """Write the files of a data folder and return its index."""
    bar.add_task("choosing the tokenizer", total=None)
    tokenizer, trained_on = _choose_tokenizer(groups["train"], config)
    tokenizer.save(folder / TOKENIZER_FILE)
    tokenizer.save_config(folder / CONFIG_FILE)
    sizes = [source.size for sources in groups.values() for source in sources]
    task = bar.add_task("tokenising", total=None if None in sizes else sum(filter(None, sizes)))
    counts, spool = {group: _Counts() for group in groups}, folder / "spool.bin"
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
    documents = _tokenise(groups, counts, tokenizer, config, spool, dtype, lambda count: bar.advance(task, count))
    bar.add_task("writing", total=None)
    partition = _assign(documents, config)
    near = _leave_out_near_(partition, documents.loose)
    partitions = {
        name: _write(folder, name, documents, np.flatnonzero(partition == number), spool, dtype)
        for number, name in enumerate(PARTITIONS)
    }
    spool.unlink()
    settings = {name: value for name, value in asdict(config).items() if name not in ("workers", "heldout")}
    index = {
        "dtype": dtype.name,
        "tokenizer": {
            "kind": config.tokenizer if config.tokenizer in ("bpe", "gpt2") else "given",
            "sha256": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "eot_id": tokenizer.eot_id,
            "trained_on": trained_on,
        },
        "partitions": partitions,
        "calibration_from": config.calibration_from,
        "sources": counts["train"].per_source,
        "heldout": counts["heldout"].per_source,
        "duplicates": {
            "repeated": sum(each.repeated for each in counts.values()),
            "also_held_out": counts["train"].also_held_out,
            "nearly_held_out": near,
            "empty": sum(each.empty for each in counts.values()),
        },
        "left_out": [
            {"source": source.name, "file": file, "reason": reason}
            for source in chain(*groups.values())
            for file, reason in sorted(source.left_out.items())
        ],
        "settings": {**settings, "heldout_fraction": config.fraction},
        "versions": {name: version(name) for name in ("numpy", "tokenizers")} | {"python": platform.python_version()},
    }
    return write_index(folder, index)


class _Counts:
    """What reading took and what it left out."""

    def __init__(self):
        self.documents = self.bytes = self.empty = self.repeated = self.also_held_out = 0
        self.per_source: list[dict[str, Any]] = []


def _read(sources: Sequence[Source], config: PrepareConfig, counts: _Counts, advance: Advance = int) -> Iterator[str]:
    """Yield the documents of several sources, split if asked, until `max_documents` or `max_bytes` is reached."""
    for source in sources:
        facts = {"source": source.name, "documents": 0, "bytes": 0}
        counts.per_source.append(facts)
        for whole in source.documents(advance):
            for text in [whole] if config.split_characters is None else split_text(whole, config.split_characters):
                if is_blank(text):
                    counts.empty += 1
                    continue
                for each in (facts, vars(counts)):
                    each["documents"] += 1
                    each["bytes"] += len(text.encode())
                yield text
                if counts.documents == config.max_documents or counts.bytes >= (config.max_bytes or float("inf")):
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
    return blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()


def _loose_digest(text: str) -> bytes:
    """Return a digest that texts share which are equal but for white space and case."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for start in range(0, len(text), _BLOCK):  # the words of a long text take many times its memory
        digest.update("".join(text[start : start + _BLOCK].split()).casefold().encode())
    return digest.digest()


def _order_key(digest: bytes, seed: int) -> int:
    """Return a document's place in the seeded order, uniform in [0, 2^64), from its content alone."""
    return int.from_bytes(blake2b(digest, digest_size=8, salt=seed.to_bytes(16, "little")).digest(), "little")


class _Documents:
    """What is known of each distinct document in reading order; some 66 bytes of each, arrays once all were read."""

    def __init__(self):
        self.keys: Any = array("Q")
        self.bytes: Any = array("q")
        self.tokens: Any = array("q")
        """Counts with the end-of-text token."""
        self.heldout: Any = array("b")
        self.digests: Any = bytearray()
        self.loose: Any = bytearray()

    def close(self) -> "_Documents":
        """Make arrays `[documents]` of the columns, and `[documents, 16]` of the digests."""
        for name, dtype in (("keys", np.uint64), ("bytes", np.int64), ("tokens", np.int64), ("heldout", bool)):
            setattr(self, name, np.array(getattr(self, name), dtype=dtype))
        for name in ("digests", "loose"):
            setattr(self, name, np.frombuffer(getattr(self, name), dtype=np.uint8).reshape(-1, DIGEST_BYTES))
        return self


def _tokenise(
    groups: dict[str, list[Source]],
    counts: dict[str, _Counts],
    tokenizer: Tokenizer,
    config: PrepareConfig,
    spool: Path,
    dtype: np.dtype,
    advance: Advance,
) -> _Documents:
    """Read every document, tokenise the distinct ones, and write their tokens in reading order."""
    documents = _Documents()

    def pieces() -> Iterator[tuple[str, bool]]:
        """Yield the distinct documents in pieces, each with whether it ends its document."""
        seen: dict[bytes, str] = {}
        for group, sources in groups.items():  # held-out text first: a document that is in both stays held out
            for text in _read(sources, config, counts[group], advance):
                digest = _digest(text)
                if digest in seen:
                    counts[group].repeated += seen[digest] == group
                    counts[group].also_held_out += seen[digest] != group
                    continue
                seen[digest] = group
                documents.digests += digest
                documents.loose += _loose_digest(text)
                documents.keys.append(_order_key(digest, config.seed))
                documents.bytes.append(len(text.encode()))
                documents.heldout.append(group == "heldout")
                held = 0
                for piece in tokenizer.pieces(text):
                    held += len(piece)
                    yield piece, held == len(text)

    length = 0
    with open(spool, "wb", buffering=_BLOCK) as file:
        for ids, ends in _encoded(pieces(), tokenizer, config.workers or usable_cores()):
            file.write(np.array([*ids, tokenizer.eot_id] if ends else ids, dtype=dtype).tobytes())
            length += len(ids) + ends
            if ends:
                documents.tokens.append(length)
                length = 0
    return documents.close()


def _encoded(
    pieces: Iterable[tuple[str, bool]], tokenizer: Tokenizer, threads: int
) -> Iterator[tuple[list[int], bool]]:
    """Yield the token ids of each piece with its mark, in the order given, encoded a few batches ahead."""
    waiting: deque[tuple[list[bool], Future[list[list[int]]]]] = deque()
    texts, marks = list[str](), list[bool]()
    size = 0

    def encode(texts: list[str]) -> list[list[int]]:
        return [tokenizer.encode(text) for text in texts]  # one at a time: of several the package uses all cores

    with ThreadPoolExecutor(threads) as pool:
        for piece, mark in chain(pieces, [("", None)]):
            if mark is not None:
                texts.append(piece)
                marks.append(mark)
                size += len(piece)
            if mark is None or size >= _BATCH_CHARACTERS or len(texts) == _BATCH_TEXTS:
                waiting.append((marks, pool.submit(encode, texts)))
                texts, marks, size = [], [], 0
            while waiting and (mark is None or len(waiting) > 2 * threads):
                done, ids = waiting.popleft()
                yield from zip(ids.result(), done, strict=True)


def _write(
    folder: Path, name: str, documents: _Documents, mine: np.ndarray, spool: Path, dtype: np.dtype
) -> dict[str, Any]:
    """Write tokens and digests of a partition's documents in their seeded order, and return its entry in the index."""
    order = mine[np.lexsort((documents.digests[mine, 0], documents.keys[mine]))]
    ends, counts, digest = np.cumsum(documents.tokens), np.zeros(1, dtype=np.int64), sha256()

    def blocks() -> Iterator[bytes]:
        """Yield the tokens of the documents, about a mebibyte at a time."""
        waiting = bytearray()
        # Read rather than mapped: what is mapped of a file of gigabytes would count as memory.
        with open(spool, "rb", buffering=0) as file:
            for document in order.tolist():
                left = int(documents.tokens[document]) * dtype.itemsize
                file.seek(int(ends[document]) * dtype.itemsize - left)
                while left:
                    data = file.read(min(left, _BLOCK))
                    left -= len(data)
                    waiting += data
                    if len(waiting) >= _BLOCK:
                        yield bytes(waiting)
                        waiting.clear()
        if waiting:
            yield bytes(waiting)

    with open(folder / tokens_file(name), "wb") as file:
        for data in blocks():
            file.write(data)
            digest.update(data)
            found = np.bincount(np.frombuffer(data, dtype), minlength=len(counts))
            found[: len(counts)] += counts
            counts = found
    digests = documents.digests[order].tobytes()
    (folder / digests_file(name)).write_bytes(digests)
    share = counts[counts > 0] / max(counts.sum(), 1)
    return {
        "tokens": int(counts.sum()),
        "documents": len(order),
        "bytes": int(documents.bytes[order].sum()),
        "unigram_entropy": max(0.0, float(-(share * np.log(share)).sum())) if len(share) else None,
        "sha256": digest.hexdigest(),
        "digests_sha256": sha256(digests).hexdigest(),
    }


def _lowest_keys(fraction: float) -> int:
    """Return the key below which a document may be held out: twice the fraction of all keys."""
    return min(int(2 * fraction * 2**64), 2**64 - 1)


def _are_few(documents: int, fraction: float) -> bool:
    """Return whether so few documents have keys below `_lowest_keys` that chance may leave too little text there."""
    return 2 * fraction * documents < _MANY_HELD_OUT


def _may_be_held_out(keys: np.ndarray, sizes: np.ndarray, fraction: float) -> np.ndarray:
    """Return a mask of the documents that `_hold_out` chooses from, of keys and bytes of text `[documents]`.

    The tokenizer learns only from the others. Of many documents these are the ones with keys below `_lowest_keys`,
    whatever the others are. Where few leave too little text there, those with the next keys are added until it
    suffices, but for documents that are too long.
    """
    pool = keys < np.uint64(_lowest_keys(fraction))
    asked = fraction * sizes.sum()
    short = _TO_SPARE * sizes <= _LONGEST_HELD_OUT[-1] * asked
    if not _are_few(len(keys), fraction) or sizes[pool & short].sum() >= _TO_SPARE * asked:
        return pool
    order = np.argsort(keys, kind="stable")
    order = order[short[order]]
    reach = np.searchsorted(np.cumsum(sizes[order]), _TO_SPARE * asked) + 1
    pool[order[:reach]] = True
    return pool


def _hold_out(keys: np.ndarray, tokens: np.ndarray, fraction: float, pool: np.ndarray) -> np.ndarray:
    """Return a mask of the documents held out: the lowest keys of a pool, up to `fraction` of all tokens.

    A document longer than an eighth of the held-out text stays in training, lest a partition be one document; where
    that leaves too few, the limit is a third. All arrays are `[documents]`.
    """
    target = fraction * tokens.sum()
    order = np.argsort(keys, kind="stable")
    order = order[pool[order]]
    taken = order[:0]
    for longest in _LONGEST_HELD_OUT:
        short = order[tokens[order] <= longest * target]
        # The document that crosses the target is taken if that lands nearer to it.
        taken = short[np.cumsum(tokens[short]) - tokens[short] / 2 <= target]
        if tokens[taken].sum() >= _ENOUGH_HELD_OUT * target:
            break
    mask = np.zeros(len(keys), dtype=bool)
    mask[taken] = True
    return mask


def _divide(keys: np.ndarray, tokens: np.ndarray, shares: tuple[float, ...]) -> np.ndarray:
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


def _assign(documents: _Documents, config: PrepareConfig) -> np.ndarray:
    """Return each document's partition, an index into PARTITIONS `[documents]`.

    A SafWarning says where less is held out than was asked for.

    Raises:
        DataError: A partition that should have text gets no document.
    """
    keys, tokens, heldout = documents.keys, documents.tokens, documents.heldout
    if config.fraction is not None:
        pool = _may_be_held_out(keys, documents.bytes, config.fraction)
        heldout = _hold_out(keys, tokens, config.fraction, pool)
    where = np.flatnonzero(heldout)
    partition = np.zeros(len(keys), dtype=np.int8)
    partition[where] = 1 + _divide(keys[where], tokens[where], config.shares)
    counts = np.bincount(partition, minlength=len(PARTITIONS))
    for name, count, share in zip(PARTITIONS, counts, (1.0, *config.shares), strict=True):
        if share > 0 and count == 0:
            raise DataError(
                f"the {name} partition got no document: {len(keys)} documents in all, {len(where)} held out; give more "
                "(a file of text is one), a larger heldout_fraction, or cut long documents with split_characters"
            )
    held = tokens[partition > 0].sum() / tokens.sum()
    if config.fraction is not None and held < _ENOUGH_HELD_OUT * config.fraction:
        warnings.warn(
            f"{held:.1%} of the tokens are held out, {config.fraction:.1%} were asked for: documents longer than a "
            "third of that text stay in training. Cut them with split_characters, or name held-out sources (heldout)",
            SafWarning,
            stacklevel=4,
        )
    return partition


def _leave_out_near_(partition: np.ndarray, loose: np.ndarray) -> int:
    """Put -1 for training documents that are held-out ones but for white space and case; return how many.

    `partition` is `[documents]`, `loose` the digests that such documents share, uint8 `[documents, 16]`.
    Raises DataError when no training document is left.
    """
    heldout = {bytes(row) for row in loose[partition > 0]}
    train = np.flatnonzero(partition == 0)
    near = train[np.array([bytes(row) in heldout for row in loose[train]], dtype=bool)]
    if len(near) == len(train):
        raise DataError("every training document is also held out, but for white space and case; give other text")
    partition[near] = -1
    return len(near)


def _choose_tokenizer(sources: Sequence[Source], config: PrepareConfig) -> tuple[Tokenizer, dict[str, int] | None]:
    """Return the tokenizer that the settings ask for, and what it was trained on (None for a given one)."""
    name = "openai-community/gpt2" if config.tokenizer == "gpt2" else config.tokenizer
    if name != "bpe":
        on_hub = name.count("/") == 1 and not Path(name).exists()
        return (Tokenizer.from_hub if on_hub else Tokenizer.load)(name), None
    sample, drawn_from = _sample(sources, config)
    facts = {"bytes": sum(len(piece.encode()) for piece in sample), "pieces": len(sample)}
    return train_bpe(sample, vocab_size=config.vocab_size), {**facts, "drawn_from_bytes": drawn_from}


def _sample(sources: Sequence[Source], config: PrepareConfig) -> tuple[list[str], int]:
    """Return pieces of training text, at most `tokenizer_bytes`, and from how many bytes they were drawn.

    Pieces of 65,536 characters are drawn by seeded content hash from the first `16 * tokenizer_bytes` bytes. A
    document that may be held out is never used; where there are few, all are read to know which may.
    """
    counts, fraction = _Counts(), config.fraction
    lowest, few = (0, False) if fraction is None else (_lowest_keys(fraction), True)
    sizes: dict[int, int] = {}  # bytes of documents by their keys, as long as they are few
    heap: list[tuple[int, int, str, int]] = []
    total, drawn_from = 0, 0
    for text in _read(sources, config, counts):
        document = _order_key(_digest(text), config.seed)
        if few and fraction is not None:
            sizes[document] = len(text.encode())
            few = _are_few(len(sizes), fraction)
        for piece in split_text(text, _SAMPLE_PIECE) if document >= lowest and not drawn_from else ():
            size = len(piece.encode())
            heapq.heappush(heap, (_order_key(_digest(piece), config.seed), size, piece, document))
            total += size
            while total > config.tokenizer_bytes and len(heap) > 1:
                total -= heapq.heappop(heap)[1]
            if counts.bytes >= _LOOK_AHEAD * config.tokenizer_bytes:
                drawn_from = counts.bytes
                break
        if drawn_from and not few:
            break
    kept_back = set[int]()
    if few and fraction is not None:
        keys, held = np.fromiter(sizes, dtype=np.uint64), np.fromiter(sizes.values(), dtype=np.int64)
        kept_back = set(keys[_may_be_held_out(keys, held, fraction)].tolist())
    return [piece for _, _, piece, document in sorted(heap) if document not in kept_back], drawn_from or counts.bytes
