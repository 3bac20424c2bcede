import math
from pathlib import Path

import numpy as np
import pytest
import torch

from saf.errors import CheckpointError, InputError
from saf.records.files import (
    append_line,
    read_json,
    read_json_value,
    read_lines,
    read_metadata,
    read_tensors,
    to_json,
    write_json,
    write_lines,
    write_tensors,
)


def test_values_of_all_kinds_become_plain_json():
    values = {
        "path": Path("a"),
        "nan": math.nan,
        "inf": -math.inf,
        1: (np.float32(1.5), torch.tensor([1, 2]), True, None),
    }
    assert to_json(values) == {"path": "a", "nan": None, "inf": None, "1": [1.5, [1, 2], True, None]}


def test_a_record_is_whole_or_absent(tmp_path, monkeypatch):
    path = write_json(tmp_path / "a" / "x.json", {"value": 1})
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_json(path, {"value": 2})
    assert read_json(path) == {"value": 1}
    assert [entry.name for entry in path.parent.iterdir()] == ["x.json"]


def test_tensors_come_back(tmp_path):
    tensors = {"a": torch.arange(6.0).reshape(2, 3).T, "b": torch.ones(2, dtype=torch.bfloat16)}
    read = read_tensors(write_tensors(tmp_path / "x.safetensors", tensors, {"note": "here"}))
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("name", "content", "read", "message"),
    [
        ("x.json", None, read_json, "does not exist"),
        ("x.json", b"{", read_json, "is not valid JSON"),
        ("x.json", b"[1]", read_json, "must hold a JSON object; got list"),
        ("x.safetensors", None, read_tensors, "does not exist"),
        ("x.safetensors", None, read_metadata, "does not exist"),
        ("x.safetensors", b"not tensors", read_tensors, "is not a readable safetensors file"),
        ("x.jsonl", b'{"a": 1}\n{"a\n', read_lines, "line 2, is not valid JSON"),  # it has its end: not cut short
        ("x.jsonl", b'{"a": "\xff"}\n{}\n', read_lines, "line 1, is not valid JSON"),
        ("x.jsonl", b"{}\n[1]\n{}\n", read_lines, "line 2, must hold a JSON object; got list"),
        ("x.jsonl", b"{}\n" + b"[" * 100_000 + b"\n{}\n", read_lines, "line 2, is not valid JSON"),
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


def test_texts_beside_tensors_and_values_that_are_no_objects_come_back(tmp_path):
    path = write_tensors(tmp_path / "x.safetensors", {"a": torch.ones(1)}, {"note": "here"})
    assert read_metadata(path) == {"note": "here"}
    assert read_metadata(write_tensors(path, {"a": torch.ones(1)})) == {}
    (tmp_path / "x.json").write_text("[[0, 3]]")
    assert read_json_value(tmp_path / "x.json") == [[0, 3]]


def test_lines_are_appended_and_replaced(tmp_path):
    path = tmp_path / "x.jsonl"
    assert read_lines(path) == []
    for number in range(3):
        append_line(path, {"number": number, "value": math.nan})
    assert read_lines(path) == [{"number": number, "value": None} for number in range(3)]
    write_lines(path, [{"a": 1}])
    assert path.read_text() == '{"a": 1}\n'


def test_a_line_that_was_cut_short_does_not_spoil_the_next_one(tmp_path):
    path = tmp_path / "x.jsonl"
    append_line(path, {"number": 1})
    whole = path.read_bytes()
    further = write_lines(tmp_path / "further.jsonl", [{"number": 3}]).read_bytes()
    for rest, kept in ((further[:-9], []), (further[:-1], [{"number": 3}])):
        path.write_bytes(whole + rest)
        append_line(path, {"number": 4})
        assert read_lines(path) == [{"number": 1}, *kept, {"number": 4}]
