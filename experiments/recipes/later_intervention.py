"""Freezing and pruning after a full run, and pruning from initialisation: tab:pruning-additional-training."""

from experiments.measurements import Measurement, Number, RunOf
from experiments.paper import Source
from experiments.recipe import Recipe, Row

# Perplexity at matched tokens, at matched time, minutes of the whole run at matched tokens (seed 1337).
PAPER = {
    "ordinary": ("ordinary", "22.563 ± 0.010", "22.561 ± 0.011", "286.86"),
    "mean-25": ("mean + variance", "22.923 ± 0.013", "22.895 ± 0.012", "282.87"),
    "pruned-25": ("pruning + variance", "23.019 ± 0.028", "22.953 ± 0.026", "275.43"),
    "gate-taylor-25": ("pruning + gate-Taylor", "22.865 ± 0.019", "22.798 ± 0.021", "275.93"),
}
MORE = "later-ordinary-more"


def _row(name: str, timed: bool) -> Row:
    label, tokens, time, minutes = PAPER[name]
    end = "-time" if timed else ""
    companions = {"tokens": f"later-{name}", "exchange": MORE} if timed and name != "ordinary" else {}
    return Row(
        arm=f"later-{name}{end}",
        label=f"{label}, matched time" if timed else label,
        reference=f"later-ordinary{end}",
        companions=companions,
        paper={"perplexity": time} if timed else {"perplexity": tokens, "minutes": minutes},
    )


def _overlap(name: str, one: str, other: str, paper: str) -> Measurement:
    """Return how many of 36 heads two arms have in common."""
    return Measurement(
        name=name,
        does="analyze stability",
        on=(RunOf(one), RunOf(other)),
        numbers=(Number(title=f"heads in common, {name}", path=("overlap",), paper=paper, places=1),),
        label="app:pruning-selection-budget",
        smoke=False,
    )


RECIPE = Recipe(
    title="Later intervention at 25%",
    source=Source("tab:pruning-additional-training", "124M at 4K, 3.6864B tokens, mean ± SE of three seeds"),
    rows=(
        Row(arm="4k-control-ordinary", label="full run"),
        *(_row(name, timed) for timed in (False, True) for name in PAPER),
        Row(arm=MORE, label="ordinary, 2% more tokens", reference="later-ordinary", companions={"exchange": MORE}),
        Row(
            arm="later-pruned-25",
            label="pruning + variance, one seed",
            reference="later-ordinary",
            first_seed=True,
            paper={"perplexity": "23.049"},
        ),
        Row(
            arm="pruned-from-start",
            label="pruning from initialisation",
            reference="later-ordinary",
            paper={"perplexity": "22.683", "minutes": "248.26"},
        ),
    ),
    metrics=(
        *("perplexity", "delta", "extra", "tokens", "paper_exchange", "own_exchange", "exchange"),
        *("updates", "minutes", "heads", "delta_seeds"),
    ),
    measurements=(
        _overlap("gate-Taylor and variance", "later-gate-taylor-25-time", "later-mean-25-time", "19, 19 and 21"),
        _overlap("gate-Taylor at both budgets", "later-gate-taylor-25", "later-gate-taylor-25-time", "36, 35 and 35"),
    ),
    smoke=("later-pruned-25-time", "later-mean-25", "later-ordinary-time", MORE, "pruned-from-start"),
    notes=(
        "The rate falls from 6e-5, where the paper's full run ends, to 6e-6; at the small scale from 1e-4 to 1e-5. "
        "Matched time is that of the ordinary arm from the full run on. The paper's minutes are of seed 1337. Its "
        "accuracies of these models are those of recipe pruning_downstream.",
        "Estimates of the change at matched time are the change at matched tokens less a rate times the extra tokens: "
        "0.14% for 1% as in the paper's regime, or as measured by the ordinary arm with 2% more tokens.",
        "From initialisation the same heads are pruned before the first update, and one schedule spans as many updates "
        "as the other arms have in all: the paper does not say its rates, and gives one seed.",
    ),
)
