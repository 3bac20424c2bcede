import csv
import gzip
import json
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from saf.data.readers import Options
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


def read(path, **options) -> list[str]:
    return [text.decode() for text in resolve(str(path), Options(**options)).documents()]


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
    assert texts == [f"row {n}".encode() for n in range(600)]
    assert 0 < sum(consumed) <= (tmp_path / "a.parquet").stat().st_size


def test_parquet_that_grows_without_measure_is_not_decompressed_beyond_max_bytes(tmp_path):
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    bomb = arrow.table({"text": ["a" * 10_000_000, "b"]})
    parquet.write_table(bomb, tmp_path / "bomb.parquet", compression="zstd", use_dictionary=False)
    before = arrow.default_memory_pool().max_memory()
    with pytest.raises(DataError, match=r"bomb.parquet, row group 0: column 'text' grows from .* to 10,000"):
        read(tmp_path / "bomb.parquet", most_bytes=1000)
    assert arrow.default_memory_pool().max_memory() == before
    # Without a limit it is a document like any other.
    assert list(map(len, read(tmp_path / "bomb.parquet"))) == [10_000_000, 1]


def test_parquet_is_read_in_batches_of_a_bounded_size(tmp_path):
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    texts = [f"{n} " + "word " * 100_000 for n in range(64)]
    parquet.write_table(arrow.table({"text": texts}), tmp_path / "long.parquet", write_batch_size=1, data_page_size=1)
    parquet.write_table(arrow.table({"text": ["word " * 100_000] * 64}), tmp_path / "same.parquet")
    for name, limit in (("long.parquet", 6e6), ("same.parquet", 16e6)):
        held, before = 0, arrow.total_allocated_bytes()
        for _ in resolve(str(tmp_path / name)).documents(lambda count: None):
            held = max(held, arrow.total_allocated_bytes() - before)
        assert 0 < held < limit, name  # 32 MB in all


def test_a_folder_is_read_recursively_in_sorted_order(tmp_path):
    (tmp_path / "b").mkdir()
    write(tmp_path / "b" / "z.txt", b"last")
    write(tmp_path / "a.txt.gz", b"first")
    source = resolve(str(tmp_path))
    assert list(source.documents()) == [b"first", b"last"]
    assert (source.facts, source.left_out) == ({"files": 2}, {})


def test_a_mixed_folder_is_read_where_it_is_text_and_the_rest_is_listed(tmp_path, monkeypatch):
    text = {"a.md": "read", "b.py": "read = 1", "c": "no suffix", "d.txt": "read too", "g.json": "{}"}
    for name, content in text.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "e.csv").write_text("text\nrow")
    write(tmp_path / "f.rst.gz", b"packed")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n")
    (tmp_path / "sound").write_bytes(b"abc\0def")
    (tmp_path / "late.md").write_bytes(b"text " * 20_000 + b"\xff")
    (tmp_path / "table.csv").write_text("name,age\nx,1\n")
    (tmp_path / "other.jsonl").write_text('{"body": "x"}\n')
    (tmp_path / "broken.md").symlink_to("nowhere")
    (tmp_path / ".env").write_text("hidden")
    os.mkfifo(tmp_path / "pipe")
    for folder, name in ((".git", "HEAD"), ("data", "index.json"), ("locked", "x.txt"), ("saved", "dataset_dict.json")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "locked")
    scan = os.scandir

    def locked(path):
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr("os.scandir", locked)
    source = resolve(str(tmp_path))
    for _ in range(2):  # the sources are read twice, for the tokenizer and for its tokens
        found = [data.decode() for data in source.documents()]
    assert sorted(found) == sorted([*text.values(), "row", "packed"])
    assert {Path(name).name: reason for name, reason in source.left_out.items()} == {
        "picture.png": "not text: not UTF-8 at byte 0",
        "sound": "not text: a NUL byte at 3",
        "late.md": "not UTF-8 at byte 100000 (line 1); convert it to UTF-8",
        "table.csv": "no column 'text'; columns found: name, age; name one with text_field",
        "other.jsonl": "line 1: no field 'text'; fields found: body; name one with text_field",
        "broken.md": "cannot be opened: No such file or directory",
        ".env": "hidden",
        "pipe": "a FIFO",
        ".git": "a hidden folder",
        "data": "written by saf (data)",
        "locked": "a folder that cannot be opened: Permission denied",
        "saved": "a saved dataset; give it as a source of its own",
        "link": "a link to a folder",
    }


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [("b.txt", b"\xff", "not UTF-8"), ("b.jsonl", b"{", "not JSON"), ("b.csv", b'"', "not a table")],
)
def test_what_promises_text_is_refused_rather_than_left_out(tmp_path, name, data, message):
    (tmp_path / "a.md").write_text("fine")
    write(tmp_path / name, data)
    with pytest.raises(DataError, match=rf"{name}.*{message}"):
        read(tmp_path)


def test_no_fifo_and_no_device_is_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(DataError, match=r"a.txt: a FIFO, not a file of text"):
        resolve(str(tmp_path / "a.txt"))
    with pytest.raises(DataError, match=r"/dev/zero: a device, not a file of text"):
        resolve("/dev/zero")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.csv", b'id,body\r\n1,"one, and\nmore"\r\n2,two\r\n'),
        ("a.csv.gz", b'\xef\xbb\xbfbody\n"one, and\nmore"\ntwo\n'),
        ("a.jsonl", b'{"text": 1, "body": "one, and\\nmore"}\n{"body": "two"}\n'),
    ],
)
def test_the_text_is_in_the_field_that_is_named(tmp_path, name, data):
    assert read(write(tmp_path / name, data), text_field="body") == ["one, and\nmore", "two"]


def test_a_long_field_of_a_csv_is_whole(tmp_path):
    before = csv.field_size_limit()
    assert read(write(tmp_path / "a.csv", b"text\n" + b"x" * 300_000)) == ["x" * 300_000]
    assert csv.field_size_limit() == before


def test_a_saved_dataset_is_a_source(tmp_path):
    package = pytest.importorskip("datasets")
    rows = package.Dataset.from_dict({"body": ["one", "two"], "id": [1, 2]})
    rows.save_to_disk(tmp_path / "single")
    assert read(tmp_path / "single", text_field="body") == ["one", "two"]
    with pytest.raises(DataError, match=r"single: no column 'text'; columns found: body, id"):
        read(tmp_path / "single")
    package.DatasetDict(train=rows).save_to_disk(tmp_path / "one")
    assert read(tmp_path / "one", text_field="body") == ["one", "two"]
    package.DatasetDict(train=rows, test=rows).save_to_disk(tmp_path / "both")
    with pytest.raises(DataError, match=r"several splits; give one of them: .*both/test, .*both/train"):
        read(tmp_path / "both", text_field="body")
    assert read(tmp_path / "both" / "test", text_field="body") == ["one", "two"]
    next((tmp_path / "single").glob("*.arrow")).write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"single: cannot be read as a dataset"):
        read(tmp_path / "single", text_field="body")


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst"])
def test_no_more_than_asked_for_is_decompressed(tmp_path, name):
    random_bytes = random.Random(0).randbytes(500_000).hex().encode()
    path, consumed = write(tmp_path / name, "é".encode() * 50_000 + random_bytes), []
    source = resolve(str(path), Options(most_bytes=99_999))
    assert list(source.documents(consumed.append)) == ["é".encode() * 49_999]
    assert source.left_out == {str(path): "read to its first 99,999 bytes (max_bytes)"}


def test_no_line_is_read_that_is_too_long_for_what_was_asked(tmp_path):
    path = write(tmp_path / "a.jsonl.gz", b'{"text": "short"}\n{"text": "' + b"x" * 8_000_000)
    with pytest.raises(DataError, match=r"line 2: longer than 1,056,576 bytes, too long for max_bytes"):
        read(path, most_bytes=1000)


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
    assert not any(b"import unittest\n" in text and b"class Test" in text for text in first[:50])


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
        ("a.jsonl", b'{"body": "x", "id": 1}\n', "a.jsonl, line 1: no field 'text'; fields found: body, id"),
        ("a.jsonl", b'{"text": 5}\n', "a.jsonl, line 1: text is int, not a string"),
        ("a.jsonl", b'{"text": "a\\ud800"}\n', "a.jsonl, line 1: half a surrogate pair at character 1"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl, line 1: not JSON"),
        ("a.txt", b"a\0b", "a.txt: not text, a NUL byte at 1"),
        ("a.bin", b"\0", "a.bin: not text, a NUL byte at 0"),
        ("a.csv", b"body\nx", "a.csv: no column 'text'; columns found: body"),
        ("a.csv", b"text\nok\n\xff\n", "a.csv: not UTF-8 after line"),
        ("a.csv", b"text,id\n,1\n", "a.csv: no text in it"),
        ("a.csv", b"id,text\n1\n", "a.csv, line 2: 1 fields where the first line names 2"),
        ("a.csv", b'text\n"open', "a.csv: not a table after line 2"),
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
    with pytest.raises(DataError, match=r"a.parquet: no column 'text'; columns found: id, body"):
        read(tmp_path / "a.parquet")
    parquet.write_table(arrow.table({"text": ["x", None]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b.parquet, row 2: text is NoneType"):
        read(tmp_path / "b.parquet")


def test_missing_files_and_empty_folders(tmp_path):
    with pytest.raises(DataError, match="no such file or folder"):
        resolve(str(tmp_path / "none.txt"))
    with pytest.raises(DataError, match="no text in it, 0 files or folders left out"):
        resolve(str(tmp_path))
    with pytest.raises(DataError, match="name of a source is empty"):
        resolve("")
