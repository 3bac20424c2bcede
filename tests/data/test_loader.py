"""A data folder is checked before it is used, and its windows are a pure function of seed and position."""

import json
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from saf.data import (
    PARTITIONS,
    TokenData,
    calibration_windows,
    prepare,
    random_windows,
    sequential_windows,
    shuffled_windows,
)
from saf.errors import DataError, InputError

TOKENS = np.arange(1000, dtype=np.uint16)
SAMPLERS = [shuffled_windows, random_windows]


@pytest.fixture
def folder(prepared, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(prepared, tmp_path / "data")


def test_an_open_folder_has_tokens_entropy_and_a_fingerprint_of_its_content(prepared, source, settings, tmp_path):
    data = TokenData.open(prepared, verify=True)
    tokens = data.tokens("train")
    assert len(tokens) == data.num_tokens("train")
    assert (data.vocab_size, data.tokenizer_hash) == (data.tokenizer().vocab_size, data.tokenizer().fingerprint)
    share = np.unique(tokens, return_counts=True)[1] / len(tokens)
    assert data.index["partitions"]["train"]["unigram_entropy"] == pytest.approx(-(share * np.log(share)).sum())
    assert data.fingerprint == prepare(source, tmp_path / "again", **settings).fingerprint
    assert data.fingerprint != prepare(source, tmp_path / "other", **{**settings, "vocab_size": 310}).fingerprint


def test_a_file_that_is_replaced_after_it_was_opened_is_not_read(folder):
    data = TokenData.open(folder)
    before = data.tokens("train").copy()
    (folder / "train.bin").unlink()
    (folder / "train.bin").write_bytes(bytes(before.nbytes))
    assert np.array_equal(data.tokens("train"), before)


def use(folder):
    data = TokenData.open(folder)
    return [*map(data.tokens, PARTITIONS), data.tokenizer()]


@pytest.mark.parametrize(
    ("name", "damage"),
    [("train.bin", "a bit"), ("train.bin", "all"), ("tokenizer.json", "a bit"), ("index.json", "a bit")],
)
def test_a_changed_or_missing_file_is_named_where_it_is_read_or_all_are_verified(folder, name, damage):
    data = (folder / name).read_bytes()
    (folder / name).unlink()
    if damage == "a bit":
        (folder / name).write_bytes(data[:50] + bytes([data[50] ^ 1]) + data[51:])
    for read in (use, partial(TokenData.open, verify=True)):
        with pytest.raises(DataError, match=name):
            read(folder)


def test_folders_that_cannot_be_used(folder, tmp_path):
    index = json.loads((folder / "index.json").read_text())
    for change in ({"schema": "saf.data/9"}, {"dtype": "uint32"}):
        (folder / "index.json").write_text(json.dumps(index | change))
        with pytest.raises(DataError, match=r"index.json.*prepare it again"):
            TokenData.open(folder)
    (folder / "index.json").write_text(json.dumps(index))
    for path, words in ((tmp_path / "none", "no such file or data folder"), (tmp_path, "not a data folder")):
        with pytest.raises(DataError, match=words):
            TokenData.open(path)
    with pytest.raises(InputError, match="partition must be one of train, calibration, controller, report"):
        TokenData.open(folder).tokens("test")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "a"}))
    with pytest.raises(DataError, match=r"tokenizer_config.json"):
        TokenData.open(folder).tokenizer()


@pytest.mark.parametrize("sample", SAMPLERS)
@given(position=st.integers(0, 10**7), size=st.integers(1, 70))
def test_a_batch_is_a_pure_function_of_its_position(sample, position, size):
    batch = sample(TOKENS, position, size, length=16, seed=3)
    assert (batch.dtype, batch.shape) == (torch.int64, (size, 17))
    half = sample(TOKENS, position + size // 2, size - size // 2, length=16, seed=3)
    assert torch.equal(batch[size // 2 :], half)


@pytest.mark.parametrize("epoch", [0, 12345])
def test_an_epoch_visits_each_window_once(epoch):
    batch = shuffled_windows(TOKENS, 99 * epoch, 99, length=10, seed=0)
    assert sorted(batch[:, 0].tolist()) == list(range(0, 990, 10))
    assert sorted(batch[:, 1:].flatten().tolist()) == list(range(1, 991)), "every token is a target once"


def test_the_order_never_changes_between_versions():
    """Runs resume by position alone, so the order is part of the format."""
    shuffled, randomly = (sample(TOKENS, 95, 8, length=10, seed=1337)[:, 0].tolist() for sample in SAMPLERS)
    assert shuffled == [760, 830, 520, 90, 780, 870, 370, 710]
    assert randomly == [547, 473, 810, 142, 701, 537, 15, 190]


def test_sequential_windows_and_fewer_tokens_than_one():
    windows = sequential_windows(TOKENS, 100)
    assert (windows.shape, windows[:, 0].tolist()) == ((9, 101), list(range(0, 900, 100)))
    assert torch.equal(sequential_windows(TOKENS, 100, limit=4), windows[:4])
    for windows in (*(partial(sample, position=0, size=1, seed=0) for sample in SAMPLERS), sequential_windows):
        with pytest.raises(DataError, match=r"length 10 needs 11 tokens, the text has 10; .* a length of 9 at most"):
            windows(np.arange(10), length=10)
        with pytest.raises(InputError, match="length must be at least 1"):
            windows(np.arange(10), length=0)
        assert len(windows(np.arange(11), length=10)) == 1


@pytest.fixture(scope="module")
def from_train(source, settings, tmp_path_factory):
    return prepare(source, tmp_path_factory.mktemp("from_train") / "data", **settings, calibration_from="train")


@pytest.mark.parametrize("partition", ["calibration", "train"])
def test_calibration_windows_do_not_overlap(prepared, from_train, partition):
    data = from_train if partition == "train" else TokenData.open(prepared)
    draw = partial(calibration_windows, data, length=64, count=12)
    windows, tokens = draw(seed=0), data.tokens(partition).astype(np.int64)
    stretches = {tuple(tokens[at : at + 64].tolist()): at for at in range(0, len(tokens), 64)}
    starts = [stretches[tuple(row.tolist())] for row in windows]
    assert len(set(starts)) == 12
    assert starts != sorted(starts)
    assert torch.equal(windows[:5], draw(seed=0, count=5, source=partition))
    # With one seed for both, calibration is not the first windows of training.
    training = shuffled_windows(data.tokens(partition), 0, 12, length=64, seed=0)[:, :-1]
    assert not any(torch.equal(windows, others) for others in (training, draw(seed=1)))


def test_calibration_that_is_refused(prepared, from_train):
    draw = partial(calibration_windows, TokenData.open(prepared), seed=0)
    with pytest.raises(DataError, match="needs 99 windows of length 100, the calibration part"):
        draw(count=99, length=100)
    with pytest.raises(InputError, match="one of calibration, train"):
        draw(count=1, length=8, source="report")
    with pytest.raises(DataError, match=r'its calibration partition is empty.*source="train"'):
        calibration_windows(from_train, length=8, count=1, seed=0, source="calibration")
