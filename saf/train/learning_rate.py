"""Linear warm-up and cosine decay, as a function of how much of the schedule is behind."""

import math

from saf.errors import InputError


def learning_rate(progress: float, *, peak: float, min_ratio: float = 0.1, warmup: float = 0.0) -> float:
    """Return the learning rate at `progress` in [0, 1]; below 0 and above 1 it stays at the ends.

    `warmup` is the share of the schedule that rises linearly from 0 to `peak`; the rest is half a cosine from
    `peak` to `peak * min_ratio`.

    >>> [round(learning_rate(p, peak=1.0, warmup=0.1), 3) for p in (0.05, 0.1, 0.55, 1.0)]
    [0.5, 1.0, 0.55, 0.1]
    """
    if not 0 <= warmup < 1:
        raise InputError(f"warm-up is a share of the schedule in [0, 1); got {warmup}")
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup:
        return peak * progress / warmup
    decay = (progress - warmup) / (1 - warmup)
    return peak * (min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * decay)))


def progress_by_update(update: int, *, updates: int, start: int = 0) -> float:
    """Return the progress of update number `update` (1-based) in a schedule over updates `start + 1 ... updates`.

    >>> progress_by_update(3, updates=4), progress_by_update(3, updates=4, start=2)
    (0.75, 0.5)
    """
    return (update - start) / (updates - start)


def progress_by_time(elapsed: float, *, budget: float, begin: float = 0.0) -> float:
    """Return the progress after `elapsed` of `budget` seconds in a run that began at progress `begin`.

    >>> progress_by_time(30.0, budget=60.0, begin=0.5)
    0.75
    """
    return begin + (1 - begin) * min(elapsed / budget, 1.0)
