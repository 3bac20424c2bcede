"""Five fixed patterns at four rates, fig:prior-quality, whose numbers are drawn; and tab:prior-geometry-correlation."""

from saf.experiments.figure import Figure
from saf.experiments.measurement import Changes, Checkpoint, Measurement, Number
from saf.experiments.recipe import Arm, Recipe
from saf.records.paper import GEOMETRY, GEOMETRY_CORRELATIONS, Source

PATTERNS = {
    "mean": {},
    # As the paper: sampled and sharp patterns are stored whole (app:controlled-pretraining-details).
    "sharp_mean": {"freeze.storage": "dense"},
    "gaussian": {"freeze.storage": "dense"},
    "dirichlet": {"freeze.storage": "dense", "freeze.pattern_options": {"scale": 16}},
    "structured_random": {},
}
RATES = (0.1, 0.25, 0.5, 0.75)
# What is read first is trained first: the two rates that all tables have; sampled patterns at the others come last.
ORDER = [(pattern, rate) for rate in (0.25, 0.5) for pattern in PATTERNS]
ORDER += [
    (pattern, rate)
    for pattern in ("mean", "sharp_mean", "structured_random", "gaussian", "dirichlet")
    for rate in (0.1, 0.75)
]
DISTANCES = {
    "squared_error": "squared error",
    "kl": "KL from the mean",
    "hellinger": "squared Hellinger",
    "total_variation": "total variation",
}
PAPER = {("mean", 0.25): {"delta": "+0.665", "perplexity": "24.1165"}, ("mean", 0.5): {"delta": "+2.649"}}

SMOKE = (0.25, 0.5), ("mean", "dirichlet")


def _changes(rates: tuple[float, ...], patterns: tuple[str, ...]) -> Changes:
    return Changes({str(rate): {pattern: f"{pattern} {rate:.0%}" for pattern in patterns} for rate in rates})


RECIPE = Recipe(
    title="Fixed patterns and rates",
    seeds=1,
    source=Source(
        "fig:prior-quality",
        "124M at 4K, one seed; a figure without numbers: those of the mean are tab:kl-continuation-selector's and "
        "tab:representation-details'",
    ),
    arms=(
        Arm(name="ordinary", reference=None, paper={"perplexity": "23.9571"}),
        *(
            Arm(
                name=f"{pattern} {rate:.0%}",
                parent="ordinary",
                settings={"freeze.rate": rate, "freeze.pattern": pattern, **PATTERNS[pattern]},
                paper=PAPER.get((pattern, rate), {}),
                smoke=rate in SMOKE[0] and pattern in SMOKE[1],
            )
            for pattern, rate in ORDER
        ),
    ),
    figures=(
        Figure(
            name="rates",
            title="Change of perplexity by rate and pattern, %",
            across="heads frozen",
            panels={
                title: {
                    pattern: {f"{rate:.0%}": (f"{pattern} {rate:.0%}", "delta") for rate in rates}
                    for pattern in PATTERNS
                }
                for title, rates in (("to 50%", RATES[:3]), ("all rates", RATES))
            },
            alike=False,
        ),
    ),
    columns=("perplexity", "delta", "heads"),
    also=("tab:prior-geometry-correlation",),
    measurements=(
        Measurement(
            name="distance and cost",
            does="analyze geometry",
            on=(Checkpoint("ordinary", 0.5),),
            settings={
                "sequences": 32,
                "rates": RATES,
                "costs": _changes(RATES, tuple(PATTERNS)),
            },
            scaled={"smoke": {"sequences": 4, "rates": SMOKE[0], "costs": _changes(*SMOKE)}},
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
            source=GEOMETRY,
        ),
    ),
)
