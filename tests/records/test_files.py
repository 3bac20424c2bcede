import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from saf.errors import InputError
from saf.records.files import read_json, read_lines, read_tensors, to_json, write_json, write_tensors


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
    assert json.loads(path.read_text()) == {"value": 1}
    assert [entry.name for entry in path.parent.iterdir()] == ["x.json"]


def test_tensors_come_back(tmp_path):
    tensors = {"a": torch.arange(6.0).reshape(2, 3).T, "b": torch.ones(2, dtype=torch.bfloat16)}
    read = read_tensors(write_tensors(tmp_path / "x.safetensors", tensors, {"note": "here"}))
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "does not exist"), ("{", "not valid JSON"), ("[1]", "must hold a JSON object; got list")],
    ids=["missing", "cut", "list"],
)
def test_a_bad_json_file_is_named(tmp_path, content, message):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=f"x.json.*{message}"):
        read_json(path)


def test_a_bad_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"a"\n{"a": 2}\n')
    with pytest.raises(InputError, match=r"x\.jsonl, line 2"):
        read_lines(path)
    assert read_lines(tmp_path / "absent.jsonl") == []


def test_a_damaged_tensor_file_is_named(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"not tensors")
    with pytest.raises(InputError, match=r"x\.safetensors is not a readable"):
        read_tensors(path)
