"""Is freezing better than ordinary attention, and than pruning? Models near convergence, matched tokens and time.

Run it with `--scale converged`. All arms of a seed continue from the checkpoint halfway (early ones: after a quarter)
through one ordinary run. At matched time an arm gets the updates that its measured speed buys.
"""

from experiments.arms import control_trunk
from experiments.paper import Source
from experiments.recipe import Figure, Recipe, Row

KINDS = {
    "exponential-{}": "frozen",
    "exponential-{}-pruned": "same heads pruned",
    "gate-taylor-{}": "pruned by gate-Taylor",
    "exponential-{}-random": "random heads frozen",
    "exponential-{}-early": "frozen after a quarter of training",
}
CLOCK = {
    "ordinary": "ordinary",
    "exponential-50": "50% frozen",
    "exponential-50-pruned": "50% same heads pruned",
}


def _rows(k: str) -> tuple[Row, ...]:
    context, trunk, more = k.upper(), control_trunk(k), f"{k}-ordinary-more"
    rows = [
        Row(arm=trunk, label=f"{context} ordinary"),
        Row(arm=more, label=f"{context} ordinary, 3% more tokens", reference=trunk, companions={"exchange": more}),
    ]
    for rate in ("50", "25"):
        for end, words in (("-time", ""), ("", ", matched tokens")):
            for kind, label in KINDS.items():
                arm, frozen = f"{k}-{kind.format(rate)}", f"{k}-exponential-{rate}"
                rows.append(
                    Row(
                        arm=arm + end,
                        label=f"{context} {rate}% {label}{words}",
                        reference=trunk,
                        against=None if arm == frozen else frozen + end,
                        companions={"tokens": arm, "exchange": more} if end else {},
                    )
                )
    frozen = f"{k}-exponential-50-clock"
    rows += [
        Row(
            arm=f"{k}-{arm}-clock",
            label=f"{context} {label}, own clock",
            reference=trunk,
            against=frozen if arm.endswith("pruned") else None,
            first_seed=True,
        )
        for arm, label in CLOCK.items()
    ]
    return tuple(rows)


LINES = {"frozen": "exponential-{}", "pruned": "exponential-{}-pruned", "pruned by gate-Taylor": "gate-taylor-{}"}

RECIPE = Recipe(
    title="Freezing, pruning and ordinary attention near convergence",
    source=Source("tab:equal-time-controls", "the question is the paper's; its models are of 124M and 2.46B tokens"),
    rows=(*_rows("16k"), *_rows("4k")),
    metrics=(
        *("perplexity", "delta", "difference", "extra", "tokens", "own_exchange", "paper_exchange", "exchange"),
        *("updates", "minutes", "intervention", "context", "heads", "exponential", "fit_kl"),
    ),
    headline=("perplexity", "delta", "difference", "extra", "tokens"),
    intervals="t",
    figures=(
        Figure(
            name="contexts",
            title="Change of perplexity from ordinary attention, %",
            across="tokens of context",
            panels={
                f"{rate}% of heads, matched {clock}": {
                    line: {k.upper(): (f"{k}-{arm.format(rate)}{end}", "delta") for k in ("4k", "16k")}
                    for line, arm in LINES.items()
                }
                for rate in ("25", "50")
                for clock, end in (("tokens", ""), ("time", "-time"))
            },
        ),
    ),
    smoke=(
        *(
            "16k-exponential-50-time",
            "16k-exponential-50-pruned-time",
            "16k-gate-taylor-50",
        ),
        "16k-ordinary-more",
    ),
    notes=(
        "Speeds are those of 124M with heads frozen in linear time and with the same heads pruned, measured in one run "
        "(results/bench/linear.json); an event and its compilation cost 28.3 of the paper's 187.65 minutes' seconds.",
        "The difference is from the frozen arm of the same rate and clock; below zero is better than freezing.",
        "Own clock: the arm gets the seconds that its reference had left, as it takes them itself.",
    ),
)
