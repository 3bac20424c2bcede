"""Frozen against trainable patterns from the same fit: tab:pattern-controls (a)."""

from experiments.paper import Source
from experiments.recipe import Recipe, Row

NUMBERS = ("perplexity", "last_updates", "continuation", "peak", "relative")
PAPER = {
    "4k-mean-25-control": ("frozen", "24.055 ± 0.040", "2159 ± 12", "90.96 ± 0.56", "31.668 ± 0.002"),
    "4k-trainable-25": (
        *("trainable", "24.052 ± 0.042", "2416 ± 13", "102.27 ± 0.82", "31.801 ± 0.002", "−0.010 ± 0.006"),
    ),
}

RECIPE = Recipe(
    title="Frozen against trainable patterns at 25%",
    source=Source("tab:pattern-controls", "124M at 4K, mean ± SE of three seeds; updates on GH200"),
    rows=(
        Row(arm="4k-control-ordinary", label="ordinary"),
        *(
            Row(
                arm=arm,
                label=label,
                reference="4k-control-ordinary",
                against="4k-mean-25-control" if label == "trainable" else None,
                paper=dict(zip(NUMBERS, texts, strict=False)),
            )
            for arm, (label, *texts) in PAPER.items()
        ),
    ),
    metrics=("perplexity", "delta", "relative", "last_updates", "continuation", "peak"),
    notes=(
        "The difference is that of the trainable arm's perplexity from the frozen one's; an update is of 15 "
        "micro-batches there.",
    ),
)
