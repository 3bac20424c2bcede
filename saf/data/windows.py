"""Windows of tokens in an order that is a pure function of seed and position, so that resuming is exact.

A window has `length + 1` tokens: inputs are `w[:, :-1]`, targets `w[:, 1:]`. Windows start every `length` tokens,
so a token shared by two neighbours is a target once and an input once.
"""

from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from saf.data.config import is_whole
from saf.data.token_data import TokenData
from saf.errors import DataError, InputError


class Tokens(Protocol):
    """Give token ids in one dimension: anything with a length whose slices turn into NumPy arrays."""

    def __len__(self) -> int: ...
    def __getitem__(self, key: slice, /) -> Any: ...


class _Stream(IntEnum):
    """Name the separate random streams of one seed: the uses never see each other's numbers."""

    SHUFFLED = 0
    RANDOM = 1
    CALIBRATION = 2


def _generator(stream: _Stream, seed: int, number: int) -> np.random.Generator:
    """Return the generator of one stream, seed and number: the same numbers wherever it is made."""
    key = np.array([seed, number], dtype=np.uint64)
    counter = np.array([0, 0, 0, stream], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def _check(tokens: Tokens, length: int, seed: int = 0) -> int:
    """Return how many windows the tokens hold; raise InputError or DataError for none."""
    if not is_whole(length) or not is_whole(seed) or length < 1 or seed < 0:
        raise InputError(f"length must be at least 1 and seed at least 0; got length {length!r}, seed {seed!r}")
    windows = (len(tokens) - 1) // length
    if windows < 1:
        raise DataError(
            f"a window of length {length} needs {length + 1} tokens, {getattr(tokens, 'name', 'the text')} has "
            f"{len(tokens):,}; "
            f"give more text or a smaller length"
        )
    return windows


def _read(tokens: Tokens, starts: np.ndarray, size: int) -> Tensor:
    """Return windows of `size` tokens from these starts, `[N, size]` int64."""
    out = np.empty((len(starts), size), dtype=np.int64)
    for row, start in enumerate(starts.tolist()):
        out[row] = np.asarray(tokens[start : start + size])
    return torch.from_numpy(out)


class ShuffledWindows:
    """Give non-overlapping windows, each once an epoch, in an order drawn from (seed, epoch).

    >>> windows = ShuffledWindows(torch.arange(9), length=2, seed=0)
    >>> windows.num_windows, windows.batch(0, 3).shape
    (4, torch.Size([3, 3]))
    """

    def __init__(self, tokens: Tokens, *, length: int, seed: int):
        """Raise DataError when there are fewer tokens than one window."""
        self.num_windows = _check(tokens, length, seed)
        self.tokens, self.length, self.seed = tokens, length, seed
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def _permutation(self, epoch: int) -> np.ndarray:
        """Return the order of windows of an epoch, made once."""
        if epoch != self._epoch:
            order = _generator(_Stream.SHUFFLED, self.seed, epoch).permutation(self.num_windows)
            self._epoch, self._order = epoch, order
        return self._order

    def batch(self, position: int, size: int) -> Tensor:
        """Return windows number `position` to `position + size - 1`, int64 `[size, length + 1]`.

        `position` counts windows since the beginning of training, over all epochs.
        """
        if position < 0:
            raise InputError(f"position must be at least 0; got {position}")
        at = [divmod(position + step, self.num_windows) for step in range(size)]
        starts = [self._permutation(epoch)[index] * self.length for epoch, index in at]
        return _read(self.tokens, np.array(starts, dtype=np.int64), self.length + 1)


class RandomWindows:
    """Give windows that start anywhere, each start drawn from (seed, position); an epoch is only a count of tokens."""

    def __init__(self, tokens: Tokens, *, length: int, seed: int):
        """Raise DataError when there are fewer tokens than one window."""
        self.num_windows = _check(tokens, length, seed)
        self.tokens, self.length, self.seed = tokens, length, seed

    def batch(self, position: int, size: int) -> Tensor:
        """Return windows number `position` to `position + size - 1`, int64 `[size, length + 1]`."""
        if position < 0:
            raise InputError(f"position must be at least 0; got {position}")
        starts = [
            _generator(_Stream.RANDOM, self.seed, position + step).integers(len(self.tokens) - self.length)
            for step in range(size)
        ]
        return _read(self.tokens, np.array(starts, dtype=np.int64), self.length + 1)


def sequential_windows(tokens: Tokens, length: int, limit: int | None = None) -> Tensor:
    """Return the first `limit` (all when None) windows in order, int64 `[windows, length + 1]`.

    Raises DataError when there are fewer tokens than one window.
    """
    windows = _check(tokens, length)
    if limit is not None and (not is_whole(limit) or limit < 1):
        raise InputError(f"limit must be at least 1; got {limit!r}")
    windows = windows if limit is None else min(limit, windows)
    return _read(tokens, np.arange(windows) * length, length + 1)


def begun_with(windows: Tensor, token: int) -> Tensor:
    """Return windows `[N, n]` that begin with a token, as models find one at the beginning of a text; same size.

    Each loses its last token. Where neighbours share a token, every token of the text is a target once all the same.

    >>> begun_with(torch.tensor([[5, 6, 7], [7, 8, 9]]), 1)
    tensor([[1, 5, 6],
            [1, 7, 8]])
    """
    return torch.cat([torch.full_like(windows[:, :1], token), windows[:, :-1]], dim=1)


def calibration_windows(
    data: TokenData,
    *,
    length: int,
    count: int,
    seed: int,
    source: str | None = None,
    setting: str = "count",
    shorter: str = "",
) -> Tensor:
    """Return `count` non-overlapping windows for calibration, int64 `[count, length]`.

    They are drawn without replacement by a generator of their own, so the order of training is unchanged.

    Args:
        data: an opened data folder.
        length: tokens of a window.
        count: number of windows.
        seed: of the draw.
        source: the partition to draw from, `calibration` or `train`; what the folder was prepared for if None.
        setting: what the caller's user knows `count` as, for the message.
        shorter: what the caller's user asks for shorter windows with, for the message.

    Raises:
        DataError: when the partition has fewer than `count` windows.
    """
    if not isinstance(data, TokenData):
        raise InputError(f"data must be an opened data folder, TokenData.open(folder); got {type(data).__name__}")
    if source is None:
        source = data.calibration_source
    if source not in ("calibration", "train"):
        raise InputError(f"calibration windows come from 'calibration' or 'train'; got {source!r}")
    if not all(map(is_whole, (length, count, seed))) or length < 1 or count < 1 or seed < 0:
        raise InputError(f"length and count must be positive, seed not negative; got {length!r}, {count!r}, {seed!r}")
    tokens = data.tokens(source)
    if len(tokens) // length < count:
        raise DataError(
            f"calibration needs {count} windows of length {length} = {count * length:,} tokens, "
            f"the {source} partition has {len(tokens):,}, {len(tokens) // length} windows; "
            f"ask for fewer with {setting}, for shorter ones{shorter and f' with {shorter}'}, or prepare more text"
        )
    order = _generator(_Stream.CALIBRATION, seed, 0).permutation(len(tokens) // length)
    return _read(tokens, order[:count] * length, length)
