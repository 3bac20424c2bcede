"""Records that timed no arms get a page of tables; nanoGPT's has one in the document of results too."""

import json
import re
from html import unescape
from pathlib import Path

import pytest
import torch

from saf.bench import measure
from saf.bench.accuracy.errors import ErrorSettings
from saf.bench.harness.environment import environment
from saf.bench.harness.pairs import summary
from saf.bench.harness.recorder import Recorder
from saf.bench.harness.settings import Point
from saf.bench.harness.timing import Budget
from saf.bench.kinds import KINDS
from saf.bench.model.update import UpdateSettings
from saf.errors import InputError
from saf.report.benchmarks.page import write_bench_report
from saf.report.record_parts import body_of
from tests.report.benchmark_records import record
from tests.report.test_results import tables

PAIRS = [(320.0, 310.0), (300.0, 300.0), (330.0, 300.0)]


def rows_of(page: str) -> list[list[str]]:
    """Return the cells of every row of every table of a page."""
    rows = re.findall("<tr>(.*?)</tr>", page, re.DOTALL)
    cells = [re.findall("<t[hd](?: [^>]*)?>(.*?)</t[hd]>", row, re.DOTALL) for row in rows]
    return [[unescape(re.sub("<[^>]*>", "", cell)) for cell in row] for row in cells]


def nanogpt(path: Path | None = None, *, refused: bool = False) -> dict:
    """Return (and write) a record with invented times, as tools/compare_nanogpt.py writes them."""
    settings, found = UpdateSettings(model="124m-learned", device="cpu"), summary(PAIRS)
    rates = {"baseline_tokens_per_second": 419649.0499, "arm_tokens_per_second": 429575.8164}
    row = {"model": "124m-learned", "point": Point(4096, 8, 4).to_dict(), "control": False, **found, **rates}
    row |= {"control_ratio": 0.99794, "refused": refused}
    recorder = Recorder(path, kind="nanogpt", settings=settings.to_dict(), budget=Budget(), say=lambda _: None)
    with recorder:
        machine = environment(torch.device("cpu"), "Invented 9000")
        recorder.trace(**machine)
        recorder.describe(nanogpt_model_sha256="7c01703240db" + "0" * 52)
        recorder.show([row | {"arm": "control nanoGPT", "control": True}, row | {"arm": "ordinary"}])
    return recorder.record


def test_nanogpt_stands_beside_ours():
    text = "\n\n".join(body_of(nanogpt())) + "\n"
    ((row,),) = tables(text)
    assert (row["model"], row["point"], row["pairs"]) == ("124m-learned", "4096x8x4", "3")
    assert (row["nanoGPT, ms"], row["ours, ms"], row["speedup"]) == ("320", "300", "1.032×")
    assert row["middle half of pairs"] == "1.016 to 1.066"
    assert (row["nanoGPT, tokens/s"], row["ours, tokens/s"]) == ("419,649", "429,576")
    assert row["control"] == "0.9979"
    assert "its model.py of sha256 7c01703240db; ours" in text
    assert "Both not compiled" in text
    ((refused,),) = tables("\n\n".join(body_of(nanogpt(refused=True))) + "\n")
    assert (refused["speedup"], refused["middle half of pairs"]) == ("refused", "–")


def test_every_kind_has_a_page(tmp_path):
    nanogpt(tmp_path / "nanogpt.json")
    settings = ErrorSettings(device="cpu", backends=("reference",), length=16, stored=16, precisions=("fp32",))
    errors = measure(settings, out=tmp_path / "errors.json", say=lambda _: None)
    record(tmp_path / "update.json")
    files = [tmp_path / name for name in ("nanogpt.json", "errors.json", "update.json")]
    page = write_bench_report(files, tmp_path / "page.html").read_text()
    assert (
        "<h1>Updates 1.032× as fast as nanoGPT&#x27;s · 16 of 16 errors are within their limits · Updates: speed</h1>"
        in page
    )
    assert re.findall("<h2[^>]*>(.*?)</h2>", page)[:2] == [
        "Updates: beside nanoGPT: nanogpt.json",
        "Numerical errors: errors.json",
    ]
    assert "<caption>a layer of live and frozen heads, reference, fp32</caption>" in page
    assert "its model.py of sha256" in page
    assert "<li>The paper tells another case.</li>" in page
    shown = rows_of(page)
    assert ["124m-learned", "4096x8x4", "320", "300", "1.032×"] in [row[:5] for row in shown]
    worst = errors["rows"][0]["relative_l2"]
    assert next(float(row[2]) for row in shown if row[0] == "output") == pytest.approx(worst, rel=0.01)
    assert ["device", "Invented 9000"] in [row[:2] for row in shown]


def test_the_headline_of_seconds_is_the_first_freezing():
    rows = [{"part": "fit", "seconds": 9.0}, {"part": "intervention", "rate": 0.25, "model": "124m", "seconds": 0.41}]
    finding = KINDS["calibration"].finding
    assert finding({"rows": rows}) == "Freezing 25% of the heads of 124m took 410 ms"
    assert finding({"rows": rows[:1]}) == "Freezing: seconds"
    assert [KINDS[kind].finding({"rows": []}) for kind in ("errors", "nanogpt")] == [
        "Numerical errors",
        "Updates: beside nanoGPT",
    ]


def test_what_is_above_its_limit_stands_out_and_words_cannot_become_markup(tmp_path):
    path = tmp_path / "errors.json"
    settings = ErrorSettings(device="cpu", backends=("reference",), length=16, stored=16, precisions=("fp32",))
    made = json.loads(json.dumps(measure(settings, say=lambda _: None)))
    made["rows"][0] |= {"within": False, "tensor": "<script>"}
    made["provenance"]["device"] = "<img src=x>"
    made["finished"] = False
    path.write_text(json.dumps(made))
    page = write_bench_report([path], tmp_path).read_text()
    assert page.count("<strong>above</strong>") == 1
    assert "<img" not in page
    assert page.count("<script") == 2
    assert "<li>Not finished" in page
    assert not re.findall(r"(?:src|href)=\"(?!#|data:)", page)


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"schema": "saf.analysis/fits/1"}))
    with pytest.raises(
        InputError, match=r"is no record of `saf bench`, as expected; `python -m experiments results` shows"
    ):
        write_bench_report([path], tmp_path / "x.html")
