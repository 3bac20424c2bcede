"""Files and folders are on the disk whole or not at all; a bad one is named."""

import math
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from saf.errors import CheckpointError, DataError, InputError
from saf.records.files import (
    append_line,
    check_file,
    file_hash,
    new_files,
    new_folder,
    read_json,
    read_json_value,
    read_lines,
    read_metadata,
    read_tensors,
    remove_leftovers_,
    to_json,
    write_json,
    write_lines,
    write_tensors,
)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_values_of_all_kinds_become_plain_json():
    values = {"path": Path("a"), "nan": math.nan, "inf": -math.inf, 1: (np.float32(1.5), torch.tensor([1, 2]), True)}
    assert to_json(values) == {"path": "a", "nan": None, "inf": None, "1": [1.5, [1, 2], True]}


def test_a_record_is_whole_or_absent(tmp_path, monkeypatch):
    path = write_json(tmp_path / "a" / "x.json", {"value": 1})
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_json(path, {"value": 2})
    assert read_json(path) == {"value": 1}
    assert names(path.parent) == ["x.json"]


def test_tensors_values_and_texts_come_back(tmp_path):
    tensors = {"a": torch.arange(6.0).reshape(2, 3).T, "b": torch.ones(2, dtype=torch.bfloat16)}
    path = write_tensors(tmp_path / "x.safetensors", tensors)
    assert all(torch.equal(read_tensors(path)[name], tensor) for name, tensor in tensors.items())
    assert read_metadata(path) == {}
    (tmp_path / "x.json").write_text("[[0, 3]]")
    assert read_json_value(tmp_path / "x.json") == [[0, 3]]


@pytest.mark.parametrize(
    ("name", "content", "read", "message"),
    [
        ("x.json", None, read_json, "does not exist"),
        ("x.json", b"{", read_json, "is not valid JSON"),
        ("x.json", b"[1]", read_json, "must hold a JSON object; got list"),
        ("x.safetensors", None, read_metadata, "does not exist"),
        ("x.safetensors", b"not tensors", read_metadata, "is not a readable safetensors file"),
        ("x.jsonl", b'{"a": 1}\n{"a\n', read_lines, "line 2, is not valid JSON"),  # it has its end: not cut short
        ("x.jsonl", b"{}\n[1]\n{}\n", read_lines, "line 2, must hold a JSON object; got list"),
    ],
)
def test_a_bad_file_is_named_with_what_to_do(tmp_path, name, content, read, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    kind = {} if read is read_lines else {"error": CheckpointError, "advice": "save it again"}
    with pytest.raises(CheckpointError if kind else InputError, match=rf"{name}\W.*{message}") as caught:
        read(path, **kind)
    assert not kind or str(caught.value).endswith("; save it again")


def test_lines_are_appended_and_one_that_was_cut_short_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "x.jsonl"
    assert read_lines(path) == []
    for number in range(3):
        append_line(path, {"number": number, "value": math.nan}, wait=number > 1)
    assert read_lines(path) == [{"number": number, "value": None} for number in range(3)]
    whole = write_lines(path, [{"number": 1}]).read_bytes()
    for rest, more in ((b'{"numb', []), (b'{"number": 3}', [{"number": 3}])):
        path.write_bytes(whole + rest)
        append_line(path, {"number": 4})
        assert read_lines(path) == [{"number": 1}, *more, {"number": 4}]


def test_a_file_is_compared_by_size_and_checksum(tmp_path):
    path = tmp_path / "x"
    path.write_text("abc")
    check_file(path, size=3, sha256=file_hash(path))
    for size, expected in ((4, "4 bytes, got 3"), (3, "SHA-256 0")):
        with pytest.raises(DataError, match=f"x is damaged: expected {expected}.*; make it again"):
            check_file(path, size=size, sha256="0", error=DataError, advice="make it again")


# --- folders


def failed(folder):
    (folder / "x").write_text("other")
    raise ZeroDivisionError


def test_a_folder_appears_when_it_is_whole_and_replaces_only_on_request(tmp_path):
    for text in ("old", "new"):
        with new_folder(tmp_path / "a", replace=True) as folder:
            (folder / "x").write_text(text)
            assert (tmp_path / "a").exists() == (text == "new")
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "a", replace=True) as folder:
        failed(folder)
    with pytest.raises(OSError, match="not empty"), new_folder(tmp_path / "a") as folder:
        (folder / "x").write_text("other")
    assert (tmp_path / "a" / "x").read_text() == "new"
    assert names(tmp_path) == ["a"]


def test_new_files_all_come_or_none(tmp_path):
    write_json(tmp_path / "a" / "mine", {})
    for name, before in (("a", ["mine"]), ("b", [])):
        folder = tmp_path / name
        with pytest.raises(ZeroDivisionError), new_files(folder) as new:
            failed(new)
        assert (names(folder) if folder.exists() else []) == before
        with new_files(folder) as new:
            (new / "x").write_text("1")
        assert names(folder) == [*before, "x"]


@pytest.mark.parametrize("write", [Path.write_bytes, lambda path, content: save_file({"a": torch.ones(9_999)}, path)])
def test_a_full_disk_is_named_by_its_folder_whichever_library_met_it(tmp_path, write):
    """A limit on the size of files stands for it: safetensors words the system's refusal in its own way."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught, new_folder(tmp_path / "new") as folder:
            write(folder / "x", bytes(30_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.filename == str(tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_what_kills_left_is_cleared(tmp_path):
    for name in (".writing-a", ".deleted-b", "d"):
        (tmp_path / name).mkdir()
    (tmp_path / ".config.json.4711.tmp").touch()
    remove_leftovers_(tmp_path)
    assert names(tmp_path) == ["d"]
