"""Associative recall of frozen and trainable patterns: tab:pattern-controls (b)."""

from experiments.paper import Source
from experiments.recipe import Recipe, Row
from experiments.tables import RECALL, RECALL_METRICS, recall_metric

PAPER = {
    "ordinary": "99.58 ± 0.15|71.78 ± 2.47|52.71 ± 2.06|42.13 ± 1.49|30.00 ± 1.30|23.53 ± 1.34|"
    "97.01 ± 0.46|88.76 ± 0.88",
    "frozen": "99.60 ± 0.06|81.36 ± 1.58|60.89 ± 1.61|49.08 ± 3.04|35.39 ± 3.74|28.30 ± 4.18|97.53 ± 0.44|88.89 ± 0.93",
    "trainable": "99.54 ± 0.07|78.44 ± 3.69|59.67 ± 5.69|47.77 ± 5.62|34.67 ± 5.00|27.04 ± 4.19|"
    "97.99 ± 0.73|89.65 ± 1.42",
}

RECIPE = Recipe(
    title="Associative recall of frozen and trainable patterns",
    source=Source(
        "tab:pattern-controls", "124M at 4K, 25% halfway, mean ± SE of three pretraining seeds, one task seed"
    ),
    rows=tuple(
        Row(
            arm=f"recall-patterns-{name}",
            label=f"{name}, recall",
            paper={recall_metric(*test): text for test, text in zip(RECALL, texts.split("|"), strict=True)},
        )
        for name, texts in PAPER.items()
    ),
    metrics=(*RECALL_METRICS, "gate", "heads"),
    notes=("Metrics are tests, tokens / pairs; trainable patterns go on training with the task, without decay.",),
)
