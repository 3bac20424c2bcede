import json
import os
import signal
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from saf.data import PARTITIONS, TokenData, prepare
from saf.data.config import PrepareConfig
from saf.data.documents import lowest_keys, order_key
from saf.data.encoding import EncodeWorker
from saf.data.preparation import Reading
from saf.data.sources import read_left_out, resolve
from saf.data.token_data import DataIndex
from saf.data.tokenizer import sample_text
from saf.data.utf8 import digest_of
from saf.errors import DataError, InputError, SafWarning

ROOT = Path(__file__).parents[2]


def documents_of(data: TokenData, partition: str) -> list[str]:
    """Decode a partition into its documents."""
    ids = np.asarray(data.tokens(partition))
    assert ids[-1] == data.eot_id
    tokenizer = data.tokenizer()
    ends = np.flatnonzero(ids == data.eot_id)
    return [tokenizer.decode(part[part != data.eot_id]) for part in np.split(ids, ends[:-1] + 1)]


def folder_bytes(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_every_document_lands_in_exactly_one_partition(prepared, texts):
    data = TokenData.open(prepared, verify=True)
    found = {name: documents_of(data, name) for name in PARTITIONS}
    assert sorted(chain(*found.values())) == sorted(texts)
    for name in PARTITIONS:
        info = data.index.partitions[name]
        assert len(found[name]) == info.documents
        assert sum(len(text.encode()) for text in found[name]) == info.bytes
    assert found["train"] != [text for text in texts if text in set(found["train"])], "documents are shuffled"


def test_held_out_tokens_are_balanced(prepared):
    data = TokenData.open(prepared)
    counts = np.array([data.num_tokens(name) for name in PARTITIONS])
    assert counts[1:].sum() / counts.sum() == pytest.approx(0.3, abs=0.03)
    assert counts[1:].max() <= 1.1 * counts[1:].min()


@pytest.mark.parametrize("tokenizer_bytes", [2**24, 2_000])
def test_of_few_documents_what_was_asked_for_is_held_out_and_the_tokenizer_learns_from_others(
    tmp_path, tokenizer_bytes
):
    """The lowest keys of these documents hold a third of the text that is to be held out."""
    draw = np.random.default_rng(3)
    texts = [f"{number} " + "word " * int(length) for number, length in enumerate(np.exp(draw.normal(4, 1, 100)))]
    source = jsonl(tmp_path / "few.jsonl", texts)
    lowest = [text for text in texts if order_key(digest_of(text.encode()), 7) < lowest_keys(0.05)]
    target = 0.05 * sum(map(len, texts))
    assert sum(len(text) for text in lowest if len(text) <= target / 3) < 0.4 * target
    config = {"heldout_fraction": 0.05, "seed": 7, "tokenizer_bytes": tokenizer_bytes}
    prepare(source, tmp_path / "data", vocab_size=270, workers=1, **config)
    data = TokenData.open(tmp_path / "data")
    counts = [data.num_tokens(name) for name in PARTITIONS]
    assert sum(counts[1:]) / sum(counts) == pytest.approx(0.05, rel=0.1)
    held_out = [text for name in PARTITIONS[1:] for text in documents_of(data, name)]
    pieces, _ = sample_text([resolve(str(source))], PrepareConfig(**config))
    assert pieces
    assert not set(pieces) & set(held_out)


def test_long_documents_that_leave_too_little_to_hold_out_are_told(tmp_path):
    texts = [f"{number} " + "word " * (20 if number < 12 else 3_000) for number in range(24)]
    with pytest.warns(
        SafWarning, match=r"0\.[0-9]% of the tokens are held out, 5\.0% were asked for.*split_characters"
    ):
        prepare(jsonl(tmp_path / "long.jsonl", texts), tmp_path / "data", vocab_size=270, workers=1)


@pytest.mark.parametrize("workers", [2, 5])
def test_the_number_of_workers_changes_nothing(prepared, corpus, settings, tmp_path, workers, monkeypatch):
    monkeypatch.setattr("saf.data.encoding.BATCH_TEXTS", 7)
    prepare(corpus, tmp_path / "data", **{**settings, "workers": workers})
    assert folder_bytes(tmp_path / "data") == folder_bytes(prepared)


def test_the_seed_changes_order_and_partitions(prepared, corpus, settings, tmp_path):
    index = prepare(corpus, tmp_path / "data", **settings, seed=1)
    assert index.fingerprint != DataIndex.load(prepared).fingerprint


def test_given_heldout_text_is_divided_and_repeats_are_dropped(texts, tmp_path):
    heldout = jsonl(tmp_path / "heldout.jsonl", texts[:40])
    train = jsonl(tmp_path / "train.jsonl", [*texts[30:], *texts[50:60], "  "])
    index = prepare(train, tmp_path / "data", heldout=heldout, vocab_size=300, workers=1)
    assert index.duplicates["also_held_out"] == 10
    assert index.duplicates["repeated"] == 10
    assert index.duplicates["empty"] == 1
    data = TokenData.open(tmp_path / "data", verify=True)
    held = [documents_of(data, name) for name in PARTITIONS[1:]]
    assert sorted(chain(*held)) == sorted(texts[:40])
    assert sorted(documents_of(data, "train")) == sorted(texts[40:])
    counts = [data.num_tokens(name) for name in PARTITIONS[1:]]
    assert max(counts) <= 1.1 * min(counts)


def test_near_copies_of_held_out_text_are_not_trained_on(texts, tmp_path):
    heldout = jsonl(tmp_path / "heldout.jsonl", texts[:40])
    train = jsonl(tmp_path / "train.jsonl", [*texts[40:], texts[0].upper(), " \n".join(texts[1].split(" "))])
    index = prepare(train, tmp_path / "data", heldout=heldout, vocab_size=300, workers=1)
    assert (index.duplicates["nearly_held_out"], index.duplicates["also_held_out"]) == (2, 0)
    assert sorted(documents_of(TokenData.open(tmp_path / "data"), "train")) == sorted(texts[40:])


def test_near_copies_of_text_that_is_drawn_are_not_trained_on(texts, settings, tmp_path):
    corpus = jsonl(tmp_path / "text.jsonl", [*texts, *(text.upper() for text in texts)])
    index = prepare(corpus, tmp_path / "data", **settings)
    data = TokenData.open(tmp_path / "data")
    held, trained = set[str](), {text.upper() for text in documents_of(data, "train")}
    for name in PARTITIONS[1:]:
        held |= {text.upper() for text in documents_of(data, name)}
    assert not held & trained
    documents = sum(info.documents for info in index.partitions.values())
    assert index.duplicates["nearly_held_out"] == 240 - documents > 10


def test_what_is_left_out_is_listed_in_the_folder(texts, settings, tmp_path):
    source, out = tmp_path / "text", tmp_path / "data"
    source.mkdir()
    for number, text in enumerate(texts):
        (source / f"{number}.md").write_text(text)
    (source / "picture.png").write_bytes(b"\x89PNG")
    index = prepare(source, out, **settings)
    (facts,) = index.sources
    assert (facts["files"], facts["documents"], facts["left_out"]) == (120, 120, 1)
    row = {"source": str(source), "file": str(source / "picture.png"), "reason": "not text: not UTF-8 at byte 0"}
    assert read_left_out(out) == [row]
    prepare(source, out, **settings, overwrite=True)
    (out / "left_out.json").write_text('{"left_out": 3}')
    with pytest.raises(DataError, match=r"left_out.json: not a list"):
        read_left_out(out)


def test_a_field_that_no_source_has_is_refused(tmp_path, settings):
    with pytest.raises(InputError, match=r"text_field='body' names a field of .*, and no source is one"):
        prepare("python", tmp_path / "data", **settings, text_field="body")


@pytest.mark.parametrize("setting", [{"vocab_size": 300}, {"tokenizer_bytes": 1_000}])
def test_settings_of_a_trained_tokenizer_are_refused_beside_a_given_one(tmp_path, setting):
    (name,) = setting
    with pytest.raises(InputError, match=rf"{name} is of a tokenizer that is trained here .*: leave {name} out"):
        prepare("python", tmp_path / "data", tokenizer="gpt2", **setting)
    assert list(tmp_path.iterdir()) == []


def test_heldout_shares(texts, corpus, settings, tmp_path):
    index = prepare(corpus, tmp_path / "data", **settings, heldout_shares=(2, 1, 1))
    tokens = [index.partitions[name].tokens for name in PARTITIONS[1:]]
    assert tokens[0] == pytest.approx(2 * tokens[1], rel=0.15)
    assert tokens[1] == pytest.approx(tokens[2], rel=0.15)


def test_calibration_from_train_leaves_its_partition_empty(corpus, settings, tmp_path):
    prepare(corpus, tmp_path / "data", **settings, calibration_from="train")
    data = TokenData.open(tmp_path / "data", verify=True)
    assert data.num_tokens("calibration") == 0
    assert data.num_tokens("controller") == pytest.approx(data.num_tokens("report"), rel=0.1)
    with pytest.raises(DataError, match='source="train"'):
        data.tokens("calibration")


def test_limits_and_splitting(corpus, texts, tmp_path, monkeypatch):
    index = prepare(corpus, tmp_path / "a", max_documents=60, vocab_size=300, heldout_fraction=0.4, workers=1)
    assert index.sources[0]["documents"] == 60
    index = prepare(corpus, tmp_path / "b", max_bytes=20_000, vocab_size=300, heldout_fraction=0.4, workers=1)
    assert 20_000 <= index.sources[0]["bytes"] <= 20_000 + max(map(len, texts))
    one = tmp_path / "one.txt"
    one.write_text("\n\n".join(texts))
    with monkeypatch.context() as patch:
        patch.setattr("saf.data.preparation.choose_tokenizer", None)  # refused before anything is read
        with pytest.raises(DataError, match=r"1 in all \(a file of text is one document\) for 4 .*split_characters"):
            prepare(one, tmp_path / "c", vocab_size=300, workers=1)
    index = prepare(one, tmp_path / "c", vocab_size=300, workers=1, split_characters=400, heldout_fraction=0.2)
    text_bytes = sum(info.bytes for info in index.partitions.values())
    assert text_bytes + index.duplicates["repeated"] <= len("\n\n".join(texts)) <= text_bytes + 400


def test_a_large_vocabulary_is_stored_as_uint32(corpus, settings, tmp_path, monkeypatch):
    monkeypatch.setattr("saf.data.shards.token_dtype", lambda size: np.dtype("<u4"))
    monkeypatch.setattr("saf.data.preparation.token_dtype", lambda size: np.dtype("<u4"))
    index = prepare(corpus, tmp_path / "data", **settings)
    assert index.dtype == "uint32"
    data = TokenData.open(tmp_path / "data", verify=True)
    assert (tmp_path / "data" / "train-00000.bin").stat().st_size == 4 * data.num_tokens("train")
    assert len(documents_of(data, "train")) == index.partitions["train"].documents


@pytest.mark.parametrize("stage", ["saf.data.preparation.choose_tokenizer", "saf.data.preparation.assign"])
def test_a_failure_leaves_nothing(corpus, settings, tmp_path, monkeypatch, stage):
    def fail(*args, **kwargs):
        raise RuntimeError("power cut")

    monkeypatch.setattr(stage, fail)
    with pytest.raises(RuntimeError, match="power cut"):
        prepare(corpus, tmp_path / "data", **settings)
    assert list(tmp_path.iterdir()) == []


def test_bad_text_in_the_middle_leaves_nothing(settings, tmp_path, corpus):
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(corpus.read_bytes() + b'{"txt": 1}\n')
    with pytest.raises(DataError, match="line 121: no field 'text'"):
        prepare(bad, tmp_path / "data", **settings)
    assert list(tmp_path.iterdir()) == [bad]


def test_a_dead_worker_is_reported(corpus, settings, tmp_path, monkeypatch):
    encode = EncodeWorker.encode

    def killed(worker, texts):
        worker.process.kill()
        return encode(worker, texts)

    monkeypatch.setattr(EncodeWorker, "encode", killed)
    with pytest.raises(DataError, match="tokenising process died with exit code -9"):
        prepare(corpus, tmp_path / "data", **settings)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"heldout_fraction": 0.0}, "heldout_fraction must lie in"),
        ({"heldout_fraction": 0.1, "heldout": "x.txt"}, "not both"),
        ({"heldout_shares": (1, 0, 1)}, "three positive numbers"),
        ({"workers": 0}, "workers must be a positive integer"),
        ({"seed": -1}, "seed must be an integer"),
        ({"calibration_from": "text"}, "calibration_from must be"),
        ({"vocab_size": 100}, "at least 257"),
        ({"vocab_size": True}, "vocab_size must be a positive integer"),
        ({"heldout_shares": ("a", 1, 1)}, "three positive numbers"),
        ({"heldout_shares": 3}, "three positive numbers"),
        ({"heldout_fraction": "half"}, "heldout_fraction must lie in"),
        ({"heldout": 5}, "named by strings or Paths; got 5"),
        ({"tokenizer": 5}, "tokenizer must be bpe, gpt2 or a path"),
        ({"text_field": ""}, "text_field must be the name of a field"),
        ({"vocabulary": 1}, "prepare has no setting vocabulary; it has heldout"),
    ],
)
def test_settings_out_of_range(corpus, tmp_path, setting, message):
    with pytest.raises(InputError, match=message):
        prepare(corpus, tmp_path / "data", **setting)
    assert list(tmp_path.iterdir()) == []


def test_no_source_at_all(tmp_path):
    with pytest.raises(InputError, match="at least one source"):
        prepare([], tmp_path / "data")
    with pytest.raises(InputError, match="the folder to make is named by a string or a Path; got 5"):
        prepare("python", 5)


def test_nothing_is_printed_without_a_terminal(corpus, settings, tmp_path, capfd):
    prepare(corpus, tmp_path / "data", **settings)
    assert capfd.readouterr() == ("", "")
    prepare(corpus, tmp_path / "shown", progress=True, **settings)
    assert "tokenising" in capfd.readouterr().err


def test_a_finished_folder_is_kept_unless_told_otherwise(corpus, settings, tmp_path):
    out = tmp_path / "data"
    first = prepare(corpus, out, **settings)
    with pytest.raises(DataError, match="a finished data folder is there"):
        prepare(corpus, out, **settings, seed=1)
    assert TokenData.open(out, verify=True).fingerprint == first.fingerprint
    second = prepare(corpus, out, **settings, seed=1, overwrite=True)
    assert TokenData.open(out, verify=True).fingerprint == second.fingerprint != first.fingerprint
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_failed_overwrite_keeps_the_old_folder(corpus, settings, tmp_path, monkeypatch):
    out = tmp_path / "data"
    first = prepare(corpus, out, **settings)
    monkeypatch.setattr("saf.records.folders.flush_folder", lambda folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare(corpus, out, **settings, seed=1, overwrite=True)
    assert TokenData.open(out, verify=True).fingerprint == first.fingerprint


def test_other_peoples_files_are_never_replaced(corpus, settings, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(DataError, match="something that is not a data folder is there"):
            prepare(corpus, tmp_path, **settings, overwrite=overwrite)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("name", ["notes.md", "runs/config.json", ".env"])
def test_overwriting_takes_nothing_that_prepare_did_not_write(corpus, settings, tmp_path, name):
    out = tmp_path / "data"
    first = prepare(corpus, out, **settings)
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("years of work")
    with pytest.raises(DataError, match=rf"also holds what `saf data prepare` did not write: {name.split('/')[0]};"):
        prepare(corpus, out, **settings, overwrite=True)
    assert (out / name).read_text() == "years of work"
    assert TokenData.open(out).fingerprint == first.fingerprint


def test_what_came_while_preparing_is_kept(corpus, settings, tmp_path, monkeypatch):
    out = tmp_path / "data"
    prepare(corpus, out, **settings)
    index = Reading.index

    def put_a_file_there(*arguments):
        (out / "notes.md").write_text("years of work")
        return index(*arguments)

    monkeypatch.setattr(Reading, "index", put_a_file_there)
    with pytest.raises(DataError, match=r"did not write: notes.md;"):
        prepare(corpus, out, **settings, overwrite=True)
    assert (out / "notes.md").read_text() == "years of work"
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.parametrize("content", ['{"name": "a website"}', "{", "[]"])
def test_an_index_of_something_else_is_not_replaced(corpus, settings, tmp_path, content):
    (tmp_path / "index.json").write_text(content)
    for overwrite in (False, True):
        with pytest.raises(DataError, match="something that is not a data folder is there"):
            prepare(corpus, tmp_path, **settings, overwrite=overwrite)
    assert (tmp_path / "index.json").read_text() == content


def test_an_empty_folder_may_be_filled(corpus, settings, tmp_path):
    (tmp_path / "data").mkdir()
    prepare(corpus, tmp_path / "data", **settings)
    TokenData.open(tmp_path / "data", verify=True)


def test_what_a_kill_left_is_cleared_away(corpus, settings, tmp_path):
    partial = tmp_path / ".writing-data"
    partial.mkdir()
    (partial / "train-00077.bin").write_bytes(b"half")
    (tmp_path / ".data.lock").write_text("")
    prepare(corpus, tmp_path / "data", **settings)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert not (tmp_path / "data" / "train-00077.bin").exists()


def test_a_kill_between_the_two_renames_loses_nothing(corpus, settings, tmp_path):
    first = prepare(corpus, tmp_path / "data", **settings)
    (tmp_path / "data").rename(tmp_path / ".replaced-data")
    with pytest.raises(DataError, match="a finished data folder is there"):
        prepare(corpus, tmp_path / "data", **settings, seed=1)
    assert TokenData.open(tmp_path / "data").fingerprint == first.fingerprint


def test_a_killed_process_leaves_no_folder_and_no_workers(corpus, tmp_path):
    script = (
        "import sys, time\n"
        "import saf.data.preparation as preparation\n"
        "from saf.data.encoding import EncodePool\n"
        "encode = EncodePool.encode\n"
        "def slow(pool, documents):\n"
        "    for number, pair in enumerate(encode(pool, documents)):\n"
        "        if number == 3:\n"
        "            print(*[worker.process.pid for worker in pool.workers], flush=True)\n"
        "            time.sleep(600)\n"
        "        yield pair\n"
        "EncodePool.encode = slow\n"
        "preparation.prepare(sys.argv[1], sys.argv[2], vocab_size=300, workers=1)\n"
    )
    command = [sys.executable, "-c", script, str(corpus), str(tmp_path / "data")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline().split()[0])
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "data").exists()
    ends = time.monotonic() + 120
    while running(worker) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not running(worker), "the worker ends with its parent"
    prepare(corpus, tmp_path / "data", vocab_size=300, heldout_fraction=0.3, workers=1)
    TokenData.open(tmp_path / "data", verify=True)


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
