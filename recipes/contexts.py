"""Rates at 4K, 8K and 16K of context: tab:main-results."""

from saf.experiments.recipe import Arm, Recipe
from saf.records.paper import QUALITY

CONTEXTS = {
    4_096: ("4K", "23.862", {0.25: ("24.045", "+0.768 ± 0.067"), 0.5: ("24.457", "+2.492 ± 0.083")}),
    8_192: ("8K", "24.179", {0.25: ("24.318", "+0.578 ± 0.011"), 0.5: ("24.676", "+2.058 ± 0.066")}),
    16_384: ("16K", "24.428", {0.25: ("24.538", "+0.450 ± 0.012"), 0.5: ("24.865", "+1.792 ± 0.112")}),
}

RECIPE = Recipe(
    title="Freezing halfway at three contexts",
    source=QUALITY,
    arms=tuple(
        arm
        for context, (name, ordinary, rates) in CONTEXTS.items()
        for arm in (
            Arm(
                name=f"{name} ordinary",
                context=context,
                reference=None,
                paper={"perplexity": ordinary},
                smoke=context < 16_384,
            ),
            *(
                Arm(
                    name=f"{name} {rate:.0%}",
                    context=context,
                    parent=f"{name} ordinary",
                    settings={"freeze.rate": rate},
                    reference=f"{name} ordinary",
                    paper={"perplexity": perplexity, "delta": change},
                    smoke=context < 16_384,
                )
                for rate, (perplexity, change) in rates.items()
            ),
        )
    ),
    columns=("perplexity", "delta", "heads", "update", "peak"),
)
