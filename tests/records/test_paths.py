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


def test_what_save_wrote_stays_a_saved_model_beside_checkpoints_of_a_trainer(tmp_path):
    folder = written(tmp_path / "it", "saf.json", sha256={})
    (folder / "checkpoints").mkdir()
    assert kind_of(folder) is Kind.HEADS


def test_a_checkpoint_without_its_manifest_and_a_run_without_its_checkpoints_keep_their_kind(tmp_path):
    assert kind_of(written(tmp_path / "checkpoint", "state.json", "saf.json")) is Kind.CHECKPOINT
    assert kind_of(written(tmp_path / "run", "config.json", "result.json")) is Kind.RUN


def test_a_model_of_another_library_is_none_of_ours(tmp_path):
    assert kind_of(written(tmp_path / "it", "config.json", "model.safetensors")) is None


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
