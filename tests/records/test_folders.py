"""Folders that appear whole or not at all, and that one process holds at a time."""

import errno

import pytest

from saf.errors import CheckpointError, DataError, InputError
from saf.records import folders
from saf.records.files import check_file, file_hash
from saf.records.folders import (
    lock_folder,
    locked_beside,
    new_folder,
    read_manifest,
    remove_leftovers_,
    verify,
    write_manifest,
)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_appears_when_it_is_whole(tmp_path):
    with new_folder(tmp_path / "a") as folder:
        (folder / "x").write_text("1")
        assert not (tmp_path / "a").exists()
    assert names(tmp_path) == ["a"]
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "b"):
        _ = 1 / 0
    assert names(tmp_path) == ["a"]


def test_a_folder_that_is_there_gives_way_when_told_to(tmp_path):
    for text in ("old", "new"):
        with new_folder(tmp_path / "a", replace=True) as folder:
            (folder / "x").write_text(text)
    assert (tmp_path / "a" / "x").read_text() == "new"
    with pytest.raises(OSError, match="not empty"), new_folder(tmp_path / "a") as folder:
        (folder / "x").write_text("other")
    assert (tmp_path / "a" / "x").read_text() == "new"
    assert names(tmp_path) == ["a"]


def test_a_replacement_that_fails_at_the_last_moment_leaves_the_old_folder(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_text("old")
    rename = type(tmp_path).rename

    def failing(path, target):
        if path.name == ".writing-a":
            raise OSError("no")
        return rename(path, target)

    monkeypatch.setattr(type(tmp_path), "rename", failing)
    with pytest.raises(OSError, match="no"), new_folder(tmp_path / "a", replace=True) as folder:
        (folder / "x").write_text("new")
    assert (tmp_path / "a" / "x").read_text() == "old"
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("I/O error: no space (os error 28)")]
)
def test_a_full_disk_is_named_by_its_folder_whichever_library_met_it(tmp_path, error):
    with pytest.raises(OSError, match="no space left on the disk") as caught, new_folder(tmp_path / "new"):
        raise error
    assert caught.value.filename == str(tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_what_kills_left_is_cleared_and_a_folder_moved_aside_comes_back(tmp_path):
    for name in (".writing-a", ".deleted-b", ".replaced-c", ".replaced-d", "d"):
        (tmp_path / name).mkdir()
    remove_leftovers_(tmp_path)
    assert names(tmp_path) == ["c", "d"]


def test_one_process_holds_a_folder_or_a_name(tmp_path):
    busy = DataError("busy")
    for lock, error in (
        (lambda: lock_folder(tmp_path), InputError),
        (lambda: locked_beside(tmp_path / "a", busy), DataError),
    ):
        with lock(), pytest.raises(error), lock():
            pytest.fail("the second got in")
        with lock():
            pass
    assert names(tmp_path) == [".lock"]


def test_a_manifest_names_the_file_that_was_changed(tmp_path):
    for name in ("x", "y"):
        (tmp_path / name).write_text(name)
    made = write_manifest(tmp_path, update=3, parent=None)
    assert verify(tmp_path)["hash"] == made == read_manifest(tmp_path)["hash"]
    (tmp_path / "x").write_text("z")
    with pytest.raises(CheckpointError, match="x is damaged: expected SHA-256"):
        verify(tmp_path)
    assert verify(tmp_path, without=("x",))["update"] == 3
    (tmp_path / "y").unlink()
    with pytest.raises(CheckpointError, match="y is missing; expected 1 bytes"):
        verify(tmp_path, without=("x",))
    manifest = tmp_path / folders.MANIFEST
    manifest.write_text(manifest.read_text().replace('"update": 3', '"update": 4'))
    with pytest.raises(CheckpointError, match="damaged: expected hash"):
        read_manifest(tmp_path)


def test_a_file_is_compared_by_size_first(tmp_path):
    path = tmp_path / "x"
    path.write_text("abc")
    check_file(path, size=3, sha256=file_hash(path))
    with pytest.raises(DataError, match="x is damaged: expected 4 bytes, got 3; make it again"):
        check_file(path, size=4, sha256="0", error=DataError, advice="make it again")
