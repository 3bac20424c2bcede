"""Five fixed patterns at four rates, fig:prior-quality, whose numbers are drawn; and tab:prior-geometry-correlation."""

from experiments.measurements import Changes, Checkpoint, Measurement, Number
from experiments.paper import GEOMETRY, GEOMETRY_CORRELATIONS, Source
from experiments.recipe import Figure, Recipe, Row

PATTERNS = {
    **{"mean": "mean", "sharp-mean": "sharp_mean", "gaussian": "gaussian", "dirichlet": "dirichlet"},
    "structured-random": "structured_random",
}
"""Arms' names of them, and the analysis's."""
RATES = ("10", "25", "50", "75")
# The two rates that all tables have come first; sampled patterns at the others last.
ORDER = [(pattern, rate) for rate in ("25", "50") for pattern in PATTERNS]
ORDER += [(p, r) for p in ("mean", "sharp-mean", "structured-random", "gaussian", "dirichlet") for r in ("10", "75")]
DISTANCES = {
    **{"squared_error": "squared error", "kl": "KL from the mean", "hellinger": "squared Hellinger"},
    "total_variation": "total variation",
}
PAPER = {("mean", "25"): {"delta": "+0.665", "perplexity": "24.1165"}, ("mean", "50"): {"delta": "+2.649"}}
SMOKE = ("25", "50"), ("mean", "dirichlet")


def _changes(rates: tuple[str, ...], patterns: tuple[str, ...]) -> Changes:
    return Changes({str(int(r) / 100): {PATTERNS[p]: f"4k-{p}-{r}" for p in patterns} for r in rates})


RECIPE = Recipe(
    title="Fixed patterns and rates",
    seeds=1,
    source=Source(
        "fig:prior-quality",
        "124M at 4K, one seed; a figure without numbers: those of the mean are tab:kl-continuation-selector's and "
        "tab:representation-details'",
    ),
    rows=(
        Row(arm="4k-ordinary", label="ordinary", paper={"perplexity": "23.9571"}),
        *(
            Row(
                arm=f"4k-{pattern}-{rate}",
                label=f"{PATTERNS[pattern]} {rate}%",
                reference="4k-ordinary",
                paper=PAPER.get((pattern, rate), {}),
            )
            for pattern, rate in ORDER
        ),
    ),
    figures=(
        Figure(
            name="rates",
            title="Change of perplexity by rate and pattern, %",
            across="heads frozen",
            alike=False,
            panels={
                title: {
                    PATTERNS[pattern]: {f"{rate}%": (f"4k-{pattern}-{rate}", "delta") for rate in rates}
                    for pattern in PATTERNS
                }
                for title, rates in (("to 50%", RATES[:3]), ("all rates", RATES))
            },
        ),
    ),
    metrics=("perplexity", "delta", "heads"),
    also=("tab:prior-geometry-correlation", "tab:kl-continuation-selector", "tab:representation-details"),
    measurements=(
        Measurement(
            name="distance and cost",
            does="analyze geometry",
            on=(Checkpoint("4k-ordinary", 0.5),),
            settings={
                "sequences": 32,
                "rates": tuple(int(rate) / 100 for rate in RATES),
                "costs": _changes(RATES, tuple(PATTERNS)),
            },
            scaled={"smoke": {"sequences": 4, "rates": (0.25, 0.5), "costs": _changes(*SMOKE)}},
            numbers=tuple(
                Number(
                    title=f"{words}, stratified" if key == "stratified" else f"{words}, {float(key):.0%}",
                    # A pair: the correlation within each rate, and the stratified one.
                    path=("correlations", distance, *((1,) if key == "stratified" else (0, key))),
                    paper=paper,
                )
                for distance, words in DISTANCES.items()
                for key, paper in GEOMETRY_CORRELATIONS[distance].items()
            ),
            label=GEOMETRY.label,
        ),
    ),
    smoke=tuple(f"4k-{pattern}-{rate}" for rate in SMOKE[0] for pattern in SMOKE[1]),
)
