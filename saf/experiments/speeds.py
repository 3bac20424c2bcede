"""Speeds that arms at matched time get instead of a clock of their own, from files of `saf bench update`.

An arm then does as many updates as its speed, measured as a pair with ordinary updates, buys of those that the
reference had left. What else runs on its machine no longer decides anything, so that such arms may share a GPU.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from saf.bench.protocol import PRUNED
from saf.errors import InputError
from saf.train.allowance import accepted_pairs

CHARGE_SECONDS = 28.3
"""What freezing is charged with, seconds of the paper's run: compiling 124M anew takes 28, freezing it 0.3."""
OWN_CLOCK = {"match_clock": "everything"}
"""What an arm says whose own seconds are charged as they are, and what a speed in their place is given with."""


def set_speed(ratio: float, *, scale: str) -> dict[str, Any]:
    """Return what an arm at matched time is told where nobody measured its speed, at a scale of that name."""
    source = f"set for the {scale} scale, not measured"
    return {**OWN_CLOCK, "match_speed": ratio, "match_speed_source": source}


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Describe one measured pair: an arm's updates beside ordinary ones."""

    length: int
    """Tokens of context."""
    batch_size: int
    way: str
    """The backend of frozen heads, or pruned."""
    rate: float
    ratio: float
    """Updates that it does while ordinary attention does one."""
    model: str
    source: str
    """The file."""

    @property
    def described(self) -> str:
        """Return the pair in words."""
        point = f"{self.length:,} tokens x {self.batch_size}"
        return f"{self.ratio:.4f} at {self.rate:.0%} {self.way}, {point}, {self.model} ({self.source})"


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Hold measured speeds, and what an arm that freezes or prunes is charged with beside them."""

    found: tuple[Speed, ...]
    charge_seconds: float = CHARGE_SECONDS
    """Of an event and of compiling after it, in seconds of the paper's 187.65 minutes."""

    @classmethod
    def read(cls, files: Iterable[Path], charge_seconds: float = CHARGE_SECONDS) -> "Speeds":
        """Return the speeds that files of `saf bench update` hold, of updates that are called.

        Raises:
            InputError: A file is of something else, or all that it timed was refused.
        """
        found: list[Speed] = []
        for path in files:
            rows = [row for row in accepted_pairs(path) if row["variant"] == "update"]
            if not rows:
                raise InputError(f"{path} has no accepted speed of frozen or pruned heads; measure again")
            # Of several kernels the first is the one that ratios are stated for.
            rows = [row for row in rows if row["kernel"] == rows[0]["kernel"]]
            found += [
                Speed(
                    length=row["point"]["length"],
                    batch_size=row["point"]["batch_size"],
                    way=row["backend"],
                    rate=row["rate"],
                    ratio=row["ratio"],
                    model=row["model"],
                    source=str(path),
                )
                for row in rows
            ]
        pairs = [(each.length, each.batch_size, each.way, each.rate) for each in found]
        if twice := {pair for pair in pairs if pairs.count(pair) > 1}:
            raise InputError(
                f"the files tell twice of {sorted(twice)} (tokens, sequences, way, rate); name one of them"
            )
        return cls(found=tuple(found), charge_seconds=charge_seconds)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Speeds":
        """Return what `to_dict` gave."""
        return cls(found=tuple(Speed(**each) for each in values["found"]), charge_seconds=values["charge_seconds"])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"found": [asdict(each) for each in self.found], "charge_seconds": self.charge_seconds}

    @property
    def name(self) -> str:
        """Return eight digits that differ for other speeds or charges, wherever the files lie."""
        deciding = [(each.length, each.batch_size, each.way, each.rate, each.ratio) for each in self.found]
        text = json.dumps([sorted(deciding), self.charge_seconds])
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def settings(self, run: Mapping[str, Any], rate: float | None) -> dict[str, Any] | None:
        """Return what an arm at matched time is told in place of a clock; None where no pair of it was measured.

        Args:
            run: All settings of its run.
            rate: The share of heads that it freezes or prunes at once; None for an ordinary arm, whose speed is 1.

        Raises:
            InputError: Pairs of its context were measured at several batch sizes, none of them its own.
        """
        if rate is None:
            return {**OWN_CLOCK, "match_speed": 1.0, "match_speed_source": "ordinary: its reference's speed"}
        backend = run.get("freeze.backend", "auto")
        way = PRUNED if run.get("freeze.operation") == "prune" else "toeplitz" if backend == "auto" else backend
        alike = [each for each in self.found if (each.length, each.way, each.rate) == (run["length"], way, rate)]
        fitting = [each for each in alike if each.batch_size == run["batch_size"]] or alike
        if len(fitting) > 1:
            told = "; ".join(each.described for each in fitting)
            raise InputError(
                f"several speeds fit runs of {run['length']:,} tokens x {run['batch_size']}: {told}; name one"
            )
        if not fitting:
            return None
        told = {"match_speed": fitting[0].ratio, "match_speed_source": fitting[0].source}
        return {**OWN_CLOCK, **told, "match_charge_seconds": self.charge_seconds}

    def described(self) -> str:
        """Return a sentence for the table."""
        told = "; ".join(each.described for each in self.found)
        return (
            f"Arms at matched time do as many updates as their measured speed buys; each event is charged with "
            f"{self.charge_seconds:g} s of the paper's 187.65 minutes. Speeds: {told}."
        )
