"""Public files of zero-shot tasks, read as the hub names their columns."""

import gzip
import json

import pytest

from saf.errors import DataError
from saf.tasks.zero_shot import ZERO_SHOT, read_questions, split_context

LINES = {
    "hellaswag": ("hellaswag_val.jsonl", {"activity_label": "Roof", "endings": ["a", "b", "c", "d"], "label": 3}),
    "piqa": ("valid.jsonl", {"goal": "dresser", "sol1": "one ", "sol2": "two"}),
    "boolq": ("val.jsonl", {"question": "is it", "passage": "It -- is.", "label": True}),
}


def write(folder, name, text, *, packed=False):
    path = folder / (f"{name}.gz" if packed else name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return path


@pytest.mark.parametrize("packed", [False, True])
def test_piqas_labels_are_in_a_file_of_their_own(tmp_path, packed):
    folder, text = tmp_path / "piqa", json.dumps(LINES["piqa"][1]) + "\n"
    write(folder, "valid.jsonl", text + text, packed=packed)
    write(folder, "valid-labels.lst", "1\n0\n", packed=packed)
    result = read_questions("piqa", tmp_path)
    assert [row["label"] for row in result.rows] == [1, 0]
    assert result.rows[0]["sol1"] == "one "
    assert len(read_questions("piqa", tmp_path, limit=1).rows) == 1
    write(folder, "valid-labels.lst", "1\n1\n", packed=packed)
    assert read_questions("piqa", tmp_path).sha256 != result.sha256
    write(folder, "valid-labels.lst", "1\n", packed=packed)
    with pytest.raises(DataError, match=r"holds 2 questions, .* 1 labels"):
        read_questions("piqa", tmp_path)


def test_hellaswags_context_is_split_where_the_file_has_no_parts(tmp_path):
    file, line = LINES["hellaswag"]
    parts = {**line, "ctx": "One. Two he", "ctx_a": "One. Two", "ctx_b": "he"}
    write(tmp_path / "hellaswag", file, "\n".join(json.dumps(each) for each in (parts, {**line, "ctx": "One. two he"})))
    first, second = read_questions("hellaswag", tmp_path).rows
    assert (first["ctx_a"], first["ctx_b"], first["label"]) == ("One. Two", "he", "3")
    assert (second["ctx_a"], second["ctx_b"]) == ("One.", "two he")
    assert split_context('He says "go." she') == ('He says "go."', "she")
    assert split_context("a man") == ("", "a man")


HELLASWAG, BOOLQ = LINES["hellaswag"][1], LINES["boolq"][1]
ARC = {"id": "q", "question": {"stem": "Who?", "choices": [{"text": "a", "label": "A"}]}, "answerKey": "1"}


@pytest.mark.parametrize(
    ("task", "file", "text", "words"),
    [
        ("boolq", "train.jsonl", "", r"boolq holds no val\.jsonl, gzipped or not"),
        ("boolq", "val.jsonl", "", "holds no question"),
        ("boolq", "val.jsonl", json.dumps({**BOOLQ, "label": 1}), "label must be true or false, got 1"),
        ("sst2", "dev.tsv", "sentence\tlabel\na\t2\n", r"line 2: .*label must be from 0 to 1, got .2."),
        ("hellaswag", "hellaswag_val.jsonl", json.dumps({**HELLASWAG, "ctx": "A.", "label": 4}), "from 0 to 3, got 4"),
        ("arc_easy", "ARC-Easy-Test.jsonl", json.dumps({"id": 1, "question": "W"}), "line 1: no question of arc_easy"),
        ("arc_easy", "ARC-Easy-Test.jsonl", json.dumps(ARC), "the answer '1' names no choice of"),
    ],
)
def test_a_file_that_is_missing_or_wrong_is_named(tmp_path, task, file, text, words):
    write(tmp_path / task, file, text)
    with pytest.raises(DataError, match=words):
        read_questions(task, tmp_path)


def test_the_shared_files_are_read(shared):
    counts = {name: len(read_questions(name, shared / "data" / "tasks").rows) for name in ZERO_SHOT}
    assert counts == {"hellaswag": 5021, "piqa": 919, "arc_easy": 1188, "sst2": 436, "boolq": 1635}
