"""Text in, a data folder out: read, tokenise, divide into partitions, shuffle, write, publish."""

import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import numpy as np

from saf.data.config import PrepareConfig
from saf.data.documents import Document, ReadingCounts, distinct_documents, limited_texts
from saf.data.encoding import EncodePool
from saf.data.folder import check_target, new_folder
from saf.data.index import PARTITIONS, TOKENIZER_FILE, DataIndex, PartitionInfo, TokenizerInfo
from saf.data.partitions import assign, check_disjoint
from saf.data.progress import ReadingProgress
from saf.data.shards import ShardWriter, chunks, token_dtype
from saf.data.sources import Source, resolve
from saf.data.spool import Spool
from saf.data.tokenizer import Tokenizer
from saf.data.tokenizer_sample import choose_tokenizer
from saf.errors import InputError

Names = str | Path | Sequence[str | Path]
# Settings that say where things are or how fast to go, not what comes out.
_NOT_RECORDED = ("workers", "heldout")


def prepare(
    sources: Names, out: str | Path, *, overwrite: bool = False, progress: bool | None = None, **settings
) -> DataIndex:
    """Make a data folder of token shards from text and return its index.

    The four partitions share no document; repeated documents are kept once, and one that is also held out is
    dropped from training. Within a partition documents follow one another in a seeded order, each ended by the
    end-of-text token. The result depends on the text, the settings and the tokenizer alone.

    Args:
        sources: `python` (text that every Python installation carries), files or folders of .txt, .jsonl or
            .parquet, or `owner/name[:config[:split]]` of a Hugging Face dataset; one or several.
        out: folder to make; it appears only once it is complete.
        overwrite: replace a finished data folder.
        progress: show a progress bar; None means only on a terminal.
        **settings: the fields of `PrepareConfig`: `heldout`, `tokenizer`, `vocab_size`, `seed`, ...

    Raises:
        DataError: when text cannot be read, is too little to fill every partition, or `out` is taken.
        InputError: when a setting is out of range or there is no source.
    """
    config = PrepareConfig(**{**settings, "heldout": _names(settings.get("heldout") or ())})
    if not _names(sources):
        raise InputError("prepare needs at least one source of text; got none")
    check_target(Path(out), overwrite=overwrite)
    train = [resolve(name) for name in _names(sources)]
    heldout = [resolve(name) for name in config.heldout]
    with ReadingProgress(progress) as shown, new_folder(Path(out), overwrite=overwrite) as folder:
        shown.stage("choosing the tokenizer")
        tokenizer, trained_on = choose_tokenizer(train, config)
        tokenizer.save(folder / TOKENIZER_FILE)
        reading = Reading(train, heldout, config)
        spool = reading.tokenise(folder, tokenizer, shown)
        shown.stage("writing shards")
        partitions = _write_partitions(folder, spool, tokenizer, config)
        spool.remove()
        index = reading.index(tokenizer, trained_on, partitions)
        index.save(folder)
    return index


def _names(names: Names) -> tuple[str, ...]:
    if isinstance(names, str | Path):
        names = (names,)
    return tuple(str(name) for name in names)


class Reading:
    """Both kinds of source, read and tokenised once, with counts of what was taken and left out."""

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
            for document, ids in pool.encode(self._documents()):
                spool.add(document, ids)
                tokens, text_bytes = tokens + len(ids), text_bytes + len(document.data)
                stage.update(share=self._share(total, text_bytes), text_bytes=text_bytes, tokens=tokens)
        spool.close()
        return spool

    def _documents(self) -> Iterator[Document]:
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
        counts, config = self._counts["train"], self._config
        shares = [self._read_from_disk / total] if total else []
        if config.max_bytes is not None:
            shares.append(counts.bytes / config.max_bytes)
        if config.max_documents is not None:
            shares.append(counts.documents / config.max_documents)
        # Reading runs ahead of tokenising.
        read = sum(counts.bytes for counts in self._counts.values())
        return max(shares) * tokenised / max(read, 1) if shares else None

    def index(self, tokenizer: Tokenizer, trained_on: dict | None, partitions: dict[str, PartitionInfo]) -> DataIndex:
        """Return the index of what was read and written."""
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
            sources=train.per_source,
            heldout=heldout.per_source,
            duplicates={
                "rule": "documents with equal content are kept once; one that is also held out stays held out",
                "repeated": train.repeated + heldout.repeated,
                "also_held_out": train.also_held_out,
                "empty": train.empty + heldout.empty,
            },
            settings=settings,
            versions={name: version(name) for name in ("numpy", "tokenizers")} | {"python": platform.python_version()},
        )


def _write_partitions(
    folder: Path, spool: Spool, tokenizer: Tokenizer, config: PrepareConfig
) -> dict[str, PartitionInfo]:
    partition = assign(spool.keys, spool.tokens, spool.heldout, fraction=config.fraction, shares=config.shares)
    check_disjoint(spool.digests, partition)
    dtype = token_dtype(tokenizer.vocab_size)
    infos = {}
    for number, name in enumerate(PARTITIONS):
        mine = np.flatnonzero(partition == number)
        order = mine[np.lexsort((spool.digests[mine, 0], spool.keys[mine]))]
        writer = ShardWriter(folder, name, dtype, vocab_size=tokenizer.vocab_size, shard_tokens=config.shard_tokens)
        for chunk in chunks((spool.document(index) for index in order), dtype):
            writer.write(chunk)
        infos[name] = writer.finish(
            documents=len(order), text_bytes=int(spool.bytes[order].sum()), digests=spool.digests[order]
        )
    return infos
