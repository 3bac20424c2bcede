"""When a quarter of the heads is frozen: tab:timing-main."""

from saf.experiments.recipe import Arm, Recipe
from saf.records.paper import Source

PAPER = {0.25: "+0.724", 0.4: "+0.679", 0.5: "+0.662", 0.6: "+0.711", 0.75: "+0.936", 1.0: "+8.168"}

RECIPE = Recipe(
    title="Timing at 25%, mean patterns",
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
                paper={"delta": change},
                smoke=moment in (0.5, 1.0),
            )
            for moment, change in PAPER.items()
        ),
    ),
    columns=("perplexity", "delta", "heads"),
    notes=("At 100% the trained model is evaluated as it was frozen, without further training.",),
)
