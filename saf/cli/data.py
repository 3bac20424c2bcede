"""`saf data prepare` and `saf data info`: make a data folder, show one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from saf.cli.output import show
from saf.cli.parsing import parse_one_of
from saf.data import PARTITIONS, PrepareConfig, TokenData, prepare
from saf.models import PRESETS
from saf.records.table import Part, Table
from saf.train import TrainConfig

MAX_ROWS = 20
"""Rows of the table of skipped files."""
FIRST = (
    *("sources", "out", "overwrite", "json", "settings.tokenizer", "settings.vocab_size", "settings.heldout"),
    *("settings.heldout_fraction", "settings.calibration_from", "settings.split_characters", "settings.text_field"),
    *("settings.max_bytes", "settings.seed"),
)
"""The flags that `saf data prepare --help` shows."""


@dataclass(kw_only=True)
class Prepare:
    """Make a data folder of tokens from text: read, tokenise, divide into partitions, shuffle."""

    sources: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")] = ("python",)
    """Read these: files of text, JSON Lines, .csv, .tsv or .parquet (all but the last also as .gz, .zst or .xz),
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


COMMANDS = {"prepare": Prepare, "info": Info}


def parse_words(words: Sequence[str]) -> Prepare | Info:
    """Parse the command."""
    return parse_one_of(COMMANDS, words, prog="saf data", first=FIRST if words[:1] == ["prepare"] else ())


def _show(folder: str, index: dict[str, Any], *, as_json: bool) -> dict[str, Any]:
    tokenizer, duplicates, skipped = index["tokenizer"], index["duplicates"], index["left_out"]
    parts: list[Part] = []
    if skipped:
        more = f", the first {MAX_ROWS}; all in index.json" if len(skipped) > MAX_ROWS else ""
        rows = [[row["file"], row["reason"]] for row in skipped[:MAX_ROWS]]
        parts.append(Table.of(f"Left out or cut: {len(skipped):,}{more}", ["file or folder", "why"], rows))
    rows = []
    for name in PARTITIONS:
        info = index["partitions"][name]
        entropy = "" if info["unigram_entropy"] is None else f"{info['unigram_entropy']:.3f}"
        density = f"{info['bytes'] / info['tokens']:.2f}" if info["tokens"] else ""
        rows.append([name, info["documents"], info["tokens"], f"{info['bytes'] / 1e6:.2f}", density, entropy])
    head = ["partition", "documents", "tokens", "text, MB", "bytes/token", "unigram entropy, nats"]
    facts = {
        "tokenizer": f"{tokenizer['kind']}, {tokenizer['vocab_size']:,} tokens, stored as {index['dtype']}",
        "calibration": _calibration(index),
        "left out": f"{duplicates['repeated']:,} repeated, {duplicates['also_held_out']:,} also held out, "
        f"{duplicates['nearly_held_out']:,} nearly (but for white space and case), {duplicates['empty']:,} empty "
        "documents",
        "fingerprint": index["fingerprint"],
    }
    result = {"folder": folder, **index}
    lines = [f"{name:<13}{value}" for name, value in facts.items()]
    show(result, *parts, Table.of(folder, head, rows), *lines, as_json=as_json)
    return result


def _calibration(index: dict[str, Any]) -> str:
    needed = TrainConfig.calibration_sequences
    source = "train" if index["calibration_from"] == "train" else "calibration"
    tokens = index["partitions"][source]["tokens"]
    first, *longer = sorted({shape.max_length for shape in PRESETS.values()})
    windows = [f"{tokens // first:,} windows of {first:,} tokens", *(f"{tokens // n:,} of {n:,}" for n in longer)]
    words = f"{', '.join(windows)}, in the {source} partition; freezing takes {needed} of the model's context"
    if tokens // longer[-1] >= needed:
        return words
    more = "more text" if source == "train" else "more text, a larger --heldout-fraction or --calibration-from train"
    return f"{words}: if these are too few, prepare {more}, or train with fewer --calibration-sequences"
