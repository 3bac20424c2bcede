"""What a command of `saf run` may use, and what that makes of a plan: rates, GPUs to run on, commands and budgets."""

from dataclasses import dataclass, field, replace
from typing import Annotated

from saf.arguments import above, at_least, check_fields
from saf.errors import InputError
from saf.experiments.execution import Lanes
from saf.experiments.packing import Packing, check_command
from saf.experiments.plan import Plan
from saf.experiments.planned_run import events_of
from saf.experiments.rates import Measured, Rates
from saf.experiments.store import Store
from saf.settings import FLAT


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Say how long a command may take, how runs share GPUs, and how fast these are known to be."""

    command_minutes: Annotated[float | None, above(0)] = None
    """End this command within so many minutes: a run that would not end in time is left for the next one."""
    budget_minutes: Annotated[float | None, above(0)] = None
    """Minutes on this machine, counted from the first command that names them: parents are packed with their arms, and
    only what fits is begun. Folders of runs may be lost after it, records are to be kept."""
    jobs: Annotated[int, at_least(1)] = 1
    """Runs at a time on one GPU, but for those whose time matters, which have it for themselves."""
    quality_only: bool = False
    """With --jobs, let runs share a GPU whose times a table would show: these times are left out."""
    measured: Annotated[Measured, FLAT] = field(default_factory=Measured)
    """What runs take, where it was measured."""

    def __post_init__(self):
        """Raise InputError for what cannot be used, and for what would have no effect."""
        check_fields(self)
        check_command(self.command_seconds)
        if self.quality_only and self.jobs == 1:
            raise InputError("quality_only has no effect without jobs above 1, which lets runs share a GPU")

    @property
    def command_seconds(self) -> float | None:
        """Return how long the command may take; None without a limit."""
        return None if self.command_minutes is None else 60 * self.command_minutes

    @property
    def budget_seconds(self) -> float | None:
        """Return how long a budget is; None without one."""
        return None if self.budget_minutes is None else 60 * self.budget_minutes

    def here(self, made: Plan) -> bool:
        """Return whether runs are made in this process, where starting one would take longer than the run."""
        return made.scale.base == "smoke" and self.jobs == 1

    def lanes(self, made: Plan) -> Lanes:
        """Return where runs are made: one at a time here, or on every GPU."""
        alone = made.clocks | (set() if self.quality_only else made.shown_times)
        if self.here(made):
            return Lanes()
        return Lanes.of_this_machine(self.jobs, alone, made.runs.values())

    def rates(self, made: Plan, store: Store) -> Rates:
        """Return what runs take: as named, else as ended ordinary runs of the plan measured, else as the scale says."""
        if not made.runs:
            return made.scale.rates
        shortest = min(made.runs.values(), key=lambda run: run.shape.max_length)
        rates = _as_recorded(made, store) or made.scale.rates
        return self.measured.applied(rates, flops_per_token=shortest.shape.flops_per_token(shortest.shape.max_length))

    def packing(self, made: Plan, store: Store, rates: Rates, *, lanes: int, left: float | None = None) -> Packing:
        """Return how runs are packed, on so many GPUs; `left` are the seconds left of the budget that is under way."""
        done = {key: store.done(key) for key in made.runs}
        return Packing(
            seconds=lambda run: run.seconds(rates, done=done[run.key]),
            lanes=lanes,
            command=self.command_seconds,
            budget=self.budget_seconds,
            left=left,
        )


def _as_recorded(made: Plan, store: Store) -> Rates | None:
    """Return the scale's rates with the speed of updates that ended ordinary runs recorded; None without any."""
    records = [(run, store.record(run.key)) for run in made.runs.values() if not events_of(run.settings)]
    found = sorted(
        run.flops_per_update / record["update_seconds"]["median"]
        for run, record in records
        if record and record.get("update_seconds") and not record["shared"] and run.settings.get("compile") != "off"
    )
    if not found:
        return None
    told = f"updates as {len(found)} ordinary runs of this store measured, the rest {made.scale.rates.source}"
    return replace(made.scale.rates, flops=found[len(found) // 2], source=told)
