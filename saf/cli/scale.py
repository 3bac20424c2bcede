"""Flags that say which runs of recipes are meant: their scale, their length, and what matched time is."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from saf.arguments import at_least
from saf.errors import InputError
from saf.experiments.scales import Scale, read_tokens, scale_named
from saf.experiments.speeds import CHARGE_SECONDS, Speeds


@dataclass(frozen=True, kw_only=True)
class AtScale:
    """Say at which scale recipes are run or shown."""

    scale: str = "small"
    """paper (its exact settings), small (any prepared folder), or smoke (seconds, on any machine); to `saf report` also
    as records name it, such as small-60M."""
    tokens: str | None = None
    """Shorter or longer runs at the small scale, such as 60M at its shortest context, others in proportion; they are
    other runs, with keys and tables of their own. Arms whose context would get too few updates are left out by name."""
    match_speed: tuple[Path, ...] = ()
    """Files of `saf bench update`: arms at matched time do as many updates as the speed measured there buys, instead of
    running by their own clock, so that they may share a GPU; other runs, with keys and tables of their own."""
    match_charge_seconds: Annotated[float, at_least(0)] = CHARGE_SECONDS
    """With --match-speed, what freezing or pruning and compiling anew are charged with, in seconds of the paper's
    187.65 minutes: by default what was measured of 124M."""

    def __post_init__(self):
        """Raise InputError for a charge that nothing is charged with."""
        if not self.match_speed and self.match_charge_seconds != CHARGE_SECONDS:
            raise InputError("match_charge_seconds has no effect without match_speed, the files of measured speeds")

    def chosen(self) -> Scale:
        """Return the scale; raise InputError for one that there is not, or a file of no speeds."""
        scale = scale_named(self.scale).resized(None if self.tokens is None else read_tokens(self.tokens))
        return scale.at_speeds(Speeds.read(self.match_speed, self.match_charge_seconds)) if self.match_speed else scale
