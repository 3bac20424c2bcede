"""A scale sets the size of every run of a recipe: model, context, batch, number of updates.

Its name may go on with the tokens of a run, with a peak learning rate, and with any word that keeps a further set of
the same runs apart: small, small-75M, small-75M-again, converged-1e-3.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from experiments.arms import Settings
from saf.errors import InputError, did_you_mean

BRANCHES = (0.25, 0.4, 0.5, 0.6, 0.75)
"""Every run from initialisation keeps a checkpoint after these shares of its updates, for other arms to start from."""
MIN_UPDATES = 40
"""Shorter runs, by a scale name with few tokens, would have no warm-up, and several of `BRANCHES` on one update."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The settings of every run from initialisation."""

    name: str
    settings: Settings
    contexts: Mapping[int, Settings]
    """Further settings by the paper's tokens of context, which are the `length` unless another is among them."""
    seeds: tuple[int, ...]
    vocabulary: int
    """Size of the tokenizer's vocabulary."""
    resizable: bool = False
    """Whether its name may set the tokens of a run."""
    freeze: Settings = field(default_factory=dict)
    """Settings of freezing for every arm whose patterns are fitted; the arm's own settings win."""
    like: str = ""
    """The scale whose overrides in arms and measurements apply to this one too; "" where it has its own."""

    @property
    def base(self) -> str:
        """The scale by which arms and measurements have its overrides: paper, small or smoke."""
        return self.like or self.name.partition("-")[0]

    def settings_at(self, context: int) -> Settings:
        """Return the settings of a run from initialisation; raise InputError where it would be too short."""
        if context not in self.contexts:
            raise InputError(f"scale {self.name!r} has contexts of {[*self.contexts]} tokens; got {context}")
        settings = {**self.settings, **self.batches(context)}
        if self.resizable and settings["updates"] < MIN_UPDATES:
            raise InputError(
                f"scale {self.name!r} leaves {settings['updates']} updates at {context:,} tokens of context, and "
                f"{MIN_UPDATES} are needed; name more tokens"
            )
        return settings

    def batches(self, context: int) -> dict[str, Any]:
        """Return the length of a context, and what else its windows and batches are."""
        return {"length": context, **self.contexts[context]}


_SHORT: Settings = {
    "peak_lr": 1e-3, "min_lr_ratio": 0.1, "warmup": 0.1, "accumulation": 1,
    # Intervals need the losses of windows alone, not those of tokens.
    "log_every": 200, "eval_every": 0, "save_every": 0, "token_losses": False, "calibration_sequences": 32,
}  # fmt: skip
"""For runs shorter than the paper's. Warm-up is a share of the updates, so longer runs warm up in proportion."""
_PAPER: Settings = {
    # The paper's app:controlled-pretraining-details. Its controls have other batches and another data order:
    # `CONTROLS` in arms.py.
    "model": "124m", "model_overrides": {"vocab_size": 50_304}, "updates": 5_000, "sampler": "random",
    "peak_lr": 6e-4, "min_lr_ratio": 0.1, "warmup": 500, "eval_every": 250, "save_every": 250,
    "calibration_sequences": 32, "calibration_source": "train", "report_tokens": 2_449_408,
}  # fmt: skip
_124M: Settings = {
    # The paper's model, with a higher rate for short runs.
    **_SHORT, "model": "124m", "model_overrides": {"vocab_size": 50_304}, "accumulation": 2,
    "log_every": 80, "eval_every": 80, "save_every": 160, "compile": "layers",
}  # fmt: skip
_SMOKE: Settings = {
    # As small as a run can be that calibrates, freezes and is compared.
    "model": "tiny", "model_overrides": {"num_layers": 2, "num_heads": 8, "hidden_size": 32},
    "batch_size": 4, "updates": 8, "peak_lr": 3e-3, "warmup": 2,
    "eval_every": 0, "save_every": 0, "eval_windows": 4, "tensorboard": False, "quiet": True,
    "calibration_sequences": 4, "heldout_sequences": 4,
}  # fmt: skip
_34M: Settings = {"model": "124m", "model_overrides": {"num_layers": 8, "num_heads": 8, "hidden_size": 512}}
_LONG: Settings = {"calibration_sequences": 16}
"""For contexts beyond 4K."""
SCALES = {
    scale.name: scale
    for scale in (
        Scale(
            name="paper",
            settings=_PAPER,
            contexts={
                1_024: {"batch_size": 32, "accumulation": 15},
                4_096: {"batch_size": 2, "accumulation": 60},
                8_192: {"batch_size": 1, "accumulation": 60, **_LONG},
                16_384: {"batch_size": 1, "accumulation": 30, **_LONG},
            },
            freeze={"fitter": "adam"},
            seeds=(1337, 1338, 1339),
            vocabulary=50_304,
        ),
        Scale(
            name="small",
            # A run takes four to five minutes on one H200, and an ordinary run with all arms from it half an hour.
            settings={**_34M, **_SHORT, "updates": 3_540},
            contexts={
                1_024: {"batch_size": 64},
                4_096: {"batch_size": 16},
                8_192: {"batch_size": 8, **_LONG},
                16_384: {"batch_size": 4, "updates": 1_770, **_LONG},
            },
            seeds=(1337,),
            vocabulary=16_384,
            resizable=True,
        ),
        Scale(
            name="converged",
            # The small model trained for 560M tokens, some sixteen a parameter: four passes over 141M tokens of text.
            settings={**_34M, **_SHORT, "updates": 8_544, "peak_lr": 2e-3, "eval_every": 1_000, "save_every": 1_000},
            # At 16K two processes can share an update.
            contexts={4_096: {"batch_size": 16}, 16_384: {"batch_size": 2, "accumulation": 2, **_LONG}},
            seeds=(1337, 1338, 1339),
            vocabulary=16_384,
            resizable=True,
            like="small",
        ),
        Scale(
            name="124m",
            settings={**_124M, "updates": 640},  # 84M tokens
            contexts={4_096: {"batch_size": 16}, 8_192: {"batch_size": 8, **_LONG}, 16_384: {"batch_size": 4, **_LONG}},
            seeds=(1337, 1338, 1339),
            vocabulary=50_304,
            resizable=True,
            like="small",
        ),
        Scale(
            name="smoke",
            settings=_SMOKE,
            contexts={
                1_024: {"length": 32},
                4_096: {"length": 32},
                8_192: {"length": 48},
                16_384: {"length": 64, "batch_size": 2},  # as many tokens an update as at 4K
            },
            seeds=(1337,),
            vocabulary=512,
        ),
    )
}


def scale_named(name: str) -> Scale:
    """Return a scale; tokens in its name resize its runs: those of small-75M have at most 75M at the shortest context.

    Updates at other contexts change by the same factor. A number such as 1e-3 is the peak learning rate.

    Raises InputError for an unknown scale.
    """
    base, *rest = name.split("-")
    if base not in SCALES:
        raise InputError(f"there is no scale {base!r}{did_you_mean(base, SCALES) or f'; there are {[*SCALES]}'}")
    scale = SCALES[base]
    if rate := re.search(r"-(\d+e-\d+)\b", name):
        scale = replace(scale, settings={**scale.settings, "peak_lr": float(rate[1])})
    if not rest or not (size := re.fullmatch(r"(\d+)([KMB])", rest[0])):
        return replace(scale, name=name)
    if not scale.resizable:
        raise InputError(f"runs of the scale {base!r} have one length; leave {rest[0]} out")
    tokens = int(size[1]) * {"K": 10**3, "M": 10**6, "B": 10**9}[size[2]]
    shortest = scale.settings_at(min(scale.contexts))
    tokens_per_update = shortest["length"] * shortest["batch_size"] * shortest["accumulation"]
    factor = tokens / (tokens_per_update * shortest["updates"])
    contexts = {}
    for context, settings in scale.contexts.items():
        contexts[context] = {**settings, "updates": int(factor * scale.settings_at(context)["updates"])}
    return replace(scale, name=name, contexts=contexts)
