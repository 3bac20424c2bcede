import hashlib
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from saf.data import RandomWindows, ShuffledWindows, TokenData, calibration_windows, prepare, sequential_windows
from saf.errors import DataError, InputError

TOKENS = np.arange(1000, dtype=np.uint16)
KINDS = [ShuffledWindows, RandomWindows]


@pytest.mark.parametrize("kind", KINDS)
@given(position=st.integers(0, 10**7), size=st.integers(1, 70))
def test_a_batch_is_a_pure_function_of_its_position(kind, position, size):
    used = kind(TOKENS, length=16, seed=3)
    used.batch(position // 2, 5)
    used.batch(position + 100, 5)
    fresh = kind(TOKENS, length=16, seed=3)
    batch = fresh.batch(position, size)
    assert batch.dtype == torch.int64
    assert batch.shape == (size, 17)
    assert torch.equal(batch, used.batch(position, size))


@pytest.mark.parametrize("kind", KINDS)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8), start=st.integers(0, 500))
def test_batches_of_any_size_tile_the_same_order(kind, sizes, start):
    windows = kind(TOKENS, length=16, seed=0)
    ends = np.cumsum([start, *sizes])
    parts = [windows.batch(int(at), size) for at, size in zip(ends, sizes, strict=False)]
    assert torch.equal(torch.cat(parts), windows.batch(start, sum(sizes)))


@pytest.mark.parametrize("epoch", [0, 1, 12345])
def test_an_epoch_visits_each_window_once(epoch):
    windows = ShuffledWindows(TOKENS, length=10, seed=0)
    assert windows.num_windows == 99
    batch = windows.batch(99 * epoch, 99)
    assert sorted(batch[:, 0].tolist()) == list(range(0, 990, 10))
    assert torch.equal(batch[:, 1:], batch[:, :-1] + 1)
    assert sorted(batch[:, 1:].flatten().tolist()) == list(range(1, 991)), "every token is a target once"


def test_epochs_and_seeds_have_their_own_order():
    orders = [
        tuple(ShuffledWindows(TOKENS, length=10, seed=seed).batch(99 * epoch, 99)[:, 0].tolist())
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    assert len(set(orders)) == 4


def test_the_order_never_changes_between_versions():
    """Runs resume by position alone, so the order is part of the format."""
    shuffled = ShuffledWindows(TOKENS, length=10, seed=1337).batch(95, 8)[:, 0]
    randomly = RandomWindows(TOKENS, length=10, seed=1337).batch(95, 8)[:, 0]
    assert shuffled.tolist() == [760, 830, 520, 90, 780, 870, 370, 710]
    assert randomly.tolist() == [547, 473, 810, 142, 701, 537, 15, 190]


def test_random_windows_reach_both_ends_and_stay_inside():
    windows = RandomWindows(np.arange(12), length=9, seed=0)
    starts = windows.batch(0, 300)[:, 0]
    assert set(starts.tolist()) == {0, 1, 2}
    assert torch.bincount(starts).min() > 70


def test_sequential_windows_are_in_order():
    windows = sequential_windows(TOKENS, 100)
    assert windows.shape == (9, 101)
    assert windows[:, 0].tolist() == list(range(0, 900, 100))
    assert torch.equal(sequential_windows(TOKENS, 100, limit=4), windows[:4])
    assert len(sequential_windows(TOKENS, 100, limit=400)) == 9
    assert sequential_windows(torch.arange(11), 10).tolist() == [list(range(11))]


@pytest.mark.parametrize("make", [*KINDS, lambda tokens, length, seed: sequential_windows(tokens, length)])
def test_fewer_tokens_than_one_window(make):
    with pytest.raises(DataError, match="a window of length 10 needs 11 tokens, the text has 10"):
        make(np.arange(10), length=10, seed=0)
    make(np.arange(11), length=10, seed=0)


@pytest.mark.parametrize("kind", KINDS)
def test_impossible_arguments(kind):
    with pytest.raises(InputError, match="length 0"):
        kind(TOKENS, length=0, seed=0)
    with pytest.raises(InputError, match="seed -1"):
        kind(TOKENS, length=4, seed=-1)
    with pytest.raises(InputError, match="position must be at least 0"):
        kind(TOKENS, length=4, seed=0).batch(-1, 2)
    with pytest.raises(InputError, match="limit"):
        sequential_windows(TOKENS, 4, limit=0)


@pytest.mark.parametrize("value", [None, "8", 1.5, True, float("nan"), []])
def test_arguments_of_a_wrong_kind(from_heldout, value):
    tokens, calibrate = from_heldout.tokens("train"), partial(calibration_windows, from_heldout)
    for wrong in (
        lambda: ShuffledWindows(tokens, length=value, seed=0),
        lambda: RandomWindows(tokens, length=8, seed=value),
        lambda: sequential_windows(tokens, value),
        lambda: sequential_windows(tokens, 8, value or "no"),
        lambda: calibrate(length=value, count=2, seed=0),
        lambda: calibrate(length=8, count=value, seed=0),
        lambda: calibrate(length=8, count=2, seed=value),
        lambda: calibration_windows(value, length=8, count=2, seed=0),
        lambda: from_heldout.tokens(value),
        lambda: TokenData.open(5 if isinstance(value, str) else value),
    ):
        with pytest.raises(InputError, match=r"must be|named by|is one of"):
            wrong()


@pytest.fixture(scope="module")
def from_train(corpus, settings, tmp_path_factory):
    folder = tmp_path_factory.mktemp("from_train") / "data"
    prepare(corpus, folder, **settings, calibration_from="train", shard_tokens=1000)
    return TokenData.open(folder)


@pytest.fixture(scope="module")
def from_heldout(prepared):
    return TokenData.open(prepared)


def starts_in(data: TokenData, partition: str, windows: torch.Tensor) -> list[int]:
    """Return which of the partition's consecutive stretches each window is."""
    tokens, length = np.asarray(data.tokens(partition)), windows.shape[1]
    stretches = {
        hashlib.sha256(tokens[at : at + length].tobytes()).digest(): at for at in range(0, len(tokens), length)
    }
    return [stretches[hashlib.sha256(row.numpy().tobytes()).digest()] for row in windows]


@pytest.mark.parametrize(("name", "partition"), [("from_heldout", "calibration"), ("from_train", "train")])
def test_calibration_windows_do_not_overlap(name, partition, request):
    data = request.getfixturevalue(name)
    windows = calibration_windows(data, length=64, count=12, seed=0)
    assert windows.shape == (12, 64)
    assert windows.dtype == torch.int64
    starts = starts_in(data, partition, windows)
    assert len(set(starts)) == 12
    assert starts != sorted(starts)
    assert torch.equal(windows, calibration_windows(data, length=64, count=12, seed=0, source=partition))
    assert not torch.equal(windows, calibration_windows(data, length=64, count=12, seed=1))
    assert torch.equal(windows[:5], calibration_windows(data, length=64, count=5, seed=0))


def test_calibration_has_a_stream_of_its_own(from_train):
    """With one seed for both, calibration must not be the first windows of training."""
    tokens = from_train.tokens("train")
    training = ShuffledWindows(tokens, length=64, seed=0).batch(0, 12)[:, :-1]
    assert not torch.equal(training, calibration_windows(from_train, length=64, count=12, seed=0))


def test_too_little_calibration_text(from_heldout, from_train):
    windows = from_heldout.num_tokens("calibration") // 100
    held = f"{from_heldout.num_tokens('calibration'):,}"
    message = (
        f"needs 99 windows of length 100 = 9,900 tokens, the calibration partition has {held}, {windows} windows; "
    )
    message += "ask for fewer with count, for shorter ones, or prepare more text"
    with pytest.raises(DataError, match=message):
        calibration_windows(from_heldout, length=100, count=99, seed=0)
    with pytest.raises(DataError, match='source="train"'):
        calibration_windows(from_train, length=8, count=1, seed=0, source="calibration")
    with pytest.raises(InputError, match="'calibration' or 'train'"):
        calibration_windows(from_train, length=8, count=1, seed=0, source="report")
    with pytest.raises(InputError, match="positive"):
        calibration_windows(from_train, length=8, count=0, seed=0)


def test_windows_over_shard_boundaries(from_train):
    tokens = from_train.tokens("train")
    assert torch.equal(
        ShuffledWindows(tokens, length=300, seed=5).batch(3, 20),
        ShuffledWindows(np.asarray(tokens), length=300, seed=5).batch(3, 20),
    )
