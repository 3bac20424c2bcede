"""Tables keep numbers whole on narrow terminals; text from outside reads as it is."""

import os
from html import escape

import pytest
from markdown_it import MarkdownIt

from saf.cli.output import show
from saf.records.table import Table, escape_markdown, plain

NUMBERS = ["1.03e-06", "0.136\N{EN DASH}0.205", "-12.5%", "123,456", "+0.35 (+0.22 to +0.53)"]


@pytest.mark.parametrize(("width", "tables"), [(20, 5), (60, 2), (120, 1)])
def test_a_narrow_terminal_splits_no_number(capsys, monkeypatch, width, tables):
    monkeypatch.setenv("COLUMNS", str(width))
    head = ["name of each", "relative error", "range", "change", "tokens", "difference (points)"]
    show({}, Table.of("title", head, [["50% toeplitz", *NUMBERS], ["ordinary", *NUMBERS]]), as_json=False)
    printed = capsys.readouterr().out
    assert all(printed.count(number) == 2 for number in NUMBERS)
    assert all(word in printed for word in ("relative", "error", "toeplitz", "ordinary"))
    assert printed.count("name of") == tables  # columns that do not fit follow with the rows' names
    if width >= 60:
        assert max(map(len, printed.splitlines())) <= width


# --- text and numbers

ODD = [
    "a_b c __d__ *e* ~~f~~ `g` ``h",
    "# heading",
    "- item",
    "=== rule",
    "a | b",
    "<b>bold</b> &lt; & x",
    "[name](link) ![picture](link) [reference]",
    "\\*",
    "+0.94% (+0.80% to +1.08%)",
]


@pytest.mark.parametrize("text", ODD)
def test_markdown_reads_as_the_text(text):
    shown = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(escape_markdown(text))
    assert shown == f"<p>{escape(text, quote=False).replace(chr(34), '&quot;')}</p>\n"


def test_what_a_terminal_would_obey_or_nothing_can_write_is_replaced():
    name = "a\x1b[31m\x00\u202eb\u200b\nc\td\u2028e" + os.fsdecode(b"\xff")
    assert plain(name) == "a\ufffd[31m\ufffd\ufffdb\ufffd c d e\ufffd"
    assert plain("Grüße, 头部 \N{MINUS SIGN}1 ×") == "Grüße, 头部 \N{MINUS SIGN}1 ×"
    plain(name).encode()
