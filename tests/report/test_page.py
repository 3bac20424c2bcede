"""The page about runs: its verdict, what it shows of heads and training, and that nothing from outside is markup."""

import re

import numpy as np
import pytest
import torch

from saf.patterns import CompactPattern
from saf.records.run import RecordedRun
from saf.report import figures
from saf.report.page import write_report
from tests.report.synthetic import Shape, edit, patterns, write_pair, write_run


def page_of(runs, folder) -> str:
    return write_report(runs, folder / "out").read_text()


def headline(page: str) -> str:
    return re.search("<h1>(.*)</h1>", page)[1]


@pytest.mark.parametrize("speedup", [1.005, 3.39])
def test_the_headline_has_no_speed_that_is_unclear(tmp_path, speedup):
    assert "as fast" not in headline(page_of(write_pair(tmp_path, speedup=speedup), tmp_path))


def test_several_arms_have_a_verdict_and_a_map_each_and_one_run_is_shown_for_itself(tmp_path):
    shape = Shape(rate=0.5)
    runs = [*write_pair(tmp_path), write_run(tmp_path / "half", shape, frozen=True, cost=0.03, speedup=1.3)]
    page = page_of(runs, tmp_path)
    assert re.match(r"3 frozen of 12 attention heads: .*; 6 frozen: perplexity \+.*, .* 1\.30× as fast", headline(page))
    assert page.count("<h2>Heads of ") == 2
    alone = page_of(runs[:1], tmp_path / "alone")
    assert re.match(r"held-out perplexity \d+\.\d+ after 60 updates", headline(alone))
    assert "<h2>Heads" not in alone


def test_differences_and_failures_are_named(tmp_path):
    runs = write_pair(tmp_path)
    edit(runs[1] / "config.json", train__seed=5)
    assert "train.seed: 1337 in the ordinary arm, 5 in the frozen arm" in page_of(runs, tmp_path)
    edit(runs[1] / "evaluation.json", windows_hash="0" * 64)
    assert "could not be compared: both arms must be evaluated on the same windows" in page_of(runs, tmp_path)


def test_names_from_outside_are_text_and_the_page_asks_for_nothing(tmp_path):
    name = "<img src=x onerror=alert(1)>&$\x1b[31m"
    run = write_run(tmp_path / name, frozen=True)
    page = page_of([run], tmp_path)
    assert "<img src=x" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;&amp;$\N{REPLACEMENT CHARACTER}" in page
    assert "<script" not in page
    assert not re.search(r"""(?:src|href)=["'](?!data:|#)""", page)
    assert "default-src 'none'" in page


def test_a_head_shows_the_pattern_that_is_installed(tmp_path):
    """The oracle is the dense pattern, averaged over the keys of a bin and set against uniform attention."""
    run = RecordedRun.open(write_run(tmp_path / "frozen", Shape(length=44), frozen=True))
    layer, head = run.freeze_report["heads"][0]
    logits = [values[layer, head] for values in patterns(Shape(length=44)).values()]
    dense = CompactPattern.from_parameters(*logits).dense()
    picture = figures.patterns(run)[0]
    size = len(picture)  # two positions a bin
    for row in (0, 7, size - 1):
        share = dense[2 * row + 1, : 2 * row + 2].reshape(-1, 2).mean(-1) * (2 * row + 2)
        expected = 0.88 * (share.log10() / 2).clamp(0, 1) + 0.12
        torch.testing.assert_close(torch.tensor(picture[row, : row + 1]), expected, atol=1e-5, rtol=0)
    assert not np.triu(picture, 1).any()
