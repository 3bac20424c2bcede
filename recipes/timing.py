"""When a quarter of the heads is frozen: tab:timing-main."""

from saf.experiments.recipe import Arm, Recipe
from saf.records.paper import Source

PAPER = {
    0.25: ("+0.724", "3750"),
    0.4: ("+0.679", "3000"),
    0.5: ("+0.662", "2500"),
    0.6: ("+0.711", "2000"),
    0.75: ("+0.936", "1250"),
    1.0: ("+8.168", "0"),
}

RECIPE = Recipe(
    title="Timing at 25%, mean and random patterns",
    seeds=1,
    source=Source("tab:timing-main", "124M at 4K, one seed"),
    arms=(
        Arm(name="ordinary", reference=None),
        *(
            Arm(
                name=f"at {moment:.0%}",
                parent="ordinary",
                at=moment,
                settings={"freeze.rate": 0.25},
                paper={"delta": change, "remaining": remaining},
                smoke=moment in (0.5, 1.0),
            )
            for moment, (change, remaining) in PAPER.items()
        ),
        *(
            Arm(
                name=f"random patterns at {moment:.0%}",
                parent="ordinary",
                at=moment,
                settings={"freeze.rate": 0.25, "freeze.pattern": "structured_random"},
                smoke=False,
            )
            for moment in PAPER
        ),
    ),
    columns=("perplexity", "delta", "remaining", "heads"),
    notes=(
        "At 100% the trained model is evaluated as it was frozen, without further training.",
        "The paper says of random patterns that the mean is better at every moment, without numbers.",
    ),
)
