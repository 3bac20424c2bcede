"""`saf data prepare` and `saf data info`: make a data folder, look into one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from saf.cli.output import show
from saf.data import PARTITIONS, DataIndex
from saf.data.config import PrepareConfig
from saf.data.preparation import prepare
from saf.data.sources import LEFT_OUT_FILE, read_left_out
from saf.data.token_data import TokenData
from saf.models import PRESETS
from saf.records.table import Part, Table
from saf.train import TrainConfig


@dataclass(kw_only=True)
class Prepare:
    """Make a data folder of token shards from text: read, tokenise, divide into partitions, shuffle."""

    sources: Annotated[tuple[str, ...], tyro.conf.Positional] = ("python",)
    """`python` (its own library's text), files of text, .jsonl, .csv, .tsv or .parquet, each but the last also as .gz
    or .zst, folders of such files, folders saved by `datasets`, or OWNER/NAME[:CONFIG[:SPLIT]] of Hugging Face."""
    settings: Annotated[PrepareConfig, tyro.conf.OmitArgPrefixes]
    """How text becomes token shards."""
    out: str
    """Folder to make; it appears only once it is complete."""
    overwrite: bool = False
    """Replace a finished data folder."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> dict[str, Any]:
        """Prepare the folder, print what it holds and return its index."""
        index = prepare(self.sources, self.out, overwrite=self.overwrite, **vars(self.settings))
        return _shown(self.out, index, as_json=self.json)


@dataclass(kw_only=True)
class Info:
    """Show what a data folder holds, checking its files."""

    folder: Annotated[str, tyro.conf.Positional]
    """A folder made by `saf data prepare`."""

    verify: bool = False
    """Also check every file's SHA-256."""

    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> dict[str, Any]:
        """Open the folder, print what it holds and return its index."""
        return _shown(self.folder, TokenData.open(self.folder, verify=self.verify).index, as_json=self.json)


SHOWN = 20
"""Rows of the table of what was left out: what a terminal shows beside the table of partitions."""
Command = Prepare | Info


def _shown(folder: str, index: DataIndex, *, as_json: bool) -> dict[str, Any]:
    """Show a data folder's index and return it."""
    tokenizer, left_out = index.tokenizer, index.duplicates
    rows = {
        "tokenizer": f"{tokenizer.kind}, {tokenizer.vocab_size:,} tokens, stored as {index.dtype}",
        "calibration": _calibration(index),
        "left out": f"{left_out.get('repeated', 0):,} repeated, {left_out.get('also_held_out', 0):,} also held "
        f"out, {left_out.get('nearly_held_out', 0):,} nearly (but for white space and case), "
        f"{left_out.get('empty', 0):,} empty documents",
        "fingerprint": index.fingerprint,
    }
    lines = [f"{name:<13}{value}" for name, value in rows.items()]
    unread = read_left_out(Path(folder))
    result = {"folder": folder, **index.to_dict(), "left_out": unread}
    show(result, *_left_out_table(folder, unread), _partition_table(folder, index), *lines, as_json=as_json)
    return result


def _left_out_table(folder: str, unread: list[dict[str, str]]) -> list[Part]:
    """Return a table of what was not read of the sources, its beginning where it is long; nothing when all was."""
    if not unread:
        return []
    rows = [[row["file"], row["reason"]] for row in unread[:SHOWN]]
    title = f"Left out or cut: {len(unread):,}"
    if len(unread) > SHOWN:
        title += f", the first {SHOWN}; all in {Path(folder) / LEFT_OUT_FILE}"
    return [Table.of(title, ["file or folder", "why"], rows)]


def _calibration(index: DataIndex) -> str:
    """Say how many windows freezing could be calibrated on at the contexts of the presets, and how many it asks for."""
    source, asked = index.calibration_source, TrainConfig.calibration_sequences
    tokens = index.partitions[source].tokens
    first, *longer = sorted({shape.max_length for shape in PRESETS.values()})
    held = [f"{tokens // first:,} windows of {first:,} tokens", *(f"{tokens // n:,} of {n:,}" for n in longer)]
    told = f"{', '.join(held)}, in the {source} partition; freezing asks for {asked} of the model's context"
    if tokens // longer[-1] >= asked:
        return told
    more = "more text" if source == "train" else "more text, a larger --heldout-fraction or --calibration-from train"
    return f"{told}: where these are too few, prepare {more}, or train with fewer --calibration-sequences"


def _partition_table(folder: str, index: DataIndex) -> Table:
    """Return a table with a row for each partition."""
    rows = []
    for name in PARTITIONS:
        info = index.partitions[name]
        entropy = "" if info.unigram_entropy is None else f"{info.unigram_entropy:.3f}"
        density = f"{info.bytes / info.tokens:.2f}" if info.tokens else ""
        rows.append([name, info.documents, info.tokens, f"{info.bytes / 1e6:.2f}", density, entropy])
    head = ["partition", "documents", "tokens", "text, MB", "bytes/token", "unigram entropy, nats"]
    return Table.of(folder, head, rows)
