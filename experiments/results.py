"""`render` returns the pages of results, docs/results/SUBJECT.md, and all cells of their tables, results/cells.csv.

`python -m experiments results` writes them from the records in results/, and `make check` compares. A page's
introduction is written by hand in its file. So are docs/results.md, the README and docs/results/answer.md: the numbers
of their tables must stand in some cell.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.analyses import ANALYSES, analysis_figure
from experiments.benchmarks import TABLES, memory, named, read_benchmarks, without_path
from experiments.figures import costs_figure, recipe_figure, speedups_figure
from experiments.measurements import Measurement
from experiments.recipe import Recipe, all_recipes
from experiments.records import Record, read_records
from experiments.tables import RecipeTable, markdown, measured_table
from saf.compare import arm_names, arms_table, compare_all
from saf.records.files import read_json, write_atomically
from saf.records.run import RecordedRun
from saf.records.table import MISSING, Table, escape_markdown

RECIPES: dict[str, dict[str, tuple[str, ...]]] = {
    "quality": {
        **dict.fromkeys(("converged", "converged-staged", "converged-1e-3", "converged-3e-3"), ("answer",)),
        "converged-56M": ("peak_rate",),
        **dict.fromkeys(("small-75M", "small-75M-high-rates", "small-75M-own-clock"), ("matched_time",)),
        "small-75M-controls": ("fixed_token_controls", "timing", "trainability"),
        "small-75M-4k": ("fixed_token_controls",),
        "small-75M-branched": ("schedules",),
        "small-75M-representation": ("representation",),
        **dict.fromkeys(("124m-84M-25", "124m-84M", "124m-84M-50"), ("linear_heads",)),
    },
    "heads": {
        "small-75M-ideas": ("better", "selectors"),
        "small-75M-scores": ("better",),
        "small-75M-patterns": ("rates_and_patterns", "timing"),
        "small-75M-analyses": ("joint_cost", "schedules", "stability"),
        "small-75M-distributions": ("distributions",),
    },
    "tasks": {"small-75M-stages": ("stages",)},
    "pretrained": {"small": ("pretrained",)},
}
"""Recipes of each page, by scale. A scale's runs are in the folder of results/ with its name."""
BENCHMARKS = {
    "updates": {
        "update": "Updates: speed",
        "nanogpt": "Updates: beside nanoGPT",
        "compile": "Compilation after an event",
        "finetune": "Finetuning updates: speed",
    },
    "inference": {"prefill": "Prefill", "decode": "Decoding"},
    "attention": {"attention": "Attention layers", "op": "One layer's attention"},
    "freezing": {"calibration": "Freezing: seconds", "errors": "Numerical errors"},
}
"""Headings of a page by kind of benchmark record."""
SERIES = {
    "converged": "The question itself, near convergence: read this first.",
    "converged-staged": "Models that train at 4K for 40% of their updates, then at 16K; on the text that "
    "docs/experiments.md prepares, whose held-out part is another than that of `converged`: compare changes alone.",
    "converged-1e-3": "Ordinary attention of `converged` at half its peak rate.",
    "converged-3e-3": "Ordinary attention of `converged` at one and a half times its peak rate.",
    "small-75M": "The first series of this recipe to read: three seeds, updates by the speed of 124M.",
    "small-75M-high-rates": "As `small-75M`, with 75% of the heads.",
    "small-75M-own-clock": "As `small-75M`, but arms get the training seconds that they take themselves.",
    "124m-84M-50": "One seed, from another trunk than `124m-84M`.",
}
"""The text above the first table of a series of runs."""
SPEED_COLUMNS = {"speedup": "", "share of time": "share of time ", "cache": "cache ", "paper": "paper "}
MEMORY_COLUMNS = {"peak memory": "", "against ordinary": "", "paper": "paper "}
"""Columns of benchmarks that pages show, with the word before each number in a cell; cells.csv has all columns."""
PAGE_TABLES = ("Perplexity and healing",)
"""Tables of analyses in recipes that pages show; the others are in cells.csv."""
BOLD_NUMBER = r"\*\*([^*]*\d[^*]*)\*\*"
RUN_COLUMNS = ("heads frozen", "perplexity", "change, 95% interval", "median update", "peak memory", "freezing took")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A table of a page, or a paragraph or picture where it has no cells."""

    heading: str
    """Heading of the section of the page that the block belongs to."""
    title: str = ""
    frame: pd.DataFrame = field(default_factory=pd.DataFrame)
    page: pd.DataFrame | None = None
    """The table that the page shows in place of `frame`; an empty one hides it."""
    text: str = ""
    """Markdown below the table."""
    picture: tuple[str, str, str] | None = None
    """Title, file name and SVG of a picture."""
    where: Mapping[str, str] = field(default_factory=dict)
    """Section, recipe, scale and table of its cells in cells.csv; empty for a block whose cells are not in it."""

    @property
    def tables(self) -> list[pd.DataFrame]:
        """The tables that have cells, that of the page first."""
        return [table for table in (self.page, self.frame) if table is not None and len(table)]

    def markdown(self) -> Iterator[str]:
        """Yield the paragraphs of the page."""
        table = self.frame if self.page is None else self.page
        if self.title and len(table):
            yield f"**{escape_markdown(self.title)}**"
        if len(table):
            yield markdown(table)
        if self.text:
            yield self.text
        if self.picture:
            yield f"![{self.picture[0]}](../images/{self.picture[1]})"

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield a line of cells.csv for each cell of `frame`."""
        where = {name: self.where.get(name, "") for name in ("section", "recipe", "scale")}
        where["table"] = self.where.get("table", self.title)
        for number, (label, row) in enumerate(self.frame.iterrows() if self.where else (), 1):
            for metric, text in row.items():
                if text not in (MISSING, ""):
                    yield {**where, "row": number, "arm": label, "metric": metric, "text": text}


# --- files


def write_pages(results: Path, docs: Path) -> list[Path]:
    """Write the pages, their pictures and the cells; return the paths."""
    return [write_atomically(path, text.encode()) for path, text in render(results, docs).items()]


def render(results: Path, docs: Path) -> dict[Path, str]:
    """Return the contents of every file that is rendered from the records in `results`."""
    pages = {name: list(_blocks(name, results)) for name in (*RECIPES, *BENCHMARKS)}
    every = [block for blocks in pages.values() for block in blocks]
    paths = {name: docs / "results" / f"{name}.md" for name, blocks in pages.items() if blocks}
    rendered = {path: _page(path, pages[name]) for name, path in paths.items()}
    pictures = {docs / "images" / block.picture[1]: block.picture[2] for block in every if block.picture}
    cells = pd.DataFrame([line for block in every for line in block.lines()])
    return {**rendered, **pictures, results / "cells.csv": cells.to_csv(index=False)}


def stale(results: Path, docs: Path) -> list[str]:
    """Return a message for each file that differs from its rendering, and for each number that stands in no cell."""
    rendered = render(results, docs)
    problems = [
        f"{path}: not what {results}/ renders to; run `python -m experiments results`"
        for path, text in rendered.items()
        if not path.is_file() or path.read_text() != text
    ]
    cells = rendered[results / "cells.csv"]
    for path in (docs.parent / "README.md", docs / "results.md", docs / "results" / "answer.md"):
        text = path.read_text() if path.is_file() else ""
        # The verdicts of answer.md stand in its sentences, in bold.
        bold = re.findall(BOLD_NUMBER, text) if path.parent == docs / "results" else []
        missing = [number for number in {*bold, *_numbers_of_tables(text)} if number not in cells]
        problems += [f"{path}: {number} stands in no cell of {results}/cells.csv" for number in sorted(missing)]
    return problems


def _numbers_of_tables(text: str) -> Iterator[str]:
    """Yield the numbers with decimals in the tables of a document, without those of the paper."""
    head: list[str] = []
    for line in text.splitlines():
        if not line.startswith("|"):
            head = []
            continue
        cells = line.split("|")
        head = head or cells
        for title, cell in zip(head, cells, strict=True):
            if "paper" not in title + cell:
                yield from re.findall(r"[+−]?\d+\.\d+×?", cell)


def _page(path: Path, blocks: Sequence[Block]) -> str:
    """Return a page: its introduction, which is written by hand in its file, and the sections."""
    lines = [path.read_text().partition("\n## ")[0].strip() if path.is_file() else f"# {path.stem}"]
    heading, noted = "", set()
    for block in blocks:
        if block.heading != heading:
            heading = block.heading
            lines.append(f"## {escape_markdown(heading)}")
        for text in block.markdown():
            # Recipes of a page share notes: each is shown once.
            notes = text.split("\n") if text.startswith("- ") else []
            lines.append("\n".join(note for note in notes if note not in noted) if notes else text)
            noted |= set(notes)
    return "\n\n".join(filter(None, lines)) + "\n"


def _blocks(name: str, results: Path) -> Iterator[Block]:
    committed = {scale: each for scale, each in RECIPES.get(name, {}).items() if (results / scale).is_dir()}
    for scale, recipes in committed.items():
        records = read_records(results, scale)
        for own in (all_recipes()[each] for each in recipes):
            yield Block(heading=f"{own.numbered_title}, {scale}", text=SERIES.get(scale, "") if own.metrics else "")
            yield from recipe_blocks(RecipeTable(own, scale, records), results / scale)
    measured = read_benchmarks(results)
    if name == "heads":
        yield from _analyses(results / "124m-midpoint")
    if name == "updates":
        yield from _runs(results)
    for kind, heading in BENCHMARKS.get(name, {}).items() if measured else ():
        yield from _committed_benchmarks(kind, heading, measured)
    if name == "updates":
        yield from _trainer(results)
    if name == "attention" and measured:
        yield from _linear(results / "bench" / "linear.json")


# --- recipes


def recipe_blocks(table: RecipeTable, folder: Path) -> Iterator[Block]:
    """Yield a recipe's blocks at one scale: its table, its headline for the page, and its measurements."""
    heading, title = f"{table.recipe.numbered_title}, {table.scale}", f"{table.recipe.title} ({table.scale})"
    where = {"section": "Recipes", "recipe": table.recipe.name, "scale": table.scale}
    if table.recipe.metrics and len(every := table.text_table()):
        page = table.text_table(headline=True) if table.recipe.headline else None
        yield Block(heading=heading, frame=every, page=page, where={**where, "table": title})
    measured = table.recipe.measured(folder, table.scale)
    if len(numbers := measured_table(table.recipe, measured)):
        title = f"{table.recipe.title}, measured ({table.scale})"
        yield Block(heading=heading, title=title, frame=numbers, where=where)
    blocks = [
        block for each in table.recipe.measurements for block in _measured(each, measured, table.recipe, heading, where)
    ]
    yield from blocks
    drawn = {figure.name: (figure.title, recipe_figure(figure, table)) for figure in table.recipe.figures}
    drawn |= {name.replace(" ", "-"): (name, analysis_figure(records)) for name, records in measured.items()}
    # The paper's figure draws the speedups of these recipes.
    if "fig:systems-across-stages" in table.recipe.labels:
        drawn["speedups"] = "Speedups", speedups_figure({block.title: block.frame for block in blocks})
    for name, (title, picture) in drawn.items():
        if picture is not None:
            yield Block(heading=heading, picture=(title, f"{table.scale}-{table.recipe.name}-{name}.svg", picture))
    yield Block(heading=heading, text="\n".join(f"- {escape_markdown(note)}" for note in table.notes()))


def document(blocks: Sequence[Block]) -> str:
    """Return all tables and notes of a recipe as Markdown."""
    texts = []
    for block in blocks:
        if block.tables:
            texts.append(f"**{escape_markdown(block.title or block.heading)}**")
        texts += [*map(markdown, block.tables), block.text]
    return "\n\n".join(filter(None, texts))


def show(blocks: Sequence[Block]) -> None:
    """Print the tables and notes of a recipe; a table with a headline is the headline alone."""
    for block in blocks:
        for frame in block.tables[:1]:
            rows = frame.reset_index()
            print()
            Table.of(block.title or block.heading, [*map(str, rows.columns)], rows.to_numpy()).print()
        if block.text:
            print()
            print(re.sub(r"\\(\W)", r"\1", block.text))  # without the marks of Markdown


# --- analyses and benchmarks


def _analysis_blocks(heading: str, record: Record, where: Mapping[str, str]) -> Iterator[Block]:
    """Yield the texts and tables of an analysis's record, or nothing for a record of another kind."""
    for part in ANALYSES[record["kind"]].tables(record) if record["kind"] in ANALYSES else ():
        if isinstance(part, Table):
            frame = pd.DataFrame(part.rows, columns=part.columns).set_index(part.columns[0])
            notes = "\n".join(f"- {escape_markdown(note)}" for note in part.notes)
            yield Block(heading=heading, title=part.title, frame=frame, text=notes, where=where)
        else:
            yield Block(heading=heading, text=escape_markdown(part))


def _analyses(folder: Path) -> Iterator[Block]:
    for path in sorted(folder.glob("*.json")):
        record, own = read_json(path), all_recipes().get(path.stem.replace("-", "_"))
        title = own.numbered_title if own else path.stem.replace("-", " ").capitalize()
        heading = f"{title}, 124M halfway through 84M tokens"
        yield from _analysis_blocks(heading, record, {"section": "Analyses", "recipe": path.stem})
        if (picture := analysis_figure([record])) is not None:
            yield Block(heading=heading, picture=(path.stem, f"{path.stem}.svg", picture))


def _committed_benchmarks(kind: str, section: str, records: list[Record]) -> Iterator[Block]:
    """Yield the tables of a kind of benchmark, and its peak memory."""
    for title, frame in TABLES[kind](records):
        yield _benchmark_block(frame, SPEED_COLUMNS, heading=section, title=title, where={"section": section})
    yield Block(
        heading=section,
        text=f"Records: those of kind {kind} in results/bench; `in` of cells.csv names that of each row.",
    )
    if kind in ("update", "prefill"):
        heading = f"{section.removesuffix(': speed')}: peak memory"
        yield _benchmark_block(memory(records, kind), MEMORY_COLUMNS, heading=heading, where={"section": heading})


def _measured(
    each: Measurement, measured: Mapping[str, list[Any]], recipe: Recipe, heading: str, where: Mapping[str, str]
) -> Iterator[Block]:
    """Yield the tables of each record, one a seed, of a recipe's measurement: an analysis, or a benchmark."""
    records = measured.get(each.name, [])
    for record in records:
        kind, seed = record["kind"], f", seed {record['experiment']['seed']}" if len(records) > 1 else ""
        name = f"{recipe.title}, {each.name}{seed}"
        if kind in TABLES:
            own = named({each.name: {**without_path(record), "quoted_as": each.quoted_as}})
            for title, frame in TABLES[kind](own):
                yield _benchmark_block(frame, SPEED_COLUMNS, heading=heading, title=f"{name}: {title}", where=where)
            if record["memory"]:
                title = f"{name}: peak memory"
                yield _benchmark_block(memory(own, kind), MEMORY_COLUMNS, heading=heading, title=title, where=where)
        for block in _analysis_blocks(heading, record, where):
            if block.where and block.title in PAGE_TABLES:
                yield replace(block, title=f"{block.title}, {each.name}")
            elif block.where:
                title, hidden = ": ".join(filter(None, [name, block.title])), pd.DataFrame()
                yield replace(block, title=title, text="", page=hidden, where={**where, "table": block.title})


def _benchmark_block(frame: pd.DataFrame, columns: Mapping[str, str], **others: Any) -> Block:
    """Return a block with all of a table of benchmarks; its page shows `columns` alone, by rate."""
    return Block(frame=frame, page=_by_rate(frame, columns), **others)


def _by_rate(frame: pd.DataFrame, columns: Mapping[str, str]) -> pd.DataFrame | None:
    """Return a table with a column for each share of the heads; None for tables without shares.

    Rows such as "2048x4; 25% frozen" and "2048x4; 50% frozen" become one row "2048x4; frozen". In a cell the number of
    the first of `columns` stands first, the others in brackets.
    """
    value, *others = columns
    if value not in frame or "% " not in " ".join(frame.index):
        return None
    lines: dict[str, dict[str, str]] = {}
    for label, row in zip(frame.index, frame.to_dict("records"), strict=True):
        # Rows without a share are ordinary attention.
        rate = re.search(r"([\d.]+%) ", str(label))
        more = [columns[name] + row[name] for name in others if row.get(name, MISSING) not in (MISSING, "plotted")]
        line = lines.setdefault(str(label).replace(rate[0], "") if rate else str(label), {})
        line[rate[1] if rate else "0%"] = f"{row[value]} ({', '.join(more)})" if more else row[value]
    table: Any = pd.DataFrame.from_dict(lines, orient="index").fillna(MISSING)
    table = table[sorted(table, key=lambda share: float(share.rstrip("%")))]
    return table.rename_axis(frame.index.name)


# --- committed folders of other kinds


def _runs(results: Path) -> Iterator[Block]:
    """Yield a table of arms for each folder of runs."""
    folders = sorted({path.parent.parent for path in results.glob("*/*/config.json")})
    for folder in folders:
        runs = [RecordedRun.open(path.parent) for path in folder.glob("*/config.json")]
        runs = sorted(runs, key=lambda run: (run.arm == "pruned", len(run.edited_heads), run.folder.name))
        names, train = arm_names(runs), runs[0].config["train"]
        table = arms_table(runs, names, compare_all(runs, names))
        frame = pd.DataFrame(table.rows, columns=table.columns).set_index("arm")
        tokens = train["length"] * train["batch_size"] * train["accumulation"]
        text = f"{train['updates']:,} updates of {tokens:,} tokens, in sequences of {train['length']:,}."
        where = {"section": "Training", "recipe": folder.name}
        page: Any = frame[[name for name in RUN_COLUMNS if name in frame]]
        yield Block(heading=f"Training runs {folder.name}", frame=frame, page=page, text=text, where=where)


def _trainer(results: Path) -> Iterator[Block]:
    """Yield what examples/pretrain_with_trainer.py measured."""
    for path in sorted((results / "llama-trainer").glob("*.json")):
        record = read_json(path)
        frame = pd.DataFrame(record["arms"])
        frame = frame.set_index(frame.columns[0]).map(lambda value: f"{value:,.4g}")
        low, high = record["95% interval, %"]
        change = f"Change {record['change of perplexity, %']:+.3f}% ({low:+.3f} to {high:+.3f})"
        text = f"{change}; {record['tokens']:,} tokens."
        where = {"section": "In a Trainer of transformers", "recipe": path.stem}
        heading = f"In a Hugging Face Trainer: {path.stem}"
        yield Block(heading=heading, title="arms", frame=frame, text=text, where=where)


def _linear(path: Path) -> Iterator[Block]:
    """Yield the times of frozen heads in linear time and of the same heads otherwise, and draw them over length."""
    record, heading, where = read_json(path), "Linear-time frozen heads", {"section": "Linear"}
    lines = [
        {"point": f"{one['length']}x{one['batch']}x{one['micro_batches']}", **one["speedups"]}
        for one in record["updates"]
    ]
    frame = pd.DataFrame(lines).set_index("point").map(lambda value: f"{value:.3f}×")
    text = "On one H100, 124M; exponential patterns in linear time beside compact ones and pruned heads."
    yield Block(heading=heading, title="updates", frame=frame, text=text, where=where)
    shares, costs = [], {"ordinary, cuDNN": {}, "frozen, compact": {}, "frozen, linear time": {}}
    for row in sorted(record["rows"], key=lambda row: (row["length"], -row["heads"], row["batch"])):
        length, tokens, best = row["length"], row["length"] * row["batch"], min(each["both"] for each in row["linear"])
        # Pairs are the microseconds of the forward pass, and of forward and backward.
        times = dict(zip(costs, (row["cudnn"][1], row["toeplitz"][1], best), strict=True))
        share = {name: f"{time / row['cudnn'][1]:.4f}" for name, time in list(times.items())[1:]}
        shares.append({"point": f"{length}x{row['batch']}, {row['heads']} heads", **share})
        # 32K tokens at every length, so that only the context differs; a sequence of 64K alone has more.
        if row["heads"] == 6 and tokens in (2**15, 2**16):
            for name, time in times.items():
                costs[name][length] = 1e3 * time / tokens
    title, frame = "forward and backward, share of cuDNN's", pd.DataFrame(shares).set_index("point")
    picture = ("Time a token over context length", "cost-by-length.svg", costs_figure(costs))
    yield Block(heading=heading, title=title, frame=frame, picture=picture, where=where)
