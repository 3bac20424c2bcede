"""What a path means is read off its files; and the folder of a run."""

import json
from pathlib import Path

import pytest

from saf.errors import CheckpointError, InputError
from saf.records.run import Kind, RecordedRun, expect, kind_of

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
        assert kind_of(written(tmp_path / kind, *names)) is kind
    assert kind_of(written(tmp_path / "without-manifest", "state.json", "saf.json")) is Kind.CHECKPOINT
    assert kind_of(written(tmp_path / "without-checkpoints", "config.json", "result.json")) is Kind.RUN
    assert kind_of(written(tmp_path / "another-library", "config.json", "model.safetensors")) is None
    beside = written(tmp_path / "beside-checkpoints-of-a-trainer", "saf.json", sha256={})
    (beside / "checkpoints").mkdir()
    assert kind_of(beside) is Kind.HEADS


def test_a_wrong_path_is_named_with_what_is_there(tmp_path):
    data = written(tmp_path / "data", "index.json")
    (tmp_path / "text.txt").write_text("")
    for path, found in (
        (data, "is a folder made by `saf data prepare`"),
        (tmp_path, "holds nothing that saf writes"),
        (tmp_path / "absent", "does not exist"),
        (tmp_path / "text.txt", "is a file"),
    ):
        with pytest.raises(InputError) as caught:
            expect(path, Kind.CHECKPOINT, Kind.RUN)
        assert str(caught.value) == f"{path} {found}; expected a checkpoint (step-N) or a run"
    assert expect(data, Kind.DATA) is Kind.DATA
    with pytest.raises(CheckpointError, match=r"expected a run$"):
        expect(data, Kind.RUN, error=CheckpointError)


def test_a_committed_run_is_read():
    run = RecordedRun.open(RESULTS / "124m-4k" / "frozen25")
    assert (run.arm, run.freeze_update, len(run.frozen_heads), run.num_heads) == ("frozen", 320, 36, 144)
    assert run.finished_result()["kind"] == "run"
    assert run.finished_result()["provenance"]["checkpoints"].keys() == {"parent", "final"}
    assert run.evaluation is not None
    assert run.evaluation["kind"] == "evaluation"
