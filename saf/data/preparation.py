"""Text in, a data folder out: read, tokenise, divide into partitions, shuffle, write, publish."""

import platform
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np

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
from saf.data.progress import ReadingProgress
from saf.data.readers import Options
from saf.data.shards import FileInfo, PartitionInfo, ShardWriter, chunks, token_dtype
from saf.data.sources import Source, resolve, write_left_out
from saf.data.spool import Spool
from saf.data.token_data import TOKENIZER_FILE, DataIndex, TokenizerInfo
from saf.data.tokenizer import CONFIG_FILE, Tokenizer, choose_tokenizer
from saf.errors import DataError, InputError, SafWarning
from saf.records.files import file_hash
from saf.records.folders import locked_beside, new_folder, restore_replaced_

Names = str | Path | Sequence[str | Path]
# Names of foreign files that an error shows.
_NAMES_SHOWN = 5
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
    trained = ("vocab_size", "tokenizer_bytes")
    idle = [name for name in trained if getattr(config, name) != getattr(PrepareConfig, name)]
    if idle and config.tokenizer != "bpe":
        raise InputError(
            f"{idle[0]} is of a tokenizer that is trained here (bpe), and {config.tokenizer} is given: "
            f"leave {idle[0]} out"
        )
    _check_enough(train, config)
    with ReadingProgress(progress) as shown, _prepared_folder(Path(out).resolve(), overwrite=overwrite) as folder:
        shown.stage("choosing the tokenizer")
        tokenizer, trained_on = choose_tokenizer(train, config)
        tokenizer.save(folder / TOKENIZER_FILE)
        tokenizer.save_config(folder / CONFIG_FILE)
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

    def tokenise(self, folder: Path, tokenizer: Tokenizer, shown: ReadingProgress) -> Spool:
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
    folder: Path, spool: Spool, tokenizer: Tokenizer, config: PrepareConfig
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
