"""Files of every format, tables, folders and datasets are read whole, or refused by file and line."""

import gzip
import json
import lzma
import os
from pathlib import Path

import pytest

from saf.data import prepare
from saf.data.reading import Source
from saf.errors import DataError
from tests.data.conftest import lines, partition_documents

BOM = b"\xef\xbb\xbf"
ROWS = [f'Grüße {n}: she said "{n}", and left;\ttwo\nlines ' + "and words " * (n % 7) for n in range(40)]
FLAT = [row.replace("\n", " ").replace("\t", " ") for row in ROWS]
TSV = BOM + "".join(f"{n}\t{row}\r\n" for n, row in [("id", "text"), *enumerate(FLAT)]).encode()
QUOTED = ('{},"{}"\r\n'.format(n, row.replace('"', '""')) for n, row in enumerate(ROWS))
CSV = BOM + f"id,text\r\n\r\n{''.join(QUOTED)}".encode()


def zstd(data: bytes) -> bytes:
    return pytest.importorskip("pyarrow").compress(data, codec="zstd", asbytes=True)


def read(path: Path, **options) -> list[str]:
    return list(Source(str(path), **options).documents())


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("A.JSONL", BOM + lines(ROWS), ROWS),
        ("a.json", BOM + lines(ROWS), ROWS),
        ("indented.json", json.dumps([{"text": row} for row in ROWS], indent=2).encode(), ROWS),
        ("one.json", json.dumps({"text": ROWS[0]}).encode(), ROWS[:1]),
        ("other.json", b'{"width": 3}', ['{"width": 3}']),
        ("a.txt", BOM + ROWS[0].encode(), ROWS[:1]),
        ("a.tsv", TSV, FLAT),
        ("a.csv", CSV, ROWS),
        ("words.csv", b"id,text\n1,NA\n2,2020-01-01\n3,7\n", ["NA", "2020-01-01", "7"]),
        ("long.csv", b"text\n" + b"x y " * 34_000, ["x y " * 34_000]),
    ],
)
def test_files_are_read_by_the_convention_of_what_wrote_them(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    assert read(tmp_path / name) == expected


@pytest.mark.parametrize(("suffix", "pack"), [(".GZ", gzip.compress), (".xz", lzma.compress), (".zst", zstd)])
def test_compressed_files(tmp_path, suffix, pack):
    path, corpus = tmp_path / f"a.jsonl{suffix}", lines(ROWS)
    half = corpus.index(b"\n", len(corpus) // 2) + 1
    path.write_bytes(pack(corpus[:half]) + pack(corpus[half:]))  # two streams, one behind the other
    assert read(path) == ROWS
    for damaged in (pack(corpus * 200)[:-20], corpus):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=rf"a.jsonl{suffix}: truncated or damaged"):
            read(path)


def test_a_parquet_file(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "[1]*" / "a.parquet"
    path.parent.mkdir()
    parquet.write_table(arrow.table({"id": range(40), "body": ROWS}), path, row_group_size=7)
    assert read(path, text_field="body") == ROWS
    with pytest.raises(DataError, match=r"a.parquet, row 1: no field 'text'; fields found: body, id"):
        read(path)
    path.write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"a.parquet: cannot be read as a dataset"):
        read(path)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b" \n\t", "a.txt: no text in it"),
        ("a.txt", b"abc\nd\xff", "a.txt, line 2: not UTF-8"),
        ("a.txt", "utf-16".encode("utf-16-le"), "a.txt: not text: a NUL byte"),
        ("a.jsonl", b'{"text": "ok"}\n{"text": \n', "a.jsonl, line 2: not JSON"),
        ("a.jsonl", b'{"text": "ok"}\n\n["x"]\n', "a.jsonl, line 3: expected a JSON object, got list"),
        ("a.jsonl", b'{"text": 5}\n', "a.jsonl, line 1: text must be a string, got int"),
        ("a.jsonl", b'{"text": "a\\ud800"}\n', "a.jsonl, line 1: text must be Unicode"),
        ("a.json", b"[" * 100_000, "a.json, line 1: not JSON"),
        ("a.csv", b"text\nwhole\nHello, world\n", "a.csv, line 3: a row must have 1 fields, got 2"),
        ("a.csv", b'text\n"open', "a.csv, line 2: not a table"),
        ("a.csv", b"text,text\none,two\n", "a.csv, line 1: columns must have different names"),
        ("none.txt", None, "no such file or folder"),
    ],
)
def test_unusable_files_are_refused_by_name_and_line(tmp_path, name, data, message):
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message):
        read(tmp_path / name)


def test_a_mixed_folder_is_read_where_it_is_text_and_the_rest_is_listed(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    (source / "b").mkdir(parents=True)
    for n, row in enumerate(ROWS):
        (source / ("b" if n % 3 else "") / f"{n}.{('md', 'py', 'txt')[n % 3]}").write_text(row)
    for name, data in {
        "late.md": b"text " * 20_000 + b"\xff",
        "table.csv": b"name,age\nx,1\n",
        ".env": b"hidden",
    }.items():
        (source / name).write_bytes(data)
    (source / "broken.md").symlink_to("nowhere")
    os.mkfifo(source / "pipe")
    data = prepare(source, out, heldout_fraction=0.4, vocab_size=257)
    assert sorted(partition_documents(data)) == sorted(ROWS)
    left_out = {Path(row["file"]).name: row["reason"] for row in data.index["left_out"]}
    assert left_out == {
        "late.md": "line 1: not UTF-8 (invalid start byte); convert it to UTF-8",
        "table.csv": "line 2: no field 'text'; fields found: age, name; name one with --text-field",
    }
    (source / "a.jsonl").write_text("{")  # this is meant to be text
    with pytest.raises(DataError, match=r"a.jsonl, line 1: not JSON"):
        read(source)


def test_datasets(tmp_path):
    package = pytest.importorskip("datasets")
    rows = package.Dataset.from_dict({"body": ROWS, "id": range(40)})
    package.DatasetDict(train=rows, test=rows).save_to_disk(tmp_path / "both")
    with pytest.raises(DataError, match=r"several splits; name one of them: .*both/train, .*both/test"):
        read(tmp_path / "both")
    single = tmp_path / "both" / "test"
    assert read(single, text_field="body") == ROWS
    next(single.glob("*.arrow")).write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"test: cannot be read as a dataset"):
        read(single, text_field="body")
    with pytest.raises(DataError, match=r"owner/name: cannot be read as a dataset after 0 rows .*network"):
        list(Source("owner/name").documents())  # tests are offline


def test_pythons_own_text_is_the_same_each_time(tmp_path):
    options = {"vocab_size": 257, "max_bytes": 100_000}
    first, again = (prepare("python", tmp_path / name, **options) for name in "ab")
    assert first.fingerprint == again.fingerprint
    assert first.index["sources"][0]["bytes"] >= 100_000
