"""The settings of one freezing event."""

from dataclasses import asdict, dataclass, field
from numbers import Integral, Real
from operator import index
from typing import Any, get_args

from saf.errors import InputError
from saf.estimates import PATTERNS, Storage, check_options
from saf.estimates.sampling import Seed, seed_of
from saf.fit import FITTERS, check_fitter_options
from saf.freezing.heldout import check_heldout
from saf.heads import HeadSet
from saf.scores import SCORES, Score, needed_by, score_name
from saf.selection import budget


@dataclass(frozen=True, kw_only=True)
class FreezeConfig:
    """Settings of one freezing event; raises InputError for a value that cannot be used."""

    rate: float = 0.25
    """Share of all heads of the original model that this event freezes: k = round(rate * layers * heads).

    They are chosen among the heads still live: on a model with frozen heads k more are frozen.
    """
    count: int | None = None
    """Freeze so many heads, whatever the rate says."""
    score: str | Score = "variance"
    """Heads with the lowest score are frozen first; a name, or a function of the statistics."""
    pattern: str = "mean"
    """What a frozen head's attention is replaced by."""
    storage: Storage = "compact"
    """How patterns are kept and executed: fitted key and distance logits, or entry by entry in bfloat16."""
    fitter: str = "proportional"
    """How the compact pattern is fitted."""
    max_fit_kl: float = 0.2
    """Largest row-averaged KL from the pattern to its compact fit, in nats; other heads are skipped."""
    strict: bool = False
    """Refuse when one of the k lowest heads does not fit, instead of taking the next one."""
    heads: tuple[tuple[int, int], ...] | None = None
    """Exactly these heads `(layer, head)`, whatever rate says and they score; refused when one does not fit."""
    exclude: tuple[tuple[int, int], ...] = ()
    """Heads `(layer, head)` that stay live."""
    max_per_layer: int | None = None
    """Most heads to freeze in a layer."""
    match: str | None = None
    """Freeze as many heads in each layer as this score would choose: with score="random", the paper's control."""
    whole_groups: bool = False
    """Choose whole KV groups, so that keys go too."""
    seed: Seed = 0
    """Of random scores and sampled patterns; from a `torch.Generator` one is drawn at once, and kept here."""
    backend: str = "auto"
    """Which backend executes the frozen heads."""
    trainable: bool = False
    """Train key and distance logits on with the model, from their fit."""
    heldout_kl: bool = False
    """Also fit the frozen heads on one half of the calibration sequences, and report their KL to the other half."""
    fitter_options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the fitter."""
    pattern_options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the pattern."""

    def __post_init__(self):
        """Check names and ranges."""
        self._check_numbers()
        budget(self.rate, 1)
        for name in ("heads", "exclude"):
            if (pairs := getattr(self, name)) is not None:
                try:
                    chosen = tuple((index(layer), index(head)) for layer, head in pairs)
                except (TypeError, ValueError):
                    raise InputError(f"{name} is a list of pairs (layer, head); got {pairs!r}") from None
                HeadSet(chosen)
                object.__setattr__(self, name, chosen)
        for name, known in (
            ("score", SCORES),
            ("match", SCORES),
            ("pattern", PATTERNS),
            ("storage", get_args(Storage)),
            ("fitter", FITTERS),
        ):
            value = getattr(self, name)
            if value is not None and not callable(value) and value not in known:
                raise InputError(f"unknown {name} {value!r}; expected one of {sorted(known)}")
        check_fitter_options(self.fitter, self.fitter_options)
        object.__setattr__(self, "seed", seed_of(self.seed))
        object.__setattr__(self, "pattern_options", check_options(self.pattern, self.pattern_options))
        if self.trainable and self.storage != "compact":
            raise InputError("trainable patterns have key and distance logits: use storage='compact'")
        if self.heldout_kl:
            check_heldout(self.pattern, self.storage)
        if not self.max_fit_kl > 0:
            raise InputError(f"max_fit_kl is in nats and positive; got {self.max_fit_kl}")
        self._check_budget()

    def _check_numbers(self) -> None:
        for name, kinds in (("rate", Real), ("max_fit_kl", Real), ("count", Integral), ("max_per_layer", Integral)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kinds | type(getattr(FreezeConfig, name))):
                kind = "a number" if kinds is Real else "a whole number"
                raise InputError(f"{name} must be {kind}; got {value!r}")

    def _check_budget(self) -> None:
        if self.count is not None and self.count < 0:
            raise InputError(f"count is a number of heads, 0 or more; got {self.count}")
        if self.max_per_layer is not None and self.max_per_layer < 1:
            raise InputError(f"max_per_layer must be at least 1; got {self.max_per_layer}")
        if self.match is not None and (self.heads is not None or self.max_per_layer is not None):
            raise InputError("match sets the number of heads of each layer; leave heads and max_per_layer out")
        beside = [name for name in ("count", "exclude", "max_per_layer") if getattr(self, name) not in (None, ())]
        if self.heads is not None and beside:
            raise InputError(f"heads says exactly which are frozen; leave {' and '.join(beside)} out")

    @property
    def needs(self) -> frozenset[str]:
        """What its scores read beside the statistics: `gradient`, `outputs`, `gates`."""
        return frozenset(key for name in (self.score, self.match) if name is not None for key in needed_by(name))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        pairs = {"exclude": [list(head) for head in self.exclude]}
        if self.heads is not None:
            pairs["heads"] = [list(head) for head in self.heads]
        return asdict(self) | pairs | {"score": score_name(self.score)}
