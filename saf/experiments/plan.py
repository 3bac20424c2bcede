"""From recipes to runs: each once however many tables it stands in, parents before the runs that go on from them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from saf.errors import InputError
from saf.experiments.columns import COLUMNS
from saf.experiments.examples import Examples, finetuning_settings, is_of_files, work_of
from saf.experiments.planned_run import PlannedRun, events_of, run_key
from saf.experiments.recipe import Arm, Flags, Recipe
from saf.experiments.scales import Scale
from saf.experiments.speeds import set_speed
from saf.schedules import OneTime

MOST_READ = 4
"""How often a run may read its training text before its plan says so."""
OTHER_VOCABULARY = 0.01
"""The share by which a vocabulary may differ from the scale's, which is rounded up, before a plan says so."""


@dataclass(kw_only=True)
class Plan:
    """Hold the runs of some recipes at one scale, parents first, and which run each arm and seed is."""

    scale: Scale
    data: str
    """Fingerprint of the prepared data."""
    folder: Path | None = None
    """Of the prepared data, where it is known."""
    questions: Path | None = None
    """Folder of the zero-shot tasks' questions; None for the hub's."""
    vocabulary: int | None = None
    """Tokens of the data's tokenizer, where they are known; the scale's otherwise."""
    files: Mapping[str, Examples] = field(default_factory=dict)
    """Examples to finetune on, by task, where they are known."""
    examples: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of these, or of those that a store's runs were finetuned on."""
    seeds: tuple[int, ...] = ()
    fewer: dict[str, int] = field(default_factory=dict)
    """Of recipes with numbers of fewer seeds, how many of these they have."""
    runs: dict[str, PlannedRun] = field(default_factory=dict)
    arms: dict[tuple[str, str, int], str] = field(default_factory=dict)
    """Keys by recipe, arm and seed."""
    left: dict[tuple[str, str], str] = field(default_factory=dict)
    """Why arms, by recipe and name, have no run: the scale has too few tokens for their context, or its measured speeds
    tell nothing of them."""
    shown_times: set[str] = field(default_factory=set)
    """Keys of runs whose times a table shows."""
    notes: list[str] = field(default_factory=list)
    """What was decided of the runs, in sentences."""

    def __post_init__(self):
        """Raise InputError for a seed that no run takes, or that stands twice, whose runs would count as two."""
        if wrong := [seed for seed in self.seeds if not 0 <= seed < 2**63]:
            raise InputError(f"seeds must be whole numbers from 0 to 2^63 - 1; got {wrong[0]}: name another")
        if len(set(self.seeds)) < len(self.seeds):
            raise InputError(f"each seed is named once; got {', '.join(map(str, self.seeds))}")

    def seeds_of(self, name: str) -> tuple[int, ...]:
        """Return the seeds that a recipe is run with."""
        return self.seeds[: self.fewer.get(name)]

    @property
    def clocks(self) -> set[str]:
        """Return the keys of runs whose own time decides what comes of them or of another."""
        own = {run.key for run in self.runs.values() if run.own_clock}
        return own | {run.match for run in self.runs.values() if run.own_clock and run.match}

    def add(self, name: str, arm: Arm, seed: int) -> None:
        """Add the run of one arm and seed; what it needs must be there."""
        if left := [other for other in arm.needs.values() if (name, other) in self.left]:
            self.left[name, arm.name] = f"it needs {left[0]}"
            return
        if arm.parent is None and arm.context in self.scale.too_short:
            self.left[name, arm.name] = self.scale.too_short[arm.context]
            return
        if arm.axis == "none" and seed != self.seeds[0]:
            return
        needed = {other: self._needed(name, arm, other, seed) for other in arm.needs.values()}
        parent = None if arm.parent is None else needed[arm.parent]
        own = merged(arm.settings, arm.scaled.get(self.scale.base, {}))
        if arm.task is not None and parent is not None:
            flags, settings, step = self._finetuned(arm, own, parent, needed[arm.like] if arm.like else None, seed)
        elif parent is not None:
            flags, settings, step = self._continued(name, arm, own, parent, seed)
        else:
            flags, settings, step = self._initial(arm, own, seed)
        if self._by_layers(arm, settings):
            flags, settings = ({**given, "compile": "layers"} for given in (flags, settings))
        match, heads, like = (other and needed[other].key for other in (arm.match, arm.heads, arm.like))
        if match is not None:
            told = self._at_speed(arm, settings, heads)
            if isinstance(told, str):
                self.left[name, arm.name] = told
                return
            flags, settings = merged(flags, told), merged(settings, told)
        data, work = self.data, None
        if arm.task is not None:
            # What is made needs no files, and what a task's files are decides its runs beside their parent.
            data = self.examples.get(arm.task, "") if is_of_files(arm.task) else ""
            files, context = self.files.get(arm.task), int(settings["length"])
            # A run that goes on with its parent's task keeps the task's settings, too.
            taught = parent.settings if parent and parent.settings.get("task") == arm.task else {}
            kept = {name: value for name, value in taught.items() if name.startswith(f"{arm.task}.")}
            work = work_of(arm.task, kept | settings, chooses=like is None, context=context, files=files)
            settings = {"updates": work.updates, **settings}
        key = run_key(flags, data=data, parent=parent and parent.key, step=step, match=match, heads=heads, like=like)
        self.arms[name, arm.name, seed] = key
        before = self.runs.get(key)
        self.runs[key] = PlannedRun(
            key=key,
            flags=flags,
            settings=settings,
            parent=parent and parent.key,
            step=step,
            match=match,
            heads=heads,
            like=like,
            work=work,
            files=self.files.get(arm.task or ""),
            scale=self.scale.name,
            seed=seed,
            vocabulary=self.vocabulary or self.scale.vocabulary,
            tables=(*(before.tables if before else ()), (name, arm.name)),
        )

    def _needed(self, name: str, arm: Arm, other: str, seed: int) -> PlannedRun:
        """Return the run of another arm that an arm needs: of its own seed, or of the first where there is no other.

        On the axis of finetuning a parent that was not finetuned itself is that of the first seed.
        """
        first = self.seeds[0]
        key = self.arms.get((name, other, seed), self.arms.get((name, other, first)))
        assert key is not None, other
        if arm.axis == "finetuning" and other == arm.parent and self.runs[key].work is None:
            key = self.arms[name, other, first]
        return self.runs[key]

    def _by_layers(self, arm: Arm, settings: Flags) -> bool:
        """Return whether a run is compiled by layers: where it has several events, which compile but new layouts then.

        Compiled whole, it would stand still after every event for longer than compiled updates save. The runs that it
        is compared with stay whole, so that recipes share them.
        """
        several = arm.task is None and "compile" not in settings and events_of(settings) > 1
        return several and self.scale.rates.compilation > 0

    def _initial(self, arm: Arm, own: Flags, seed: int) -> tuple[dict[str, Any], dict[str, Any], int | None]:
        """Return what a run from initialisation is told, its settings, and that it goes on from no update."""
        flags = merged(self.scale.flags(arm.context), own)
        flags |= {"seed": seed, "save_at": self.scale.save_at}
        if arm.more:
            flags["updates"] += round(arm.more * flags["updates"])
        return flags, flags, None

    def _continued(
        self, name: str, arm: Arm, own: Flags, parent: PlannedRun, seed: int
    ) -> tuple[dict[str, Any], dict[str, Any], int | None]:
        """Return what a run that goes on pretraining is told, its settings, and the parent's update."""
        step = _branch_update(name, arm, self.scale, parent)
        longer = {"updates": parent.updates + round(arm.more * parent.updates), "lr_start": step} if arm.more else {}
        flags = merged(longer, own) | ({"seed": seed + arm.reseed} if arm.reseed else {})
        plain = {name: value for name, value in parent.settings.items() if not name.startswith("freeze.")}
        return flags, merged(plain, flags), step

    def _finetuned(
        self, arm: Arm, own: Flags, parent: PlannedRun, like: PlannedRun | None, seed: int
    ) -> tuple[dict[str, Any], dict[str, Any], int | None]:
        """Return what a finetuned run is told, what is known of its settings, and that it goes on from the last update.

        Its seed is the plan's first, but on the axis of finetuning and in a chain.
        """
        assert arm.task is not None, arm.name
        varied = seed if arm.axis in ("finetuning", "chain") else self.seeds[0]
        flags = {**own, "task": arm.task, "seed": varied + arm.reseed}
        shape = {name: parent.settings[name] for name in ("model", "model_overrides", "length")}
        taken = {} if like is None else {name: like.flags[name] for name in like.flags if "freeze." not in name}
        return flags, {**shape, **finetuning_settings(arm.task), **taken, **flags}, None

    def _at_speed(self, arm: Arm, settings: Flags, heads: str | None) -> dict[str, Any] | str:
        """Return what an arm at matched time is told in place of its own clock, or why the scale has no speed of it."""
        if "match_speed" in settings:
            return {}
        rate = settings.get("freeze.rate") if heads is None else self.runs[heads].settings["freeze.rate"]
        if self.scale.speeds is None:
            given = self.scale.set_speed
            return {} if given is None else set_speed(given if rate else 1.0, scale=self.scale.base)
        if arm.on_own_clock:
            return "no speed stands for its own seconds"
        if events_of(settings) > 1:
            return "a speed is of heads that are all frozen at once"
        return self.scale.speeds.settings(settings, rate) or "no speed of it was measured"


def plan(
    recipes: Mapping[str, Recipe],
    scale: Scale,
    *,
    data: str,
    seeds: Iterable[int] = (),
    arms: tuple[str, ...] = (),
    vocabulary: int | None = None,
    files: Mapping[str, Examples] | None = None,
    examples: Mapping[str, str] | None = None,
) -> Plan:
    """Return the runs that recipes need at a scale.

    Args:
        recipes: By name.
        scale: How large their runs are.
        data: Fingerprint of the prepared data that they train on.
        seeds: Of the runs; the scale's own when empty, of which a recipe may have fewer.
        arms: Names of the arms to run, with what they go on from and are compared with; all of them when empty.
        vocabulary: Tokens of the data's tokenizer, for what is foretold of time and memory; the scale's when None.
        files: Examples to finetune on, by task.
        examples: Instead of files, the fingerprints of those that a store's runs were finetuned on.

    Raises:
        InputError: A seed below 0 or named twice, an unknown arm or context, a moment at which the scale keeps no
            checkpoint, or tokens or measured speeds that leave out an arm that was named, or all.
    """
    files, named = files or {}, tuple(seeds)
    made = Plan(
        scale=scale,
        data=data,
        vocabulary=vocabulary,
        seeds=named or scale.seeds,
        files=files,
        examples=examples or {task: each.fingerprint for task, each in files.items()},
    )
    made.fewer |= {name: one.seeds for name, one in recipes.items() if one.seeds is not None and not named}
    chosen = {name: recipe.chosen(arms, smoke=scale.base == "smoke") for name, recipe in recipes.items()}
    if scale.speeds is not None and not any(arm.match for its in chosen.values() for arm in its):
        raise InputError("speeds have no effect where no arm is at matched time; leave them out")
    if scale.tokens and not any(chosen.values()):
        raise InputError(f"--tokens {scale.tokens} has no effect where nothing is trained; leave it out")
    for seed in made.seeds:
        for name, its in chosen.items():
            for arm in its if seed in made.seeds_of(name) else ():
                made.add(name, arm, seed)
    _tell_left(made, named=arms)
    for (name, _, _), key in made.arms.items():
        if any(COLUMNS[column].timed for column in recipes[name].columns if column in COLUMNS):
            made.shown_times.add(key)
    return made


def notes_of_data(made: Plan, *, tokens: int, vocabulary: int) -> list[str]:
    """Return what a plan's data mean for its runs, in sentences: tokens read many times, or another vocabulary.

    Args:
        made: The plan.
        tokens: Of the training text.
        vocabulary: Tokens of the data's tokenizer.
    """
    scale, notes = made.scale, []
    longest = max((run.updates * run.tokens_per_update for run in made.runs.values() if run.work is None), default=0.0)
    if longest > MOST_READ * tokens:
        fewer = ", or ask for shorter runs (--tokens)" if scale.resizable else ""
        notes.append(
            f"The training text has {tokens:,} tokens and the longest run trains on {longest:,.0f}, so that it reads "
            f"each {longest / tokens:,.0f} times: its perplexities tell little of text read once. Prepare more{fewer}."
        )
    if made.runs and abs(vocabulary / scale.vocabulary - 1) > OTHER_VOCABULARY:
        notes.append(
            f"The data have a vocabulary of {vocabulary:,} tokens where the scale {scale.base!r} means "
            f"{scale.vocabulary:,}: models are of another size, and perplexities are of other tokens."
        )
    return notes


def _tell_left(made: Plan, *, named: tuple[str, ...]) -> None:
    """Say in a plan's notes which arms were left out; raise InputError for one that was named, or when none is left."""
    for (name, arm), why in made.left.items():
        if arm in named:
            raise InputError(f"{name}/{arm} cannot be run as the scale was changed: {why}")
    if made.left and not made.runs:
        raise InputError(f"nothing is left to run: {next(iter(made.left.values()))}")
    for of, why in dict.fromkeys((name, why) for (name, _), why in made.left.items()):
        left = ", ".join(arm for (name, arm), said in made.left.items() if (name, said) == (of, why))
        made.notes.append(f"{of}, left out because {why}: {left}.")


def _branch_update(name: str, arm: Arm, scale: Scale, parent: PlannedRun) -> int:
    """Return the parent's update that an arm goes on from; raise InputError when no checkpoint is kept there."""
    at = 0.5 if arm.at is None else float(arm.at)
    moments = kept_moments(parent, scale)
    if at not in moments:
        kept = ", ".join(f"{share:g}" for share in moments)
        raise InputError(f"{name}/{arm.name} goes on from {at:g} of its parent's updates; {arm.parent} keeps {kept}")
    return OneTime(at=at).first_update(parent.updates)


def kept_moments(run: PlannedRun, scale: Scale) -> tuple[float, ...]:
    """Return the shares of a run's updates whose checkpoints are kept: its last one's alone where it has a parent."""
    return (1.0,) if run.parent is not None else (*scale.save_at, 1.0)


def merged(settings: Flags, changes: Flags) -> dict[str, Any]:
    """Return settings with some changed; of dictionaries of settings, such as model_overrides, those named alone."""
    changed = {
        name: {**settings[name], **value} if isinstance(value, dict) and name in settings else value
        for name, value in changes.items()
    }
    return {**settings, **changed}
