"""Bars of speedup in a real browser: they stand where the numbers say, in any theme and at any width."""

import pytest

from saf.bench.kinds import groups_of
from saf.report.benchmarks.page import write_bench_report
from tests.report.benchmark_records import TIMES, record
from tests.report.waiting import wait_until

pytestmark = pytest.mark.browser
SLOWER = TIMES | {"ordinary flash": [125.0]}


@pytest.fixture
def opened(page, tmp_path):
    """Return the page of one record, open, with what it asked for and complained of."""
    path = tmp_path / "update.json"
    record(path, times=SLOWER, others=["flash"], memory={0.0: 2**34, 0.25: 2**34 - 2**30})
    page.asked, page.complaints = [], []
    page.on("request", lambda request: page.asked.append(request.url))
    page.on("console", lambda message: page.complaints.append(message.text))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto(write_bench_report([path], tmp_path / "page.html").as_uri())
    yield page
    assert page.complaints == []
    assert [url for url in page.asked if not url.startswith(("file:", "data:"))] == []


def place(opened, css: str) -> list[tuple[float, float]]:
    """Return left and right of every such mark in the figure of speedups, in pixels."""
    script = f"""[...document.querySelectorAll('#speed .speed-track {css}')].map((mark) => {{
        const box = mark.getBoundingClientRect();
        return [box.left, box.right];
    }})"""
    return opened.evaluate(script)


@pytest.mark.parametrize("width", [1280, 400])
def test_bars_reach_from_one_to_the_median(opened, width):
    opened.set_viewport_size({"width": width, "height": 900})
    flash, quarter, half = groups_of(record(times=SLOWER, others=["flash"]))[0].arms
    one = place(opened, "i.one")[0][0]
    bars = place(opened, "i.bar")
    assert bars[0][1] == pytest.approx(one, abs=1)
    assert [bars[1][0], bars[2][0]] == pytest.approx([one, one], abs=1)
    scale = (bars[2][1] - one) / (half.ratio - 1)
    assert bars[1][1] - one == pytest.approx(scale * (quarter.ratio - 1), abs=1)
    assert one - bars[0][0] == pytest.approx(scale * (1 - flash.ratio), abs=1)
    bounds = [(left + right) / 2 - one for left, right in place(opened, "i.bound")]
    assert bounds == pytest.approx([scale * (arm.bound - 1) for arm in (quarter, half)], abs=1.5)
    assert len(place(opened, "i.pair")) == 4 * 4


def test_the_table_beside_the_figure_says_the_same(opened):
    shown = opened.locator("#speed .speed-value b").all_inner_texts()
    table = opened.locator("#speed table tbody tr")
    assert table.count() == 3
    for row, value in zip(table.all_inner_texts(), shown, strict=False):
        assert value in row
    assert opened.locator("#memory table tbody tr").count() == 2


def test_both_themes_change_every_colour(opened):
    probe = """['.speed-track i.bar', '.speed-track i.left', '.speed-name', 'body'].map((css) => {
        const style = getComputedStyle(document.querySelector(css));
        return [style.backgroundColor, style.borderTopColor, style.color].join();
    })"""
    light = opened.evaluate(probe)
    opened.get_by_role("button", name="Dark page").click()
    dark = opened.evaluate(probe)
    assert all(before != after for before, after in zip(light, dark, strict=True))


@pytest.mark.parametrize("width", [360, 768])
def test_nothing_is_wider_than_a_small_screen(opened, width):
    opened.set_viewport_size({"width": width, "height": 800})
    wait_until(opened, f"document.documentElement.scrollWidth <= {width}")


def test_kernels_and_settings_open(opened):
    kernels = opened.locator("#kernels details").first
    kernels.locator("summary").click()
    assert "sdpa_<forward>" in kernels.inner_text()
    settings = opened.locator("#provenance details")
    settings.locator("summary").click()
    assert "tolerance" in settings.inner_text()
