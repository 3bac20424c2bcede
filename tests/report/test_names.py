"""Names of folders and files are text in everything that is written, whatever they hold."""

import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt

from experiments.results import write_document
from saf.cli.output import show
from saf.evaluate.side_by_side import arm_names, arms_table, compare_all
from saf.records.run import RecordedRun
from saf.records.text import plain
from saf.report.results import render_results
from saf.report.runs.page import write_report
from saf.report.runs.picture import write_picture
from tests.report.benchmark_records import record
from tests.report.synthetic import Shape, write_pair

HOSTILE = "<u>[red]|`c`*d*_e_~~f~~$g$&lt;[h](i)\n# j\x1b[31m\u202e"
READ = plain(HOSTILE)
"""How it reads: on one line, what cannot be shown replaced."""


class _Reader(HTMLParser):
    """Collect the text that a page shows and the elements that it consists of."""

    def __init__(self):
        super().__init__()
        self.shown, self.elements = "", set()

    def handle_starttag(self, tag, attrs):
        self.elements.add(tag)
        self.shown += "".join(f" {value} " for name, value in attrs if name in ("title", "alt", "aria-label"))

    def handle_data(self, data):
        self.shown += data


def read_html(page: str) -> str:
    """Return the text of a page, without scripts; fail where the name became an element."""
    reader = _Reader()
    reader.feed(re.sub(r"<(style|script).*?</\1>", "", page, flags=re.DOTALL))
    assert not reader.elements & {"u", "s", "del"}
    return reader.shown


def read_markdown(document: str) -> str:
    """Return the text of a document as GitHub reads it; fail where the name became markup."""
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    headings = re.findall("<h1>", parser.render(document))
    assert len(headings) <= 1
    return read_html(parser.render(document))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("names")
    paths = write_pair(folder, Shape(updates=40, freeze_update=20))
    return [path.rename(folder / f"{HOSTILE} {path.name}") for path in paths]


def of_terminal(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    opened = [RecordedRun.open(run) for run in runs]
    names = arm_names(opened)
    show({}, str(runs[0]), arms_table(opened, names, compare_all(opened, names)), as_json=False)
    return capsys.readouterr().out


def of_page(runs, tmp_path, capsys, monkeypatch):
    return read_html(write_report(runs, tmp_path / "page.html").read_text())


def of_picture(runs, tmp_path, capsys, monkeypatch):
    drawn = ElementTree.fromstring(write_picture(runs, tmp_path / "picture.svg").read_text())
    return "".join(drawn.itertext())


def of_document(runs, tmp_path, capsys, monkeypatch):
    write_pair(tmp_path / "results" / HOSTILE, Shape(updates=40, freeze_update=20))
    write_document(tmp_path / "results", tmp_path / "docs" / "results.md")
    return read_markdown((tmp_path / "docs" / "results.md").read_text())


def of_document_of_files(runs, tmp_path, capsys, monkeypatch):
    content = record()
    content["provenance"] |= {"command": f"saf bench ```` {HOSTILE}", "device": HOSTILE}
    for name in ("update", "loose"):
        path = tmp_path / HOSTILE / f"{name} {HOSTILE}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content if name == "update" else {"kind": HOSTILE, HOSTILE: HOSTILE}))
    return read_markdown(render_results(tmp_path, tmp_path)["results.md"])


WRITERS = (of_terminal, of_page, of_picture, of_document, of_document_of_files)


@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)
def test_a_hostile_name_is_read_as_it_is(writer, runs, tmp_path, capsys, monkeypatch):
    shown = writer(runs, tmp_path, capsys, monkeypatch)
    assert READ in shown
    assert "\x1b" not in shown
    assert "\u202e" not in shown
