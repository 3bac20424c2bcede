"""Text from outside is shown as it reads, on one line."""

import os

import pytest
from markdown_it import MarkdownIt

from saf.records.text import html, markdown, markdown_block, markdown_code, plain

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
def test_markdown_and_html_read_as_the_text(text):
    shown = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(markdown(text))
    assert shown == f"<p>{html(text).replace('&#x27;', chr(39))}</p>\n"


@pytest.mark.parametrize("text", ODD)
def test_code_spans_and_blocks_read_as_the_text(text):
    render = MarkdownIt("commonmark").enable("table").render
    assert f"<td><code>{html(text)}</code></td>" in render(f"| a |\n| --- |\n| {markdown_code(text)} |\n")
    assert render(markdown_block(f"{text}\n```\n````")) == (
        f'<pre><code class="language-sh">{html(text)}\n```\n````\n</code></pre>\n'
    )


def test_what_a_terminal_would_obey_or_nothing_can_write_is_replaced():
    name = "a\x1b[31m\x00\u202eb\u200b\nc\td\u2028e" + os.fsdecode(b"\xff")
    assert plain(name) == "a\ufffd[31m\ufffd\ufffdb\ufffd c d e\ufffd"
    assert plain("Grüße, 头部 \N{MINUS SIGN}1 ×") == "Grüße, 头部 \N{MINUS SIGN}1 ×"
    plain(name).encode()


def test_markdown_leaves_plain_words_and_numbers_alone():
    for text in ("update_seconds", "+0.94%", "\N{MINUS SIGN}3.04%", "1.87 s to 2.13 s", "cuDNN & co", "4096x8x4"):
        assert markdown(text) == text
