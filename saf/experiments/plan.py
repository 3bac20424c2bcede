"""From recipes to runs: each run once however many tables it stands in, parents before the runs that go on from them.

A run's key is the hash of what decides its outcome: its settings, its data, and its parent's key and checkpoint. Equal
arms of two recipes are one run, and a run that is in the store is not made again.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from saf.errors import InputError
from saf.experiments.columns import COLUMNS
from saf.experiments.examples import Examples, Work, finetuning_settings, is_of_files, work_of
from saf.experiments.rates import Rates
from saf.experiments.recipe import Arm, Flags, Recipe, Scale
from saf.freezing.config import FreezeConfig
from saf.models import preset
from saf.models.config import GPTConfig
from saf.schedules import Gradual, OneTime, TrainLoss, ValidationBudget, schedule_from_dict
from saf.train.config import TrainConfig

SCHEMA = "saf.experiment/1"
"""Of keys and of the store; another version's runs are not this one's."""
_FREE = ("log_every", "quiet", "tensorboard", "keep", "save_at", "token_losses", "match_speed_source")
"""Settings that decide what is told, shown and kept, not what is computed."""

STATE_BYTES = 16
"""Bytes a parameter: float32 weight, gradient, and AdamW's two moments."""
ACTIVATION_BYTES = 45
"""Bytes a token, layer and channel: what the peak of 124M at 8 x 4,096 (14.3 GiB) leaves beside its state."""


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """Describe one run of `saf pretrain`, or of `saf finetune`."""

    key: str
    flags: Flags
    """What it is told, beside its data, folder and parent."""
    settings: Flags
    """The same with what it takes over from its parents."""
    parent: str | None
    """The key of the run that it goes on from."""
    step: int | None
    """The parent's update that it goes on from; None is its last."""
    match: str | None
    """The key of the run whose time it gets."""
    heads: str | None = None
    """The key of the run whose heads it has."""
    like: str | None = None
    """The key of the finetuned run whose examples, epochs and settings it takes over."""
    work: Work | None = None
    """What it is expected to do where it finetunes its parent; None pretrains."""
    files: Examples | None = None
    """The examples that it is finetuned on, where they are known."""
    scale: str
    seed: int
    vocabulary: int
    """Tokens of its tokenizer, where its settings name no other."""
    tables: tuple[tuple[str, str], ...]
    """The recipes that it stands in, each with the name of its arm there."""

    @property
    def title(self) -> str:
        """Return the run in words: where it stands first, and its seed."""
        recipe, arm = self.tables[0]
        more = f" and {len(self.tables) - 1} more" if len(self.tables) > 1 else ""
        return f"{recipe}/{arm}{more}, seed {self.seed}"

    @property
    def needs(self) -> frozenset[str]:
        """Return the keys of the runs that must have ended before it begins."""
        return frozenset(key for key in (self.parent, self.match, self.heads, self.like) if key)

    @property
    def verb(self) -> str:
        """Return the command that makes it."""
        return "pretrain" if self.work is None else "finetune"

    @property
    def task(self) -> str | None:
        """Return what it finetunes its parent on; None for pretraining."""
        return None if self.work is None else str(self.settings["task"])

    @property
    def shape(self) -> GPTConfig:
        """Return the model's shape."""
        given = {"vocab_size": self.vocabulary, "max_length": self.settings["length"]}
        return preset(self.settings["model"], **{**given, **self.settings.get("model_overrides", {})})

    @property
    def updates(self) -> int:
        """Return the updates of the whole schedule; to finetune, all that are expected."""
        return int(self.settings["updates"]) if self.work is None else self.work.updates

    @property
    def accumulation(self) -> int:
        """Return the micro-batches of an update."""
        return int(self.settings.get("accumulation", TrainConfig.accumulation))

    @property
    def micro_batch_tokens(self) -> int:
        """Return the tokens of a micro-batch; to finetune, of its largest."""
        longest = int(self.settings["length"])
        if self.work is not None:
            longest = min(longest, int(self.settings.get("max_tokens") or self.work.length))
        return int(self.settings.get("batch_size", TrainConfig.batch_size)) * longest

    @property
    def tokens_per_update(self) -> float:
        """Return the tokens of an update; to finetune, as many as are expected."""
        return self.micro_batch_tokens * self.accumulation if self.work is None else self.work.tokens

    @property
    def updates_to_do(self) -> int:
        """Return how many updates are its own."""
        return self.updates - (self.step or 0)

    @property
    def flops_per_update(self) -> float:
        """Return the FLOPs of one update, as if all heads were live."""
        length = self.shape.max_length if self.work is None else round(self.work.length)
        return self.tokens_per_update * self.shape.flops_per_token(length)

    @property
    def own_clock(self) -> bool:
        """Return whether the seconds that it takes decide how long it trains."""
        return self.match is not None and self.settings.get("match_speed") is None

    def seconds(self, rates: Rates, *, done: int | None = None) -> float:
        """Return what it takes on one GPU, all heads counted as live; `done` is the update that it goes on from."""
        left = self.updates_to_do if done is None else max(0, self.updates - done)
        compiled = self.settings.get("compile", "auto") != "off"
        # A forward pass is a third of an update's arithmetic.
        tested = 0.0 if self.work is None else self.work.tested * self.shape.flops_per_token(self.shape.max_length) / 3
        return rates.seconds(
            left * self.flops_per_update + tested,
            micro_batches=left * self.accumulation,
            events=events_of(self.settings),
            compiled=compiled,
        )

    @property
    def predicted_bytes(self) -> float:
        """Return its peak memory, as if all heads were live."""
        width, layers = self.shape.hidden_size, self.shape.num_layers
        weights = layers * (4 + 2 * self.shape.mlp_ratio) * width**2 + self.shape.vocab_size * width
        return STATE_BYTES * weights + ACTIVATION_BYTES * self.micro_batch_tokens * layers * width


@dataclass(kw_only=True)
class Plan:
    """Hold the runs of some recipes at one scale, parents first, and which run each arm and seed is."""

    scale: Scale
    data: str
    """Fingerprint of the prepared data."""
    vocabulary: int | None = None
    """Tokens of the data's tokenizer, where they are known; the scale's otherwise."""
    files: Mapping[str, Examples] = field(default_factory=dict)
    """Examples to finetune on, by task, where they are known."""
    examples: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of these, or of those that a store's runs were finetuned on."""
    seeds: tuple[int, ...] = ()
    runs: dict[str, PlannedRun] = field(default_factory=dict)
    arms: dict[tuple[str, str, int], str] = field(default_factory=dict)
    """Keys by recipe, arm and seed."""
    left: dict[tuple[str, str], str] = field(default_factory=dict)
    """Why arms, by recipe and name, have no run: the scale's measured speeds tell nothing of them."""
    shown_times: set[str] = field(default_factory=set)
    """Keys of runs whose times a table shows."""
    notes: list[str] = field(default_factory=list)
    """What was decided of the runs, in sentences."""

    @property
    def clocks(self) -> set[str]:
        """Return the keys of runs whose own time decides what comes of them or of another."""
        own = {run.key for run in self.runs.values() if run.own_clock}
        return own | {run.match for run in self.runs.values() if run.own_clock and run.match}

    def add(self, name: str, arm: Arm, seed: int, *, compiled: bool) -> None:
        """Add the run of one arm and seed; what it needs must be there."""
        if left := [other for other in arm.needs.values() if (name, other) in self.left]:
            self.left[name, arm.name] = f"it needs {left[0]}"
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
            flags, settings, step = self._initial(arm, own, seed, compiled=compiled)
        match, heads, like = (other and needed[other].key for other in (arm.match, arm.heads, arm.like))
        if match is not None and self.scale.speeds is not None:
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
            work = work_of(arm.task, settings, chooses=like is None, context=context, files=files)
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

    def _initial(
        self, arm: Arm, own: Flags, seed: int, *, compiled: bool
    ) -> tuple[dict[str, Any], dict[str, Any], int | None]:
        """Return what a run from initialisation is told, its settings, and that it goes on from no update."""
        flags = merged(self.scale.flags(arm.context), own)
        flags |= {"seed": seed, "save_at": self.scale.save_at, **({} if compiled else {"compile": "off"})}
        if arm.more:
            flags["updates"] += round(arm.more * flags["updates"])
        return flags, flags, None

    def _continued(
        self, name: str, arm: Arm, own: Flags, parent: PlannedRun, seed: int
    ) -> tuple[dict[str, Any], dict[str, Any], int | None]:
        """Return what a run that goes on pretraining is told, its settings, and the parent's update."""
        step = _branch_update(name, arm, self.scale, parent.updates)
        longer = {"updates": parent.updates + round(arm.more * parent.updates), "lr_start": step} if arm.more else {}
        flags = merged(longer, own) | ({"seed": seed + arm.reseed} if arm.reseed else {})
        plain = {name: value for name, value in parent.settings.items() if not name.startswith("freeze.")}
        return flags, merged(plain, flags), step

    def _finetuned(
        self, arm: Arm, own: Flags, parent: PlannedRun, like: PlannedRun | None, seed: int
    ) -> tuple[dict[str, Any], dict[str, Any], int | None]:
        """Return what a finetuned run is told, what is known of its settings, and that it goes on from the last update.

        Its seed is the plan's first, but on the axis of finetuning.
        """
        assert arm.task is not None, arm.name
        varied = seed if arm.axis == "finetuning" else self.seeds[0]
        flags = {**own, "task": arm.task, "seed": varied + arm.reseed}
        shape = {name: parent.settings[name] for name in ("model", "model_overrides", "length")}
        taken = {} if like is None else {name: like.flags[name] for name in like.flags if "freeze." not in name}
        return flags, {**shape, **finetuning_settings(arm.task), **taken, **flags}, None

    def _at_speed(self, arm: Arm, settings: Flags, heads: str | None) -> dict[str, Any] | str:
        """Return what an arm at matched time is told with the scale's measured speeds, or why there is none of it."""
        assert self.scale.speeds is not None, arm.name
        if "match_speed" in settings:
            return {}
        if arm.on_own_clock:
            return "no speed stands for its own seconds"
        if events_of(settings) > 1:
            return "a speed is of heads that are all frozen at once"
        rate = settings.get("freeze.rate") if heads is None else self.runs[heads].settings["freeze.rate"]
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
        seeds: Of the runs; the scale's own when empty.
        arms: Names of the arms to run, with what they go on from and are compared with; all of them when empty.
        vocabulary: Tokens of the data's tokenizer, for what is foretold of time and memory; the scale's when None.
        files: Examples to finetune on, by task.
        examples: Instead of files, the fingerprints of those that a store's runs were finetuned on.

    Raises:
        InputError: An unknown arm or context, a moment at which the scale keeps no checkpoint, or measured speeds that
            tell nothing of an arm that was named.
    """
    files = files or {}
    known = examples or {task: each.fingerprint for task, each in files.items()}
    made = Plan(
        scale=scale, data=data, vocabulary=vocabulary, seeds=tuple(seeds) or scale.seeds, files=files, examples=known
    )
    chosen = {name: recipe.chosen(arms, smoke=scale.base == "smoke") for name, recipe in recipes.items()}
    if scale.speeds is not None and not any(arm.match for its in chosen.values() for arm in its):
        raise InputError("speeds have no effect where no arm is at matched time; leave them out")
    uncompiled = {name for name, its in chosen.items() if _uncompiled(made, name, its)}
    for seed in made.seeds:
        for name, its in chosen.items():
            for arm in its:
                made.add(name, arm, seed, compiled=name not in uncompiled)
    for (name, arm), why in made.left.items():
        if arm in arms:
            raise InputError(f"{name}/{arm} cannot be run at the speeds that were named: {why}")
    for of, why in dict.fromkeys((name, why) for (name, _), why in made.left.items()):
        left = ", ".join(arm for (name, arm), said in made.left.items() if (name, said) == (of, why))
        made.notes.append(f"{of}, left out at these speeds because {why}: {left}.")
    for (name, _, _), key in made.arms.items():
        if any(COLUMNS[column].timed for column in recipes[name].columns if column in COLUMNS):
            made.shown_times.add(key)
    return made


def _uncompiled(plan: Plan, name: str, arms: Iterable[Arm]) -> bool:
    """Return whether the runs of a recipe are not compiled, and tell of it in the plan's notes.

    An arm whose events would compile longer than compiled updates save runs uncompiled, and so do the arms that it is
    compared with, which are those of its recipe. The scale's own rates decide, so that keys are the same everywhere.
    """
    # Of the vocabulary that is meant: a rule that saw the data's would give other keys.
    trial, rates = Plan(scale=replace(plan.scale, speeds=None), data="", seeds=(0,)), plan.scale.rates
    for arm in arms:
        trial.add(name, arm, 0, compiled=True)
        run = trial.runs[trial.arms[name, arm.name, 0]]
        if run.work is not None:
            continue
        events, flops = events_of(run.settings), run.updates_to_do * run.flops_per_update
        if "compile" not in run.settings and rates.better_uncompiled(flops, events=events):
            plan.notes.append(
                f"{name} runs uncompiled: {arm.name} has up to {events} events, which would compile for "
                f"{events * rates.compilation:.0f} s; compiled updates save {rates.saved(flops):.0f} s."
            )
            return True
    return False


def events_of(settings: Flags) -> int:
    """Return how many events a run may have at most, by the settings of its schedule; 0 where no heads change."""
    if not any(name.startswith("freeze.") for name in settings):
        return 0
    name = settings.get("schedule", OneTime.name)
    fields = {key.rpartition(".")[2]: value for key, value in settings.items() if key.startswith(f"schedule.{name}.")}
    schedule = schedule_from_dict({"name": name, **fields})
    updates = int(settings["updates"])
    if isinstance(schedule, Gradual):
        return schedule.groups
    if isinstance(schedule, ValidationBudget):
        share = schedule.every if isinstance(schedule.every, float) else schedule.every / updates
        return round((1 - schedule.first_update(updates) / updates) / share)
    if isinstance(schedule, TrainLoss):
        return round(min(schedule.cap, float(settings.get("freeze.rate", schedule.cap))) / schedule.group)
    return 1


def merged(settings: Flags, changes: Flags) -> dict[str, Any]:
    """Return settings with some changed; of dictionaries of settings, such as model_overrides, those named alone."""
    changed = {
        name: {**settings[name], **value} if isinstance(value, dict) and name in settings else value
        for name, value in changes.items()
    }
    return {**settings, **changed}


def run_key(
    flags: Flags,
    *,
    data: str,
    parent: str | None,
    step: int | None,
    match: str | None = None,
    heads: str | None = None,
    like: str | None = None,
) -> str:
    """Return the hash, 16 digits, of what decides a run's outcome."""
    deciding = {name: value for name, value in flags.items() if name not in _FREE and not _is_default(name, value)}
    others = [match] if heads is None and like is None else [match, heads] if like is None else [match, heads, like]
    text = json.dumps([SCHEMA, deciding, data, parent, step, *others], sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_default(name: str, value: Any) -> bool:
    """Return whether a setting of freezing is what it would be anyway, so that writing it down makes no other run."""
    group, _, field_name = name.partition(".")
    return group == "freeze" and field_name != "rate" and getattr(FreezeConfig(), field_name, None) == value


def _branch_update(name: str, arm: Arm, scale: Scale, updates: int) -> int:
    """Return the parent's update that an arm goes on from; raise InputError when no checkpoint is kept there."""
    at = 0.5 if arm.at is None else float(arm.at)
    if at not in (*scale.save_at, 1.0):
        kept = ", ".join(f"{share:g}" for share in (*scale.save_at, 1.0))
        raise InputError(f"{name}/{arm.name} goes on from {at:g} of its parent's updates; runs keep {kept}")
    return OneTime(at=at).first_update(updates)
