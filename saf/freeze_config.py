"""`FreezeConfig` holds the settings of one event; `head_order` is the order in which it tries a model's heads."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from saf.calibration import COLLECTIONS
from saf.errors import InputError, check_keywords, check_name, shown
from saf.exponential_fit import fit_exponential_heads
from saf.fit import check_fitter
from saf.heads import Head, HeadLayout, HeadSet, head_pairs
from saf.ops.frozen_heads import BACKENDS
from saf.records.run import STATE_AFTER
from saf.scores import SCORES, Score, required_inputs, score_name
from saf.selection import Chooser, existing, heads_at_rate, select
from saf.targets import FITTED, TARGETS, Storage, check_options

# Settings that set the number of heads; on the command line only one may be named.
COUNT_SETTINGS = ("rate", "count", "heads", "match_heads")
_HEAD_LISTS = ("heads", "exclude", "only", "match_heads")
_FIT_SETTINGS = ("fitter", "fitter_options", "max_fit_kl")
_PATTERN_SETTINGS = ("pattern", "pattern_options", "storage", "backend", "trainable", *_FIT_SETTINGS)
_NOT_WITH_JOINT_COST = ("heads", "match", "match_heads", "whole_groups", "strict")
# By setting: the other settings that have no effect where it is set.
_NOT_WITH = {
    "heads": ("count", "exclude", "only", "below", "max_per_layer", "match", "match_heads", "whole_groups"),
    "match_heads": ("count", "max_per_layer", "match"),
    "match": ("max_per_layer",),
}
# Scores of how attention differs between sequences: nothing but rounding where all sequences are alike.
_COMPARING_SCORES = ("variance", "forward_kl", "rank_sum", "gradient_veto", "residual_cosine", "relative_output_change")
# Heads of lowest score that are tried for each one that joint cost may take. On SmolLM2-135M 5% of all heads, chosen by
# their joint cost on general text, raise perplexity on wikitext-2 by 13%; chosen among three times as many of lowest
# forward KL, by 0.7% (docs/log.md).
CANDIDATES = 3
# Calibration tokens from which exponential patterns are the default: the shortest context at which they were measured
# to make updates faster than compact ones, 1.078x in place of 1.068x with 25% of 124M frozen (docs/log.md).
LINEAR_FROM = 4_096
Operation = Literal["freeze", "prune"]


def unfitted_reason(storage: Storage, pattern: str) -> str | None:
    """Return why patterns of these settings need no fit; None where they are fitted."""
    if storage not in FITTED:
        return f"storage={storage!r} keeps every entry"
    return None if TARGETS[pattern].exact is None else f"pattern={pattern!r} is compact by nature"


@dataclass(frozen=True, kw_only=True)
class FreezeConfig:
    """Hold the settings of one event that freezes or prunes heads; `saf pretrain --help-all` explains each of them."""

    operation: Operation = "freeze"
    """Freeze heads into fixed patterns, or prune the same heads, that is remove them: the control. Pruning uses no
    settings of patterns and fits."""
    rate: float = 0.25
    """Freeze this share of the original model's heads, k = round(rate * layers * heads), in addition to heads frozen
    before."""
    count: int | None = None
    """Freeze this number of heads, whatever rate is."""
    score: str | Score = field(default="variance", metadata={"one_of": SCORES})
    """Freeze the heads with the lowest values of this score: variance of attention between sequences, or forward_kl,
    the KL divergence of a sequence's attention from the mean. In Python it may be a function of the statistics."""
    pattern: str = field(default="mean", metadata={"one_of": TARGETS})
    """Replace a frozen head's attention by this pattern."""
    storage: Storage | Literal["auto"] = "auto"
    """Keep patterns as fitted key and distance logits (compact), as sums of damped cosines, which take linear time
    (exponential; heads that do not fit stay compact), or entry by entry in float32 (dense). auto is exponential from
    4,096 calibration tokens on, else compact, as are trainable patterns, those that need no fit and those of a named
    backend other than linear."""
    fitter: str = "proportional"
    """Fit compact patterns by this fitter."""
    max_fit_kl: float = 0.2
    """Skip heads whose compact fit has a larger row-averaged KL from the pattern than this, in nats."""
    strict: bool = False
    """Raise an error if one of the k lowest heads does not fit, instead of taking the next one, or if fewer than k may
    be chosen."""
    heads: tuple[Head, ...] | None = None
    """Freeze exactly these (layer, head) pairs; one that does not fit is an error. On the command line write 0:3 1:11,
    or a file: JSON pairs, or the events.jsonl of a run."""
    exclude: tuple[Head, ...] = ()
    """Keep these heads live; they are written like heads."""
    only: tuple[Head, ...] | None = None
    """Choose among these heads alone, written like heads; None allows all."""
    below: float | None = None
    """Choose only heads that score less than this."""
    max_per_layer: int | None = None
    """Freeze at most this number of heads in a layer; by default there is no limit."""
    match: str | None = None
    """Freeze as many heads in each layer as this score would choose: the paper's control, with a random score."""
    match_heads: tuple[Head, ...] | None = None
    """Freeze as many heads in each layer as this list has, written like heads: a control for another run."""
    whole_groups: bool = False
    """Choose whole KV groups, so that keys go too."""
    joint_cost: bool = False
    """Choose the heads that cost least together on held-out text, among three times as many of lowest score. Each step
    takes the head that adds least to the cost of those taken before."""
    budget: float | None = None
    """Choose heads by joint cost, and stop where perplexity on held-out text would rise by more than this share, such
    as 0.01; the rate is then the most that may freeze."""
    seed: int = 0
    """Random seed for random scores and sampled patterns."""
    backend: str = "auto"
    """Execute frozen heads by this backend: toeplitz, linear, fused or reference; auto takes the one that `saf doctor`
    names."""
    trainable: bool = False
    """Train key and distance logits with the model, from their fit on, instead of keeping them fixed."""
    fitter_options: dict[str, Any] = field(default_factory=dict)
    """Pass these further arguments to the fitter, by name; on the command line such as: steps 200. With storage named
    exponential, those of `fit_exponential_heads` too, such as: band 64."""
    pattern_options: dict[str, Any] = field(default_factory=dict)
    """Pass these further arguments to the pattern, by name; on the command line such as: scale 4."""

    def __post_init__(self):
        """Raise InputError for unknown names, values out of range, and settings that others leave without effect."""
        check_name("operation", self.operation, get_args(Operation))
        check_name("storage", self.storage, ("auto", *get_args(Storage)))
        check_name("pattern", self.pattern, TARGETS)
        check_name("backend", self.backend, ("auto", *BACKENDS))
        for name in ("score", "match"):
            if isinstance(value := getattr(self, name), str):
                check_name(name, value, SCORES)
        heads_at_rate(self.rate, 1)  # raises for a rate that is no share
        # The calibration's length is not known yet: storage "auto" counts as what it is for the shortest.
        check_fitter(self.fitter, self.fit_options(self.storage_at(0))[0])
        for name in _HEAD_LISTS:
            if (heads := getattr(self, name)) is not None:
                # Tuples, also of the lists in a recorded event: settings that are equal compare as equal.
                object.__setattr__(self, name, tuple(head_pairs(heads)))
                HeadSet(heads)  # raises for a head named twice
        check_options(self.pattern, self.pattern_options)
        for name, unit in (("max_fit_kl", "in nats"), ("budget", "such as 0.01 for 1% of perplexity")):
            if (number := getattr(self, name)) is not None and not number > 0:
                raise InputError(f"{name} must be positive, {unit}, got {number}")
        for name, least in (("count", 0), ("max_per_layer", 1), ("seed", 0)):
            if (number := getattr(self, name)) is not None and number < least:
                raise InputError(f"{name} must be at least {least}, got {number}")
        self._check_effects()

    def _check_effects(self) -> None:
        """Raise InputError for settings without effect, or that contradict each other."""
        unfitted = unfitted_reason(self.storage_at(0), self.pattern)
        unused = [
            (self.operation == "prune", "pruned heads have no patterns", _PATTERN_SETTINGS),
            (self.uses_joint_cost, "heads are chosen by their joint cost", _NOT_WITH_JOINT_COST),
            (unfitted is not None, f"{unfitted}, and nothing is fitted", _FIT_SETTINGS),
        ]
        for by, names in _NOT_WITH.items():
            unused.append((getattr(self, by) is not None, f"{by} sets which heads are chosen", names))
        # A setting at its default was not asked for: whoever names one that does nothing expects something of it.
        defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(self)}
        for applies, reason, names in unused:
            changed = [name for name in names if getattr(self, name) != defaults[name]]
            if applies and changed:
                raise InputError(f"{reason}: leave {' and '.join(changed)} out")
        if self.match is not None and self.match == self.score:
            raise InputError(f"match has no effect where heads are chosen by {self.match!r} anyway; leave it out")
        if self.storage == "exponential" and TARGETS[self.pattern].exact is not None:
            raise InputError(f"pattern={self.pattern!r} is not fitted: use storage='compact' with it")
        if self.trainable and self.storage_at(0) != "compact":
            raise InputError("trainable patterns have key and distance logits: use storage='compact'")

    def check_calibration(self, *, sequences: int) -> None:
        """Raise InputError where `sequences` different calibration sequences are too few for the scores."""
        names = [name for name in (self.score, self.match) if name in _COMPARING_SCORES]
        if names and self.heads is None and sequences < 2:
            raise InputError(
                f"score {names[0]!r} compares sequences: calibration must have two different ones, got {sequences}; "
                "the paper's runs had 16 to 32"
            )

    def storage_at(self, length: int) -> Storage:
        """Return the storage of patterns calibrated on sequences of `length` tokens.

        >>> FreezeConfig().storage_at(1_024), FreezeConfig().storage_at(4_096)
        ('compact', 'exponential')
        """
        if self.storage != "auto":
            return self.storage
        linear = self.backend == "linear" or (self.backend == "auto" and length >= LINEAR_FROM)
        return "exponential" if linear and not self.trainable and TARGETS[self.pattern].exact is None else "compact"

    def fit_options(self, storage: Storage) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the fitter's options and, for exponential storage, those of `fit_exponential_heads`."""
        names = check_keywords("", (), fit_exponential_heads) if storage == "exponential" else []
        compact = {name: value for name, value in self.fitter_options.items() if name not in names}
        return compact, {name: self.fitter_options[name] for name in self.fitter_options.keys() - compact.keys()}

    def requested(self, num_heads: int) -> int:
        """Return k, how many heads of a model of `num_heads` these settings ask for.

        >>> FreezeConfig(rate=0.25).requested(144)
        36
        """
        named = self.heads if self.heads is not None else self.match_heads
        if named is not None:
            return len(named)
        return heads_at_rate(self.rate, num_heads) if self.count is None else self.count

    @property
    def asks_for_none(self) -> bool:
        """Whether these settings ask for no head of any model."""
        return not self.requested(1_000_000)  # more heads than a model has: a rate of 1e-9 asks for none, too

    @property
    def uses_joint_cost(self) -> bool:
        """Whether heads are chosen by what they cost together."""
        return self.joint_cost or self.budget is not None

    @property
    def all_or_none(self) -> bool:
        """Whether a head that does not fit is an error: no other takes its place."""
        return self.strict or self.heads is not None

    @property
    def kind(self) -> str:
        """The kind of heads that the event leaves behind, one of `saf.heads.KINDS`: frozen or pruned."""
        return STATE_AFTER[self.operation]

    @property
    def score_names(self) -> tuple[str | Score, ...]:
        """The score by which heads are chosen, and the one whose counts by layer are matched, if any."""
        return (self.score,) if self.match is None else (self.score, self.match)

    @property
    def needs(self) -> frozenset[str]:
        """Inputs of the scores beyond the statistics: `gradient`, `outputs`, `gates`, or names in `COLLECTIONS`."""
        return frozenset(key for name in self.score_names for key in required_inputs(name))

    @property
    def collect(self) -> tuple[str, ...]:
        """Names in `COLLECTIONS` of what calibration measures for the scores beyond the statistics."""
        names = self.needs & COLLECTIONS.keys()
        if "outputs" in self.needs:
            names |= {"mean_rows"}  # by which head_outputs replaces a head's attention
        return tuple(sorted(names))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        lists = {name: getattr(self, name) for name in _HEAD_LISTS}
        pairs = {name: [list(head) for head in heads] for name, heads in lists.items() if heads is not None}
        return asdict(self) | pairs | {"score": score_name(self.score)}


# --- the heads of a model


def head_order(scores: Mapping[str | Score, Tensor], config: FreezeConfig, layout: HeadLayout) -> Chooser:
    """Return the order in which heads are tried, by ascending score `[L, H]`, within the settings' number and limits.

    Frozen and pruned heads score NaN. With `whole_groups` heads come by KV groups, whose size is that of `layout`, any
    layer of the model.
    """
    ranked = scores[config.score]
    count = config.requested(ranked.numel())
    if config.heads is not None:
        return Chooser(ranked, count=count, only=config.heads)
    group_size = layout.num_heads // layout.num_kv_heads if config.whole_groups else 1
    limits: dict[str, Any] = {"only": config.only, "exclude": set(config.exclude), "group_size": group_size}
    if config.uses_joint_cost:
        # Candidates, of which it takes some; messages name their number, so no more than there are.
        count = min(CANDIDATES * count, int((~ranked.isnan()).sum()))
    matched = config.match_heads
    if config.match is not None:
        matched = select(scores[config.match], count=count, **limits)
    if config.below is not None:  # after `select`: this limit is of the ranking score, not of the one to match
        limits["exclude"] |= set(map(tuple, (ranked >= config.below).nonzero().tolist()))
    if matched is not None:
        return Chooser(ranked, match=matched, **limits)
    return Chooser(ranked, count=count, max_per_layer=config.max_per_layer, **limits)


def check_config(config: Any) -> None:
    """Raise InputError for settings that are no FreezeConfig."""
    if not isinstance(config, FreezeConfig):
        raise InputError(f"config must be a FreezeConfig, got {shown(config)}: pass saf.FreezeConfig(rate=0.25)")


def check_heads(config: FreezeConfig, layouts: Sequence[HeadLayout], *, allow_empty: bool = False) -> None:
    """Raise InputError unless a model with these layers has the heads that the settings ask for, whatever they score.

    With `allow_empty`, as in later events of a run, there may be none to choose.
    """
    live = torch.tensor([[head in layout.live for head in range(layout.num_heads)] for layout in layouts])
    if frozen := sorted(head for head in existing(live, config.heads or ()) if not live[head]):
        raise InputError(f"{frozen} are frozen or pruned already; name live heads")
    num_live, total = int(live.sum()), live.numel()
    # Equal scores stand for those that are not measured yet, the lowest number for one within any limit `below`.
    lowest = torch.full(live.shape, torch.finfo(torch.float32).min).masked_fill(~live, math.nan)
    order = head_order(dict.fromkeys(config.score_names, lowest), config, layouts[0])
    available = sum(map(len, order.propose()))
    if config.count is not None and config.count > num_live:
        raise InputError(f"count must be at most the {num_live} live heads of {total}, got {config.count}")
    most = min(available, config.requested(total))
    if config.operation == "prune" and most == sum(layout.num_slots for layout in layouts):
        raise InputError(f"pruning must leave the model a head, got all {most} to prune: ask for fewer")
    if (config.strict and not order.attained(available)) or not (available or allow_empty):
        least = order.total if config.strict else 1
        raise InputError(
            f"at least {least} of {total} heads must be {config.kind}, got {available} of {num_live} live ones: rate "
            "or count, only, exclude, max_per_layer and whole_groups allow no more"
        )
