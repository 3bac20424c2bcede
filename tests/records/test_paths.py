"""What a path means is told by its files, and a wrong one by what was expected and what is there."""

import json

import pytest

from saf.errors import CheckpointError, InputError
from saf.records.paths import Kind, expect, kind_of

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


@pytest.mark.parametrize("kind", FILES)
def test_a_folder_is_known_by_its_files(kind, tmp_path):
    assert kind_of(written(tmp_path / "it", *FILES[kind])) is kind


def test_folders_with_less_or_more_than_these_files(tmp_path):
    assert kind_of(written(tmp_path / "without-manifest", "state.json", "saf.json")) is Kind.CHECKPOINT
    assert kind_of(written(tmp_path / "without-checkpoints", "config.json", "result.json")) is Kind.RUN
    assert kind_of(written(tmp_path / "another-library", "config.json", "model.safetensors")) is None
    beside = written(tmp_path / "beside-checkpoints-of-a-trainer", "saf.json", sha256={})
    (beside / "checkpoints").mkdir()
    assert kind_of(beside) is Kind.HEADS


def test_a_wrong_path_is_told_with_what_is_there(tmp_path):
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
