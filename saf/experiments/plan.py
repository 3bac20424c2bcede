"""From recipes to runs: each run once however many tables it stands in, parents before the runs that go on from them.

A run's key is the hash of what decides its outcome: its settings, its data, and its parent's key and checkpoint. Equal
arms of two recipes are one run, and a run that is in the store is not made again.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from saf.errors import InputError
from saf.experiments.recipe import Arm, Flags, Recipe, Scale
from saf.freezing.config import FreezeConfig
from saf.models import preset
from saf.models.config import GPTConfig
from saf.schedules import OneTime
from saf.train.config import TrainConfig

SCHEMA = "saf.experiment/1"
"""Of keys and of the store; another version's runs are not this one's."""
_FREE = ("log_every", "quiet", "tensorboard", "keep", "save_at")
"""Settings that decide what is shown and kept, not what is computed."""

TRAINING_FLOPS = 4.0e14
"""FLOP/s assumed of one GPU: 124M trains at 4.3e14 on an H200 in bfloat16 (docs/results.md), smaller models slower."""
STATE_BYTES = 16
"""Bytes a parameter: float32 weight, gradient, and AdamW's two moments."""
ACTIVATION_BYTES = 45
"""Bytes a token, layer and channel: what the peak of 124M at 8 x 4,096 (14.3 GiB) leaves beside its state."""


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """Describe one run of `saf pretrain`."""

    key: str
    flags: Flags
    """What it is told, beside its data, folder and parent."""
    settings: Flags
    """The same with what it takes over from its parents."""
    parent: str | None
    """The key of the run that it goes on from."""
    step: int | None
    """The parent's update that it goes on from."""
    match: str | None
    """The key of the run whose time it gets."""
    heads: str | None = None
    """The key of the run whose heads it has."""
    scale: str
    seed: int
    tables: tuple[tuple[str, str], ...]
    """The recipes that it stands in, each with the name of its arm there."""

    @property
    def title(self) -> str:
        """Return the run in words: where it stands first, and its seed."""
        recipe, arm = self.tables[0]
        more = f" and {len(self.tables) - 1} more" if len(self.tables) > 1 else ""
        return f"{recipe}/{arm}{more}, seed {self.seed}"

    @property
    def shape(self) -> GPTConfig:
        """Return the model's shape, with the preset's vocabulary unless the settings name another."""
        overrides = dict(self.settings.get("model_overrides", {}))
        return preset(self.settings["model"], **{"max_length": self.settings["length"], **overrides})

    @property
    def updates(self) -> int:
        """Return the updates of the whole schedule."""
        return int(self.settings["updates"])

    @property
    def micro_batch_tokens(self) -> int:
        """Return the tokens of a micro-batch."""
        return int(self.settings.get("batch_size", TrainConfig.batch_size)) * int(self.settings["length"])

    @property
    def tokens_per_update(self) -> int:
        """Return the tokens of an update."""
        return self.micro_batch_tokens * int(self.settings.get("accumulation", TrainConfig.accumulation))

    @property
    def updates_to_do(self) -> int:
        """Return how many updates are its own."""
        return self.updates - (self.step or 0)

    @property
    def predicted_seconds(self) -> float:
        """Return its time on one GPU of `TRAINING_FLOPS`, as if all heads were live, without compilation."""
        per_token = self.shape.flops_per_token(self.shape.max_length)
        return self.updates_to_do * self.tokens_per_update * per_token / TRAINING_FLOPS

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
    seeds: tuple[int, ...] = ()
    runs: dict[str, PlannedRun] = field(default_factory=dict)
    arms: dict[tuple[str, str, int], str] = field(default_factory=dict)
    """Keys by recipe, arm and seed."""

    def add(self, name: str, arm: Arm, seed: int) -> None:
        """Add the run of one arm and seed; its parent must be there."""
        parent = None if arm.parent is None else self.runs[self.arms[name, arm.parent, seed]]
        if parent is None:
            flags = merged(self.scale.flags(arm.context), arm.settings)
            flags |= {"seed": seed, "save_at": self.scale.save_at}
            step, settings = None, flags
        else:
            step = _branch_update(name, arm, self.scale, parent.updates)
            longer = (
                {"updates": parent.updates + round(arm.more * parent.updates), "lr_start": step} if arm.more else {}
            )
            flags = merged(longer, arm.settings)
            settings = merged(parent.settings, flags)
        match, heads = (None if other is None else self.arms[name, other, seed] for other in (arm.match, arm.heads))
        key = run_key(flags, data=self.data, parent=parent and parent.key, step=step, match=match, heads=heads)
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
            scale=self.scale.name,
            seed=seed,
            tables=(*(before.tables if before else ()), (name, arm.name)),
        )


def plan(
    recipes: Mapping[str, Recipe],
    scale: Scale,
    *,
    data: str,
    seeds: Iterable[int] = (),
    arms: tuple[str, ...] = (),
) -> Plan:
    """Return the runs that recipes need at a scale.

    Args:
        recipes: By name.
        scale: How large their runs are.
        data: Fingerprint of the prepared data that they train on.
        seeds: Of the runs; the scale's own when empty.
        arms: Names of the arms to run, with what they go on from and are compared with; all of them when empty.

    Raises:
        InputError: An unknown arm or context, or a moment at which the scale keeps no checkpoint.
    """
    made = Plan(scale=scale, data=data, seeds=tuple(seeds) or scale.seeds)
    for seed in made.seeds:
        for name, recipe in recipes.items():
            for arm in recipe.chosen(arms, smoke=scale.name == "smoke"):
                made.add(name, arm, seed)
    return made


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
) -> str:
    """Return the hash, 16 digits, of what decides a run's outcome."""
    deciding = {name: value for name, value in flags.items() if name not in _FREE and not _is_default(name, value)}
    others = [match] if heads is None else [match, heads]
    text = json.dumps([SCHEMA, deciding, data, parent, step, *others], sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_default(name: str, value: Any) -> bool:
    """Return whether a setting of freezing is what it would be anyway, so that writing it down makes no other run."""
    group, _, field_name = name.partition(".")
    return group == "freeze" and field_name != "rate" and getattr(FreezeConfig(), field_name, None) == value


def _branch_update(name: str, arm: Arm, scale: Scale, updates: int) -> int:
    """Return the parent's update that an arm goes on from; raise InputError when no checkpoint is kept there."""
    if arm.at not in (*scale.save_at, 1.0):
        kept = ", ".join(f"{share:g}" for share in (*scale.save_at, 1.0))
        raise InputError(f"{name}/{arm.name} goes on from {arm.at:g} of its parent's updates; runs keep {kept}")
    return OneTime(at=float(arm.at)).first_update(updates)
