"""`saf data prepare` and `saf data info`: make a data folder, show one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from saf.cli.output import show
from saf.cli.parsing import parse_one_of
from saf.data import PARTITIONS, PrepareConfig, TokenData, prepare
from saf.models import PRESETS
from saf.records.table import Table
from saf.train import TrainConfig

MAX_ROWS = 20
"""Rows of the table of skipped files."""


@dataclass(kw_only=True)
class Prepare:
    """Make a data folder of tokens from text: read, tokenise, divide into partitions, shuffle."""

    sources: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")] = ("python",)
    """Read these: files of text, JSON Lines, .tsv or .parquet (all but the last also as .gz, .zst or .xz),
    folders of these, folders saved by datasets, OWNER/NAME[:CONFIG[:SPLIT]] of the Hugging Face hub, or python, the
    text of Python's own library."""
    settings: Annotated[PrepareConfig, tyro.conf.OmitArgPrefixes]
    """These settings say how text becomes tokens."""
    out: str
    """Write this folder; it appears only once it is complete."""
    overwrite: bool = False
    """Replace a finished data folder."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> dict[str, Any]:
        data = prepare(self.sources, self.out, overwrite=self.overwrite, **vars(self.settings))
        return _show(self.out, data.index, as_json=self.json)


@dataclass(kw_only=True)
class Info:
    """Show the contents of a data folder, checking its files."""

    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Show this folder made by `saf data prepare`."""
    verify: bool = False
    """Check every file's SHA-256 too."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> dict[str, Any]:
        return _show(self.folder, TokenData.open(self.folder, verify=self.verify).index, as_json=self.json)


Command = Prepare | Info
FIRST = {
    Prepare: ("sources", "out", "overwrite", "json", "settings"),
    PrepareConfig: (
        *("tokenizer", "vocab_size", "heldout", "heldout_fraction", "report_only", "calibration_from"),
        *("split_characters", "text_field", "max_bytes", "seed"),
    ),
}
"""The settings that `saf data prepare --help` shows."""


def parse_words(words: Sequence[str]) -> Command:
    """Parse the command."""
    return parse_one_of({"prepare": Prepare, "info": Info}, words, prog="saf data", first=FIRST)


def _show(folder: str, index: dict[str, Any], *, as_json: bool) -> dict[str, Any]:
    head = ("partition", "documents", "tokens", "text, MB", "bytes/token", "unigram entropy, nats")
    rows = [_partition(name, index["partitions"][name]) for name in PARTITIONS]
    tokenizer, duplicates = index["tokenizer"], index["duplicates"]
    facts = {
        "tokenizer": f"{tokenizer['kind']}, {tokenizer['vocab_size']:,} tokens, stored as {index['dtype']}",
        "too few": _calibration(index),
        "left out": f"{duplicates['repeated']:,} repeated, {duplicates['also_held_out']:,} also held out, "
        f"{duplicates['empty']:,} empty documents",
        "fingerprint": index["fingerprint"],
    }
    parts = [Table.of(folder, head, rows), Table.facts("", facts)]
    if skipped := index["left_out"]:
        more = f", the first {MAX_ROWS}; all in index.json" if len(skipped) > MAX_ROWS else ""
        files = [[row["file"], row["reason"]] for row in skipped[:MAX_ROWS]]
        parts.insert(0, Table.of(f"Left out or cut: {len(skipped):,}{more}", ("file or folder", "why"), files))
    result = {"folder": folder, **index}
    show(result, *parts, as_json=as_json)
    return result


def _partition(name: str, info: Mapping[str, Any]) -> list[Any]:
    entropy = None if info["unigram_entropy"] is None else f"{info['unigram_entropy']:.3f}"
    density = f"{info['bytes'] / info['tokens']:.2f}" if info["tokens"] else None
    return [name, info["documents"], info["tokens"], f"{info['bytes'] / 1e6:.2f}", density, entropy]


def _calibration(index: Mapping[str, Any]) -> str | None:
    """Say for which presets' contexts freezing would find too few calibration windows; None where for none."""
    if not index["partitions"]["train"]["tokens"]:
        return None
    source = "train" if index["calibration_from"] == "train" else "calibration"
    needed, tokens = TrainConfig.calibration_sequences, index["partitions"][source]["tokens"]
    lengths = sorted({shape.max_length for shape in PRESETS.values()})
    few = [f"{tokens // n:,} windows of {n:,} tokens" for n in lengths if tokens // n < needed]
    if not few:
        return None
    more = "more text" if source == "train" else "more text, a larger --heldout-fraction or --calibration-from train"
    return (
        f"{', '.join(few)} in the {source} partition; freezing takes {needed} of the model's context: prepare {more}, "
        "or train with fewer --calibration-sequences"
    )
