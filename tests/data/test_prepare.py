"""Text becomes four partitions that share no document, ordered by content and seed, or nothing at all."""

import fcntl
import hashlib
import os
import threading
from itertools import chain

import numpy as np
import pytest

from saf.data import PARTITIONS, TokenData, prepare
from saf.errors import DataError, InputError, SafWarning
from tests.data.conftest import jsonl, partition_documents


def test_every_document_lands_in_exactly_one_partition(prepared, texts):
    data = TokenData.open(prepared, verify=True)
    parts = {name: partition_documents(data, name) for name in PARTITIONS}
    assert sorted(chain(*parts.values())) == sorted(texts)
    assert parts["train"] != [text for text in texts if text in set(parts["train"])], "documents are shuffled"
    counts = np.array([data.num_tokens(name) for name in PARTITIONS])
    assert counts[1:].sum() / counts.sum() == pytest.approx(0.3, abs=0.03)
    assert counts[1:].max() <= 1.1 * counts[1:].min()
    for name, facts in data.index["partitions"].items():
        assert (facts["documents"], facts["bytes"]) == (len(parts[name]), len("".join(parts[name]).encode()))


@pytest.mark.parametrize(
    ("settings", "sums"),
    [
        ({}, ["35cae20d8d242663", "411ccb365b4a6f7e", "a8be50bdf3b3a72d", "d4fb125c9e4270b6"]),
        (
            {"seed": 11, "heldout_fraction": 0.1},
            ["e8e70b8546d0eaa0", "e756d37adcb68e61", "62b8ee738413da8c", "378fc8c313f10c1d"],
        ),
        ({"split_characters": 200}, ["288db4196a6bfe85", "20044c32b2e425b6", "2051efeec036bfff", "b9f7e4503c4f4630"]),
        (
            {"max_bytes": 30_000, "heldout_fraction": 0.5, "calibration_from": "train"},
            ["a30044b51026d136", None, "767cfb2afdde5c63", "3604badfbc9a8d0b"],
        ),
    ],
)
def test_partitions_and_their_order_never_change_between_versions(source, tmp_path, settings, sums):
    """Runs resume by a position in the data, so partitions and order are part of the format; tokens are bytes here."""
    data = prepare(source, tmp_path / "data", **{"vocab_size": 257, "heldout_fraction": 0.3, **settings})
    for name, expected in zip(PARTITIONS, sums, strict=True):
        tokens = data.tokens(name).astype("<u2").tobytes() if data.num_tokens(name) else b""
        assert (hashlib.sha256(tokens).hexdigest()[:16] if tokens else None) == expected


def test_of_few_documents_the_fraction_is_held_out_but_for_long_ones(tmp_path):
    """The lowest keys of the first documents hold a third of the text that is to be held out."""
    draw = np.random.default_rng(3)
    texts = [f"{number} " + "word " * int(length) for number, length in enumerate(np.exp(draw.normal(4, 1, 100)))]
    data = prepare(jsonl(tmp_path / "few.jsonl", texts), tmp_path / "few", seed=7, vocab_size=270)
    counts = [data.num_tokens(name) for name in PARTITIONS]
    assert sum(counts[1:]) / sum(counts) == pytest.approx(0.05, rel=0.1)
    texts = [f"{number} " + "word " * (20 if number < 12 else 3_000) for number in range(24)]
    with pytest.warns(SafWarning, match=r"0\.[0-9]% of the tokens are held out instead of 5\.0%"):
        data = prepare(jsonl(tmp_path / "long.jsonl", texts), tmp_path / "long", vocab_size=270)
    assert max(map(len, partition_documents(data, *PARTITIONS[1:]))) < 200


@pytest.mark.parametrize(("tokenizer_bytes", "least"), [(2**24, 30), (50_000, 10)])
def test_the_tokenizer_learns_from_a_share_of_the_text_and_nothing_that_is_held_out(tmp_path, tokenizer_bytes, least):
    """Every document repeats a word of its own, which is one token where the tokenizer learned from it."""
    drawn = np.random.default_rng(0)
    words = ["".join(drawn.choice(list("abcdefghijklmnopqrstuvwxyz"), 10)) for _ in range(80)]
    source = jsonl(tmp_path / "a.jsonl", [f"{word} " * 200 for word in words])
    options = {"vocab_size": 1_500, "heldout_fraction": 0.2, "tokenizer_bytes": tokenizer_bytes}
    data = prepare(source, tmp_path / "data", **options)
    assert data.index["tokenizer"]["trained_on"]["bytes"] <= tokenizer_bytes

    def learned(*partitions: str) -> int:
        documents = partition_documents(data, *partitions)
        return sum(len(data.tokenizer().encode(" " + text.split()[0])) == 1 for text in documents)

    assert learned(*PARTITIONS[1:]) == 0
    assert learned("train") > least


def test_heldout_sources_are_divided_and_repeats_are_dropped(texts, tmp_path):
    heldout = jsonl(tmp_path / "heldout.jsonl", texts[:40])
    train = jsonl(tmp_path / "train.jsonl", [*texts[30:], *texts[50:60], "  "])
    data = prepare(train, tmp_path / "data", heldout=heldout, vocab_size=300)
    assert data.index["duplicates"] == {"also_held_out": 10, "repeated": 10, "empty": 1}
    assert sorted(partition_documents(data, *PARTITIONS[1:])) == sorted(texts[:40])
    assert sorted(partition_documents(data, "train")) == sorted(texts[40:])
    with pytest.raises(DataError, match=r"none.txt: no such file"):
        prepare(train, tmp_path / "none", heldout=tmp_path / "none.txt")


def test_text_to_evaluate_on_is_one_partition_by_the_tokenizer_of_other_data(prepared, texts, tmp_path):
    (tmp_path / "one.txt").write_text(texts[0])
    data = prepare(tmp_path / "one.txt", tmp_path / "data", tokenizer=str(prepared), report_only=True)
    assert partition_documents(data) == partition_documents(data, "report") == texts[:1]
    assert data.tokenizer_hash == TokenData.open(prepared).tokenizer_hash
    options = {"tokenizer": str(prepared), "report_only": True, "heldout": jsonl(tmp_path / "two.jsonl", texts[:3])}
    data = prepare(tmp_path / "one.txt", tmp_path / "both", **options)
    assert sorted(partition_documents(data, "report")) == sorted(texts[:3])


def test_limits(source, texts, tmp_path):
    options = {"vocab_size": 257, "heldout_fraction": 0.4}
    (read,) = prepare(source, tmp_path / "b", max_bytes=20_000, **options).index["sources"]
    assert 20_000 <= read["bytes"] <= 20_000 + max(map(len, texts))
    (tmp_path / "one.txt").write_text("é" + "\n\n".join(texts))
    with pytest.raises(DataError, match=r"got no document: 1 documents in all.*--split-characters"):
        prepare(tmp_path / "one.txt", tmp_path / "c", **options)
    data = prepare(tmp_path / "one.txt", tmp_path / "c", split_characters=400, max_bytes=9_000, **options)
    assert data.index["sources"][0]["bytes"] == 9_000
    assert max(map(len, partition_documents(data))) <= 400


def test_a_source_is_read_once_and_may_be_a_pipe(source, settings, prepared, tmp_path):
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    threading.Thread(target=lambda: pipe.write_bytes(source.read_bytes()), daemon=True).start()
    assert prepare(pipe, tmp_path / "data", **settings).fingerprint == TokenData.open(prepared).fingerprint


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"heldout_fraction": 0.0}, "heldout_fraction must be in"),
        ({"heldout_fraction": 0.1, "heldout": "x.txt"}, "got both"),
        ({"max_bytes": 0}, "max_bytes must be at least 1"),
        ({"calibration_from": "text"}, "calibration_from must be"),
        ({"vocab_size": 100}, "at least 257"),
        ({"tokenizer": "gpt2", "vocab_size": 300}, "vocab_size must be left out"),
        ({"report_only": True}, "report_only needs the tokenizer"),
    ],
)
def test_settings_out_of_range(source, tmp_path, setting, message):
    with pytest.raises(InputError, match=message):
        prepare(source, tmp_path / "data", **setting)
    assert list(tmp_path.iterdir()) == []


def test_bad_text_in_the_middle_leaves_nothing(source, settings, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(source.read_bytes() + b'{"txt": 1}\n')
    for sources in (bad, tmp_path):  # the file alone, and in a folder
        with pytest.raises(DataError, match="line 121: no field 'text'"):
            prepare(sources, tmp_path / "data", **settings)
        assert list(tmp_path.iterdir()) == [bad]


def test_a_finished_folder_is_replaced_only_by_overwrite_and_other_files_never(source, settings, tmp_path):
    out = tmp_path / "data"
    first = prepare(source, out, **settings)
    with pytest.raises(DataError, match="a finished data folder is there"):
        prepare(source, out, **settings, seed=1)
    assert TokenData.open(out, verify=True).fingerprint == first.fingerprint
    second = prepare(source, out, **settings, seed=1, overwrite=True)
    assert TokenData.open(out, verify=True).fingerprint == second.fingerprint != first.fingerprint
    (out / "notes").mkdir()
    with pytest.raises(DataError, match=r"also holds notes, which its index.json does not name"):
        prepare(source, out, **settings, overwrite=True)
    for name in ("thesis.tex", "index.json"):
        other = tmp_path / name.partition(".")[0]
        other.mkdir()
        (other / name).write_text("{}")
        with pytest.raises(DataError, match="something that is not a data folder is there"):
            prepare(source, other, **settings, overwrite=True)
        assert (other / name).read_text() == "{}"


def test_what_killed_processes_left_is_cleared_or_restored_and_one_prepares_at_a_time(source, settings, tmp_path):
    out = tmp_path / "data"
    with open(tmp_path / ".data.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another process is preparing this folder"):
            prepare(source, out, **settings)
    (tmp_path / ".writing-data").mkdir()
    first = prepare(source, out, **settings)
    out.rename(tmp_path / ".replaced-data")  # killed between the two renames that replace a folder
    assert TokenData.open(out, verify=True).fingerprint == first.fingerprint
    out.rename(tmp_path / ".replaced-data")
    with pytest.raises(DataError, match="a finished data folder is there"):
        prepare(source, out, **settings)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
