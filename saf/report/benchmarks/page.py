"""A page about benchmark records: bars of speedup where all of them timed arms, else tables, a section a record."""

from collections.abc import Sequence
from pathlib import Path

from saf.bench.harness.kernels import attention_table, kernel_words, longest_kernels
from saf.bench.harness.measured import Group, Record
from saf.bench.kinds import KINDS, SPEED_KINDS, compares_arms, groups_of
from saf.errors import InputError
from saf.records.files import read_json, write_atomically
from saf.records.result import is_result, with_header
from saf.records.table import html_of
from saf.report.benchmarks import summary as words
from saf.report.benchmarks.bars import memory_panel, speed_panels
from saf.report.page import page, section, text
from saf.report.provenance import measured_on, provenance_section
from saf.report.record_parts import parts_of


def read_records(files: Sequence[Path]) -> list[Record]:
    """Read records of `saf bench`; raise InputError for anything else."""
    records = []
    for file in files:
        record = read_json(file, advice="expected a file that `saf bench` wrote")
        # Benchmarks alone list what they left out.
        if not is_result(record) or "left_out" not in record:
            raise InputError(
                f"{file} is no record of `saf bench`, as expected; `python -m experiments results` shows every result"
            )
        records.append(with_header(record))
    return records


def write_bench_report(files: Sequence[Path], out: Path) -> Path:
    """Write one self-contained page about benchmark records and return its path: bars when all timed arms, or tables.

    `out` is the .html file, or a folder to put `report.html` in. Raises InputError for files that are no records.
    """
    if not files:
        raise InputError("a report needs at least one file of `saf bench`")
    target = out if out.suffix == ".html" else out / "report.html"
    records = read_records(files)
    made = render if all(map(compares_arms, records)) else render_tables
    return write_atomically(target, made(records, [file.name for file in files]).encode())


def render(records: Sequence[Record], names: Sequence[str]) -> str:
    """Return the page with bars as text; `names` are those of the files."""
    own = [groups_of(record, file=name * (len(names) > 1)) for record, name in zip(records, names, strict=True)]
    groups = [group for part in own for group in part]
    return page(
        kicker=" · ".join(names),
        headline=words.headline(groups, records),
        dek=words.dek(groups, records),
        warning=words.warning(own, records),
        key_figures=words.key_figures(groups, records),
        sections=_sections(records, names, own),
        footer=measured_on(records),
        data={},
        scripts=("theme.js",),
    )


def _sections(records: Sequence[Record], names: Sequence[str], own: Sequence[Sequence[Group]]) -> str:
    """Return the HTML of the page's sections; one without measurements is left out."""
    parts = []
    groups = [group for part in own for group in part]
    if groups:
        told = dict.fromkeys(
            SPEED_KINDS[record["kind"]].conditions(record) for record, part in zip(records, own, strict=True) if part
        )
        intro = "".join(f"<p>{text(each)}</p>" for each in told)
        parts.append(section("speed", "How fast each arm is", intro + speed_panels(groups)))
    memory = [record for record in records if record["memory"]]
    if memory:
        panels = "".join(memory_panel(record) for record in memory)
        parts.append(section("memory", "Peak memory", panels))
    timed = [(name, record) for name, record in zip(names, records, strict=True) if record["rows"]]
    if timed:
        kernels = "".join(_kernels(record, name * (len(timed) > 1)) for name, record in timed)
        parts.append(section("kernels", "What ran", kernels))
    parts.append(section("provenance", "Provenance", provenance_section(records, names)))
    return "\n".join(parts)


def _kernels(record: Record, name: str) -> str:
    """Return what the profiles of a record say: the attention kernels of every arm, and the longest ones to open."""
    words = f"<p>{text(': '.join(filter(None, [name, kernel_words(record)])))}</p>"
    if not record["kernels"]:
        return words
    tables = attention_table(record).titled("Attention kernels in one pass").html()
    longest = "".join(
        f'<details class="numbers"><summary>{text(point)}: longest kernels</summary>{table.html()}</details>'
        for point, table in longest_kernels(record).items()
    )
    return words + tables + longest


def render_tables(records: Sequence[Record], names: Sequence[str]) -> str:
    """Return the page as text, a section a record; `names` are those of the files."""
    titles = [_title(record) for record in records]
    devices = dict.fromkeys(str(record["provenance"]["device"]) for record in records)
    sections = [
        section(
            f"record-{number}",
            text(f"{title}: {name}" if len(names) > 1 else title),
            "".join(map(html_of, parts_of(record))),
        )
        for number, (record, title, name) in enumerate(zip(records, titles, names, strict=True))
    ]
    return page(
        kicker=" · ".join(names),
        headline=" · ".join(dict.fromkeys(text(_finding(record)) for record in records)),
        dek=f"Measured on {text(' and '.join(devices))}.",
        warning="",
        key_figures=(),
        sections="\n".join([*sections, section("provenance", "Provenance", provenance_section(records, names))]),
        footer=measured_on(records),
        data={},
        scripts=("theme.js",),
    )


def _title(record: Record) -> str:
    kind = KINDS.get(name := str(record.get("kind")))
    return name.capitalize() if kind is None else kind.title_of(record)


def _finding(record: Record) -> str:
    kind = KINDS.get(str(record.get("kind")))
    return _title(record) if kind is None else kind.finding(record)
