"""Calibration by all processes of a group: each measures some of the heads, on all sequences.

A variance over sequences is not made of variances over some of them, so sequences are never shared out: heads are.
Every process runs the model over all sequences and keeps queries and keys of the layers of its own heads alone, which
are consecutive, so that few layers are measured in two processes.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from torch import nn

from saf.adapters import adapter_for
from saf.calibration.capture import Batch, check_heads
from saf.calibration.driver import calibrate
from saf.heads import HeadSet
from saf.machine.processes import agreed, gathered, group_place
from saf.machine.stopwatch import Stopwatch
from saf.statistics import AttentionStatistics


def calibrate_together(
    model: nn.Module, batches: Iterable[Batch], *, watch: Stopwatch, **options: Any
) -> AttentionStatistics:
    """Return what `calibrate` measures of all live heads, shared out over the processes of the group.

    Every process calls this with the same model, batches and `options` of `calibrate`, and all return the same: what
    one process measures, to the last bit where its kernels treat heads apart. `watch` adds the seconds of putting
    statistics together (`gather`).

    Raises what `calibrate` raises in any process, in every one.
    """
    rank, count = group_place()
    if count == 1:
        return calibrate(model, batches, watch=watch, **options)
    with agreed():
        own = shares_of(check_heads(adapter_for(model), None), count)[rank]
        measured = calibrate(model, batches, heads=own, watch=watch, **options)
    with watch("gather"):
        return AttentionStatistics.join(gathered(measured))


def shares_of(heads: HeadSet, count: int) -> list[HeadSet]:
    """Return `count` runs of consecutive heads that differ by one head in length at most; some may be empty.

    >>> [share.to_list() for share in shares_of(HeadSet([(0, 0), (0, 1), (1, 0)]), 2)]
    [[[0, 0]], [[0, 1], [1, 0]]]
    """
    ordered = list(heads)
    ends = [number * len(ordered) // count for number in range(count + 1)]
    return [HeadSet(ordered[first:end]) for first, end in pairwise(ends)]
