"""Freezing and pruning after a full run, and pruning from initialisation: tab:pruning-additional-training.

Arms at matched time stand beside themselves at matched tokens; one more ordinary run has a few percent more tokens.
"""

from saf.experiments.recipe import Arm, Recipe
from saf.experiments.scales import HELD_OUT
from saf.experiments.speeds import OWN_CLOCK
from saf.records.paper import Source

RATES = {"peak_lr": 6e-5, "min_lr_ratio": 0.1, "warmup": 0}
# The rate that a full run of the small scale ends with, as 6e-5 is of the paper's.
SMALL = {"small": {"peak_lr": 1e-4}}
PRUNED = {"freeze.operation": "prune"}
SETTINGS = {
    "ordinary": {},
    "mean + variance": {"freeze.rate": 0.25},
    "pruning + variance": PRUNED,
    "pruning + gate-Taylor": {**PRUNED, "freeze.rate": 0.25, "freeze.score": "gate_taylor"},
}
PAPER = {
    "ordinary": ("22.563 ± 0.010", "22.561 ± 0.011"),
    "mean + variance": ("22.923 ± 0.013", "22.895 ± 0.012"),
    "pruning + variance": ("23.019 ± 0.028", "22.953 ± 0.026"),
    "pruning + gate-Taylor": ("22.865 ± 0.019", "22.798 ± 0.021"),
}
MINUTES = {
    **{"ordinary": "286.86", "mean + variance": "282.87"},
    **{"pruning + variance": "275.43", "pruning + gate-Taylor": "275.93"},
}
"""Of whole runs at matched tokens, seed 1337."""
TIMED = ", matched time"
MORE = "ordinary, 2% more tokens"
# Of the third of all tokens that is left: 2% of them all.
LONGER = {"match_speed": 1.06, "match_speed_source": "set for the exchange rate, not measured", **OWN_CLOCK}


def _arm(name: str, timed: bool) -> Arm:
    """One of the four arms, given as many updates as the ordinary one, or its time."""
    end = TIMED if timed else ""
    return Arm(
        name=name + end,
        parent="full run",
        at=1.0,
        more=0.5,
        match="ordinary" if timed else None,
        settings={**RATES, **SETTINGS[name]},
        scaled={**SMALL, **HELD_OUT} if SETTINGS[name] else SMALL,
        heads="mean + variance" if name == "pruning + variance" else None,
        reference=None if name == "ordinary" else "ordinary" + end,
        beside={"tokens": name, "exchange": MORE} if timed and name != "ordinary" else {},
        paper={"perplexity": PAPER[name][timed]} | ({} if timed else {"minutes": MINUTES[name]}),
        smoke=not timed or name in ("ordinary", "pruning + variance"),
    )


RECIPE = Recipe(
    title="Later intervention at 25%",
    source=Source("tab:pruning-additional-training", "124M at 4K, 3.6864B tokens, mean ± SE of three seeds"),
    arms=(
        Arm(name="full run", reference=None),
        *(_arm(name, timed) for timed in (False, True) for name in SETTINGS),
        Arm(
            **{"name": MORE, "parent": "full run", "at": 1.0, "more": 0.5, "match": "ordinary"},
            **{"settings": {**RATES, **LONGER}, "scaled": SMALL, "reference": "ordinary"},
            beside={"exchange": MORE},
        ),
        # The same run as the first seed's above: the paper compares it with the one below.
        Arm(
            **{"name": "pruning + variance, one seed", "parent": "full run", "at": 1.0, "more": 0.5, "axis": "none"},
            **{"settings": {**RATES, **PRUNED}, "scaled": {**SMALL, **HELD_OUT}, "heads": "mean + variance"},
            **{"reference": "ordinary", "paper": {"perplexity": "23.049"}},
        ),
        Arm(
            name="pruning from initialisation",
            more=0.5,
            settings={**PRUNED, "freeze_at": 0},
            scaled=HELD_OUT,
            heads="mean + variance",
            paper={"perplexity": "22.683", "minutes": "248.26"},
        ),
    ),
    columns=(
        *("perplexity", "delta", "extra", "tokens", "paper_exchange", "own_exchange", "exchange"),
        *("updates", "minutes", "heads"),
    ),
    notes=(
        "The rate falls from 6e-5, where the paper's full run ends, to 6e-6; at the small scale from 1e-4 to 1e-5. "
        "Pruning + variance has exactly the heads of mean + variance. Matched time is that of the ordinary arm from "
        "the full run on. The paper's minutes are of seed 1337. Its accuracies of these models are those of recipe "
        "pruning_downstream.",
        "Extra tokens are those of the whole run beside the ordinary arm's at matched time. With tokens at a rate: the "
        "change at matched tokens less the rate times the extra tokens. 0.14 is the rate of the paper's runs of 5,000 "
        "updates; the measured one is that of the ordinary arm with 2% more tokens, beside the ordinary arm.",
        "From initialisation the same heads are pruned before the first update, and one schedule of the scale's rates "
        "spans as many updates as the other arms have in all: the paper does not tell its rates, and gives one seed.",
    ),
)
