"""The settings of one event that freezes heads, or prunes them."""

from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from saf.errors import InputError, check_name
from saf.fit import check_fitter_options
from saf.fit.structured import check_constant_after
from saf.freezing.heldout import check_heldout
from saf.heads import Head, HeadSet, head_pairs
from saf.records.events import MADE
from saf.scores import SCORES, Score, required_inputs, score_name
from saf.selection import budget
from saf.targets import FITTED, TARGETS, Seed, Storage, check_options, seed_of

HEAD_LISTS = ("heads", "exclude", "only", "match_heads")
"""Settings that are heads, pairs (layer, head)."""
BUDGETS = ("rate", "count", "heads", "match_heads")
"""Settings that say how many heads, one of which is given."""
REPLACING = ("residual_cosine", "relative_output_change")
"""Scores that read what the calibration's mean pattern changes on held-out sequences."""
Operation = Literal["freeze", "prune"]
COMPARING = ("variance", "forward_kl", "rank_sum", "gradient_veto")
"""Scores that read how attention differs between calibration sequences: nothing but rounding where they are alike."""
OF_PATTERNS = ("pattern", "storage", "fitter", "max_fit_kl", "backend", "trainable", "heldout_kl")
OF_PATTERNS += ("fitter_options", "pattern_options")
"""Settings of what pruned heads do not have: patterns, their fits, and what executes them."""


def refuse_patterns(given: Sequence[str]) -> None:
    """Raise InputError when settings of patterns are `given` for heads that are to be pruned; say which."""
    if given:
        raise InputError(
            "pruned heads have no patterns, so nothing is fitted or executed for them: with operation='prune' "
            f"leave {' and '.join(given)} out"
        )


def fits_nothing(storage: Storage, pattern: str) -> str | None:
    """Return why patterns that are kept so need no fit; None where they are fitted."""
    if storage not in FITTED:
        return f"storage={storage!r} keeps every entry"
    return None if TARGETS[pattern].exact is None else f"pattern={pattern!r} is compact by nature"


@dataclass(frozen=True, kw_only=True)
class FreezeConfig:
    """Hold the settings of one event that freezes or prunes heads; raise InputError for a value that cannot be used."""

    operation: Operation = "freeze"
    """Freeze heads into fixed patterns, or prune them: remove them altogether, the control. Heads to prune are measured
    and chosen in the same way, from calibration to budget; what patterns and fits are set by is left out."""
    rate: float = 0.25
    """Share of the original model's heads that this event freezes, k = round(rate * layers * heads), chosen among those
    still live: on a model with frozen heads k more are frozen."""
    count: int | None = None
    """Freeze so many heads, whatever rate says."""
    score: str | Score = "variance"
    """Heads with the lowest score are frozen first; a name or, in Python, a function of the statistics."""
    pattern: str = "mean"
    """What a frozen head's attention is replaced by."""
    storage: Storage = "compact"
    """How patterns are kept: fitted key and distance logits; exponential, whose distance logits beyond a band are a
    sum of damped cosines, so that a head takes time linear in length (heads that it does not fit stay compact); or
    every entry, in float32 (dense) or, in half the memory but with rows that miss one by up to 0.004, in bfloat16."""
    fitter: str = "proportional"
    """How compact patterns are fitted."""
    max_fit_kl: float = 0.2
    """Largest row-averaged KL from the pattern to its compact fit, in nats; other heads are skipped."""
    strict: bool = False
    """Refuse when one of the k lowest heads does not fit, instead of taking the next one, or fewer may be chosen: the
    latter alone of heads to prune, which are not fitted."""
    heads: tuple[Head, ...] | None = None
    """Exactly these heads (layer, head), whatever rate says and they score; refused when one does not fit. On the
    command line 0:3 1:11 or a file: JSON pairs, or the events.jsonl of a run."""
    exclude: tuple[Head, ...] = ()
    """Heads that stay live, written the same way."""
    only: tuple[Head, ...] | None = None
    """Heads that may be chosen, written the same way; all of them when None."""
    below: float | None = None
    """Choose only heads that score less than this."""
    max_per_layer: int | None = None
    """Most heads to freeze in a layer; any number when None."""
    match: str | None = None
    """Freeze as many heads in each layer as this score would choose: the paper's control, with a random score."""
    match_heads: tuple[Head, ...] | None = None
    """Freeze as many heads in each layer as this list has, written as heads are: that control beside another run."""
    whole_groups: bool = False
    """Choose whole KV groups, so that keys go too."""
    seed: Seed = 0
    """Of random scores and sampled patterns; in Python also a torch.Generator, from which one is drawn at once."""
    backend: str = "auto"
    """Which backend executes frozen heads: toeplitz, fused or reference, or the one that `saf doctor` names."""
    trainable: bool = False
    """Train key and distance logits on with the model, from their fit, instead of keeping them fixed."""
    heldout_kl: bool = False
    """Also fit the frozen heads on one half of the calibration sequences, and report their KL to the other half."""
    fitter_options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the fitter, by name; on the command line such as: steps 200."""
    pattern_options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the pattern, by name; on the command line such as: scale 4."""

    def __post_init__(self):
        """Check names and ranges."""
        check_name("operation", self.operation, get_args(Operation))
        check_name("storage", self.storage, get_args(Storage))
        check_name("pattern", self.pattern, TARGETS)
        for name in ("score", "match"):
            if isinstance(value := getattr(self, name), str):
                check_name(name, value, SCORES)
        self._check_pruning()
        budget(self.rate, 1)
        for name in HEAD_LISTS:
            if (pairs := getattr(self, name)) is not None:
                chosen = tuple(head_pairs(pairs))
                HeadSet(chosen)
                object.__setattr__(self, name, chosen)
        check_fitter_options(self.fitter, self.fitter_options)
        object.__setattr__(self, "seed", seed_of(self.seed))
        object.__setattr__(self, "pattern_options", check_options(self.pattern, self.pattern_options))
        self._check_fits()
        if self.storage == "exponential" and TARGETS[self.pattern].exact is not None:
            raise InputError(f"pattern={self.pattern!r} is not fitted: use storage='compact' with it")
        if self.trainable and self.storage != "compact":
            raise InputError("trainable patterns have key and distance logits: use storage='compact'")
        if self.heldout_kl:
            check_heldout(self.pattern, self.storage)
        if not self.max_fit_kl > 0:
            raise InputError(f"max_fit_kl is in nats and positive; got {self.max_fit_kl}")
        self._check_budget()
        if self.match is not None and self.match == self.score:
            raise InputError(f"match has no effect where heads are chosen by {self.match!r} anyway; leave it out")

    def check_calibration(self, *, sequences: int, length: int) -> None:
        """Raise InputError for calibration sequences, so many different ones, that these settings cannot take.

        Scores that compare sequences need two, unless heads are named; options of the fit must suit the length, tokens.
        """
        names = [name for name in (self.score, self.match) if name in COMPARING] if self.heads is None else []
        if names and sequences < 2:
            raise InputError(
                f"score {names[0]!r} compares sequences: calibration must have two different ones, got {sequences}; "
                "the paper's runs had 16 to 32"
            )
        after = self.fitter_options.get("alpha_constant_after")
        if after is not None and self.operation == "freeze":
            check_constant_after(after, length)

    def _check_pruning(self) -> None:
        """Raise InputError for settings that say something of patterns when heads are pruned."""
        usual = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(self)}
        given = [name for name in OF_PATTERNS if getattr(self, name) != usual[name]]
        if self.operation == "prune":
            refuse_patterns(given)

    def _check_fits(self) -> None:
        """Raise InputError for settings of fits where nothing is fitted."""
        why = fits_nothing(self.storage, self.pattern)
        given = ["max_fit_kl"] * (self.max_fit_kl != FreezeConfig.max_fit_kl)
        given += ["the fitter"] * (self.fitter != FreezeConfig.fitter or bool(self.fitter_options))
        if why is not None and given:
            raise InputError(f"{why}, and nothing is fitted: leave {' and '.join(given)} out")

    def _check_budget(self) -> None:
        """Raise InputError for settings of how many heads that contradict one another."""
        if self.count is not None and self.count < 0:
            raise InputError(f"count is a number of heads, 0 or more; got {self.count}")
        if self.max_per_layer is not None and self.max_per_layer < 1:
            raise InputError(f"max_per_layer must be at least 1; got {self.max_per_layer}")
        if self.match is not None and (self.heads is not None or self.max_per_layer is not None):
            raise InputError("match sets the number of heads of each layer; leave heads and max_per_layer out")
        if self.match_heads is not None and (beside := self._given("heads", "count", "max_per_layer", "match")):
            raise InputError(f"match_heads sets the number of heads of each layer; leave {' and '.join(beside)} out")
        if self.heads is not None and (beside := self._given("count", "exclude", "max_per_layer", "only", "below")):
            raise InputError(f"heads says exactly which are frozen; leave {' and '.join(beside)} out")

    def _given(self, *names: str) -> list[str]:
        """Return those of the settings that say something."""
        return [name for name in names if getattr(self, name) not in (None, ())]

    @property
    def kind(self) -> str:
        """Return what the event makes of heads, a kind of `saf.heads.KINDS`: frozen or pruned."""
        return MADE[self.operation]

    def requested(self, num_heads: int) -> int:
        """Return how many heads of a model of `num_heads` these settings ask for.

        >>> FreezeConfig(rate=0.25).requested(144)
        36
        """
        named = self.heads if self.heads is not None else self.match_heads
        if named is not None:
            return len(named)
        return budget(self.rate, num_heads) if self.count is None else self.count

    @property
    def needs(self) -> frozenset[str]:
        """Return what the scores read beside the statistics: `gradient`, `outputs`, `gates`."""
        return frozenset(key for name in (self.score, self.match) if name is not None for key in required_inputs(name))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        lists = {name: getattr(self, name) for name in HEAD_LISTS}
        pairs = {name: [list(head) for head in heads] for name, heads in lists.items() if heads is not None}
        return asdict(self) | pairs | {"score": score_name(self.score)}
