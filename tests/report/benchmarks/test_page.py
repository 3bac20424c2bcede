"""The page about benchmarks: what it says, and what `saf report` does with its files."""

import json
import re
from xml.etree import ElementTree

import pytest

from saf.bench.harness.settings import Point
from saf.bench.kinds import groups_of
from saf.bench.model.update import UpdateSettings
from saf.cli.report import COMMAND
from saf.errors import InputError
from saf.records.files import write_json
from saf.report.benchmarks.bars import beyond, scale_of
from saf.report.benchmarks.page import render, write_bench_report
from saf.report.benchmarks.picture import bars_picture, write_bars
from tests.report.benchmark_records import TIMES, record
from tests.report.synthetic import write_pair


def headline(page: str) -> str:
    return re.search("<h1>(.*)</h1>", page)[1]


def test_the_headline_tells_both_rates():
    page = render([measured := record()], ["update.json"])
    ratios = [arm.ratio for arm in groups_of(measured)[0].arms]
    assert headline(page) == (
        f"Freezing 25% of heads made updates <em>{ratios[0]:.3f}× as fast</em>, 50% <em>{ratios[1]:.3f}×</em>"
    )
    assert "against ordinary attention on cuDNN, 100 ms" in page
    assert "Read with care" not in page
    assert "1.056×" in page
    assert "Paper, tab:main-results: 124M" in page


def test_several_points_are_told_as_a_range():
    page = render([record(points=[Point(4096, 8, 4), Point(8192, 4, 4)])], ["x"])
    assert re.search(r"<em>1\.\d\d× to 1\.\d\d× as fast</em>", headline(page))
    assert page.count('class="speed-point"') == 2


def test_a_refused_measurement_shows_no_speed():
    page = render([record(times=TIMES | {"control cudnn": [110.0]})], ["x"])
    assert "refused or missing" in headline(page)
    assert page.count('class="speed refused"') == 2
    assert page.count("two ordinary models differ by 9.09%") == 3
    assert not re.search(r"<b>1\.[01]\d\d×</b>", page)
    assert page.count('<i class="bar"') == 0


def test_memory_alone_has_a_page():
    memory = record(memory={0.0: 100 * 2**20, 0.25: 97 * 2**20, 0.5: 95 * 2**20}) | {"rows": []}
    page = render([memory], ["memory.json"])
    assert headline(page) == "Freezing heads changed peak memory: 25% by <em>−3.0%</em>, 50% by <em>−5.0%</em>"
    assert page.count('class="speed memory"') == 3
    nothing = memory | {"memory": [], "left_out": [{"what": "all", "why": "out of time"}]}
    assert headline(render([nothing], ["x"])) == "Nothing was measured"
    assert "Left out: all: out of time." in render([nothing], ["x"])


def test_files_shown_together_are_named():
    page = render([record(), record(points=[Point(16384, 2, 4)])], ["4k.json", "16k.json"])
    assert page.count("; 16k.json</small>") == 1
    assert page.count("<figure") == 1


def test_names_from_a_file_cannot_become_markup():
    evil = "<img src=x onerror=alert(1)>"
    measured = record()
    measured["provenance"] |= {"device": evil, "command": evil}
    measured["left_out"] = [{"what": evil, "why": "</script>"}]
    page = render([measured], [evil])
    assert "<img" not in page
    assert page.count("</script>") == 2
    assert "sdpa_&lt;forward&gt;" in page


def test_nothing_is_asked_of_the_network():
    page = render([record()], ["x"])
    assert not re.findall(r"(?:src|href)=\"(?!#|data:)", page)
    assert not re.search(r"@import|url\(", page)
    assert "default-src 'none'" in page


def test_the_picture_has_a_bar_for_each_arm_as_long_as_its_gain():
    measured = record(times=TIMES | {"ordinary flash": [125.0]}, others=["flash"])
    root = ElementTree.fromstring(bars_picture([measured]))
    svg = "{http://www.w3.org/2000/svg}"

    def boxes(css: str) -> list[ElementTree.Element]:
        legend = 1 if css == "f-frozen" else 0
        return [node for node in root.iter(f"{svg}rect") if node.get("class") == css][legend:]

    one = float(next(node for node in root.iter(f"{svg}line") if node.get("class") == "one").get("x1"))
    first, second = (float(node.get("width")) for node in boxes("f-frozen"))
    flash, quarter, half = groups_of(measured)[0].arms
    assert first / second == pytest.approx((quarter.ratio - 1) / (half.ratio - 1), rel=0.01)
    (slower,) = boxes("f-ordinary")
    assert float(slower.get("x")) + float(slower.get("width")) == pytest.approx(one, abs=0.2)
    assert float(slower.get("width")) / first == pytest.approx((1 - flash.ratio) / (quarter.ratio - 1), rel=0.01)
    assert len([node for node in root.iter(f"{svg}line") if node.get("class") == "pair"]) == 4 * 4 + 4
    words = " ".join(node.text or "" for node in root.iter(f"{svg}text"))
    assert f"{quarter.ratio:.3f}×" in words


def test_a_single_pair_far_from_all_others_is_written_at_the_edge_of_the_axis():
    usual, odd = record(), record(times=TIMES | {"25% toeplitz cudnn": [92.0, 93.0, 20.0, 94.0]})
    far = max(before / after for before, after in groups_of(odd)[0].arms[0].row["pair_ms"])
    scales = [scale_of(groups_of(each)) for each in (usual, odd)]
    assert scales[1].high < far
    assert not any(beyond(scales[0], value) for value in (1.0, 1.1, 1.2))
    assert beyond(scales[0], 0.5) == "‹ 0.50×"
    drawn, page = bars_picture([odd]), render([odd], ["x"])
    assert drawn.count('class="pair"') == bars_picture([usual]).count('class="pair"') - 1
    assert f"{far:.2f}× ›" in drawn
    assert f'style="left:100.00%" title="{far:.2f}× ›"' in page


def test_every_bar_has_a_colour_pruned_ones_too():
    settings = UpdateSettings(pairs=4, device="cpu", pruned=True)
    times = TIMES | {"25% pruned cudnn": [80.0], "50% pruned cudnn": [70.0]}
    drawn = bars_picture([record(times=times, settings=settings)])
    used = set(re.findall(r'class="(f-[a-z0-9-]+)"', drawn))
    assert {"f-frozen", "f-pruned"} <= used <= set(re.findall(r"\.(f-[a-z0-9-]+)\{fill:#", drawn))


def test_a_refused_bar_is_drawn_as_such():
    drawn = bars_picture([record(times=TIMES | {"control cudnn": [110.0]})])
    assert drawn.count('class="refused"') == 2
    assert "two ordinary models differ" in drawn


def test_a_picture_needs_speeds_and_an_svg_name(tmp_path):
    with pytest.raises(InputError, match="timed nothing"):
        write_bars([record() | {"rows": []}], tmp_path / "x.svg")
    with pytest.raises(InputError, match=r"ending in \.svg"):
        write_bars([record()], tmp_path / "x.png")


def test_a_page_needs_a_file(tmp_path):
    with pytest.raises(InputError, match="at least one file"):
        write_bench_report([], tmp_path)


def command(*words: object) -> dict:
    return COMMAND.from_words([str(word) for word in words]).run()


def test_the_command_writes_page_and_picture(tmp_path):
    path = tmp_path / "results" / "update.json"
    record(path)
    answer = command(path, "--picture", tmp_path / "bars.svg")
    assert answer["report"] == str(path.with_suffix(".html"))
    assert path.with_suffix(".html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "bars.svg").read_text().startswith("<svg")


def test_a_record_that_no_seal_vouches_for_is_named_when_it_cannot_be_shown(tmp_path):
    path, whole = tmp_path / "update.json", tmp_path / "whole.json"
    changed = {**record(whole), "rows": [{"point": None}]}
    path.write_text(json.dumps(changed))
    with pytest.raises(InputError, match=r"(Key|Type)Error.*as they were written: \S+update\.json; restore") as caught:
        command(path, whole)
    assert "whole.json" not in str(caught.value)
    write_json(path, changed)  # with a seal it would be a fault of this program
    with pytest.raises(KeyError):
        command(path)


def test_the_command_says_what_does_not_go_together(tmp_path):
    path = tmp_path / "update.json"
    record(path)
    ordinary, _ = write_pair(tmp_path / "runs")
    for words, reason in (
        ((), "nothing to report on"),
        ((path, ordinary), "folders and .json files together"),
        ((path, "--out", tmp_path / "page.md"), "a page is HTML; .*got page.md"),
        ((ordinary, "--out", tmp_path / "page.pdf"), "a page is HTML; .*got page.pdf"),
    ):
        with pytest.raises(InputError, match=reason):
            command(*words)
