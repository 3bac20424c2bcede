"""Tables of freezing and accuracy, from records made by the code that measures them."""

import pytest

from benchmarks import accuracy, freezing
from saf.records.files import to_json
from saf.records.table import Cell
from saf.report.record_parts import body_of
from saf.report.results_summary import Finding, summary_table
from tests.report.test_results import tables


def rendered(record: dict) -> str:
    return "\n\n".join(body_of(to_json(record))) + "\n"


@pytest.fixture(scope="module")
def intervention() -> dict:
    points = ("32x4",)
    return freezing.measure(freezing.Freezing(model="tiny", points=points, repeats=3, dense_layers=1, device="cpu"))


def test_freezing_is_shown_stage_by_stage(intervention):
    (shown,), fits, dense = tables(rendered(intervention))
    row = next(row for row in intervention["rows"] if row["part"] == "intervention")
    assert shown["whole"] == f"{1e3 * row['seconds']:.4g} ms"
    assert shown["fit"] == f"{1e3 * row['stages']['fit']['median']:.4g} ms"
    assert (fits[0]["heads"], fits[0]["tokens"]) == ("16", "32")
    assert dense[0]["layers measured"] == "1 of 4, extrapolated"
    rows = [row | {"model": "124m", "point": {"length": 4096, "batch_size": 32}} for row in intervention["rows"]]
    assert tables(rendered(intervention | {"rows": rows}))[0][0]["paper"] == "54.86 ± 6.04 s"


def test_the_summary_says_that_weights_were_not_trained(intervention):
    rows = [row | {"model": "124m", "point": {"length": 4096, "batch_size": 32}} for row in intervention["rows"]]
    for weights, what in (
        ({}, "freezing, warm, weights not trained: 124m"),
        ({"weights": "of a run"}, "freezing, warm: 124m"),
    ):
        record = intervention | {"rows": [row | weights for row in rows]}
        (found,) = summary_table([], [("calibration", record)]).rows
        assert (found[0], found[3]) == (what, "54.86 ± 6.04 s")


def test_the_summary_names_the_file_of_the_shares_that_it_shows():
    """A newer file with another share of heads has no column, and is not where these numbers stand."""
    others = [
        Finding(what="perplexity", where="here", rate=rate, ours=ours, quoted=None, date=date, source=Cell(text=file))
        for rate, ours, date, file in ((0.25, "-1", "1", "one"), (0.5, "-2", "2", "two"), (0.75, "-3", "3", "three"))
    ]
    beyond = Finding(
        what="perplexity", where="there", rate=0.75, ours="-4", quoted=None, date="4", source=Cell(text="four")
    )
    (row,) = summary_table([], [], [*others, beyond]).rows
    assert row == ("perplexity", "here", "-1", "–", "-2", "–", Cell(text="two"))


def test_disagreeing_collections_have_no_ratio(intervention):
    rows = [row | {"refused": True} if row["part"] == "dense" else row for row in intervention["rows"]]
    dense = tables(rendered(intervention | {"rows": rows}))[2][0]
    assert (dense["ratio"], dense["ratio of wholes"]) == ("refused", "refused")


def test_errors_stand_beside_the_papers_comparison():
    record = accuracy.measure(accuracy.Accuracy(device="cpu", backends=("reference",)))
    pruned, fp32, _, _, bf16, alone = tables(rendered(record))
    assert [row["tensor"] for row in fp32][:3] == ["output", "input", "value"]
    assert [row["paper, L2"] for row in fp32][:2] == ["1.86e-7", "2.51e-7"]
    assert [row["paper, max."] for row in bf16][-1] == "6.25e-2"
    first = next(row for row in record["rows"] if row["part"] == "layer")
    assert float(fp32[0]["relative L2"]) == pytest.approx(first["relative_l2"], rel=0.01)
    assert float(fp32[0]["from eager, max."]) == pytest.approx(first["eager"]["max_abs"], rel=0.01)
    assert {row["within"] for row in (*pruned, *fp32, *bf16, *alone)} == {"yes"}
    assert "paper, L2" not in alone[0]
    assert "paper, L2" not in pruned[0]


def test_errors_of_another_case_or_above_the_limit_are_told():
    shape = {"length": 16, "stored": 16, "precisions": ("fp32",)}
    record = accuracy.measure(accuracy.Accuracy(device="cpu", backends=("reference",), **shape))
    record["rows"][0] |= {"within": False}
    text = rendered(record)
    assert "paper, L2" not in tables(text)[0][0]
    assert "The paper tells another case." in text
    assert tables(text)[0][0]["within"] == "**above**"
