"""A run of several events on its page: marks on the curve, a row each, and all frozen heads on the map."""

import json
import re

import pytest
import torch

from saf.records.events import append_event, keep_events_, read_events
from saf.records.run import RecordedRun
from saf.report.runs.page import write_report
from saf.report.runs.picture import write_picture
from tests.report.synthetic import edit, write_run


@pytest.fixture
def several(tmp_path):
    """A frozen run whose record goes on: one head more, and another that was undone."""
    folder = write_run(tmp_path / "run", frozen=True)
    keep_events_(folder, lambda event: True)
    (first,) = read_events(folder)
    live = [[layer, head] for layer in range(3) for head in range(4) if [layer, head] not in first.heads]

    def freeze(update, head):
        scores = [[None if [layer, at] in first.heads else 9.0 for at in range(4)] for layer in range(3)]
        tensors = {
            name: tensor[:1] if name in ("alpha", "rho", "log_z") else tensor
            for name, tensor in first.tensors().items()
        }
        tensors |= {name: tensors[name] + 1 for name in ("alpha", "variance")}
        values = {**first.values, "update": update, "heads": [head], "scores": scores, "fit_kl": [[*head, 0.5]]}
        values = {
            name: value for name, value in values.items() if name not in ("number", "kind", "tensors", "tensors_sha256")
        }
        more = {"loss_before": 3.0, "loss_after": 3.25, "reason": "train_loss: <flat>", "seconds": {"fit": 2.0}}
        append_event(folder, "freeze", values | more, tensors)

    freeze(40, live[0])
    freeze(50, live[1])
    append_event(folder, "undo", {"update": 55, "heads": [live[1]], "undoes": 3, "reason": "too dear"})
    return folder


def test_what_was_measured_of_a_head_is_of_the_event_that_froze_it(several):
    run = RecordedRun.open(several)
    first, second = run.kept_freezes
    assert (run.newest_freeze, run.last_change) == (second, 55)
    tensors = run.freeze_tensors
    assert torch.equal(tensors["alpha"], torch.cat([first.tensors()["alpha"], second.tensors()["alpha"]]))
    for layer in range(3):
        for head in range(4):
            event = first if [layer, head] in first.heads else second
            assert tensors["variance"][layer, head] == event.tensors()["variance"][layer, head]


def test_the_page_marks_every_event_and_shows_all_frozen_heads(several, tmp_path):
    page = write_report([several], tmp_path / "report.html").read_text()
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])
    run = RecordedRun.open(several)
    heads = run.kept_freezes[0].heads + run.kept_freezes[1].heads
    (freeze,) = data["freezes"]
    assert freeze["frozen"] == heads
    assert set(freeze["fit_kl"]) == set(freeze["patterns"]["curves"]) == {f"{layer},{head}" for layer, head in heads}
    assert all(freeze["scores"]["variance"][layer][head] is not None for layer, head in heads)
    assert freeze["seconds"]["fit"] == pytest.approx(4.0 + run.events[0].seconds["fit"])
    told = {event["update"]: event["told"] for event in data["arms"][0]["events"]}
    assert told[40] == "1 head frozen: train_loss: <flat>"
    assert told[50] == "1 head frozen, undone by event 4: train_loss: <flat>"
    assert told[55] == "1 head live again: too dear"
    table = page[page.index("<caption>Events") :]
    for words in ("2: freeze", "3.0000 → 3.2500", "undone by event 4", "train_loss: &lt;flat&gt;", "4: undo"):
        assert words in table


def test_what_several_events_changed_is_told_without_what_training_between_them_did(several, tmp_path):
    edit(several / "result.json", intervention__events=3, intervention__loss_rise=0.0625)
    edit(several / "result.json", intervention__loss_before=3.4, intervention__loss_after=2.9)
    page = write_report([several], tmp_path / "report.html").read_text()
    assert "At the events themselves the loss on the controller’s held-out text changed by +0.0625 nats at 3" in page
    assert "from 3.4000 to 2.9000" not in page
    edit(several / "result.json", intervention__events=1)
    assert "from 3.4000 to 2.9000 nats (−0.5000)" in write_report([several], tmp_path / "one.html").read_text()


def test_the_first_paragraph_tells_from_which_event_to_which(several, tmp_path):
    ordinary = write_run(tmp_path / "ordinary")
    page = write_report([ordinary, several], tmp_path / "report.html").read_text()
    assert "Heads froze after updates 30 to 40 of 60." in page
    once = write_run(tmp_path / "once", frozen=True)
    page = write_report([ordinary, once], tmp_path / "once.html").read_text()
    assert "Heads froze after update 30 of 60." in page


def test_the_picture_has_a_line_at_every_event(several, tmp_path):
    picture = write_picture([several], tmp_path / "out.svg").read_text()
    assert picture.count('<line class="event"') == 4
    assert picture.count("heads frozen at") == 1


def test_a_run_of_one_event_has_no_table_of_events(tmp_path):
    page = write_report([write_run(tmp_path / "run", frozen=True)], tmp_path / "report.html").read_text()
    assert "<caption>Events" not in page
