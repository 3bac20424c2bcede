"""What a path means is read off its files; the folder of a run and its events."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from saf.errors import CheckpointError, InputError
from saf.records.files import write_json
from saf.records.run import (
    Kind,
    RecordedRun,
    append_event,
    expect,
    heads_edited_by,
    heads_of_record,
    inherit_events,
    keep_events_,
    kind_of,
    merge_reports,
    read_events,
)

RESULTS = Path(__file__).parents[2] / "results"
FILES = {
    Kind.CHECKPOINT: ("manifest.json", "saf.json", "model.safetensors"),
    Kind.RUN: ("config.json", "metrics.jsonl"),
    Kind.DATA: ("index.json",),
    Kind.MODEL: ("config.json", "saf.json", "model.safetensors"),
    Kind.HEADS: ("saf.json", "saf.safetensors"),
}


def written(folder, *names, **saved):
    folder.mkdir()
    for name in names:
        (folder / name).write_text(json.dumps(saved))
    return folder


def test_a_folder_is_known_by_its_files(tmp_path):
    for kind, names in FILES.items():
        assert kind_of(written(tmp_path / kind.name, *names)) is kind
    assert kind_of(written(tmp_path / "without-manifest", "state.json", "saf.json")) is Kind.CHECKPOINT
    assert kind_of(written(tmp_path / "without-checkpoints", "config.json", "result.json")) is Kind.RUN
    assert kind_of(written(tmp_path / "another-library", "config.json", "model.safetensors")) is None
    heads = written(tmp_path / "with-checkpoints-of-a-trainer", "saf.json", sha256={})
    (heads / "checkpoints").mkdir()
    assert kind_of(heads) is Kind.HEADS


def test_a_wrong_path_is_named_with_what_is_there(tmp_path):
    data, step = written(tmp_path / "data", *FILES[Kind.DATA]), written(tmp_path / "step-2")
    for path, actual in (
        (data, "is a folder written by `saf data prepare`"),
        (step, "holds nothing that saf writes"),
        (Path(__file__), "is a file"),
        (data / "step-1", "does not exist"),
        (tmp_path / "step-1", r"does not exist \(there are step-2\)"),
    ):
        with pytest.raises(CheckpointError, match=rf"{path} {actual}; expected a checkpoint \(step-N\) or a run$"):
            expect(path, Kind.CHECKPOINT, Kind.RUN, error=CheckpointError)


def test_a_committed_run_is_read(tmp_path):
    run = RecordedRun.open(RESULTS / "124m-4k" / "frozen25")
    assert (run.arm, run.last_change, len(run.frozen_heads), run.num_heads) == ("frozen", 320, 36, 144)
    assert (run.finished_result()["kind"], run.evaluation["kind"]) == ("run", "evaluation")
    shutil.copytree(run.folder, tmp_path / "run")
    write_json(tmp_path / "run" / "checkpoints" / "step-320" / "saf.json", {"layers": []})
    assert heads_of_record(tmp_path / "run") == run.frozen_heads, "whichever checkpoints are left"


# --- events


def freeze(folder, heads, update=6, **more):
    return append_event(folder, "freeze", {"update": update, "heads": heads, **more}, {"alpha": torch.ones(2, 3)})


def test_events_are_numbered_lines_with_a_file_of_tensors_each(tmp_path):
    assert read_events(tmp_path) == []
    with pytest.raises(InputError, match="the folder that holds it"):
        read_events(tmp_path / "events.jsonl")
    assert freeze(tmp_path, [[0, 1]], reason="because", seconds={"fit": 1.5}).number == 1
    append_event(tmp_path, "undo", {"update": 7, "heads": [[0, 1]], "loss_after": float("nan")})
    first, second = read_events(tmp_path)
    assert (first.number, first.kind, first.update, first.heads) == (1, "freeze", 6, [[0, 1]])
    assert (first.seconds, first.values["reason"]) == ({"fit": 1.5}, "because")
    assert torch.equal(first.tensors()["alpha"], torch.ones(2, 3))
    assert (second.number, second.kind, second.tensors()) == (2, "undo", {})
    assert second.values["loss_after"] is None
    assert read_events(tmp_path / "events.jsonl") == [first, second]


def test_what_events_chose_together_leaves_undone_ones_out(tmp_path):
    assert merge_reports([]) is None
    freeze(tmp_path, [[1, 0]], scores=[[3.0, 4.0], [1.0, 5.0]], fit_kl=[[1, 0, 0.1]], score_name="variance")
    freeze(tmp_path, [[0, 0]], scores=[[2.0, 6.0], [None, 7.0]], fit_kl=[[0, 0, 0.2]], score_name="variance")
    freeze(tmp_path, [[0, 1]], scores=[[None, 8.0], [None, 9.0]], fit_kl=[[0, 1, 0.3]], score_name="variance")
    append_event(tmp_path, "undo", {"heads": [[0, 1]], "undoes": 3})
    together = merge_reports(read_events(tmp_path))
    assert (together["heads"], together["number"]) == ([[1, 0], [0, 0]], 2)
    assert together["scores"] == [[2.0, 6.0], [1.0, 7.0]]
    assert together["fit_kl"] == [[1, 0, 0.1], [0, 0, 0.2]]
    assert together["rejected"] == []
    assert heads_edited_by(read_events(tmp_path)) == [[0, 0], [1, 0]]


def test_events_that_are_not_kept_go_with_their_tensors_and_what_they_undid(tmp_path):
    freeze(tmp_path, [[0, 1]], update=3)
    freeze(tmp_path, [[0, 2]], update=6)
    append_event(tmp_path, "undo", {"update": 6, "heads": [[0, 1]], "undoes": 1})
    assert [event.undone_by for event in read_events(tmp_path)] == [3, None, None]
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"number": 4, "ki')
    keep_events_(tmp_path, lambda event: event.update < 6)
    assert [(event.update, event.undone_by) for event in read_events(tmp_path)] == [(3, None)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["event-1.safetensors", "events.jsonl"]
    assert freeze(tmp_path, [[0, 3]]).number == 2


def test_inherited_events_are_marked_and_replace_what_was_there(tmp_path):
    for name in ("parent", "child"):
        (tmp_path / name).mkdir()
    freeze(tmp_path / "parent", [[0, 1]], loss_before=3.0)
    freeze(tmp_path / "child", [[0, 3]])
    freeze(tmp_path / "child", [[0, 2]])
    inherit_events(tmp_path / "parent", tmp_path / "child")
    (event,) = read_events(tmp_path / "child")
    assert (event.heads, event.values["inherited"], event.values["loss_before"]) == ([[0, 1]], True, 3.0)
    assert torch.equal(event.tensors()["alpha"], torch.ones(2, 3))
    assert not (tmp_path / "child" / "event-2.safetensors").exists()
