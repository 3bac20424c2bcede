"""Every arm of every recipe, as data: the settings that differ from its parent's, or from its scale's.

An arm is trained once for each scale and seed, however many recipes show it. Settings are fields of `saf.TrainConfig`;
`freeze`, `schedule` and `mqar` are dictionaries of settings of their own. An arm's name has its context (`k`, such as
"4k"), what happens to heads, their share in percent, and an ending that docs/experiments.md explains.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

from saf.errors import InputError, did_you_mean
from saf.records.files import read_json

Settings = Mapping[str, Any]
CONTEXTS = {"1k": 1_024, "4k": 4_096, "8k": 8_192, "16k": 16_384}
BASES: tuple[str, ...] = ("paper", "small", "smoke")
"""Scales that arms may have settings of their own for (`Scale.base`)."""
RATES = (0.1, 0.25, 0.5, 0.75)
"""Shares of heads that the paper freezes (app:controlled-pretraining-details)."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One training, or one finetuning, for each seed."""

    name: str
    settings: Settings = field(default_factory=dict)
    """Changes of the scale's settings, or of the parent's."""
    scaled: Mapping[str, Settings] = field(default_factory=dict)
    """Further changes at single scales."""
    context: int | None = None
    """Tokens of context at the paper's scale; other scales have their own for it. None is the parent's, or 4,096."""
    parent: str | None = None
    """The arm whose checkpoint it continues from; None starts from initialisation."""
    at: float = 0.5
    """Share of the parent's updates after which it branches off; finetuning starts from the end."""
    extra_updates: float = 0.0
    """Updates beyond the parent's schedule (without a parent, the scale's), as a share of it."""
    match: str | None = None
    """The arm whose training time it gets from the parent's checkpoint on; None trains the scale's updates."""
    heads: str | None = None
    """The arm whose heads it freezes or prunes; None lets its settings choose."""
    reseed: int = 0
    """Added to the seed, for another order of the data."""
    task: str | None = None
    """The task that it finetunes its parent on; None is pretraining."""
    like: str | None = None
    """The finetuned ordinary arm whose examples, epochs and settings it takes; None chooses its own."""
    varies: Literal["pretraining", "task", "both"] = "pretraining"
    """Which seed of a finetuned arm varies. The other one is the scale's first, so that the two are never pooled."""
    stand_in: str | None = None
    """The arm that is run in its place at scales other than the paper's, where the two would not differ."""

    @property
    def needs(self) -> dict[str, str]:
        """The arms whose runs must have ended before this one begins, by their role."""
        named = {"parent": self.parent, "match": self.match, "heads": self.heads, "like": self.like}
        return {role: name for role, name in named.items() if name is not None}


def percent(rate: float) -> str:
    """Return a rate as arms' names have it: 0.25 is "25"."""
    return f"{100 * rate:g}"


def freeze(rate: float, **more: Any) -> Settings:
    """Return the settings that freeze a share of the heads, with the paper's storage unless `more` names another."""
    # The default would store patterns for linear time from 4,096 tokens on, and as vectors below.
    return {"freeze": {"rate": rate, "storage": "compact", **more}}


def prune(rate: float, **more: Any) -> Settings:
    """Return the settings that prune a share of the heads."""
    return {"freeze": {"rate": rate, "operation": "prune", **more}}


def merge(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings, later parts over earlier ones; dictionaries within them, such as `freeze`, are merged, too."""
    result: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            # {**one, **other} would drop the rest of `freeze` where an arm changes one setting of it.
            both = isinstance(value, Mapping) and isinstance(result.get(name), Mapping)
            result[name] = merge(result[name], value) if both else value
    return result


# --- settings that several arms share

HELD_OUT = {"paper": {"calibration_source": "calibration"}}
"""The paper's controls calibrate on held-out text; its other runs do on training text."""
CONTROLS = {"paper": {"sampler": "shuffled", "batch_size": 8, "accumulation": 15}}
"""The paper's controls, each with ordinary runs of its own: 491,520 tokens an update as everywhere at its scale."""
STRICT = {"paper": {"calibration_source": "calibration", "freeze": {"strict": True}}}
"""In its controls every one of the lowest-scoring heads must fit; none is replaced by the next."""
PRUNE = {"freeze": {"operation": "prune"}}
"""For an arm that prunes the heads of another one (`Arm.heads`)."""
RANDOM = {"score": "random", "match": "variance"}
"""Random heads, as many in each layer as variance selects: chance then differs in the heads, not in their layers."""
LAYERWISE = {scale: {"compile": "layers"} for scale in ("paper", "small")}
LATER = {"peak_lr": 6e-5, "min_lr_ratio": 0.1, "warmup": 0}
"""Training after a full run: from the learning rate that the run ends with down to a tenth of it."""
LATER_REPORT = {"paper": {"report_tokens": 4_997_120}}
LATER_SCALED = {"small": {"peak_lr": 1e-4}, **LATER_REPORT}  # small runs end with a tenth of 1e-3
ONE_BILLION = {
    # 524,288 tokens an update, as four GPUs with eight micro-batches of two windows each.
    "model": "1b", "batch_size": 2, "accumulation": 32, "updates": 37_512, "sampler": "shuffled",
    "peak_lr": 3e-4, "min_lr_ratio": 0.1, "warmup": 375,
    "eval_every": 1_000, "save_every": 500, "calibration_sequences": 16, "report_tokens": 4_194_304,
}  # fmt: skip

# --- matched time


@cache
def measured_speeds() -> dict[tuple[str, str], dict[float, float]]:
    """Return the updates that 124M does while ordinary attention does one, by context, event and rate, in pairs."""
    bench = Path(__file__).resolve().parents[1] / "results" / "bench"
    speeds: dict[tuple[str, str], dict[float, float]] = {}
    # All digits count: rounded, a budget could lose an update, and a recorded run be refused as of other settings.
    for name in ("update-rates", "update-4k-again", "update-8k", "update-16k", "update-16k-rates"):
        for row in read_json(bench / f"{name}.json")["rows"]:
            event = {"toeplitz": "freeze", "pruned": "prune"}.get(row["backend"])
            if event is not None:
                speeds.setdefault((f"{row['point']['length'] // 1024}k", event), {})[row["rate"]] = row["ratio"]
    # Heads frozen in linear time and the same heads pruned, measured in one run.
    for entry, event in product(read_json(bench / "linear.json")["updates"], ("exponential", "pruned")):
        by_rate = {rate: entry["speedups"].get(f"{percent(rate)}% {event}") for rate in RATES}
        speeds[f"{entry['length'] // 1024}k", event] = {rate: speed for rate, speed in by_rate.items() if speed}
    return speeds


CHARGE_SECONDS = 28.3
"""Time that an arm at matched time is charged for an event and the compilation after it, of `PAPER_SECONDS`."""
PAPER_SECONDS = 187.65 * 60
"""Training time of the paper's ordinary arm at matched time (tab:equal-time-controls)."""


def speed(ratio: float, source: str, charge: float = 0.0) -> Settings:
    """Return settings that give a run `ratio` updates for each that its reference had left; `source` is recorded."""
    return {"match_speed": ratio, "match_speed_source": source, "match_charge_seconds": charge}


MORE_TOKENS = speed(1.06, "set for the exchange rate")
"""6% more updates than the reference had left: they measure by how much 1% more tokens lowers perplexity."""
SAME_SPEED: dict[str, Settings] = {name: speed(1.0, "ordinary: its reference's speed") for name in ("small", "smoke")}
"""Settings of ordinary attention at matched time, by scale."""


def matched_time(k: str, kind: str, rate: float) -> dict[str, Settings]:
    """Return the settings of an arm at matched time, by scale; `kind` is an event of `measured_speeds`.

    At the paper's scale an arm has the seconds that its reference had left. Small runs are too short for a clock and
    get as many updates as the measured speed buys.
    """
    # The paper's scale has no entry: without a speed a run gets seconds (`_matched_budget` in run.py).
    card = "H200" if kind in ("freeze", "prune") else "H100"  # the speeds of linear.json
    small = speed(measured_speeds()[k, kind][rate], f"124M on an {card}, measured in pairs", CHARGE_SECONDS)
    return {"small": small, "smoke": speed(1.25, "set for the smoke scale, not measured")}


# --- pretraining: one ordinary run a context, and what branches off it


def control_trunk(k: str) -> str:
    """Return the ordinary arm of a context that its controls continue from."""
    return "4k-control-ordinary" if k == "4k" else f"{k}-ordinary"


def _contexts() -> Iterator[Arm]:
    """Yield the arms of the main question at each context: ordinary, frozen and pruned."""
    for k, context in CONTEXTS.items():
        yield Arm(name=f"{k}-ordinary", context=context)
    yield Arm(name=control_trunk("4k"), scaled=CONTROLS, stand_in="4k-ordinary")
    for k in ("4k", "8k", "16k"):
        trunk = control_trunk(k)
        yield Arm(name=f"{k}-ordinary-time", parent=trunk, match=trunk, scaled=SAME_SPEED)
        # Ordinary again in another order of the data: how far two equal arms end apart.
        yield Arm(name=f"{k}-ordinary-time-reordered", parent=trunk, match=trunk, scaled=SAME_SPEED, reseed=1_000)
        yield Arm(name=f"{k}-ordinary-more", parent=trunk, match=trunk, settings=MORE_TOKENS)
        for rate in measured_speeds()[k, "freeze"]:
            yield from _paired(k, rate)


def _paired(k: str, rate: float) -> Iterator[Arm]:
    """Yield frozen and pruned arms of a rate: at matched tokens, as the paper's controls, at matched time."""
    mean, pruned, trunk = f"{k}-mean-{percent(rate)}", f"{k}-pruned-{percent(rate)}", control_trunk(k)
    branch, control = partial(Arm, parent=f"{k}-ordinary"), partial(Arm, parent=trunk)
    timed = partial(Arm, parent=trunk, match=trunk)
    frozen_time, pruned_time = matched_time(k, "freeze", rate), matched_time(k, "prune", rate)
    yield branch(name=mean, settings=freeze(rate))
    # The heads of the frozen arm, so that the two differ in what is done to these heads alone.
    yield branch(name=pruned, settings=PRUNE, heads=mean)
    yield control(name=f"{mean}-control", settings=freeze(rate), scaled=STRICT, stand_in=mean)
    yield control(name=f"{pruned}-control", settings=PRUNE, scaled=HELD_OUT, heads=f"{mean}-control", stand_in=pruned)
    yield timed(name=f"{mean}-time", settings=freeze(rate), scaled=merge(STRICT, frozen_time))
    yield timed(name=f"{pruned}-time", settings=PRUNE, scaled=merge(HELD_OUT, pruned_time), heads=f"{mean}-time")
    # The paper has random heads at 4K and these rates alone.
    if k == "4k" and rate in (0.25, 0.5):
        random, settings = f"{k}-random-{percent(rate)}", freeze(rate, **RANDOM)
        yield control(name=random, settings=settings, scaled=HELD_OUT)
        yield timed(name=f"{random}-time", settings=settings, scaled=merge(HELD_OUT, frozen_time))


EXPONENTIAL: dict[str, Settings] = {
    # The band; None keeps a logit for each key, 1.0 takes the short form of alpha wherever cancellation allows it.
    "exponential-64": {"band": 64, "max_short_kl": None},
    "exponential-128": {"band": 128, "max_short_kl": None},
    "exponential-short": {"band": 128, "max_short_kl": 1.0},
}


def _exponential() -> Iterator[Arm]:
    """Yield heads frozen as sums of damped cosines, from the checkpoint of `4k-mean-25` and `4k-mean-50`."""
    for (kind, options), rate in product(EXPONENTIAL.items(), (0.25, 0.5)):
        # A band of 64 would leave nothing to the cosines in the 32 tokens of a smoke run.
        smoke = {"freeze": {"fitter_options": {**options, "band": options["band"] // 16}}}
        settings = freeze(rate, storage="exponential", fitter_options=options)
        name = f"4k-{kind}-{percent(rate)}"
        yield Arm(name=name, parent="4k-ordinary", settings=settings, scaled={"smoke": smoke})


def _linear_time() -> Iterator[Arm]:
    """Yield heads frozen in linear time and their controls, at matched tokens and at matched time."""
    for k, rate in product(("4k", "16k"), (0.25, 0.5)):
        trunk, frozen = control_trunk(k), f"{k}-exponential-{percent(rate)}"
        linear = freeze(rate, storage="exponential")
        # Heads chosen for pruning do better than pruned heads of low variance (app:pruning-selection-budget).
        gates, random = prune(rate, score="gate_taylor"), freeze(rate, storage="exponential", **RANDOM)
        for arm, kind in (
            (Arm(name=frozen, settings=linear), "exponential"),
            (Arm(name=f"{frozen}-pruned", settings=PRUNE, heads=frozen), "pruned"),
            (Arm(name=f"{k}-gate-taylor-{percent(rate)}", settings=gates), "pruned"),
            (Arm(name=f"{frozen}-random", settings=random), "exponential"),
            (Arm(name=f"{frozen}-early", settings=linear, at=0.25), "exponential"),
        ):
            scaled = matched_time(k, kind, rate)
            yield replace(arm, parent=trunk)
            yield replace(arm, parent=trunk, name=f"{arm.name}-time", match=trunk, scaled=scaled)
    for k in ("4k", "16k"):
        # Charged the seconds that they take themselves, not those of the speeds above.
        timed, frozen = partial(Arm, parent=control_trunk(k), match=control_trunk(k)), f"{k}-exponential-50"
        yield timed(name=f"{k}-ordinary-clock")
        yield timed(name=f"{frozen}-clock", settings=freeze(0.5, storage="exponential"))
        yield timed(name=f"{frozen}-pruned-clock", settings=PRUNE, heads=frozen)


def _staged() -> Iterator[Arm]:
    """Yield arms that train at 4K first, which is cheaper, and at 16K from 40% of the updates on."""
    trunk = "16k-staged-ordinary"
    # A tenth of the updates before the event, in which heads learn to attend beyond 4K.
    yield Arm(name=trunk, parent="4k-ordinary", at=0.4, context=CONTEXTS["16k"])
    branch, timed = partial(Arm, parent=trunk), partial(Arm, parent=trunk, match=trunk)
    for rate in (0.25, 0.5):
        frozen, linear = f"16k-staged-exponential-{percent(rate)}", freeze(rate, storage="exponential")
        speeds = {kind: matched_time("16k", kind, rate) for kind in ("exponential", "pruned")}
        yield branch(name=frozen, settings=linear)
        yield branch(name=f"{frozen}-pruned", settings=PRUNE, heads=frozen)
        yield timed(name=f"{frozen}-time", settings=linear, scaled=speeds["exponential"])
        yield timed(name=f"{frozen}-pruned-time", settings=PRUNE, scaled=speeds["pruned"], heads=f"{frozen}-time")


PEAK_RATES = ("3e-4", "6e-4", "1e-3", "2e-3", "3e-3")
WARMUPS = {"5": 0.05, "10": 0.1}
"""Shares of all updates."""


def _peak_rates() -> Iterator[Arm]:
    """Yield ordinary runs by peak rate and warm-up, and each with a quarter of its heads frozen at the end."""
    for k, peak, warmup in product(("4k", "16k"), PEAK_RATES, WARMUPS):
        name, settings = f"{k}-peak-{peak}-warmup-{warmup}", {"peak_lr": float(peak), "warmup": WARMUPS[warmup]}
        # 5% of the 8 updates of a smoke run would be none.
        yield Arm(name=name, context=CONTEXTS[k], settings=settings, scaled={"smoke": {"warmup": 2}})
        yield Arm(name=f"{name}-mean-25", parent=name, at=1.0, settings=freeze(0.25))


def _freeze_times() -> Iterator[Arm]:
    """Yield arms that freeze a quarter of the heads earlier or later, with the mean pattern and with random ones."""
    random = {"freeze": {"storage": "compact", "pattern": "structured_random"}}
    # At 1.0 no update follows: the immediate cost in a trained model.
    for at in (0.25, 0.4, 0.6, 0.75, 1.0):
        branch, mean = partial(Arm, parent="4k-ordinary", at=at), f"4k-mean-25-at-{percent(at)}"
        yield branch(name=mean, settings=freeze(0.25))
        yield branch(name=f"4k-structured-random-25-at-{percent(at)}", settings=random, heads=mean)
    for at in (0.25, 1.0):
        name, control = f"4k-mean-25-at-{percent(at)}", partial(Arm, parent=control_trunk("4k"), scaled=STRICT)
        yield control(name=f"{name}-control", at=at, settings=freeze(0.25), stand_in=name)


PATTERNS: dict[str, Settings] = {
    # Sampled and sharp patterns are stored dense, as in the paper (app:controlled-pretraining-details).
    "sharp-mean": {"pattern": "sharp_mean", "storage": "dense"},
    "gaussian": {"pattern": "gaussian", "storage": "dense"},
    "dirichlet": {"pattern": "dirichlet", "storage": "dense", "pattern_options": {"scale": 16}},
    "structured-random": {"pattern": "structured_random"},
}


def _patterns() -> Iterator[Arm]:
    """Yield arms with other patterns than the mean, dense storage, learned positions, trainable patterns."""
    branch, learned = partial(Arm, parent="4k-ordinary"), "4k-learned-ordinary"
    for (pattern, settings), rate in product(PATTERNS.items(), RATES):
        # The heads of the mean, whose compact fits may fail: other patterns need no fit and would keep such heads.
        name, event = f"4k-{pattern}-{percent(rate)}", {"storage": "compact", **settings}
        yield branch(name=name, settings={"freeze": event}, heads=f"4k-mean-{percent(rate)}")
    yield branch(name="4k-dense-25", settings=freeze(0.25, storage="dense"))
    yield branch(name="4k-residual-cosine-25", settings=freeze(0.25, score="residual_cosine"))
    # Another position embedding is another model from the first update on.
    yield Arm(name=learned, settings={"model_overrides": {"position": "learned"}})
    yield Arm(name="4k-learned-dense-25", parent=learned, settings=freeze(0.25, storage="dense"))
    yield Arm(name="4k-learned-mean-25", parent=learned, settings=freeze(0.25))
    # The same patterns, trained on: the paper's control of freezing itself (tab:pattern-controls).
    trainable = freeze(0.25, trainable=True)
    yield Arm(name="4k-trainable-25", parent=control_trunk("4k"), settings=trainable, scaled=STRICT)


TRIGGERED_SMOKE = {"smoke": {"updates": 96, "peak_lr": 3e-2, "schedule": {"multiplier": 22.0}}}
"""Long enough, and with a threshold high enough, for one event."""


def _schedules() -> Iterator[Arm]:
    """Yield schedules of several events, and one-time arms that are compiled like them."""

    def events(name: str, rate: float = 0.5, **settings: Any) -> Settings:
        return {**freeze(rate), "schedule": {"name": name, **settings}}

    branch = partial(Arm, parent="4k-ordinary")
    for rate in (0.25, 0.5):
        yield branch(name=f"4k-gradual-{percent(rate)}", settings=events("gradual", rate))
    for budget in (0.01, 0.02):
        settings = events("validation_budget", budget=budget)
        yield branch(name=f"4k-validation-budget-{percent(budget)}", settings=settings)
    for multiplier in (3.0, 1.5):
        name, settings = f"4k-train-loss-{multiplier}", events("train_loss", multiplier=multiplier)
        # The trigger may fire at any update, so these train from initialisation; a branch at 25% sees no loss before
        # it.
        yield Arm(name=name, settings=settings, scaled=TRIGGERED_SMOKE if multiplier == 3.0 else {})
        yield branch(name=f"{name}-from-25", settings=settings, at=0.25)
    yield Arm(name="4k-train-loss-1.5-to-25", settings=events("train_loss", 0.25, multiplier=1.5))
    # Runs of several events are compiled by layers; so are those that their time is compared with.
    yield Arm(name="4k-layerwise-ordinary", scaled=LAYERWISE)
    for rate in (0.25, 0.5):
        layerwise = partial(Arm, parent="4k-layerwise-ordinary", scaled=LAYERWISE)
        yield layerwise(name=f"4k-layerwise-mean-{percent(rate)}", settings=freeze(rate))


_GRADIENT_SCORES = ("qk_gradient", "rank_sum", "gradient_veto")
SCORES: dict[str, tuple[str, ...]] = {
    "1k": _GRADIENT_SCORES,
    "4k": (
        "forward_kl", "residual_cosine", "relative_output_change", "output_magnitude", "redundancy", "gate_taylor",
        *_GRADIENT_SCORES,
    ),
    "8k": ("forward_kl",),
    "16k": ("forward_kl",),
}  # fmt: skip
"""Scores that are compared with the variance, by context: as in the paper, and all of them at 4K."""


def tracked_arm(k: str, score: str, rate: float) -> str:
    """Return the name of the arm frozen by a score."""
    return f"{k}-tracked-{score.replace('_', '-')}-{percent(rate)}"


def _scores() -> Iterator[Arm]:
    """Yield arms by other scores; they branch off a trunk that tracks gradients."""
    for k, scores in SCORES.items():
        trunk = f"{k}-tracked-ordinary"
        # A trunk of its own: gradient scores read the average of Q/K gradients over all updates before the event.
        yield Arm(name=trunk, context=CONTEXTS[k], settings={"track_gradients": True})
        # At 1K, where the paper has gradient scores, its patterns are dense.
        stored, rates = ({"storage": "dense"}, (0.25,)) if k == "1k" else ({}, (0.25, 0.5))
        for rate in rates:
            yield Arm(name=tracked_arm(k, "variance", rate), parent=trunk, settings=freeze(rate, **stored))
            for score in scores:
                yield Arm(name=tracked_arm(k, score, rate), parent=trunk, settings=freeze(rate, score=score, **stored))


HALF_OF_12 = {"paper": {"freeze": {"max_per_layer": 6}}}
"""Layers of the paper's model have 12 heads, those of other scales 8."""


def _variants() -> Iterator[Arm]:
    """Yield arms that might lower the change of perplexity at the same rate."""
    for rate in (0.25, 0.5):
        for arm in (
            Arm(name="rewarm", settings={**freeze(rate), "rewarm": 0.01}),
            Arm(name="two-events", settings={**freeze(rate), "schedule": {"name": "gradual", "groups": 2}}),
            Arm(name="three-events", settings={**freeze(rate), "schedule": {"name": "gradual", "groups": 3}}),
            Arm(name="half-layer", settings=freeze(rate, max_per_layer=4), scaled=HALF_OF_12),
            Arm(name="at-40", settings=freeze(rate), at=0.4),
            Arm(name="at-25", settings=freeze(rate), at=0.25),
            Arm(name="at-25-half-layer", settings=freeze(rate, max_per_layer=4), scaled=HALF_OF_12, at=0.25),
            Arm(name="pruned", settings=prune(rate)),
            Arm(name="gradient-pruned", settings=prune(rate, score="qk_gradient")),
            Arm(name="at-25-pruned", settings=prune(rate), at=0.25),
        ):
            yield replace(arm, name=f"4k-tracked-{arm.name}-{percent(rate)}", parent="4k-tracked-ordinary")


def _bought() -> Iterator[Arm]:
    """Yield some of the variants with the extra updates that their speed buys, more after an earlier event."""
    frozen = {**speed(1.085, "124M on an H200, 4K"), **freeze(0.25, operation="freeze")}
    pruned = {**speed(1.127, "124M on an H200, 4K"), **prune(0.25)}
    for name, settings, at in (
        ("variance", frozen, 0.5),
        ("at-40", frozen, 0.4),
        ("at-25", frozen, 0.25),
        ("pruned", pruned, 0.5),
        ("at-25-pruned", pruned, 0.25),
    ):
        trunk = "4k-tracked-ordinary"
        yield Arm(name=f"4k-tracked-{name}-25-bought", parent=trunk, match=trunk, at=at, settings=settings)


# --- after a full run; 1B

LATER_ARMS: dict[str, Settings] = {
    "ordinary": {},
    "mean-25": freeze(0.25),
    "pruned-25": PRUNE,
    "gate-taylor-25": prune(0.25, score="gate_taylor"),
}


def _later() -> Iterator[Arm]:
    """Yield half as many updates again on top of a full run, frozen or pruned before them."""
    # 2.4576B tokens and half as many again are the 3.6864B of tab:pruning-additional-training.
    after = partial(Arm, parent=control_trunk("4k"), at=1.0, extra_updates=0.5)
    for name, event in LATER_ARMS.items():
        arm = after(
            name=f"later-{name}",
            settings={**LATER, **event},
            scaled=merge(LATER_SCALED, HELD_OUT if event else {}),
            heads="later-mean-25" if name == "pruned-25" else None,
        )
        kind = "freeze" if name == "mean-25" else "prune"
        speeds = matched_time("4k", kind, 0.25) if event else SAME_SPEED
        yield arm
        yield replace(arm, name=f"{arm.name}-time", match="later-ordinary", scaled=merge(arm.scaled, speeds))
    settings = {**LATER, **MORE_TOKENS}
    yield after(name="later-ordinary-more", settings=settings, scaled=LATER_SCALED, match="later-ordinary")
    yield Arm(
        name="pruned-from-start",
        extra_updates=0.5,
        heads="later-mean-25",
        scaled=merge(CONTROLS, HELD_OUT, LATER_REPORT),
        settings={**PRUNE, "schedule": {"name": "one_time", "at": 0}},
    )


def _one_billion() -> Iterator[Arm]:
    """Yield the arms of 1B; other scales run those of 8K in their place."""
    branch = partial(Arm, parent="1b-ordinary")
    yield Arm(name="1b-ordinary", context=8_192, scaled={"paper": ONE_BILLION}, stand_in="8k-ordinary")
    for rate in (0.25, 0.5):
        yield branch(name=f"1b-mean-{percent(rate)}", settings=freeze(rate), stand_in=f"8k-mean-{percent(rate)}")
    yield branch(name="1b-gate-taylor-25", settings=prune(0.25, score="gate_taylor"))


# --- finetuning

RECALL_SMOKE = {
    "updates": 2, "batch_size": 4,
    "mqar": {
        "length": 32, "pairs": 2, "vocabulary": 64,
        "test_lengths": (32, 32), "test_pairs": (2, 4), "test_examples": 4, "development": 4,
    },
}  # fmt: skip
TASK_SMOKE = {"batch_size": 4, "accumulation": 1, "epochs": 1, "most_examples": 64}
RECOVERY = (0, 50, 200, 500)
"""Updates after an event at which the model is tested."""


def _tuned(
    group: str, parents: Mapping[str, str], task: str, own: Mapping[str, Settings] | None = None, **others: Any
) -> Iterator[Arm]:
    """Yield the arms GROUP-MODEL that finetune each model's parent on a task; `others` are further fields of each.

    The arm of the model "ordinary" has the settings `own`, by scale; the others take its examples, epochs and settings.
    """
    ordinary, smoke = f"{group}-ordinary", {"smoke": RECALL_SMOKE if task == "mqar" else TASK_SMOKE}
    for model, parent in parents.items():
        tuned = partial(Arm, name=f"{group}-{model}", parent=parent, task=task, **others)
        yield tuned(scaled=merge(own or {}, smoke)) if model == "ordinary" else tuned(like=ordinary)


def _recovered(group: str, parent: str, models: Mapping[str, Settings], **others: Any) -> Iterator[Arm]:
    """Yield arms that freeze or prune heads of a model after it learnt recall, then train on with new examples."""
    for model, event in models.items():
        yield Arm(
            name=f"{group}-{model}",
            parent=parent,
            task="mqar",
            # Not the examples that recall was learnt on.
            reseed=1_000,
            heads=f"{group}-mean-25" if model == "pruned-25" else None,
            settings={"updates": RECOVERY[-1], "report_at": RECOVERY, **event},
            scaled={"smoke": {"updates": 4, "report_at": (0, 1, 2, 4)}},
            **others,
        )


def _recall() -> Iterator[Arm]:
    """Yield associative recall, learnt by checkpoints of `_later` and of `_patterns`, or before heads change."""
    later = {name: f"later-{name}-time" for name in LATER_ARMS}
    yield from _tuned("recall-later", later, "mqar")
    # Seeds of pretraining and of the task vary apart, since their spreads are never pooled.
    for arm in _tuned("recall-later", later, "mqar", varies="task"):
        yield replace(arm, name=f"{arm.name}-task-seeds", like=arm.like and f"{arm.like}-task-seeds")
    yield from _recovered("recovery", "recall-later-ordinary", LATER_ARMS)
    patterns = {"ordinary": control_trunk("4k"), "frozen": "4k-mean-25-control", "trainable": "4k-trainable-25"}
    yield from _tuned("recall-patterns", patterns, "mqar")


SMALL_TASKS: dict[str, dict[str, Settings]] = {
    # Batches of 32 leave launches of small kernels few enough; SST-2 is a stratified part of its file.
    "sst2": {"small": {"batch_size": 32, "most_examples": 16_384}},
    "boolq": {"small": {"batch_size": 32}},
}
_QUALITY: Settings = {"batch_size": 4, "accumulation": 4}
_QUALITY_16K: Settings = {**_QUALITY, "max_tokens": 16_384}
DOWNSTREAM: dict[str, tuple[str, Mapping[str, Settings]]] = {
    # Task: context, settings by scale.
    "sst2": ("4k", {"paper": {"batch_size": 256}, **SMALL_TASKS["sst2"]}),
    "boolq": ("4k", {"paper": {"batch_size": 64}, **SMALL_TASKS["boolq"]}),
    # QuALITY's articles have some 6,200 tokens: they fit the models of 16K.
    "quality": ("16k", dict.fromkeys(BASES, _QUALITY_16K)),
}
DURING = {
    "one-time": {"name": "one_time", "at": 0.5},
    "train-loss": {"name": "train_loss"},
    "after": {"name": "one_time", "at": 1.0},
}
"""Schedules of freezing while a model is finetuned, by the ending of their arms."""
ONE_BILLION_TASKS: dict[str, Mapping[str, Settings]] = {
    "sst2": {"paper": {"batch_size": 128}, **SMALL_TASKS["sst2"]},
    "boolq": {"paper": {"batch_size": 32}, **SMALL_TASKS["boolq"]},
    "quality": dict.fromkeys(BASES, _QUALITY),
}


def _downstream() -> Iterator[Arm]:
    """Yield finetuning on questions: one checkpoint of each arm with three seeds."""
    for task, (k, own) in DOWNSTREAM.items():
        parents = {model: f"{k}-{model}" for model in ("ordinary", "mean-25", "mean-50")}
        yield from _tuned(f"downstream-{task}", parents, task, own, varies="task")
    for task, own in ONE_BILLION_TASKS.items():
        parents = {model: f"1b-{model}" for model in ("ordinary", "mean-25", "gate-taylor-25", "mean-50")}
        yield from _tuned(f"1b-{task}", parents, task, own, varies="task")


def _during() -> Iterator[Arm]:
    """Yield arms that freeze a quarter of the heads while an ordinary checkpoint is finetuned."""
    smoke = {"smoke": {"calibration_sequences": 4}}
    for task, own in SMALL_TASKS.items():
        yield from _tuned(f"during-{task}", {"ordinary": "4k-ordinary"}, task, own, varies="task")
        for ending, schedule in DURING.items():
            (arm,) = _tuned(f"during-{task}", {ending: "4k-ordinary"}, task, varies="task")
            yield replace(arm, settings={**freeze(0.25), "schedule": schedule}, scaled=smoke)


def _pruning_downstream() -> Iterator[Arm]:
    """Yield finetuned checkpoints of arms at matched time and of `_later`, with either seed varying."""
    midpoint = {model: f"4k-{model}-time" for model in ("ordinary", "mean-25", "mean-50", "pruned-25", "pruned-50")}
    tokens = {name: f"later-{name}" for name in LATER_ARMS} | {"from-start": "pruned-from-start"}
    time = {name: f"later-{name}-time" for name in LATER_ARMS}
    for task, own in SMALL_TASKS.items():
        yield from _tuned(f"midpoint-{task}", midpoint, task, own)
        yield from _tuned(f"later-tokens-{task}", tokens, task, own)
        yield from _tuned(f"later-time-{task}", time, task, own, varies="task")
        yield from _tuned(f"later-time-pretraining-{task}", time, task, own)


def _stages() -> Iterator[Arm]:
    """Yield chains in which one seed sets all stages: pretraining, tasks, and events after recall was learnt."""
    models: dict[str, Settings] = {"ordinary": {}, "mean-25": freeze(0.25), "pruned-25": PRUNE}
    parents = {model: f"4k-{model}" for model in models}
    # QuALITY is cut to the context of the models, which are those of 4K.
    tasks = {task: own["small"] for task, own in SMALL_TASKS.items()} | {"quality": {"max_tokens": 4_096}, "mqar": {}}
    for task, settings in tasks.items():
        yield from _tuned(f"stages-{task}", parents, task, dict.fromkeys(BASES, settings), varies="both")
    yield from _recovered("stages-recovery", "stages-mqar-ordinary", models, varies="both")


OWN_ARMS: list[Arm] = []
"""Arms of your own recipes: add yours here."""


@cache
def arms() -> dict[str, Arm]:
    """Return all arms by name; raise InputError where two have one name."""
    families = (
        *(_contexts, _exponential, _linear_time, _staged, _peak_rates, _freeze_times, _patterns, _schedules, _scores),
        *(_variants, _bought, _later, _one_billion),
        *(_recall, _downstream, _during, _pruning_downstream, _stages),
    )
    by_name: dict[str, Arm] = {}
    for arm in (*(arm for family in families for arm in family()), *OWN_ARMS):
        if by_name.setdefault(arm.name, arm) is not arm:
            raise InputError(f"two arms are called {arm.name!r} in experiments/arms.py; give one another name")
    return by_name


def arm_at(name: str, scale: str) -> Arm:
    """Return an arm, or its stand-in at a scale; raise InputError for a name that none has."""
    if name not in arms():
        raise InputError(f"there is no arm {name!r}{did_you_mean(name, arms())}")
    arm = arms()[name]
    return arm if scale == "paper" or arm.stand_in is None else arm_at(arm.stand_in, scale)
