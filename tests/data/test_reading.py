"""Files of every format, folders and datasets are read whole, or refused by name; tables are in test_tables.py."""

import gzip
import lzma
import os
import subprocess
import sys
from pathlib import Path

import pytest

from saf.data import TokenData, prepare
from saf.errors import DataError
from tests.data.texts import documents, jsonl, lines

ROWS = [f"Grüße {n}: a document\nwith two lines " + "and words " * (n % 7) for n in range(40)]
CORPUS = lines(ROWS)


def zstd(data: bytes) -> bytes:
    return pytest.importorskip("pyarrow").compress(data, codec="zstd", asbytes=True)


PACK = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstd}


@pytest.mark.parametrize("suffix", PACK)
def test_compressed_files(tmp_path, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    half = CORPUS.index(b"\n", len(CORPUS) // 2) + 1
    path.write_bytes(PACK[suffix](CORPUS[:half]) + PACK[suffix](CORPUS[half:]))  # two streams, one behind the other
    assert documents(path, tmp_path / "data") == sorted(ROWS)
    whole = PACK[suffix](CORPUS * 200)
    path.write_bytes(whole[:-20])
    with pytest.raises(DataError, match=rf"a.jsonl{suffix}: truncated or damaged \w+ file after line \d+"):
        prepare(path, tmp_path / "cut")
    path.write_bytes(CORPUS)
    with pytest.raises(DataError, match=rf"a.jsonl{suffix}: truncated or damaged"):
        prepare(path, tmp_path / "plain")


def test_a_parquet_file(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"id": range(40), "body": ROWS}), path, row_group_size=7)
    assert documents(path, tmp_path / "data", text_field="body") == sorted(ROWS)
    with pytest.raises(DataError, match=r"a.parquet, row 1: no field 'text'; fields found: body, id"):
        prepare(path, tmp_path / "none")
    parquet.write_table(arrow.table({"text": ["x", None]}), path)
    with pytest.raises(DataError, match=r"a.parquet, row 2: text must be a string, got NoneType"):
        prepare(path, tmp_path / "none")
    path.write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"a.parquet: truncated or damaged Parquet file"):
        prepare(path, tmp_path / "none")


def test_a_mixed_folder_is_read_where_it_is_text_and_the_rest_is_listed(tmp_path, monkeypatch):
    source = tmp_path / "source"
    (source / "b").mkdir(parents=True)
    for n, row in enumerate(ROWS):
        suffix = ("md", "py", "txt", "rst.gz")[n % 4]
        (source / ("b" if n % 3 else "") / f"{n}.{suffix}").write_bytes(
            gzip.compress(row.encode()) if suffix.endswith("gz") else row.encode()
        )
    (source / "no-suffix").write_text("also read")
    (source / "picture.png").write_bytes(b"\x89PNG\r\n")
    (source / "sound").write_bytes(b"abc\0def")
    (source / "late.md").write_bytes(b"text " * 20_000 + b"\xff")
    (source / "table.csv").write_text("name,age\nx,1\n")
    (source / "other.jsonl").write_text('{"body": "x"}\n')
    (source / "broken.md").symlink_to("nowhere")
    (source / ".env").write_text("hidden")
    os.mkfifo(source / "pipe")
    for folder, name in ((".git", "HEAD"), ("data", "index.json"), ("saved", "dataset_dict.json"), ("locked", "x")):
        (source / folder).mkdir()
        (source / folder / name).write_text("text")
    (source / "link").symlink_to(source / "b")
    listed = os.listdir

    def refuse(path):
        if Path(path).name == "locked":  # modes do not stop the superuser, who may run this
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "listdir", refuse)
    out = tmp_path / "out"
    assert documents(source, out) == sorted([*ROWS, "also read"])
    left_out = {Path(row["file"]).name: row["reason"] for row in TokenData.open(out).index["left_out"]}
    expected = {
        "picture.png": "not UTF-8 at byte 0",
        "sound": "a NUL byte at 3",
        "late.md": "not UTF-8 at byte 100,000 (line 1)",
        "table.csv": "no field 'text'; fields found: age, name",
        "other.jsonl": "line 1: no field 'text'; fields found: body",
        "broken.md": "not a file",
        ".env": "hidden",
        "pipe": "not a file",
        ".git": "hidden",
        "data": "data",
        "locked": "Permission denied",
        "saved": "saved dataset",
        "link": "a link to a folder",
    }
    assert left_out.keys() == expected.keys()
    assert all(part in left_out[name] for name, part in expected.items())


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"", "a.txt: no text in it"),
        ("a.txt", b" \n\t", "a.txt: no text in it"),
        ("a.txt", b"abc\nd\xff", r"a.txt: not UTF-8 at byte 5 \(line 2\)"),
        ("a.txt", "utf-16".encode("utf-16"), "a.txt: not text: a NUL byte at 3"),
        ("a.bin", b"\0", "a.bin: not text: a NUL byte at 0"),
        ("a.jsonl", b"\n\n", "a.jsonl: no text in it"),
        ("a.jsonl", b'{"text": "ok"}\n{"text": "\xff"}\n', "a.jsonl, line 2: not UTF-8"),
        ("a.jsonl", b'{"text": "ok"}\n{"text": \n', "a.jsonl, line 2: not JSON"),
        ("a.jsonl", b'{"text": "ok"}\n\n["x"]\n', "a.jsonl, line 3: expected a JSON object, got list"),
        ("a.jsonl", b'{"body": "x", "id": 1}\n', "a.jsonl, line 1: no field 'text'; fields found: body, id"),
        ("a.jsonl", b'{"text": 5}\n', "a.jsonl, line 1: text must be a string, got int"),
        ("a.jsonl", b'{"text": "a\\ud800"}\n', "a.jsonl, line 1: text must be Unicode"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl, line 1: not JSON"),
        ("a.csv", b"body\nx", "a.csv, line 2: no field 'text'; fields found: body"),
        ("a.csv", b"text\nok\n\xff\n", "a.csv, line 3: not UTF-8"),
        ("a.csv", b'text\n"open', "a.csv, line 2: not a table"),
    ],
)
def test_unusable_files_are_refused_by_name_alone_and_in_a_folder(tmp_path, name, data, message):
    source = tmp_path / "source"
    source.mkdir()
    (source / name).write_bytes(data)
    with pytest.raises(DataError, match=message):
        prepare(source / name, tmp_path / "data")
    if "not UTF-8" in message or "not JSON" in message:
        (source / "fine.md").write_text("fine")
        with pytest.raises(DataError, match=message):
            prepare(source, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_a_long_field_of_a_csv_is_whole(tmp_path):
    long = sorted(f"{n} " + "x y " * 34_000 for n in range(12))
    (tmp_path / "a.csv").write_text("text\n" + "\n".join(long))
    assert documents(tmp_path / "a.csv", tmp_path / "data", heldout_fraction=0.5) == long


def test_a_text_of_more_than_max_bytes_is_cut_at_a_character(tmp_path):
    text = "".join(f"{n} " + "é" * 45 for n in range(1_000))
    (tmp_path / "a.txt").write_text(text)
    for limit in (9_999, 10_000):
        cut = documents(tmp_path / "a.txt", tmp_path / str(limit), max_bytes=limit, split_characters=300)
        whole = text.encode()[:limit].decode(errors="ignore")
        assert sum(map(len, cut)) == len(whole)
        assert all(piece in whole for piece in cut)
        (told,) = TokenData.open(tmp_path / str(limit)).index["left_out"]
        assert "max_bytes" in told["reason"]


def test_json_lines_are_streamed(tmp_path):
    """A file of 80 MB is read in less memory than it has."""
    row = lines(["word " * 20_000])
    with open(tmp_path / "big.jsonl", "wb") as file:
        for _ in range(800):
            file.write(row)
    script = (
        "import resource, sys; from saf.data.reading import resolve\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert sum(1 for _ in resolve(sys.argv[1]).documents()) == 800\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)"
    )
    words = [sys.executable, "-c", script, str(tmp_path / "big.jsonl")]
    told = subprocess.run(words, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert float(told.stdout) < 20


def test_datasets(tmp_path):
    package = pytest.importorskip("datasets")
    rows = package.Dataset.from_dict({"body": ROWS, "id": range(40)})
    rows.save_to_disk(tmp_path / "single")
    assert documents(tmp_path / "single", tmp_path / "a", text_field="body") == sorted(ROWS)
    with pytest.raises(DataError, match=r"single, row 1: no field 'text'; fields found: body, id"):
        prepare(tmp_path / "single", tmp_path / "none")
    package.DatasetDict(train=rows).save_to_disk(tmp_path / "one")
    assert documents(tmp_path / "one", tmp_path / "b", text_field="body") == sorted(ROWS)
    package.DatasetDict(train=rows, test=rows).save_to_disk(tmp_path / "both")
    with pytest.raises(DataError, match=r"several splits; give one of them: .*both/train, .*both/test"):
        prepare(tmp_path / "both", tmp_path / "none", text_field="body")
    assert documents(tmp_path / "both" / "test", tmp_path / "c", text_field="body") == sorted(ROWS)
    next((tmp_path / "single").glob("*.arrow")).write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"single: cannot be read as a dataset"):
        prepare(tmp_path / "single", tmp_path / "none", text_field="body")
    with pytest.raises(DataError, match=r"owner/name: cannot be read as a dataset after 0 rows .*network"):
        prepare("owner/name", tmp_path / "none")  # tests are offline


def test_missing_files_and_empty_folders(tmp_path):
    with pytest.raises(DataError, match="no such file or folder"):
        prepare(tmp_path / "none.txt", tmp_path / "data")
    with pytest.raises(DataError, match="no text in it"):
        prepare(tmp_path, tmp_path / "data")
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(DataError, match=r"a.txt: no text in it"):
        prepare(tmp_path / "a.txt", tmp_path / "data")


def test_pythons_own_text_is_the_same_each_time_and_has_no_tests(tmp_path):
    options = {"vocab_size": 257, "max_bytes": 300_000}
    first, again = (prepare("python", tmp_path / name, **options) for name in "ab")
    assert first.fingerprint == again.fingerprint
    assert first.index["sources"][0]["bytes"] >= 300_000


def test_held_out_files_are_missed_before_anything_is_read(tmp_path, texts):
    with pytest.raises(DataError, match=r"held.txt: no such file"):
        prepare(jsonl(tmp_path / "a.jsonl", texts), tmp_path / "data", heldout=tmp_path / "held.txt")
