"""Public files of zero-shot tasks, read as the hub names their columns; records of answers, and two by hand."""

import gzip
import json

import pytest

from saf.compare import compare_zero_shot, pair_tables, verdict
from saf.errors import CompareError, DataError, InputError
from saf.records.table import markdown_of
from saf.tasks.zero_shot import (
    read_questions,
    read_zero_shot,
    split_context,
    task_answers,
    zero_shot_record,
    zero_shot_tables,
)

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
    questions, source = read_questions("piqa", tmp_path)
    assert [row["label"] for row in questions] == [1, 0]
    assert questions[0]["sol1"] == "one "
    assert read_questions("piqa", tmp_path, limit=1)[0] == questions[:1]
    write(folder, "valid-labels.lst", "1\n1\n", packed=packed)
    assert read_questions("piqa", tmp_path)[1]["sha256"] != source["sha256"]
    write(folder, "valid-labels.lst", "1\n", packed=packed)
    with pytest.raises(DataError, match=r"holds 2 questions, .* 1 labels"):
        read_questions("piqa", tmp_path)


def test_hellaswags_context_is_split_where_the_file_has_no_parts(tmp_path):
    file, line = LINES["hellaswag"]
    parts = {**line, "ctx": "One. Two he", "ctx_a": "One. Two", "ctx_b": "he"}
    write(tmp_path / "hellaswag", file, "\n".join(json.dumps(each) for each in (parts, {**line, "ctx": "One. two he"})))
    (first, second), _ = read_questions("hellaswag", tmp_path)
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


# --- records


def answers(taken: str, right: str, **more) -> list[dict]:
    """Answers by the numbers of choices taken and right, a digit a question."""
    common = {"shortened": False, "log_probs": [0.0], **more}
    pairs = enumerate(zip(taken, right, strict=True))
    return [{"id": str(n), "answer": int(b), "taken": int(a), "right": a == b, **common} for n, (a, b) in pairs]


ORDINARY = {"architecture": "llama", "vocab_size": 9, "heads_by_layer": [2], "frozen": 0, "pruned": 0}
FROZEN = ORDINARY | {"frozen": 1}
SAME = answers("01", "01")


def evaluation(folder, *, longest: int = 8, precision: str = "fp32", of: dict = FROZEN, checkpoints=None, **tasks):
    labels = {"sst2": ("negative", "positive")}
    answered = {
        name: task_answers(each, labels=list(labels.get(name, ())), version="1") for name, each in tasks.items()
    }
    head = {"out": folder, "checkpoints": checkpoints}
    return zero_shot_record(answered, {}, facts={"longest": longest, "precision": precision, "of": of}, **head)


def test_two_evaluations_are_paired_by_question(tmp_path):
    right = {"sst2": "1111100000", "piqa": "0101010101"}
    record = evaluation(
        tmp_path / "a",
        sst2=answers("1111100011", right["sst2"]),
        piqa=answers("0101010101", right["piqa"], right_norm=True),
    )
    assert record["tasks"]["sst2"]["taken"] == {"0": 3, "1": 7}
    assert record["tasks"]["piqa"]["accuracy_norm"] == 1.0
    assert "negative 3, positive 7" in " ".join(map(markdown_of, zero_shot_tables(record)))
    # Two more are right in SST-2; six are lost and none gained in PIQA.
    evaluation(tmp_path / "b", sst2=answers("1111100000", right["sst2"]), piqa=answers("1010101101", right["piqa"]))
    comparison = compare_zero_shot(tmp_path / "a", tmp_path / "b")
    one, two = comparison["tasks"]["sst2"], comparison["tasks"]["piqa"]
    assert (one["gained"], one["lost"], one["difference"]) == (2, 0, pytest.approx(0.2))
    assert (two["gained"], two["lost"], two["difference"]) == (0, 7, pytest.approx(-0.7))
    assert (one["p_value"], two["p_value"]) == (pytest.approx(0.5), pytest.approx(2 / 128))
    assert (one["p_holm"], two["p_holm"]) == (pytest.approx(0.5), pytest.approx(2 * 2 / 128))
    assert comparison["mean_difference"] == pytest.approx(-0.25)
    assert one["taken"] == [{"0": 3, "1": 7}, {"0": 5, "1": 5}]
    # sd of the paired changes (eight 0, two 1) is 0.4: over the square root of ten questions.
    assert one["standard_error"] == pytest.approx(0.4 / 10**0.5)
    assert verdict(comparison).startswith("Cost: accuracy −25.00 points on average over 2 tasks, −70.00 (")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"piqa": SAME}, "differ in tasks"),
        ({"sst2": answers("01", "11")}, "different questions"),
        ({"precision": "bf16"}, "differ in precision"),
        ({"sst2": answers("01", "01", shortened=True), "longest": 9}, "differ in longest"),
        ({"of": ORDINARY}, "b has no frozen or pruned heads; name"),
        ({"of": FROZEN | {"heads_by_layer": [3]}}, r"heads_by_layer: \[2\] in the ordinary arm, \[3\] in the frozen"),
        ({"of": FROZEN | {"architecture": "gemma2"}}, r"architecture: 'llama' in the ordinary arm, 'gemma2' in"),
        ({"checkpoints": {"model": "b", "parent": "ffff"}}, "derived from ffff, which is not"),
    ],
)
def test_what_cannot_be_paired_is_refused(tmp_path, other, words):
    evaluation(tmp_path / "a", sst2=SAME, checkpoints={"model": "a", "parent": "0"})
    evaluation(tmp_path / "b", **({} if "piqa" in other else {"sst2": SAME}) | other)
    with pytest.raises(CompareError, match=words):
        compare_zero_shot(tmp_path / "a", tmp_path / "b")


def test_models_of_one_origin_and_files_as_written_are_compared(tmp_path):
    evaluation(tmp_path / "a", sst2=SAME, checkpoints={"model": "a", "parent": "0"})
    # Frozen in the other one, in what that was frozen in, or from a parent that no file names; lengths play no part.
    for origin, expected in (("a", 0), ("0", 0), (None, 0), ("ffff", 1)):
        evaluation(tmp_path / "b", sst2=SAME, longest=9, checkpoints={"model": "b", "parent": origin})
        record = compare_zero_shot(tmp_path / "a", tmp_path / "b", allow_differences=True)
        assert len(record["differences"]) == expected
    assert "parent: the frozen model was derived from ffff" in " ".join(pair_tables(record)[0].notes)
    with open(tmp_path / "a" / "zero_shot.jsonl", "a") as file:
        file.write("{}\n")
    with pytest.raises(InputError, match=r"zero_shot\.jsonl"):
        read_zero_shot(tmp_path / "a")
