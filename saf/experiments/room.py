"""Room on the disk of a store: no run begins whose checkpoints would not fit beside those of the runs under way.

A disk that fills up ends every run that saves next, and loses what they trained. A run that finds no room waits for
the ones under way, whose checkpoints but the last go when they end; after them it is left for the next command.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from saf.experiments.planned_run import PlannedRun
from saf.experiments.store import Store

RESERVE_BYTES = 2e9
"""Bytes that stay free beside checkpoints, for records, logs and what compilers keep: as many as the checkpoints of the
run that begins, and at most these."""


def free_bytes(folder: Path) -> float:
    """Return the bytes that are free on a folder's disk."""
    return float(shutil.disk_usage(folder).free)


class Room:
    """Answer whether a run's checkpoints fit on the disk of a store."""

    def __init__(self, store: Store, say: Callable[[str], None]):
        """Take the store, and what shows a line for the first time that a run finds no room."""
        self.store, self._say, self._told = store, say, set[str]()

    def allows(self, run: PlannedRun, active: Iterable[PlannedRun]) -> bool:
        """Return whether a run fits beside what those under way have still to write."""
        pledged = sum(max(0.0, one.disk_bytes - self._written(one)) for one in active)
        needed = max(0.0, run.disk_bytes - self._written(run))
        reserve = min(RESERVE_BYTES, run.disk_bytes)
        free = free_bytes(self.store.folder) - pledged - reserve
        if needed <= free:
            return True
        if run.key not in self._told:
            self._told.add(run.key)
            self._say(
                f"{run.title} is not begun: its checkpoints take up to {needed / 1e9:.1f} GB and the disk of "
                f"{self.store.folder} has {max(0.0, free) / 1e9:.1f} GB beside what goes on there and "
                f"{reserve / 1e9:.1f} GB for records and logs. Folders under {self.store.folder / 'runs'} whose "
                "record is in records may be removed; a run that is needed again is then trained again"
            )
        return False

    def _written(self, run: PlannedRun) -> float:
        """Return the bytes of a run's folder."""
        written = 0.0
        for folder, _, names in os.walk(self.store.run_folder(run.key)):
            for name in names:
                with contextlib.suppress(OSError):  # it was removed since it was listed
                    written += os.stat(os.path.join(folder, name)).st_size
        return written
