"""Axes of static figures."""

import math
import re
from importlib.resources import files
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saf.report.plot import Panel, Scale, cell, decimal_names, legend, style, tick_name

KINDS = st.sampled_from(["linear", "log", "root"])


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8), kind=KINDS)
def test_a_scale_holds_its_values_in_order_and_has_ticks_inside(values, kind):
    scale = Scale.of(values, kind)
    shares = [scale.share(value) for value in sorted(values)]
    assert all(-1e-6 <= share <= 1 + 1e-6 for share in shares)
    assert all(after >= before - 1e-9 for before, after in pairwise(shares))
    ticks = scale.ticks()
    assert ticks
    assert ticks == sorted(ticks)
    assert all(-1e-6 <= scale.share(tick) <= 1 + 1e-6 for tick in ticks)


def test_a_logarithmic_scale_needs_positive_values():
    assert Scale.of([1e-3, 10.0], "log").kind == "log"
    assert Scale.of([0.0, 10.0], "log").kind == "linear"
    scale = Scale.of([1e-3, 10.0], "log", margin=0.0)
    assert scale.share(0.1) == pytest.approx(0.5)
    assert scale.ticks() == pytest.approx([0.001, 0.01, 0.1, 1, 10])
    assert Scale(1.5, 8.0, "log").ticks() == [2, 5]


def test_root_scales_spread_small_values_of_either_sign():
    scale = Scale(-1.0, 1.0, "root")
    assert scale.share(0.0) == 0.5
    assert scale.share(0.25) - 0.5 == pytest.approx(0.5 - scale.share(-0.25)) == pytest.approx(0.25)
    assert scale.ticks() == pytest.approx([-1, -0.1, 0, 0.1, 1])


def test_values_that_are_missing_have_no_say():
    assert Scale.of([None, math.nan, 2.0, 4.0], margin=0.0) == Scale(2.0, 4.0)
    assert Scale.of([]).share(0.0) == pytest.approx(0.5)


def test_a_panel_grows_upwards_and_leaves_out_what_is_missing():
    panel = Panel(10, 20, 100, 50, Scale(0, 1), Scale(0, 10))
    assert panel.at((0, 0)) == (10, 70)
    assert panel.at((1, 10)) == (110, 20)
    drawn = panel.dots([(0.5, 5.0), None], "dot-frozen")
    assert drawn == ['<circle class="dot-frozen" cx="60.0" cy="45.0" r="3"/>']
    assert 'points="10.0,70.0 110.0,20.0"' in panel.line([(0, 0), (1, 10)], "frozen")
    steps = re.search('points="(.*?)"', Panel(0, 0, 10, 10, Scale(0, 1), Scale(0, 1)).steps([0.0, 0.5, 1.0], "live"))
    assert steps.group(1) == "0.0,10.0 5.0,5.0 10.0,0.0"


def test_names_of_ticks():
    assert tick_name(1e-6) == "10\u207b\u2076"
    assert tick_name(-1e-4) == "\u221210\u207b\u2074"
    assert tick_name(0.0005) == "0.0005"
    assert tick_name(0.0) == "0"
    assert tick_name(2000.0) == "2,000"


def test_ticks_around_a_value_lie_at_round_distances_from_it():
    assert Scale(0.4, 9.5).ticks(6, around=1.0) == [1, 3, 5, 7, 9]
    assert Scale(0.9, 1.33).ticks(6, around=1.0) == [0.9, 1.0, 1.1, 1.2, 1.3]


def test_ticks_of_one_axis_have_equally_many_decimals():
    assert decimal_names([0.975, 1.0, 1.025]) == ["0.975", "1.000", "1.025"]
    assert decimal_names([1.0, 1.25], least=2) == ["1.00", "1.25"]
    assert decimal_names([1.0, 3.0]) == ["1", "3"]


def test_marks_of_the_horizontal_axis_stand_below_and_across_the_panel():
    panel = Panel(10, 20, 100, 50, Scale(0, 2), Scale(0, 1))
    assert panel.upright(1, "one") == '<line class="one" x1="60.0" x2="60.0" y1="20.0" y2="70.0"/>'
    assert [re.findall('x="(.*?)" y="(.*?)".*>(.*)<', each)[0] for each in panel.foot([1, 2], ["a", "b"])] == [
        ("60.0", "86.0", "a"),
        ("110.0", "86.0", "b"),
    ]


def test_every_class_in_use_has_a_colour_in_both_schemes():
    used = [*legend(0, 0, [("dot-live light", "a & b")]), cell(0, 0, 5, "s3"), cell(0, 0, 5, "blank")]
    for scheme in (0, 1):
        rules = style(scheme)
        for name in re.findall('class="(.*?)"', "".join(used)):
            assert all(f".{part}{{" in rules for part in name.split() if part != "small")
    assert "a &amp; b" in used[1]


def test_both_ways_to_a_dark_page_have_the_same_colours():
    sheet = files("saf.report").joinpath("assets", "page.css").read_text(encoding="utf-8")
    first, second = re.findall(r"@media screen[^{]*\{ :root[^{]*\{(.*?)\n\} \}", sheet, re.DOTALL)
    assert first == second
