import gzip
import json
import sys
from types import SimpleNamespace

import pytest

from saf.data.sources import resolve
from saf.errors import DataError

ROWS = ["Erste Zeile: Grüße", "second document\nwith two lines", "third"]
JSONL = "".join(json.dumps({"text": text, "extra": 1}) + "\n" for text in ROWS).encode()


def zstd(data: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor().compress(data)


def write(path, data: bytes):
    compress = {".gz": gzip.compress, ".zst": zstd}.get(path.suffix, bytes)
    path.write_bytes(compress(data))
    return path


def read(path) -> list[str]:
    return list(resolve(str(path)).documents())


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_jsonl_yields_the_text_of_each_line(tmp_path, name):
    assert read(write(tmp_path / name, JSONL)) == ROWS


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst"])
def test_a_text_file_is_one_document(tmp_path, name):
    assert read(write(tmp_path / name, "Grüße\n\nzwei".encode())) == ["Grüße\n\nzwei"]


def test_zstandard_frames_follow_one_another(tmp_path):
    path = tmp_path / "a.txt.zst"
    path.write_bytes(zstd(b"one ") + zstd(b"two " * 200_000))
    assert read(path) == ["one " + "two " * 200_000]


def test_parquet_yields_the_text_column(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table({"id": range(600), "text": [f"row {n}" for n in range(600)]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    consumed = []
    texts = list(resolve(str(tmp_path / "a.parquet")).documents(consumed.append))
    assert texts == [f"row {n}" for n in range(600)]
    assert 0 < sum(consumed) <= (tmp_path / "a.parquet").stat().st_size


def test_a_folder_is_read_recursively_in_sorted_order(tmp_path):
    (tmp_path / "b").mkdir()
    write(tmp_path / "b" / "z.txt", b"last")
    write(tmp_path / "a.txt.gz", b"first")
    write(tmp_path / "b" / "notes.pdf", b"ignored")
    write(tmp_path / ".hidden.txt", b"ignored")
    source = resolve(str(tmp_path))
    assert list(source.documents()) == ["first", "last"]
    assert source.facts == {"files": 2, "files_ignored": 2}


def test_progress_counts_the_bytes_on_disk(tmp_path):
    path = write(tmp_path / "a.jsonl.gz", JSONL * 500)
    consumed = []
    source = resolve(str(path))
    list(source.documents(consumed.append))
    assert sum(consumed) == source.size == path.stat().st_size


def test_the_embedded_text_is_the_same_each_time_and_has_no_tests():
    first, again = list(resolve("python").documents()), list(resolve("python").documents())
    assert first == again
    assert sum(map(len, first)) > 4e6
    assert not any("import unittest\n" in text and "class Test" in text for text in first[:50])


def test_a_hub_dataset_is_streamed(monkeypatch):
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        return iter([{"text": "one", "id": 1}, {"text": "two", "id": 2}])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert read("owner/name:config:test") == ["one", "two"]
    assert read("owner/name") == ["one", "two"]
    assert calls == [
        (("owner/name", "config"), {"split": "test", "streaming": True}),
        (("owner/name", None), {"split": "train", "streaming": True}),
    ]


def test_an_unreachable_hub_dataset_is_named(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(DataError, match=r"owner/name: no such file.*after 0 rows \(ConnectionError: no route\)"):
        read("owner/name")


@pytest.mark.parametrize(
    ("module", "name", "package"),
    [
        ("pyarrow", "a.parquet", "pyarrow"),
        ("zstandard", "a.txt.zst", "zstandard"),
        ("datasets", "owner/name", "datasets"),
    ],
)
def test_a_missing_package_is_named(tmp_path, monkeypatch, module, name, package):
    monkeypatch.setitem(sys.modules, module, None)
    if "/" not in name:
        (tmp_path / name).write_bytes(b"x")
        name = str(tmp_path / name)
    with pytest.raises(DataError, match=f"pip install {package}"):
        read(name)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"", "a.txt: no text in it"),
        ("a.txt", b" \n\t", "a.txt: no text in it"),
        ("a.jsonl", b"\n\n", "a.jsonl: no text in it"),
        ("a.txt", b"abc\nd\xff", r"a.txt: not UTF-8 at byte 5 \(line 2\)"),
        ("a.jsonl", b'{"text": "ok"}\n{"text": "\xff"}\n', "a.jsonl, line 2: not UTF-8 at byte 25"),
        ("a.jsonl", b'{"text": "ok"}\n{"text": \n', "a.jsonl, line 2: not JSON"),
        ("a.jsonl", b'{"text": "ok"}\n\n["x"]\n', "a.jsonl, line 3: expected an object.*got list"),
        ("a.jsonl", b'{"body": "x", "id": 1}\n', "a.jsonl, line 1: no text field; fields found: body, id"),
        ("a.jsonl", b'{"text": 5}\n', "a.jsonl, line 1: text is int, not a string"),
        ("a.jsonl", b'{"text": "a\\ud800"}\n', "a.jsonl, line 1: half a surrogate pair at character 1"),
        ("a.csv", b"text\nx", "unsupported suffix '.csv'; supported: .txt"),
        ("a.parquet", b"PAR1 no", "a.parquet: truncated or damaged Parquet file"),
        ("a.txt.gz", b"", "a.txt.gz: no text in it"),
    ],
)
def test_unusable_files_are_refused_by_name(tmp_path, name, data, message):
    with pytest.raises(DataError, match=message):
        read(write(tmp_path / name, data))


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_truncated_file_is_noticed(tmp_path, suffix):
    path = write(tmp_path / f"a.jsonl.{suffix}", JSONL * 5000)
    path.write_bytes(path.read_bytes()[:-20])
    kind = {"gz": "gzip", "zst": "zstandard"}[suffix]
    with pytest.raises(DataError, match=rf"a.jsonl.{suffix}: truncated or damaged {kind} file after line \d+"):
        read(path)


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_file_that_is_not_what_its_suffix_says(tmp_path, suffix):
    path = tmp_path / f"a.txt.{suffix}"
    path.write_bytes(b"plain text, not compressed at all" * 20)
    with pytest.raises(DataError, match="truncated or damaged"):
        read(path)


def test_parquet_without_a_text_column(tmp_path):
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    parquet.write_table(arrow.table({"id": [1], "body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet: no text column; columns found: id, body"):
        read(tmp_path / "a.parquet")
    parquet.write_table(arrow.table({"text": ["x", None]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b.parquet, row 2: text is NoneType"):
        read(tmp_path / "b.parquet")


def test_missing_files_and_empty_folders(tmp_path):
    with pytest.raises(DataError, match="no such file or folder"):
        resolve(str(tmp_path / "none.txt"))
    with pytest.raises(DataError, match="none of its 0 files can be read"):
        resolve(str(tmp_path))
    with pytest.raises(DataError, match="name of a source is empty"):
        resolve("")
