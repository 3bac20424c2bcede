"""Five fixed patterns at four rates: fig:prior-quality, whose numbers are drawn; two stand in a table."""

from saf.experiments.recipe import Arm, Recipe
from saf.records.paper import QUALITY

PATTERNS = {
    "mean": {},
    # As the paper: sampled and sharp patterns are stored whole (app:controlled-pretraining-details).
    "sharp_mean": {"freeze.storage": "dense"},
    "gaussian": {"freeze.storage": "dense"},
    "dirichlet": {"freeze.storage": "dense", "freeze.pattern_options": {"scale": 16}},
    "structured_random": {},
}
RATES = (0.1, 0.25, 0.5, 0.75)
PAPER = {
    ("mean", 0.25): {"delta": "+0.768 ± 0.067", "perplexity": "24.045"},
    ("mean", 0.5): {"delta": "+2.492 ± 0.083", "perplexity": "24.457"},
}

RECIPE = Recipe(
    title="Fixed patterns and rates",
    source=QUALITY,
    arms=(
        Arm(name="ordinary", reference=None, paper={"perplexity": "23.862"}),
        *(
            Arm(
                name=f"{pattern} {rate:.0%}",
                parent="ordinary",
                settings={"freeze.rate": rate, "freeze.pattern": pattern, **more},
                paper=PAPER.get((pattern, rate), {}),
                smoke=rate in (0.25, 0.5) and pattern in ("mean", "dirichlet"),
            )
            for pattern, more in PATTERNS.items()
            for rate in RATES
        ),
    ),
    columns=("perplexity", "delta", "heads"),
)
