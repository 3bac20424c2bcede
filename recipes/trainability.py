"""Frozen against trainable patterns from the same fit: tab:pattern-controls (a)."""

from saf.experiments.recipe import Arm, Recipe
from saf.experiments.scales import HELD_OUT
from saf.records.paper import Source

FREEZE = {"freeze.rate": 0.25, "freeze.strict": True}

RECIPE = Recipe(
    title="Frozen against trainable patterns at 25%",
    source=Source("tab:pattern-controls", "124M at 4K, mean ± SE of three seeds; updates on GH200"),
    arms=(
        Arm(name="ordinary", reference=None),
        Arm(
            name="frozen",
            parent="ordinary",
            settings=FREEZE,
            scaled=HELD_OUT,
            paper={
                **{"perplexity": "24.055 ± 0.040", "update": "2159 ± 12", "continuation": "90.96 ± 0.56"},
                "peak": "31.668 ± 0.002",
            },
        ),
        Arm(
            name="trainable",
            parent="ordinary",
            settings={**FREEZE, "freeze.trainable": True},
            scaled=HELD_OUT,
            against="frozen",
            paper={
                "perplexity": "24.052 ± 0.042",
                "relative": "−0.010 ± 0.006",
                "update": "2416 ± 13",
                "continuation": "102.27 ± 0.82",
                "peak": "31.801 ± 0.002",
            },
        ),
    ),
    columns=("perplexity", "delta", "relative", "update", "continuation", "peak"),
    notes=(
        "The difference is that of the trainable arm's perplexity from the frozen one's; an update is of 15 "
        "micro-batches there.",
    ),
)
