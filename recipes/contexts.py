"""Rates at 4K, 8K and 16K of context: tab:main-results."""

from saf.experiments.recipe import Arm, Recipe
from saf.records.paper import QUALITY

# Perplexity, change, milliseconds of an update; the ordinary model's are those beside 25% and beside 50%.
CONTEXTS = {
    4_096: (
        *("4K", "23.862", "2249.49, 2229.80"),
        {0.25: ("24.045", "+0.768 ± 0.067", "2129.42"), 0.5: ("24.457", "+2.492 ± 0.083", "1991.85")},
    ),
    8_192: (
        *("8K", "24.179", "2710.24, 2782.97"),
        {0.25: ("24.318", "+0.578 ± 0.011", "2636.22"), 0.5: ("24.676", "+2.058 ± 0.066", "2524.39")},
    ),
    16_384: (
        *("16K", "24.428", "3741.42, 3697.14"),
        {0.25: ("24.538", "+0.450 ± 0.012", "3649.78"), 0.5: ("24.865", "+1.792 ± 0.112", "3454.31")},
    ),
}

RECIPE = Recipe(
    title="Freezing halfway at three contexts",
    source=QUALITY,
    arms=tuple(
        arm
        for context, (name, ordinary, beside, rates) in CONTEXTS.items()
        for arm in (
            Arm(
                name=f"{name} ordinary",
                context=context,
                reference=None,
                paper={"perplexity": ordinary, "update": beside},
                smoke=context < 16_384,
            ),
            *(
                Arm(
                    name=f"{name} {rate:.0%}",
                    context=context,
                    parent=f"{name} ordinary",
                    settings={"freeze.rate": rate},
                    reference=f"{name} ordinary",
                    paper={"perplexity": perplexity, "delta": change, "update": update},
                    smoke=context < 16_384,
                )
                for rate, (perplexity, change, update) in rates.items()
            ),
        )
    ),
    columns=("perplexity", "delta", "context", "heads", "update", "peak"),
    notes=(
        "The paper's updates are of 15 micro-batches on one GH200, the ordinary model's timed beside each rate; ours "
        "are of these runs, and recipe training_systems times both in pairs.",
    ),
)
