"""`saf data prepare` turns text into a data folder of tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from saf.cli.output import show
from saf.cli.parsing import HELP, parse
from saf.data import PARTITIONS, PrepareConfig, prepare
from saf.errors import InputError
from saf.records.table import Table

MAX_ROWS = 20
"""Rows of the table of skipped files."""


@dataclass(kw_only=True)
class Command:
    """Turn text into a data folder of tokens, with text that is held out for calibration and measurements.

    A folder of text; a dataset of the Hugging Face hub, with GPT-2's tokenizer:

      $ saf data prepare my_texts --out data
      $ saf data prepare OWNER/NAME --tokenizer gpt2 --out data
    """

    sources: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE [SOURCE ...]")] = (
        "python",
    )
    """Read files of text, JSON Lines, .csv, .tsv (each also as .gz, .zst or .xz) or .parquet, folders of them, folders
    saved by datasets, OWNER/NAME[:CONFIG[:SPLIT]] of the Hugging Face hub, or python, the text of Python's library."""
    settings: Annotated[PrepareConfig, tyro.conf.OmitArgPrefixes]
    """Turn text into tokens by these settings."""
    out: str
    """Write this folder; it appears only once it is complete."""
    overwrite: bool = False
    """Replace a finished data folder."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> dict[str, Any]:
        data = prepare(self.sources, self.out, overwrite=self.overwrite, **vars(self.settings))
        result = {"folder": self.out, **data.index}
        show(result, *_tables(self.out, data.index), as_json=self.json)
        return result


def parse_words(words: Sequence[str]) -> Command:
    """Parse the words after "prepare", the only subcommand."""
    first, *rest = words or ["--help"]
    if first not in {"prepare", *HELP}:
        raise InputError(f"the command must be `saf data prepare`, got {first!r}")
    return parse(Command, rest if first == "prepare" else [first], prog="saf data prepare")


def _tables(folder: str, index: dict[str, Any]) -> Iterator[Table]:
    if skipped := index["left_out"]:
        more = f", the first {MAX_ROWS}; all in index.json" if len(skipped) > MAX_ROWS else ""
        files = [[row["file"], row["reason"]] for row in skipped[:MAX_ROWS]]
        yield Table.of(f"Left out: {len(skipped):,}{more}", ("file or folder", "why"), files)
    rows = []
    for name in PARTITIONS:
        part = index["partitions"][name]
        density = f"{part['bytes'] / part['tokens']:.2f}" if part["tokens"] else None
        # A model that has learnt nothing but how frequent tokens are has this loss.
        entropy = None if part["unigram_entropy"] is None else f"{part['unigram_entropy']:.3f}"
        rows.append([name, part["documents"], part["tokens"], f"{part['bytes'] / 1e6:.2f}", density, entropy])
    columns = ("partition", "documents", "tokens", "text, MB", "bytes/token", "unigram entropy, nats")
    yield Table.of(folder, columns, rows)
    tokenizer, duplicates = index["tokenizer"], index["duplicates"]
    facts = {
        "tokenizer": f"{tokenizer['kind']}, {tokenizer['vocab_size']:,} tokens, stored as {index['dtype']}",
        "left out": f"{duplicates['repeated']:,} repeated, {duplicates['also_held_out']:,} also held out, "
        f"{duplicates['empty']:,} empty documents",
        "fingerprint": index["fingerprint"],
    }
    yield Table.facts("", facts)
