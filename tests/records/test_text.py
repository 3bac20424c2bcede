"""Text from outside is shown as it reads, on one line."""

import os
from html import escape

import pytest
from markdown_it import MarkdownIt

from saf.records.text import markdown, plain

ODD = [
    "a_b c __d__ *e* ~~f~~ `g` ``h",
    "# heading",
    "- item",
    "12. item",
    "=== rule",
    "--- rule",
    "a | b",
    "<b>bold</b> &lt; & x",
    "[name](link) ![picture](link) [reference]",
    "\\*",
    "+0.94% (+0.80% to +1.08%)",
    "`",
]


@pytest.mark.parametrize("text", ODD)
def test_markdown_reads_as_the_text(text):
    shown = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(markdown(text))
    assert shown == f"<p>{escape(text, quote=False).replace(chr(34), '&quot;')}</p>\n"


def test_what_a_terminal_would_obey_or_nothing_can_write_is_replaced():
    name = "a\x1b[31m\x00\u202eb\u200b\nc\td\u2028e" + os.fsdecode(b"\xff")
    assert plain(name) == "a\ufffd[31m\ufffd\ufffdb\ufffd c d e\ufffd"
    assert plain("Grüße, 头部 \N{MINUS SIGN}1 ×") == "Grüße, 头部 \N{MINUS SIGN}1 ×"
    plain(name).encode()


def test_markdown_leaves_plain_words_and_numbers_alone():
    for text in ("update_seconds", "+0.94%", "\N{MINUS SIGN}3.04%", "1.87 s to 2.13 s", "cuDNN & co", "4096x8x4"):
        assert markdown(text) == text
