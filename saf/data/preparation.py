"""Text in, a data folder out: read, tokenise, divide into partitions, shuffle, write, publish."""

import platform
import sys
import time
import warnings
from array import array
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from saf.data.config import PrepareConfig
from saf.data.documents import (
    ENOUGH_HELD_OUT,
    PARTITIONS,
    TRAIN,
    Document,
    ReadingCounts,
    assign,
    check_disjoint,
    distinct_documents,
    leave_out_near_,
    limited_texts,
)
from saf.data.encoding import EncodePool
from saf.data.readers import Options
from saf.data.shards import CHUNK_TOKENS, FileInfo, PartitionInfo, ShardWriter, chunks, token_dtype
from saf.data.sources import Source, resolve, write_left_out
from saf.data.token_data import TOKENIZER_FILE, DataIndex, TokenizerInfo
from saf.data.tokenizer import Tokenizer, choose_tokenizer
from saf.data.utf8 import DIGEST_BYTES
from saf.errors import DataError, InputError, SafWarning
from saf.records.files import file_hash
from saf.records.folders import locked_beside, new_folder, restore_replaced_

Names = str | Path | Sequence[str | Path]
# Names of foreign files that an error shows.
_NAMES_SHOWN = 5
# Seconds between two states of the progress display: people see no more of them.
_BETWEEN_LINES = 0.1
# Bytes of tokens that are written at once; a round number, and disks are not what preparing waits for.
_SPOOL_BYTES = 2**20
# Settings that say where things are or how fast to go, not what comes out.
_NOT_RECORDED = ("workers", "heldout")


def prepare(
    sources: Names, out: str | Path, *, overwrite: bool = False, progress: bool | None = None, **settings
) -> DataIndex:
    """Make a data folder of token shards from text and return its index.

    The four partitions share no document; repeated documents are kept once, and one that is also held out, or differs
    from one held out in white space and case alone, is dropped from training. Within a partition documents follow one
    another in a seeded order, each ended by the end-of-text token. The result depends on the text, the settings and
    the tokenizer alone.

    Args:
        sources: `python` (text that every Python installation carries), files or folders of text (UTF-8 without NUL
            bytes), .jsonl, .csv, .tsv or .parquet, a folder saved by `datasets`, or `owner/name[:config[:split]]` of a
            Hugging Face dataset; one or several. What of a folder was not read is listed in left_out.json.
        out: folder to make; it appears only once it is complete.
        overwrite: replace a finished data folder.
        progress: show a progress bar; None means only on a terminal.
        **settings: the fields of `PrepareConfig`: `heldout`, `tokenizer`, `vocab_size`, `seed`, ...

    Raises:
        DataError: when text cannot be read, is too little to fill every partition, or `out` is taken.
        InputError: when a setting is out of range or there is no source.
    """
    if unknown := settings.keys() - PrepareConfig.__dataclass_fields__.keys():
        known = ", ".join(PrepareConfig.__dataclass_fields__)
        raise InputError(f"prepare has no setting {', '.join(sorted(unknown))}; it has {known}")
    config = PrepareConfig(**{**settings, "heldout": _names(settings.get("heldout") or ())})
    if not _names(sources):
        raise InputError("prepare needs at least one source of text; got none")
    if not isinstance(out, str | Path):
        raise InputError(f"the folder to make is named by a string or a Path; got {out!r}")
    check_target(Path(out), overwrite=overwrite)
    train = [_resolved(name, config) for name in _names(sources)]
    heldout = [_resolved(name, config) for name in config.heldout]
    if config.text_field != PrepareConfig.text_field and not any(source.has_fields for source in (*train, *heldout)):
        raise InputError(
            f"text_field={config.text_field!r} names a field of JSONL, CSV, Parquet or a dataset, and no source is one"
        )
    _check_enough(train, config)
    with ReadingProgress(progress) as shown, _prepared_folder(Path(out).resolve(), overwrite=overwrite) as folder:
        shown.stage("choosing the tokenizer")
        tokenizer, trained_on = choose_tokenizer(train, config)
        tokenizer.save(folder / TOKENIZER_FILE)
        reading = Reading(train, heldout, config)
        spool = reading.tokenise(folder, tokenizer, shown)
        shown.stage("writing shards")
        partitions, near = _write_partitions(folder, spool, tokenizer, config)
        spool.remove()
        index = reading.index(tokenizer, trained_on, partitions, near)
        if path := write_left_out([*train, *heldout], folder):
            index = replace(index, left_out=FileInfo(path.name, path.stat().st_size, file_hash(path)))
        index.save(folder)
    return index


def _check_enough(train: Sequence[Source], config: PrepareConfig):
    """Raise DataError where files alone tell of fewer documents than partitions, before hours of reading."""
    most = [source.most_documents for source in train]
    partitions = 1 + sum(share > 0 for share in config.shares)
    if config.fraction is None or config.split_characters is not None or None in most:
        return
    if (found := sum(count or 0 for count in most)) < partitions:
        raise DataError(
            f"too few documents: {found} in all (a file of text is one document) for {partitions} partitions; give "
            f"more files, other files of held-out text, or cut long documents with split_characters"
        )


def check_target(out: Path, *, overwrite: bool):
    """Raise DataError unless a folder may be written: it is not there, is empty, or with `overwrite` was prepared.

    A prepared folder that holds anything else besides is left alone: overwriting removes what was written, no more.
    """
    if not (out.exists() or out.is_symlink()) or (out.is_dir() and not any(out.iterdir())):
        return
    try:
        index = DataIndex.load(out)
    except DataError as error:
        raise DataError(
            f"{out}: something that is not a data folder is there ({error}); choose another place"
        ) from error
    if not overwrite:
        raise DataError(
            f"{out}: a finished data folder is there; name another, or replace it (overwrite=True, --overwrite)"
        )
    if foreign := sorted({path.name for path in out.iterdir()} - index.file_names):
        named = ", ".join(foreign[:_NAMES_SHOWN]) + ", ..." * (len(foreign) > _NAMES_SHOWN)
        raise DataError(
            f"{out} also holds what `saf data prepare` did not write: {named}; move it away, or choose another"
        )


@contextmanager
def _prepared_folder(out: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary folder that becomes `out`, which this process holds meanwhile."""
    busy = DataError(f"{out}: another process is preparing this folder; wait for it or choose another")
    with locked_beside(out, busy):
        restore_replaced_(out)
        check_target(out, overwrite=overwrite)
        with new_folder(out, replace=overwrite) as folder:
            yield folder
            # Preparing takes hours: something may have been put there meanwhile.
            check_target(out, overwrite=overwrite)


def _resolved(name: str, config: PrepareConfig) -> Source:
    return resolve(name, Options(text_field=config.text_field, most_bytes=config.max_bytes))


def _names(names: Names) -> tuple[str, ...]:
    """Return the names of sources as a tuple of strings; one name alone stands for itself."""
    if isinstance(names, str | Path):
        names = (names,)
    if not isinstance(names, Sequence) or not all(isinstance(name, str | Path) for name in names):
        raise InputError(f"sources of text are named by strings or Paths; got {names!r}")
    return tuple(str(name) for name in names)


class Reading:
    """Read both kinds of source and tokenise them once, with counts of what was taken and left out."""

    def __init__(self, train: list[Source], heldout: list[Source], config: PrepareConfig):
        self._train, self._heldout, self._config = train, heldout, config
        self._counts = {"train": ReadingCounts(), "heldout": ReadingCounts()}
        self._read_from_disk = 0

    def tokenise(self, folder: Path, tokenizer: Tokenizer, shown: "ReadingProgress") -> "Spool":
        """Read every document, tokenise it and put it aside in reading order."""
        sizes = [source.size for source in (*self._train, *self._heldout)]
        total = None if None in sizes else sum(size for size in sizes if size)
        spool = Spool(folder / "spool.bin", token_dtype(tokenizer.vocab_size), tokenizer.eot_id)
        stage = shown.stage("tokenising", 1.0 if total or self._limited() else None)
        tokens, text_bytes = 0, 0
        with EncodePool(folder / TOKENIZER_FILE, self._config.workers) as pool:
            for (document, size, is_last), ids in pool.encode(self._pieces(tokenizer)):
                spool.add(ids)
                if is_last:
                    spool.end(document)
                tokens, text_bytes = tokens + len(ids), text_bytes + size
                stage.update(share=self._share(total, text_bytes), text_bytes=text_bytes, tokens=tokens)
        spool.close()
        return spool

    def _pieces(self, tokenizer: Tokenizer) -> Iterator[tuple[memoryview, tuple[Document, int, bool]]]:
        """Yield the documents in pieces, each with its document, its bytes, and whether it is the last one of it."""
        for document in self._documents():
            done = 0
            for piece in tokenizer.pieces(document.data):
                done += len(piece)
                yield piece, (document, len(piece), done == len(document.data))

    def _documents(self) -> Iterator[Document]:
        """Yield the distinct documents of all sources, each with the partition that it belongs to."""
        # Held-out text first: a document that is in both stays held out.
        seen: dict[bytes, bool] = {}
        for name, sources in (("heldout", self._heldout), ("train", self._train)):
            counts = self._counts[name]
            texts = limited_texts(sources, self._config, counts, self._advance)
            held = name == "heldout"
            yield from distinct_documents(texts, heldout=held, seed=self._config.seed, seen=seen, counts=counts)

    def _advance(self, count: int):
        self._read_from_disk += count

    def _limited(self) -> bool:
        return self._config.max_bytes is not None or self._config.max_documents is not None

    def _share(self, total: int | None, tokenised: int) -> float | None:
        """Return the share of the work that is done, from 0 to 1, or None where nothing bounds it."""
        counts, config = self._counts["train"], self._config
        shares = [self._read_from_disk / total] if total else []
        if config.max_bytes is not None:
            shares.append(counts.bytes / config.max_bytes)
        if config.max_documents is not None:
            shares.append(counts.documents / config.max_documents)
        # Reading runs ahead of tokenising.
        read = sum(counts.bytes for counts in self._counts.values())
        return max(shares) * tokenised / max(read, 1) if shares else None

    def index(
        self, tokenizer: Tokenizer, trained_on: dict | None, partitions: dict[str, PartitionInfo], near: int
    ) -> DataIndex:
        """Return the index of what was read and written; `near` documents were left out as nearly held out."""
        train, heldout, config = self._counts["train"], self._counts["heldout"], self._config
        settings = {name: value for name, value in asdict(config).items() if name not in _NOT_RECORDED}
        settings.update(heldout_fraction=config.fraction, heldout_shares=list(config.heldout_shares))
        return DataIndex(
            dtype=token_dtype(tokenizer.vocab_size).name,
            tokenizer=TokenizerInfo(
                kind=config.tokenizer if config.tokenizer in ("bpe", "gpt2") else "given",
                sha256=tokenizer.fingerprint,
                vocab_size=tokenizer.vocab_size,
                eot_id=tokenizer.eot_id,
                trained_on=trained_on,
            ),
            partitions=partitions,
            calibration_from=config.calibration_from,
            sources=_with_left_out(self._train, train.per_source),
            heldout=_with_left_out(self._heldout, heldout.per_source),
            duplicates={
                "rule": "documents with equal content are kept once; one that is also held out, or is equal to one "
                "held out but for white space and case, is not trained on",
                "repeated": train.repeated + heldout.repeated,
                "also_held_out": train.also_held_out,
                "nearly_held_out": near,
                "empty": train.empty + heldout.empty,
            },
            settings=settings,
            versions={name: version(name) for name in ("numpy", "tokenizers")} | {"python": platform.python_version()},
        )


def _with_left_out(sources: Sequence[Source], facts: Sequence[dict]) -> list[dict]:
    """Add how many files were left out to what is known of each source that was reached."""
    return [{**known, "left_out": len(source.left_out)} for source, known in zip(sources, facts, strict=False)]


def _write_partitions(
    folder: Path, spool: "Spool", tokenizer: Tokenizer, config: PrepareConfig
) -> tuple[dict[str, PartitionInfo], int]:
    """Write every partition; return what was written, and how many documents were left out as nearly held out."""
    partition = assign(
        spool.keys, spool.tokens, spool.heldout, sizes=spool.bytes, fraction=config.fraction, shares=config.shares
    )
    _tell_of_little(partition, spool.tokens, config)
    near = leave_out_near_(partition, spool.loose)
    check_disjoint(spool.digests, partition)
    dtype = token_dtype(tokenizer.vocab_size)
    infos = {}
    for number, name in enumerate(PARTITIONS):
        mine = np.flatnonzero(partition == number)
        order = mine[np.lexsort((spool.digests[mine, 0], spool.keys[mine]))]
        writer = ShardWriter(folder, name, dtype, vocab_size=tokenizer.vocab_size, shard_tokens=config.shard_tokens)
        for chunk in chunks(spool.parts(order), dtype):
            writer.write(chunk)
        infos[name] = writer.finish(
            documents=len(order), text_bytes=int(spool.bytes[order].sum()), digests=spool.digests[order]
        )
    return infos, near


def _tell_of_little(partition: np.ndarray, tokens: np.ndarray, config: PrepareConfig):
    """Warn where less is held out than was asked for, since the documents that are left are too long."""
    share = tokens[partition != TRAIN].sum() / tokens.sum()
    if config.fraction is not None and share < ENOUGH_HELD_OUT * config.fraction:
        warnings.warn(
            f"{share:.1%} of the tokens are held out, {config.fraction:.1%} were asked for: documents longer than a "
            "third of that text stay in training. Cut them with split_characters, or name held-out sources (heldout)",
            SafWarning,
            stacklevel=3,
        )


class Spool:
    """Keep token ids in one temporary file; what is known of each document in memory, some 66 bytes each."""

    def __init__(self, path: Path, dtype: np.dtype, eot_id: int):
        self._path, self._dtype = path, dtype
        self._eot = np.array([eot_id], dtype=dtype).tobytes()
        self._file = open(path, "wb", buffering=_SPOOL_BYTES)  # noqa: SIM115 (closed by close)
        self._digests, self._loose = bytearray(), bytearray()
        self._waiting = 0
        self._keys, self._tokens, self._bytes, self._heldout = array("Q"), array("q"), array("q"), array("b")

    def add(self, ids: np.ndarray):
        """Append tokens of the document that ends next."""
        self._file.write(ids.astype(self._dtype).tobytes())
        self._waiting += len(ids)

    def end(self, document: Document):
        """End a document with an end-of-text token."""
        self._file.write(self._eot)
        self._digests += document.digest
        self._loose += document.loose
        self._keys.append(document.key)
        self._tokens.append(self._waiting + 1)
        self._waiting = 0
        self._bytes.append(len(document.data))
        self._heldout.append(document.heldout)

    def close(self):
        """Flush the file and make the columns arrays; nothing can be added after."""
        self._file.close()
        self.keys = np.array(self._keys, dtype=np.uint64)
        self.tokens = np.array(self._tokens, dtype=np.int64)
        self.bytes = np.array(self._bytes, dtype=np.int64)
        self.heldout = np.array(self._heldout, dtype=bool)
        self.digests, self.loose = (
            np.frombuffer(bytes(kept), dtype=np.uint8).reshape(-1, DIGEST_BYTES)
            for kept in (self._digests, self._loose)
        )
        self._ends = np.cumsum(self.tokens)

    def parts(self, documents: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the tokens of documents in the order given, end-of-text included, a long one in parts.

        They are read rather than mapped: what is mapped of a file of gigabytes would count as memory.
        """
        width = self._dtype.itemsize
        with open(self._path, "rb", buffering=0) as file:
            for index in documents:
                end = int(self._ends[index])
                for start in range(end - int(self.tokens[index]), end, CHUNK_TOKENS):
                    file.seek(start * width)
                    yield np.frombuffer(file.read(min(CHUNK_TOKENS, end - start) * width), dtype=self._dtype)

    def remove(self):
        """Delete the file."""
        self._path.unlink()


class ReadingProgress(AbstractContextManager):
    """Show progress over text whose amount is known by bytes on disk or by a limit, or not at all."""

    def __init__(self, show: bool | None):
        """Show a bar if `show`; None means only when stderr is a terminal."""
        self._shown = sys.stderr.isatty() if show is None else show
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not self._shown,
        )

    def __enter__(self) -> "ReadingProgress":
        self._bar.start()
        return self

    def __exit__(self, *reason):
        self._bar.stop()

    def stage(self, name: str, total: float | None = None) -> "Stage":
        """Begin a named stage; `total` is 1.0 when the share done will be known."""
        for task in self._bar.tasks:
            self._bar.update(task.id, total=1.0, completed=1.0, rate="")
        return Stage(self._bar, self._bar.add_task(name, total=total, rate=""))


class Stage:
    """Show one line of the progress display."""

    def __init__(self, bar: Progress, task):
        self._bar, self._task = bar, task
        self._start = self._last = time.monotonic()

    def update(self, *, share: float | None, text_bytes: int, tokens: int):
        """Show how far a stage is: share in [0, 1] if known, bytes of text and tokens so far."""
        now = time.monotonic()
        if now - self._last < _BETWEEN_LINES:
            return
        self._last, seconds = now, now - self._start
        rate = f"{text_bytes / seconds / 1e6:.1f} MB/s, {tokens / seconds / 1e6:.2f} M tokens/s"
        completed = min(share, 1.0) if share is not None else 0.0
        self._bar.update(self._task, completed=completed, rate=rate)
