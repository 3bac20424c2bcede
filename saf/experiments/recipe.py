"""What a recipe is: the arms and measurements of one table or figure, as data, and the scales it can be run at.

A recipe is a module of the folder `recipes` with a `RECIPE`. It says nothing of how runs are made:
`saf.experiments.plan` turns its arms into runs of `saf pretrain` and `saf finetune`, `saf.experiments.render` makes
their table.
"""

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import saf
from saf.errors import InputError
from saf.experiments.measurement import Measurement, RecordOf
from saf.experiments.rates import Rates
from saf.experiments.speeds import OWN_CLOCK, Speeds
from saf.freezing.config import BUDGETS
from saf.records.paper import Source

Flags = Mapping[str, Any]
"""Settings of a run by the names of its command's flags, without dashes: {"freeze.rate": 0.25, "batch_size": 8}."""
Axis = Literal["pretraining", "finetuning", "none"]
"""Which seed of an arm varies; that of the other stage is the plan's first, so that the two are never pooled."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Describe one row of a table: a run for each seed."""

    name: str
    """By which other arms and `--arms` name it."""
    settings: Flags = field(default_factory=dict)
    """What it changes: of the scale's settings, or of its parent's."""
    scaled: Mapping[str, Flags] = field(default_factory=dict)
    """What it changes further at single scales, by their names."""
    parent: str | None = None
    """The arm whose run it goes on from; None starts from initialisation."""
    at: float | None = None
    """The share of the parent's updates after which it does; None is half of them, and the end to finetune."""
    task: str | None = None
    """What it finetunes its parent on; None pretrains on text."""
    like: str | None = None
    """The finetuned ordinary arm whose examples, epochs and settings it takes over; None chooses its own."""
    axis: Axis = "pretraining"
    """Which seed varies: that of pretraining; that of finetuning, from the parent of the plan's first seed; or none, a
    run of the first seed alone."""
    report: int | None = None
    """Which of the reports that its run made before the end its row is of, counted from 0; None is the end."""
    row: bool = True
    """Whether the table shows it; an arm that others go on from alone needs none."""
    more: float = 0.0
    """Updates that it adds to its parent's whole schedule, as a share of them; its learning rate begins anew there.
    Without a parent, those that it adds to the scale's."""
    match: str | None = None
    """The arm whose time it gets, from its parent on; None trains as many updates as the scale says."""
    reseed: int = 0
    """What is added to the seed from its parent on, so that it goes through the data in another order."""
    heads: str | None = None
    """The arm whose heads it freezes or prunes, exactly those; None lets its settings choose."""
    context: int = 4_096
    """Tokens of context in the paper; other scales have their own for it."""
    reference: str | None = "ordinary"
    """The arm, of the same seed, that its perplexity is compared with; None for one that is only compared with."""
    against: str | None = None
    """The arm that its paired difference is taken from, where the paper gives one."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """Other arms that its row is made with, by what they are to it: "raw", the same on the raw clock; "tokens", the
    same at matched tokens; "exchange", the ordinary arm with more tokens. Each has its own reference; `--arms` leaves
    them out unless it names them."""
    paper: Mapping[str, str] = field(default_factory=dict)
    """The paper's numbers, by the names of columns."""
    smoke: bool = True
    """Whether it is run at the smoke scale, which has two values of each axis."""

    @property
    def others(self) -> tuple[str, ...]:
        """Return the arms that its numbers are made with."""
        return tuple(filter(None, (self.reference, self.against, *self.beside.values())))

    @property
    def needs(self) -> dict[str, str]:
        """Return the arms whose runs must have ended before its own begins, by what they are to it, in words."""
        named = {"goes on from": self.parent, "gets the time of": self.match}
        named |= {"has the heads of": self.heads, "is finetuned like": self.like}
        return {what: other for what, other in named.items() if other is not None}

    def obstacle(self) -> str | None:
        """Return what contradicts itself in it; None where nothing does."""
        if (self.match or self.task) and self.parent is None:
            return f"{'gets the time of' if self.match else 'finetunes'} a parent, and names none"
        if self.task and (self.match or self.at is not None or self.more):
            return "finetunes its parent from its end; leave match, at and more out"
        if not self.task and (self.like or self.axis == "finetuning"):
            return "is not finetuned; name its task, or leave like and axis out"
        if self.heads and (said := [f"freeze.{name}" for name in BUDGETS if f"freeze.{name}" in self.settings]):
            return f"has the heads of {self.heads!r}; leave {' and '.join(said)} out"
        return None

    @property
    def on_own_clock(self) -> bool:
        """Return whether it says that its own seconds are charged as they are."""
        own = OWN_CLOCK.items() <= self.settings.items()
        return self.match is not None and own and "match_speed" not in self.settings


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Describe one table or figure: its arms, in the order of its rows, what is shown of each, and what is measured."""

    title: str
    source: Source
    """The paper's table, and the conditions of its numbers."""
    arms: tuple[Arm, ...] = ()
    columns: tuple[str, ...] = ()
    """Names in `saf.experiments.columns.COLUMNS`; without any, arms are only trained to be measured."""
    measurements: tuple[Measurement, ...] = ()
    """Benchmarks and analyses, those that others read before them."""
    also: tuple[str, ...] = ()
    """Labels of the paper's further tables, figures and sections that it answers."""
    notes: tuple[str, ...] = ()
    """Sentences below the table."""

    def __post_init__(self):
        """Raise InputError for two arms of one name, or for an arm that names one that is not there."""
        before: set[str] = set()
        names = [arm.name for arm in self.arms]
        for arm in self.arms:
            if arm.name in before:
                raise InputError(f"{self.title}: two arms are called {arm.name!r}")
            for what, other in arm.needs.items():
                if other not in before:
                    raise InputError(f"{self.title}: arm {arm.name!r} {what} {other!r}, which is no arm before it")
            if problem := arm.obstacle():
                raise InputError(f"{self.title}: arm {arm.name!r} {problem}")
            for other in arm.others:
                if other not in names:
                    raise InputError(
                        f"{self.title}: arm {arm.name!r} is compared with {other!r}, which is no arm of it"
                    )
            before.add(arm.name)
        self._check_measurements(before)

    def _check_measurements(self, arms: set[str]) -> None:
        """Raise InputError for a measurement of a name that is taken, or that reads what is not before it."""
        before: set[str] = set()
        for each in self.measurements:
            if each.name in arms | before:
                raise InputError(f"{self.title}: two arms or measurements are called {each.name!r}")
            read = {of.measurement for of in each.references("") if isinstance(of, RecordOf)}
            for name in (*(set(each.arms("")) - arms), *(read - before)):
                raise InputError(f"{self.title}: {each.name!r} reads {name!r}, which is nothing before it")
            before.add(each.name)

    def chosen(self, names: tuple[str, ...], *, smoke: bool) -> tuple[Arm, ...]:
        """Return the arms asked for with those that they go on from and are compared with; all of them without names.

        Raises:
            InputError: A name that no arm has, with the nearest ones.
        """
        by_name = {arm.name: arm for arm in self.arms}
        measured = {each.name for each in self.measurements}
        wanted = [name for name in names if name not in measured]
        wanted += [] if names else [arm.name for arm in self.arms if arm.smoke or not smoke]
        scale = "smoke" if smoke else ""
        wanted += [name for each in self.chosen_measurements(names, smoke=smoke) for name in each.arms(scale)]
        kept: set[str] = set()
        while wanted:
            name = wanted.pop()
            if name not in by_name:
                raise InputError(f"there is no arm {name!r}; {_nearest(name, [*by_name, *measured])}")
            if name not in kept:
                kept.add(name)
                arm = by_name[name]
                wanted += filter(None, (*arm.needs.values(), arm.reference, arm.against))
        return tuple(arm for arm in self.arms if arm.name in kept)

    def chosen_measurements(self, names: tuple[str, ...], *, smoke: bool) -> tuple[Measurement, ...]:
        """Return the measurements asked for with those that they read; all of them without names."""
        kept: set[str] = set()
        for each in reversed(self.measurements):
            if each.name in names or each.name in kept or (not names and (each.smoke or not smoke)):
                kept |= {each.name, *(of.measurement for of in each.references("") if isinstance(of, RecordOf))}
        return tuple(each for each in self.measurements if each.name in kept)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Describe how large the runs of a recipe are: the settings of every run from initialisation."""

    name: str
    settings: Flags
    """Of every run."""
    contexts: Mapping[int, Flags]
    """Further ones by the paper's context."""
    seeds: tuple[int, ...]
    save_at: tuple[float, ...]
    """The shares of its updates after which every run from initialisation keeps a checkpoint to go on from."""
    text: str
    """What it is trained on, in words."""
    rates: Rates
    """How long its runs take on one GPU."""
    vocabulary: int
    """Tokens of the tokenizer that is meant."""
    resizable: bool = False
    """Whether its runs may be of other lengths than it says."""
    speeds: Speeds | None = None
    """What arms at matched time get instead of a clock of their own; None for their clocks."""

    @property
    def base(self) -> str:
        """Return the name of the scale whose runs were resized, or have other speeds."""
        return self.name.partition("-")[0]

    def at_speeds(self, speeds: Speeds) -> "Scale":
        """Return the scale with measured speeds for arms at matched time; its name says which."""
        return replace(self, name=f"{self.name}-speeds-{speeds.name}", speeds=speeds)

    def resized(self, tokens: int | None) -> "Scale":
        """Return the scale with runs of so many tokens at the shortest context, at others in proportion.

        Its name says so, and so do keys and records: runs of different lengths never stand in one table.

        Raises:
            InputError: The scale has one length alone, or the tokens are too few for its updates.
        """
        if tokens is None:
            return self
        if not self.resizable:
            able = " or ".join(name for name, scale in SCALES.items() if scale.resizable)
            raise InputError(f"runs of the scale {self.name!r} have one length; leave --tokens out, or name {able}")
        sizes = {context: _update_tokens(self.flags(context)) for context in self.contexts}
        share = tokens / (sizes[min(sizes)] * self.contexts[min(sizes)]["updates"])
        contexts = {}
        for context, settings in self.contexts.items():
            updates = round(share * settings["updates"])
            if updates < FEWEST_UPDATES:
                raise InputError(
                    f"--tokens {tokens:,} leaves {updates} updates of {sizes[context]:,} tokens in the runs that stand "
                    f"for {context:,} of context; they need {FEWEST_UPDATES}, so that each moment of a table has an "
                    "update of its own: name more"
                )
            contexts[context] = {**settings, "updates": updates}
        return replace(self, name=f"{self.name}-{short(tokens)}", contexts=contexts)

    def flags(self, context: int) -> dict[str, Any]:
        """Return the settings of a run from initialisation; raise InputError for a context that the scale has not."""
        if context not in self.contexts:
            raise InputError(
                f"the scale {self.name!r} has no runs of {context:,} tokens; it has {sorted(self.contexts)}"
            )
        return {**self.settings, **self.contexts[context]}


FEWEST_UPDATES = 40
"""Of a run whose length is asked for: the moments of a table lie on updates of their own, and there is a warm-up."""


def read_tokens(text: str) -> int:
    """Return a number of tokens from a whole number with K, M or B behind it, or none.

    >>> read_tokens("60M"), read_tokens("1.5B"), read_tokens("4096")
    (60000000, 1500000000, 4096)

    Raises:
        InputError: Anything else.
    """
    unit = {"K": 10**3, "M": 10**6, "B": 10**9}.get(text[-1:].upper(), 1)
    try:
        tokens = float(text if unit == 1 else text[:-1]) * unit
    except ValueError:
        tokens = 0.0
    if not 1 <= tokens < 1e15:
        raise InputError(f"tokens must be a number such as 60M, 1.5B or 4096; got {text!r}")
    return round(tokens)


def short(tokens: int) -> str:
    """Return tokens as they are asked for: 60M, or all digits where that would round.

    >>> short(60_000_000), short(62_500_000), short(1234)
    ('60M', '62500K', '1234')
    """
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


def _update_tokens(flags: Flags) -> int:
    """Return the tokens of one update."""
    return int(flags["length"]) * int(flags.get("batch_size", 8)) * int(flags.get("accumulation", 1))


_BRANCHES = (0.25, 0.4, 0.5, 0.6, 0.75)
"""The moments of tab:timing-main; the sixth, after training, is every run's last checkpoint."""

SCALES = {
    scale.name: scale
    for scale in (
        Scale(
            name="paper",
            # app:controlled-pretraining-details and app:fixed-token-controls.
            settings={
                **{"model": "124m", "model_overrides": {"vocab_size": 50_304}, "accumulation": 15, "updates": 5_000},
                **{"peak_lr": 6e-4, "min_lr_ratio": 0.1, "warmup": 500, "eval_every": 250, "save_every": 0},
                "calibration_sequences": 32,
            },
            contexts={
                1_024: {"length": 1_024, "batch_size": 32},
                4_096: {"length": 4_096, "batch_size": 8},
                8_192: {"length": 8_192, "batch_size": 4, "calibration_sequences": 16},
                16_384: {"length": 16_384, "batch_size": 2, "calibration_sequences": 16},
            },
            seeds=(1337, 1338, 1339),
            save_at=_BRANCHES,
            text="FineWeb-Edu by GPT-2's tokenizer, 2.4576B tokens",
            vocabulary=50_304,
            # 124M trains at 4.3e14 on an H200 in bfloat16 (docs/results.md); compilation is that of docs/log.md.
            rates=Rates(
                **{"flops": 4.0e14, "start": 60.0, "compilation": 28.0, "uncompiled": 1.35, "launching": 0.03},
                source="an H200; what is uncompiled is assumed",
            ),
        ),
        Scale(
            name="small",
            # Some 30M weights: four to five minutes a run on one H200, a parent with its arms in half an hour.
            settings={
                "model": "124m",
                "model_overrides": {"num_layers": 8, "num_heads": 8, "hidden_size": 512},
                **{"accumulation": 1, "peak_lr": 1e-3, "min_lr_ratio": 0.1, "warmup": 0.1, "eval_every": 0},
                **{"save_every": 0, "log_every": 200, "calibration_sequences": 32, "token_losses": False},
            },
            contexts={
                1_024: {"length": 1_024, "batch_size": 64, "updates": 3_540},
                4_096: {"length": 4_096, "batch_size": 16, "updates": 3_540},
                8_192: {"length": 8_192, "batch_size": 8, "updates": 3_540, "calibration_sequences": 16},
                16_384: {"length": 16_384, "batch_size": 4, "updates": 1_770, "calibration_sequences": 16},
            },
            seeds=(1337,),
            save_at=_BRANCHES,
            text="any prepared folder; a vocabulary of 16K is meant",
            vocabulary=16_384,
            rates=Rates(
                **{"flops": 3.3e14, "start": 15.0, "compilation": 19.0, "uncompiled": 1.35, "launching": 0.02},
                source="assumed of an H200, not measured",
            ),
            resizable=True,
        ),
        Scale(
            name="smoke",
            # As small as a run can be that calibrates, freezes and is compared.
            settings={
                "model": "tiny",
                "model_overrides": {"num_layers": 2, "num_heads": 8, "hidden_size": 32},
                **{"batch_size": 4, "updates": 8, "peak_lr": 3e-3, "warmup": 2, "eval_every": 0, "save_every": 0},
                **{"eval_windows": 4, "calibration_sequences": 4, "heldout_sequences": 4, "tensorboard": False},
            },
            contexts={1_024: {"length": 32}, 4_096: {"length": 32}, 8_192: {"length": 48}, 16_384: {"length": 64}},
            seeds=(1337, 1338),
            save_at=_BRANCHES,
            text="a megabyte of Python's own library",
            vocabulary=512,
            rates=Rates(
                **{"flops": 1.0e9, "start": 0.5, "compilation": 0.0, "uncompiled": 1.0, "launching": 0.02},
                source="assumed of two CPU cores",
            ),
        ),
    )
}


def scale_named(name: str) -> Scale:
    """Return a scale; raise InputError naming the nearest ones."""
    if name not in SCALES:
        raise InputError(f"there is no scale {name!r}; {_nearest(name, SCALES)}")
    return SCALES[name]


def recipes_folder() -> Path:
    """Return the folder of the recipes that come with the project: `recipes`, beside the package."""
    return Path(saf.__file__).resolve().parents[1] / "recipes"


def open_recipes(names: tuple[str, ...] = (), *, folder: Path | None = None) -> dict[str, Recipe]:
    """Return recipes by name, all of a folder's without `names`.

    Raises:
        InputError: There is no such folder or recipe (with the nearest names), or a file of it that is no recipe.
    """
    folder = folder or recipes_folder()
    files = {path.stem: path for path in sorted(folder.glob("*.py")) if not path.stem.startswith("_")}
    if not files:
        raise InputError(f"{folder} holds no recipes; they stand beside the package in a checkout, or name a folder")
    for name in names:
        if name not in files:
            raise InputError(f"there is no recipe {name!r}; {_nearest(name, files)}")
    return {name: _open(files[name]) for name in names or files}


def _open(path: Path) -> Recipe:
    """Run one module of recipes and return its RECIPE."""
    spec = importlib.util.spec_from_file_location(f"recipes.{path.stem}", path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    recipe = getattr(module, "RECIPE", None)
    if not isinstance(recipe, Recipe):
        raise InputError(f"{path} is no recipe: it must set RECIPE to a saf.experiments.recipe.Recipe")
    return recipe


def _nearest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    near = get_close_matches(name, known, n=3)
    return f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
