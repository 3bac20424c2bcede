"""`saf data prepare` and `saf data info`: make a data folder, look into one."""

from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from saf.cli.output import show
from saf.data import PARTITIONS, PrepareConfig, TokenData, prepare
from saf.models import PRESETS
from saf.records.table import Part, Table
from saf.train import TrainConfig


@dataclass(kw_only=True)
class Prepare:
    """Make a data folder of tokens from text: read, tokenise, divide into partitions, shuffle."""

    sources: Annotated[tuple[str, ...], tyro.conf.Positional] = ("python",)
    """`python` (its own library's text), files of text, JSON Lines, .csv, .tsv or .parquet, each but the last also as
    .gz, .zst or .xz, folders of these, folders saved by `datasets`, or OWNER/NAME[:CONFIG[:SPLIT]] of Hugging Face."""
    settings: Annotated[PrepareConfig, tyro.conf.OmitArgPrefixes]
    """How text becomes tokens."""
    out: str
    """Folder to make; it appears only once it is complete."""
    overwrite: bool = False
    """Replace a finished data folder."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> dict[str, Any]:
        """Prepare the folder, print what it holds and return its index."""
        data = prepare(self.sources, self.out, overwrite=self.overwrite, **vars(self.settings))
        return _shown(self.out, data.index, as_json=self.json)


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


def _shown(folder: str, index: dict[str, Any], *, as_json: bool) -> dict[str, Any]:
    """Show a data folder's index and return it."""
    tokenizer, left_out = index["tokenizer"], index["duplicates"]
    rows = {
        "tokenizer": f"{tokenizer['kind']}, {tokenizer['vocab_size']:,} tokens, stored as {index['dtype']}",
        "calibration": _calibration(index),
        "left out": f"{left_out['repeated']:,} repeated, {left_out['also_held_out']:,} also held out, "
        f"{left_out['nearly_held_out']:,} nearly (but for white space and case), {left_out['empty']:,} empty documents",
        "fingerprint": index["fingerprint"],
    }
    lines = [f"{name:<13}{value}" for name, value in rows.items()]
    result = {"folder": folder, **index}
    tables = (*_left_out_table(index["left_out"]), _partition_table(folder, index))
    show(result, *tables, *lines, as_json=as_json)
    return result


def _left_out_table(unread: list[dict[str, str]]) -> list[Part]:
    """Return a table of what was not read of the sources, its beginning where it is long; nothing when all was."""
    if not unread:
        return []
    rows = [[row["file"], row["reason"]] for row in unread[:SHOWN]]
    title = f"Left out or cut: {len(unread):,}"
    if len(unread) > SHOWN:
        title += f", the first {SHOWN}; all in index.json"
    return [Table.of(title, ["file or folder", "why"], rows)]


def _calibration(index: dict[str, Any]) -> str:
    """Say how many windows freezing could be calibrated on at the contexts of the presets, and how many it asks for."""
    asked = TrainConfig.calibration_sequences
    source = "train" if index["calibration_from"] == "train" else "calibration"
    tokens = index["partitions"][source]["tokens"]
    first, *longer = sorted({shape.max_length for shape in PRESETS.values()})
    held = [f"{tokens // first:,} windows of {first:,} tokens", *(f"{tokens // n:,} of {n:,}" for n in longer)]
    told = f"{', '.join(held)}, in the {source} partition; freezing asks for {asked} of the model's context"
    if tokens // longer[-1] >= asked:
        return told
    more = "more text" if source == "train" else "more text, a larger --heldout-fraction or --calibration-from train"
    return f"{told}: where these are too few, prepare {more}, or train with fewer --calibration-sequences"


def _partition_table(folder: str, index: dict[str, Any]) -> Table:
    """Return a table with a row for each partition."""
    rows = []
    for name in PARTITIONS:
        info = index["partitions"][name]
        entropy = "" if info["unigram_entropy"] is None else f"{info['unigram_entropy']:.3f}"
        density = f"{info['bytes'] / info['tokens']:.2f}" if info["tokens"] else ""
        rows.append([name, info["documents"], info["tokens"], f"{info['bytes'] / 1e6:.2f}", density, entropy])
    head = ["partition", "documents", "tokens", "text, MB", "bytes/token", "unigram entropy, nats"]
    return Table.of(folder, head, rows)
