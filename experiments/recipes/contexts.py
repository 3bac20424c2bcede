"""Rates at 4K, 8K and 16K of context: tab:main-results."""

from experiments.paper import QUALITY
from experiments.recipe import Recipe, Row

# Perplexity, change, milliseconds of an update; the ordinary model's are those beside 25% and beside 50%.
PAPER = {
    "4k": {
        "ordinary": ("23.862", None, "2249.49, 2229.80"),
        "mean-25": ("24.045", "+0.768 ± 0.067", "2129.42"),
        "mean-50": ("24.457", "+2.492 ± 0.083", "1991.85"),
    },
    "8k": {
        "ordinary": ("24.179", None, "2710.24, 2782.97"),
        "mean-25": ("24.318", "+0.578 ± 0.011", "2636.22"),
        "mean-50": ("24.676", "+2.058 ± 0.066", "2524.39"),
    },
    "16k": {
        "ordinary": ("24.428", None, "3741.42, 3697.14"),
        "mean-25": ("24.538", "+0.450 ± 0.012", "3649.78"),
        "mean-50": ("24.865", "+1.792 ± 0.112", "3454.31"),
    },
}
LABELS = {"ordinary": "ordinary", "mean-25": "25%", "mean-50": "50%"}

RECIPE = Recipe(
    title="Freezing halfway at three contexts",
    source=QUALITY,
    rows=tuple(
        Row(
            arm=f"{k}-{name}",
            label=f"{k.upper()} {LABELS[name]}",
            reference=f"{k}-ordinary",
            paper={metric: text for metric, text in zip(("perplexity", "delta", "update"), texts, strict=True) if text},
        )
        for k, arms in PAPER.items()
        for name, texts in arms.items()
    ),
    metrics=("perplexity", "delta", "context", "heads", "update", "peak"),
    smoke=("4k-mean-25", "4k-mean-50", "8k-mean-25"),
    notes=(
        "The paper's updates are of 15 micro-batches on one GH200, the ordinary model's timed beside each rate; recipe "
        "training_systems times both in pairs.",
    ),
)
