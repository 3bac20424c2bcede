"""Packing a plan into what a user has of a GPU: budgets of minutes, each used in commands with a limit of their own.

A budget is one stay on a machine: folders of runs live as long as it, records longer. So a parent is packed together
with the arms that go on from it; where they are more than a budget holds, the next one trains the parent again. In a
command no run is begun that would not end before the command's limit, unless it is longer than any command and the
first on its GPU: then it stops at the limit with a checkpoint, and the next command resumes it. Other GPUs go on.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from saf.errors import InputError
from saf.experiments.plan import Plan
from saf.experiments.planned_run import PlannedRun
from saf.records.quantities import gibibytes
from saf.records.table import Table
from saf.train.observer import duration

Lacks = Callable[[PlannedRun], Mapping[str, str]]
"""Why runs that a run goes on from cannot be used, by their keys."""
RESERVE = 30.0
"""Seconds of a command that are kept back for runs that stop at its limit to write their checkpoints."""


def check_command(seconds: float | None) -> None:
    """Raise InputError for a command's seconds that leave none to train in; None is no limit."""
    if seconds is not None and seconds <= RESERVE:
        raise InputError(
            f"a command of {seconds:g} s leaves no time beside the {RESERVE:g} s that are kept for checkpoints; "
            "allow more with --command-minutes"
        )


@dataclass(frozen=True, kw_only=True)
class Item:
    """Describe a part of a command: a run, or the part of it until the limit."""

    run: PlannedRun
    lane: int
    """The GPU."""
    begins: float
    """Seconds after the command's beginning."""
    seconds: float
    stops: bool
    """Whether it stops at the limit, to be resumed by the next command."""


@dataclass(kw_only=True)
class Stay:
    """Hold what one budget is used for: runs by command, in the order in which they begin."""

    runs: list[PlannedRun]
    commands: list[list[Item]]
    again: frozenset[str] = frozenset()
    """Keys of runs that are trained for their checkpoints alone: their records are there by then."""

    @property
    def seconds(self) -> float:
        """Return how long the commands take together."""
        return sum(length(command) for command in self.commands)


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Say how a plan is packed: seconds of a run, GPUs, and seconds of a command and of a budget, None for no limit."""

    seconds: Callable[[PlannedRun], float]
    lanes: int = 1
    command: float | None = None
    budget: float | None = None
    left: float | None = None
    """What is left of the first budget, where a part of it is used."""

    def __post_init__(self):
        """Raise InputError for limits that leave no time."""
        check_command(self.command)
        if self.budget is not None and self.budget <= 0:
            raise InputError(f"a budget must be above 0 minutes; got {self.budget / 60:g}")

    def stays(self, missing: Sequence[PlannedRun], plan: Plan, lacks: Lacks) -> list[Stay]:
        """Return the budgets that missing runs take; one without a budget, none when nothing is missing.

        The first one may be empty, where what is left of it is too short for any.

        Args:
            missing: Runs without a record, parents first.
            plan: With the runs that they go on from.
            lacks: Of the store as it is; later budgets begin with an empty one.

        Raises:
            InputError: A run does not fit into a budget with those that it goes on from.
        """
        lacks = _once(lacks)
        packed: list[list[PlannedRun]] = [[]]
        for group in _families(missing, plan):
            self._place(group, packed, plan, lacks)
        made, seen, wanted = [], set(), {run.key for run in missing}
        for number, runs in enumerate(packed):
            needed = required(runs, plan, lacks if number == 0 else all_lost)
            again = frozenset(run.key for run in needed if run.key not in wanted or run.key in seen)
            made.append(Stay(runs=needed, commands=self.commands(needed), again=again))
            seen |= {run.key for run in needed}
        return made if missing else []

    def _place(self, group: list[PlannedRun], packed: list[list[PlannedRun]], plan: Plan, lacks: Lacks) -> None:
        """Add a parent with its arms to the first budget that has room for all, else to as many new ones as needed."""

        def seconds(runs: list[PlannedRun], number: int) -> float:
            needed = required(runs, plan, lacks if number == 0 else all_lost)
            return sum(map(length, self.commands(needed)))

        def fits(runs: list[PlannedRun], number: int) -> bool:
            budget = self.left if number == 0 and self.left is not None else self.budget
            return budget is None or seconds(runs, number) <= budget

        for number, before in enumerate([*packed, []]):
            if fits([*before, *group], number):
                packed[number : number + 1] = [[*before, *group]]
                return
        if packed[-1]:
            packed.append([])
        for run in group:
            if not fits([*packed[-1], run], len(packed) - 1):
                packed.append([])
                if not fits([run], len(packed) - 1):
                    takes = duration(seconds([run], len(packed) - 1))
                    shorter = ", or ask for shorter runs (--tokens)" if plan.scale.resizable else ""
                    raise InputError(
                        f"{run.title} takes {takes} with the runs that it goes on from, more than a budget of "
                        f"{duration(self.budget or 0)}; allow more minutes{shorter}"
                    )
            packed[-1].append(run)

    def commands(self, runs: Sequence[PlannedRun]) -> list[list[Item]]:
        """Return what each command does of some runs, parents first, each on the GPU that is free first."""
        waiting, left = list(runs), {run.key: self.seconds(run) for run in runs}
        limit = float("inf") if self.command is None else self.command - RESERVE
        commands: list[list[Item]] = []
        while waiting:
            command: list[Item] = []
            free, ends = [0.0] * self.lanes, {run.key: float("inf") for run in waiting}
            idle = list(waiting)
            while item := self._next(idle, command, left, free, ends, limit):
                command.append(item)
                idle.remove(item.run)
                free[item.lane] = item.begins + item.seconds
                if item.stops:
                    left[item.run.key] -= item.seconds
                else:
                    ends[item.run.key] = free[item.lane]
                    waiting.remove(item.run)
            commands.append(command)
        return commands

    def _next(
        self,
        idle: Sequence[PlannedRun],
        command: Sequence[Item],
        left: Mapping[str, float],
        free: Sequence[float],
        ends: Mapping[str, float],
        limit: float,
    ) -> Item | None:
        """Return the run that begins next in a command, the first of those that can begin earliest; None for none.

        `idle` are those that have not begun in it.
        """
        lane = min(range(len(free)), key=free.__getitem__)
        used = any(item.lane == lane for item in command)
        best: Item | None = None
        for run in idle:
            begins = max([free[lane], *(ends.get(key, 0.0) for key in run.needs)])
            seconds = left[run.key]
            stops = begins + seconds > limit
            if begins >= limit or (stops and (used or seconds <= limit)):
                continue
            if best is None or begins < best.begins:
                part = limit - begins if stops else seconds
                best = Item(run=run, lane=lane, begins=begins, seconds=part, stops=stops)
        return best


def length(command: Sequence[Item]) -> float:
    """Return the seconds of a command."""
    return max((item.begins + item.seconds for item in command), default=0.0)


def required(runs: Iterable[PlannedRun], plan: Plan, lacks: Lacks) -> list[PlannedRun]:
    """Return runs with those that must be trained, or trained again, for them to begin; parents first."""
    needed = {run.key for run in runs}
    # Children stand after their parents, so that a lost grandparent is found through a lost parent.
    for run in reversed(plan.runs.values()):
        if run.key in needed:
            needed |= set(lacks(run))
    return [run for run in plan.runs.values() if run.key in needed]


def all_lost(run: PlannedRun) -> dict[str, str]:
    """Return that no folder is kept of the runs that a run goes on from: a later budget begins on another machine.

    Records are kept, and with them the heads of a run.
    """
    return {key: "it is of another stay" for key in (run.parent, run.match, run.like) if key}


def _once(lacks: Lacks) -> Lacks:
    """Return the same answer for a run every time: sums of a checkpoint's files take seconds."""
    known: dict[str, Mapping[str, str]] = {}

    def answer(run: PlannedRun) -> Mapping[str, str]:
        if run.key not in known:
            known[run.key] = lacks(run)
        return known[run.key]

    return answer


def runs_in_words(runs: int, of: int, again: int) -> str:
    """Return how many of all runs are meant, and how many parents with them are trained once more than that.

    >>> runs_in_words(54, 59, 0), runs_in_words(59, 59, 5)
    ('54 of 59 runs', '59 of 59 runs, and 5 parents again for their checkpoints,')
    """
    more = f", and {again} parent{'s' * (again > 1)} again for {'their' if again > 1 else 'its'} checkpoints,"
    return f"{runs} of {of} runs{more if again else ''}"


def packing_table(stays: Sequence[Stay], packing: Packing, plan: Plan) -> Table:
    """Return what runs when: a row a run, with its budget, command, GPU and minutes."""
    rows = []
    for stay, of in enumerate(stays, 1):
        for number, command in enumerate(of.commands, 1):
            for item in command:
                told = "again, for its checkpoints" if item.run.key in of.again else None
                told = "stops, goes on in the next command" if item.stops else told
                memory = gibibytes(item.run.predicted_bytes)
                times = [f"{item.begins / 60:.1f}", f"{item.seconds / 60:.1f}"]
                rows.append([stay, number, item.lane, item.run.title, item.run.updates_to_do, *times, memory, told])
    heads = ["budget", "command", "GPU", "run", "updates", "begins, min", "takes, min", "memory", "note"]
    hidden = [name for name, shown in (("budget", packing.budget), ("command", packing.command)) if shown is None]
    hidden += ["GPU"] if packing.lanes == 1 else []
    table = Table.of(f"Plan ({plan.scale.name}: {plan.scale.text})", heads, rows).without(hidden)
    return table.used(keep=("run",))


def _families(missing: Sequence[PlannedRun], plan: Plan) -> list[list[PlannedRun]]:
    """Return runs by the one from initialisation that they go on from, in the order of the plan."""

    def root(run: PlannedRun) -> str:
        while run.parent is not None:
            run = plan.runs[run.parent]
        return run.key

    families: dict[str, list[PlannedRun]] = {}
    for run in missing:
        families.setdefault(root(run), []).append(run)
    return list(families.values())
