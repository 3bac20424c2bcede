"""A page of tables: benchmark records whose finding is no speedup of an arm."""

import re
from collections.abc import Iterator, Sequence

from saf.records.table import Table
from saf.report.bodies import TITLES, parts_of
from saf.report.measured import Record
from saf.report.page import inline, page, section, text
from saf.report.provenance import measured_on, provenance_section

_CAPTION = re.compile(r"\*\*(.+?)\*\*(?:: )?(.*)", re.DOTALL)


def render_tables(records: Sequence[Record], names: Sequence[str]) -> str:
    """Return the page as text, a section a record; `names` are those of the files."""
    titles = [TITLES.get(kind := str(record.get("kind")), kind.capitalize()) for record in records]
    devices = dict.fromkeys(str(record["provenance"]["device"]) for record in records)
    sections = [
        section(f"record-{number}", text(f"{title}: {name}" if len(names) > 1 else title), "".join(_content(record)))
        for number, (record, title, name) in enumerate(zip(records, titles, names, strict=True))
    ]
    return page(
        kicker=" · ".join(names),
        headline=text(" · ".join(dict.fromkeys(titles))),
        dek=f"Measured on {text(' and '.join(devices))}.",
        warning="",
        key_figures="",
        sections="\n".join([*sections, section("provenance", "Provenance", provenance_section(records, names))]),
        footer=measured_on(records),
        data={},
        scripts=("theme.js",),
    )


def _content(record: Record) -> Iterator[str]:
    """Yield paragraphs, lists and tables; bold words at the start of a paragraph become the next table's caption."""
    caption = ""
    for part in parts_of(record):
        if isinstance(part, Table):
            yield part.titled(caption).html()
        elif found := _CAPTION.fullmatch(part):
            caption, rest = found.groups()
            yield f"<p>{inline(rest)}</p>" if rest else ""
        elif part.startswith("- "):
            yield f"<ul>{''.join(f'<li>{inline(line[2:])}</li>' for line in part.splitlines())}</ul>"
        else:
            yield f"<p>{inline(part)}</p>"
