"""A data folder is checked before it is used, and its windows are a pure function of seed and position."""

import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from saf.data import (
    RandomWindows,
    ShuffledWindows,
    TokenData,
    calibration_windows,
    prepare,
    sequential_windows,
)
from saf.errors import DataError, InputError

TOKENS = np.arange(1000, dtype=np.uint16)
KINDS = [ShuffledWindows, RandomWindows]


@pytest.fixture
def folder(prepared, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(prepared, tmp_path / "data")


def test_what_an_open_folder_holds(prepared):
    data = TokenData.open(prepared, verify=True)
    tokens = data.tokens("train")
    assert len(tokens) == len(np.asarray(tokens)) == data.num_tokens("train")
    assert tokens[5:9].dtype == np.int64
    assert tokens[5:9].tolist() == [tokens[at] for at in range(5, 9)]
    assert data.vocab_size == data.tokenizer().vocab_size == 300
    assert data.tokenizer_hash == data.tokenizer().fingerprint
    assert data.eot_id == data.tokenizer().eot_id
    counts = np.bincount(np.asarray(tokens))
    share = counts[counts > 0] / counts.sum()
    assert data.unigram_entropy("train") == pytest.approx(-(share * np.log(share)).sum())
    with pytest.raises(InputError, match="partition must be one of train, calibration, controller, report"):
        data.tokens("test")


def test_the_fingerprint_knows_tokens_not_places(prepared, folder, source, settings, tmp_path):
    again = prepare(source, tmp_path / "again", **settings)
    assert TokenData.open(folder).fingerprint == TokenData.open(prepared).fingerprint == again.fingerprint
    assert prepare(source, tmp_path / "other", **{**settings, "vocab_size": 310}).fingerprint != again.fingerprint


@pytest.mark.parametrize("name", ["train.bin", "report.digests", "tokenizer.json", "index.json"])
@pytest.mark.parametrize("damage", ["a bit", "its end", "all"])
def test_a_changed_file_is_named(folder, name, damage):
    data = (folder / name).read_bytes()
    if damage == "all":
        (folder / name).unlink()
    else:
        flipped = data[:50] + bytes([data[50] ^ 1]) + data[51:]
        (folder / name).write_bytes(data[:-2] if damage == "its end" else flipped)
    with pytest.raises(DataError, match=name):
        TokenData.open(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index["tokenizer"].update(eot_id=7),
        lambda index: index["partitions"]["report"].update(tokens=5),
        lambda index: index.update(calibration_from="train"),
        lambda index: index.update(fingerprint=64 * "0"),
        lambda index: index.update(schema="saf.data/9"),
        lambda index: index.pop("hash"),
    ],
)
def test_a_changed_index_is_refused(folder, change):
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"index.json.*prepare it again"):
        TokenData.open(folder)


def test_another_end_of_text_is_refused(folder):
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "a"}))
    with pytest.raises(DataError, match=r"tokenizer_config.json"):
        TokenData.open(folder)


def test_what_was_found_whole_is_checked_again_once_it_changes(folder, monkeypatch):
    path, before = folder / "train.bin", time.time() - 100
    for file in folder.iterdir():
        os.utime(file, (before, before))
    time.sleep(2.1)  # what has just changed is not remembered
    TokenData.open(folder)
    remembered = [file.read_text() for file in Path(os.environ["XDG_CACHE_HOME"]).rglob("*.json")]
    assert sum(str(folder) in text for text in remembered) == 1
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    os.utime(path, (before, before))  # the same size and time of modification
    with pytest.raises(DataError, match=r"train.bin is damaged: expected SHA-256"):
        TokenData.open(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))  # nothing can be written there
    with pytest.raises(DataError, match=r"train.bin is damaged: expected SHA-256"):
        TokenData.open(folder)


def test_folders_that_are_not_data_folders(tmp_path, folder):
    with pytest.raises(DataError, match="no such data folder here; give --data"):
        TokenData.open(tmp_path / "none")
    with pytest.raises(DataError, match="is a file; give --data"):
        TokenData.open(folder / "train.bin")
    with pytest.raises(DataError, match=r"not a data folder, it has no index.json"):
        TokenData.open(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@given(position=st.integers(0, 10**7), size=st.integers(1, 70))
def test_a_batch_is_a_pure_function_of_its_position(kind, position, size):
    used = kind(TOKENS, length=16, seed=3)
    used.batch(position // 2, 5)
    used.batch(position + 100, 5)
    batch = kind(TOKENS, length=16, seed=3).batch(position, size)
    assert (batch.dtype, batch.shape) == (torch.int64, (size, 17))
    assert torch.equal(batch, used.batch(position, size))
    assert torch.equal(batch[size // 2 :], used.batch(position + size // 2, size - size // 2))


@pytest.mark.parametrize("epoch", [0, 1, 12345])
def test_an_epoch_visits_each_window_once(epoch):
    windows = ShuffledWindows(TOKENS, length=10, seed=0)
    assert windows.num_windows == 99
    batch = windows.batch(99 * epoch, 99)
    assert sorted(batch[:, 0].tolist()) == list(range(0, 990, 10))
    assert sorted(batch[:, 1:].flatten().tolist()) == list(range(1, 991)), "every token is a target once"


def test_the_order_never_changes_between_versions():
    """Runs resume by position alone, so the order is part of the format."""
    shuffled = ShuffledWindows(TOKENS, length=10, seed=1337).batch(95, 8)[:, 0]
    randomly = RandomWindows(TOKENS, length=10, seed=1337).batch(95, 8)[:, 0]
    assert shuffled.tolist() == [760, 830, 520, 90, 780, 870, 370, 710]
    assert randomly.tolist() == [547, 473, 810, 142, 701, 537, 15, 190]


def test_sequential_windows_are_in_order():
    windows = sequential_windows(TOKENS, 100)
    assert windows.shape == (9, 101)
    assert windows[:, 0].tolist() == list(range(0, 900, 100))
    assert torch.equal(sequential_windows(TOKENS, 100, limit=4), windows[:4])
    assert len(sequential_windows(TOKENS, 100, limit=400)) == 9


@pytest.mark.parametrize("make", [*KINDS, lambda tokens, length, seed: sequential_windows(tokens, length)])
def test_fewer_tokens_than_one_window(make):
    with pytest.raises(DataError, match="a window of length 10 needs 11 tokens, the text has 10"):
        make(np.arange(10), length=10, seed=0)
    with pytest.raises(InputError, match="length must be at least 1"):
        make(np.arange(10), length=0, seed=0)
    make(np.arange(11), length=10, seed=0)


@pytest.fixture(scope="module")
def from_train(source, settings, tmp_path_factory):
    return prepare(source, tmp_path_factory.mktemp("from_train") / "data", **settings, calibration_from="train")


@pytest.fixture(scope="module")
def from_heldout(prepared):
    return TokenData.open(prepared)


@pytest.mark.parametrize(("name", "partition"), [("from_heldout", "calibration"), ("from_train", "train")])
def test_calibration_windows_do_not_overlap(name, partition, request):
    data = request.getfixturevalue(name)
    windows = calibration_windows(data, length=64, count=12, seed=0)
    tokens = np.asarray(data.tokens(partition)).astype(np.int64)
    stretches = {tuple(tokens[at : at + 64].tolist()): at for at in range(0, len(tokens), 64)}
    starts = [stretches[tuple(row.tolist())] for row in windows]
    assert len(set(starts)) == 12
    assert starts != sorted(starts)
    assert torch.equal(windows, calibration_windows(data, length=64, count=12, seed=0, source=partition))
    assert not torch.equal(windows, calibration_windows(data, length=64, count=12, seed=1))
    assert torch.equal(windows[:5], calibration_windows(data, length=64, count=5, seed=0))
    # With one seed for both, calibration is not the first windows of training.
    training = ShuffledWindows(data.tokens(partition), length=64, seed=0).batch(0, 12)[:, :-1]
    assert not torch.equal(training, windows)


def test_too_little_calibration_text(from_heldout, from_train):
    held = from_heldout.num_tokens("calibration")
    message = f"needs 99 windows of length 100 = 9,900 tokens, the calibration partition has {held:,}, {held // 100} "
    with pytest.raises(DataError, match=message):
        calibration_windows(from_heldout, length=100, count=99, seed=0)
    with pytest.raises(DataError, match=r'its calibration partition is empty.*source="train"'):
        calibration_windows(from_train, length=8, count=1, seed=0, source="calibration")
    with pytest.raises(InputError, match="'calibration' or 'train'"):
        calibration_windows(from_train, length=8, count=1, seed=0, source="report")
    with pytest.raises(InputError, match="at least 1"):
        calibration_windows(from_train, length=8, count=0, seed=0)
