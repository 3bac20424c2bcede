"""Tables are read by the convention of what wrote them, or refused by file and line; nothing is cut or joined."""

import gzip
import json

import pytest

from saf.cli import main
from saf.data import prepare
from saf.errors import DataError
from saf.tasks.examples import read_examples
from tests.data.texts import documents, lines

BOM = b"\xef\xbb\xbf"
TEXTS = [f'Document {n}: she said "number {n}", and left; ' + "words and more words " * (n % 5 + 2) for n in range(40)]
QUOTES = [f'"{n} begins with a mark' if n % 2 else f'{n} is 5" wide' for n in range(40)]


@pytest.mark.parametrize("mark", [b"", BOM], ids=["plain", "byte order mark"])
@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.json", "a.ndjson", "a.jsonlines", "a.json.gz", "A.JSON.GZ", "a.ndjson.gz", "a.JSONL"]
)
def test_json_lines_are_read_by_their_content(tmp_path, name, mark):
    content = mark + lines(TEXTS)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.lower().endswith(".gz") else content)
    assert documents(tmp_path / name, tmp_path / "data") == sorted(TEXTS)


@pytest.mark.parametrize("indent", [None, 2])
def test_a_list_of_objects_is_a_table(tmp_path, indent):
    (tmp_path / "a.json").write_text(json.dumps([{"text": text} for text in TEXTS], indent=indent))
    assert documents(tmp_path / "a.json", tmp_path / "data") == sorted(TEXTS)


def test_files_of_one_object_each_are_its_text_and_other_json_is_text(tmp_path):
    source, settings = tmp_path / "source", json.dumps({"width": 3, "names": ["a", "b"]}, indent=2)
    source.mkdir()
    for n, text in enumerate(TEXTS):
        (source / f"{n}.json").write_text(json.dumps({"id": n, "text": text}, indent=n % 2 or None))
    (source / "settings.json").write_text(settings)
    assert documents(source, tmp_path / "data") == sorted([*TEXTS, settings])


def test_a_byte_order_mark_is_no_text(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for n, text in enumerate(TEXTS):
        (source / f"{n}.txt").write_bytes(BOM + text.encode())
    assert documents(source, tmp_path / "data") == sorted(TEXTS)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_tab_separated_values_have_no_quotes(tmp_path, end):
    rows = (f"{n}\t{text}{end}" for n, text in enumerate(QUOTES))
    (tmp_path / "a.tsv").write_bytes(BOM + f"id\ttext{end}{''.join(rows)}".encode())
    assert documents(tmp_path / "a.tsv", tmp_path / "data") == sorted(QUOTES)


def test_comma_separated_values_have_them(tmp_path):
    rows = ('{},"{}"\r\n'.format(n, text.replace('"', '""')) for n, text in enumerate(TEXTS))
    (tmp_path / "a.csv").write_bytes(BOM + f"id,text\r\n{''.join(rows)}".encode())
    assert documents(tmp_path / "a.csv", tmp_path / "data") == sorted(TEXTS)


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("long.csv", "text\nwhole\nHello, world\n", 3),
        ("long-last.csv", "id,text\n1,whole\n2,Hello, world\n", 3),
        ("short.csv", "id,text,label\n1,whole,0\n2,first half\nsecond half,0\n", 3),
        ("long.tsv", "id\ttext\n1\twhole\n2\tone\ttwo\n", 3),
        ("quoted.tsv", 'id\ttext\n1\twhole\n2\t"two\nlines"\n', 4),
    ],
)
def test_rows_of_another_length_are_refused_by_line(tmp_path, name, content, line):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=rf"{name}, line {line}"):
        prepare(str(tmp_path / name), tmp_path / "data", workers=1)


def test_two_columns_of_one_name_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("text,text\none,two\n")
    with pytest.raises(DataError, match=r"a\.csv.*'text'"):
        prepare(str(tmp_path / "a.csv"), tmp_path / "data", workers=1)


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json.gz", "A.JSONL.GZ"])
def test_examples_of_a_task_are_read_alike(tmp_path, name):
    content = BOM + b"".join(
        json.dumps({"text": f"Is {n} odd?", "choices": [" no", " yes"], "answer": n % 2}).encode() + b"\n"
        for n in range(4)
    )
    (tmp_path / name).write_bytes(gzip.compress(content) if name.lower().endswith(".gz") else content)
    found = read_examples(tmp_path / name, "jsonl").examples
    assert [(example.text, example.answer) for example in found] == [(f"Is {n} odd?", n % 2) for n in range(4)]


@pytest.mark.parametrize("name", ["text.jsonl", "text.json.gz", "marked.txt", "text.csv"])
def test_a_file_of_text_for_a_model_of_transformers_is_read_alike(tmp_path, name):
    """A single document: as plain text it has the same tokens."""
    pytest.importorskip("transformers")
    from saf.data.tokenizer import train_bpe
    from tests.transformers_models import make

    text = "The quick brown fox jumps over the lazy dog and sleeps. " * 20
    make("llama-grouped", vocab_size=300).save_pretrained(tmp_path / "model")
    train_bpe([text], vocab_size=300).save(tmp_path / "model" / "tokenizer.json")
    (tmp_path / "plain.txt").write_text(text)
    written = {
        "text.jsonl": lines([text]),
        "text.json.gz": gzip.compress(lines([text])),
        "marked.txt": BOM + text.encode(),
        "text.csv": f'id,text\n1,"{text}"\n'.encode(),
    }
    (tmp_path / name).write_bytes(written[name])
    losses = []
    for file in ("plain.txt", name):
        words = ["evaluate", tmp_path / "model", "--data", tmp_path / file, "--length", 16, "--device", "cpu"]
        assert main([*map(str, words), "--out", str(tmp_path / f"of-{file}")]) == 0
        losses.append(json.loads((tmp_path / f"of-{file}" / "evaluation.json").read_text())["loss"])
    assert losses[0] == losses[1]
