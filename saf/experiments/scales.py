"""How large the runs of a recipe are: the paper's own settings, small ones for an afternoon, and as small as can be."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from saf.errors import InputError, did_you_mean
from saf.experiments.rates import Rates
from saf.experiments.recipe import Flags
from saf.experiments.speeds import Speeds


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
    too_short: Mapping[int, str] = field(default_factory=dict)
    """Why contexts have no runs of the length that was asked for, in words, by the paper's context."""
    speeds: Speeds | None = None
    """What arms at matched time get instead of a clock of their own; None for their clocks."""
    set_speed: float | None = None
    """Updates that those which freeze or prune do while their reference does one, where runs are too short for either;
    None for clocks or measured speeds."""

    @property
    def base(self) -> str:
        """Return the name of the scale whose runs were resized, or have other speeds."""
        return parts_of(self.name)[0]

    @property
    def told_of_speeds(self) -> str | None:
        """Return a sentence on the speeds that arms at matched time get; None where they have their own clocks."""
        if self.speeds is not None:
            return self.speeds.described()
        if self.set_speed is None:
            return None
        return (
            f"Arms at matched time that freeze or prune do {self.set_speed:g} updates for each that the reference had "
            "left, the ordinary ones as many: set for this scale, not measured."
        )

    @property
    def tokens(self) -> str:
        """Return the tokens that its runs were resized to, as its name has them; "" where they were not."""
        return parts_of(self.name)[1]

    def at_speeds(self, speeds: Speeds) -> "Scale":
        """Return the scale with measured speeds for arms at matched time; its name says which."""
        return replace(self, name=f"{self.name}-speeds-{speeds.name}", speeds=speeds)

    def resized(self, tokens: int | None) -> "Scale":
        """Return the scale with runs of so many tokens at the shortest context, at others in proportion.

        Its name says so, and so do keys and records: runs of different lengths never stand in one table. Contexts whose
        runs would have too few updates are left out, and `too_short` says why.

        Raises:
            InputError: The scale has one length alone, or the tokens are too few at every context.
        """
        if tokens is None:
            return self
        if not self.resizable:
            able = " or ".join(name for name, scale in SCALES.items() if scale.resizable)
            raise InputError(f"runs of the scale {self.name!r} have one length; leave --tokens out, or name {able}")
        sizes = {context: _update_tokens(self.flags(context)) for context in self.contexts}
        share = tokens / (sizes[min(sizes)] * self.contexts[min(sizes)]["updates"])
        contexts, too_short = {}, {}
        for context, settings in self.contexts.items():
            updates = round(share * settings["updates"])
            if updates >= FEWEST_UPDATES:
                contexts[context] = {**settings, "updates": updates}
            else:
                too_short[context] = (
                    f"--tokens {tokens:,} leaves {updates} updates of {sizes[context]:,} tokens at {context:,} of "
                    f"context and {FEWEST_UPDATES} are needed, so that each moment of a table has an update of its "
                    "own; name more"
                )
        if not contexts:
            raise InputError(too_short[min(too_short)])
        return replace(self, name=f"{self.name}-{short(tokens)}", contexts=contexts, too_short=too_short)

    def flags(self, context: int) -> dict[str, Any]:
        """Return the settings of a run from initialisation; raise InputError for a context that the scale has not."""
        if context in self.too_short:
            raise InputError(self.too_short[context])
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


HELD_OUT: Mapping[str, Flags] = {"paper": {"calibration_source": "calibration"}}
"""For `Arm.scaled` of the paper's controls, which calibrate on held-out text; its other runs do on training text."""
_BRANCHES = (0.25, 0.4, 0.5, 0.6, 0.75)
"""The moments of tab:timing-main; the sixth, after training, is every run's last checkpoint."""

SCALES = {
    scale.name: scale
    for scale in (
        Scale(
            name="paper",
            # app:controlled-pretraining-details, in the micro-batches of app:fixed-token-controls: as many tokens.
            settings={
                **{"model": "124m", "model_overrides": {"vocab_size": 50_304}, "accumulation": 15, "updates": 5_000},
                **{"peak_lr": 6e-4, "min_lr_ratio": 0.1, "warmup": 500, "eval_every": 250, "save_every": 0},
                **{"calibration_sequences": 32, "calibration_source": "train"},
            },
            contexts={
                1_024: {"length": 1_024, "batch_size": 32},
                4_096: {"length": 4_096, "batch_size": 8},
                8_192: {"length": 8_192, "batch_size": 4, "calibration_sequences": 16},
                16_384: {"length": 16_384, "batch_size": 2, "calibration_sequences": 16},
            },
            seeds=(1337, 1338, 1339),
            save_at=_BRANCHES,
            text="FineWeb-Edu by GPT-2's tokenizer; 124M on 2.4576B tokens, 1B on 19.667B",
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
            # Their clocks would have hundredths of a second, which a busy machine takes to load a run.
            set_speed=1.25,
            text="half a megabyte of Python's own library",
            vocabulary=512,
            rates=Rates(
                **{"flops": 1.0e9, "start": 0.5, "compilation": 0.0, "uncompiled": 1.0, "launching": 0.02},
                source="assumed of two CPU cores",
            ),
        ),
    )
}


def parts_of(name: str) -> tuple[str, str, str]:
    """Return what the name of a scale tells: the scale that it was made of, its tokens and its speeds; "" where none.

    >>> parts_of("small-60M-speeds-0123abcd"), parts_of("paper")
    (('small', '60M', '0123abcd'), ('paper', '', ''))
    """
    runs, _, speeds = name.partition("-speeds-")
    base, _, tokens = runs.partition("-")
    return base, tokens, speeds


def scale_named(name: str) -> Scale:
    """Return a scale; raise InputError naming the nearest ones."""
    if name not in SCALES:
        raise InputError(f"there is no scale {name!r}{did_you_mean(name, SCALES) or f'; there are {[*SCALES]}'}")
    return SCALES[name]
