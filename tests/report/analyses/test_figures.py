"""Figures of analyses draw what their records say."""

import re
from xml.etree import ElementTree

import pytest
import torch

from saf.errors import InputError
from saf.report.analyses import FIGURES, analysis_figure, write_figure

ONE_HEAD = {
    "kind": "one-head",
    "windows": 16,
    "length": 64,
    "nll_change": torch.tensor([[0.001, 0.002, 0.004], [0.003, -0.0001, torch.nan]], dtype=torch.float64),
    "eligible": [[0, 0], [0, 1], [1, 0], [1, 1]],
    "scores": {
        "variance": torch.tensor([[1e-6, 2e-6, 9e-6], [3e-6, 1e-7, torch.nan]]),
        "redundancy": torch.tensor([[-0.5, -0.2, 0.0], [-0.1, -0.9, torch.nan]]),
    },
    "quality": {
        "variance": {"spearman": 1.0, "mean_cost": {0.25: 0.1}},
        "redundancy": {"spearman": torch.nan, "mean_cost": {0.25: 0.1}},
    },
}


def parts_of(svg: str, css: str) -> list[ElementTree.Element]:
    return [each for each in ElementTree.fromstring(svg).iter() if css in (each.get("class") or "").split()]


def test_one_head_has_a_cell_for_each_head_and_a_dot_for_each_accepted_one():
    drawn = analysis_figure(ONE_HEAD)
    assert len(parts_of(drawn, "blank")) == 1
    cells = [each for each in ElementTree.fromstring(drawn).iter() if re.fullmatch(r"s\d+", each.get("class") or "")]
    assert len(cells) == 5
    # The dearest head has the last shade, the one that gains nothing the first.
    shades = [int(each.get("class")[1:]) for each in cells]
    assert shades[2] == max(shades) == 23
    assert shades[4] == 0
    # Ringed in the map and open in both panels: the head whose fit was not accepted.
    assert len(parts_of(drawn, "open-ordinary")) == 3
    assert len(parts_of(drawn, "dot-frozen")) == 8
    assert "5 heads, 16 windows" in drawn
    assert "Spearman 1<" in drawn
    both = {"alpha_constant_after": 5, "nll_change": 2 * ONE_HEAD["nll_change"]}
    by_rate = {"all": {"difference": 1e-5, "ci95": [0.0, 2e-5]}}
    assert (
        len(parts_of(analysis_figure(ONE_HEAD | {"structured": both, "fit_difference": by_rate}), "dot-frozen")) == 12
    )


def test_a_partial_record_can_be_drawn():
    partial = {key: value for key, value in ONE_HEAD.items() if key != "quality"}
    drawn = analysis_figure(partial | {"kind": "one-head-partial"})
    assert "so far" in drawn


def test_profiles_show_selected_heads_and_the_matched_means():
    values = torch.tensor([[0.1, 0.2], [0.3, torch.nan]])
    record = {
        "kind": "profiles",
        "windows": 4,
        "length": 64,
        "profiles": dict.fromkeys(("entropy", "local_mass", "largest", "first_token"), values),
        "selected": [[0, 1]],
        "matched": dict.fromkeys(("entropy", "local_mass", "largest", "first_token"), (0.2, 0.1)),
    }
    drawn = analysis_figure(record)
    # One in the legend, one in each of four panels.
    assert len(parts_of(drawn, "dot-frozen")) == 5
    assert len(parts_of(drawn, "dot-live")) == 9
    assert drawn.count("means 0.2 selected, 0.1 in the same layers") == 4
    alone = analysis_figure(record | {"selected": [], "matched": {}})
    assert not parts_of(alone, "dot-frozen")


def test_stability_colours_heads_by_the_sets_they_are_in():
    record = {
        "kind": "stability",
        "first": 2,
        "second": 1,
        "overlap": 1,
        "expected": 0.5,
        "standard_deviation": 0.5,
        "rank_correlation": 0.9,
        "heads": [[[0, 0], [0, 1]], [[0, 0]]],
        "scores": ([[1.0, 2.0, 3.0]], [[1.0, 3.0, 2.0]]),
    }
    drawn = analysis_figure(record)
    assert [len(parts_of(drawn, f"dot-{name}")) for name in ("frozen", "ordinary", "live")] == [2, 2, 2]
    assert "1 heads in both selections, of 2 and 1" in drawn


def test_other_records_and_names_are_refused(tmp_path):
    for kind in ("other", "update", None):
        with pytest.raises(InputError, match="record of `saf analyze`"):
            analysis_figure({"kind": kind})
    with pytest.raises(InputError, match=r"ending in \.svg"):
        write_figure(ONE_HEAD, tmp_path / "x.png")
    assert write_figure(ONE_HEAD, tmp_path / "x.svg").read_text().startswith("<svg")


def test_every_analysis_has_a_figure():
    from saf.cli.analyze import COMMANDS

    assert FIGURES.keys() - {"one-head-partial"} == COMMANDS.keys() - {"draw"}
