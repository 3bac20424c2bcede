"""Finetuning of the 1B checkpoints: tab:scale-up-downstream, and the accuracies of tab:scale-up-results."""

from experiments.paper import Source
from experiments.recipe import Recipe, Row

TASKS = {"sst2": "SST-2", "boolq": "BoolQ", "quality": "QuALITY"}
MODELS = {
    **{"ordinary": "ordinary", "mean-25": "frozen 25%", "gate-taylor-25": "gate-Taylor 25%"},
    "mean-50": "frozen 50%",
}
# Accuracy, by seed, change, update in ms.
PAPER = {
    "sst2": {
        "ordinary": ("91.44 ± 0.25", "91.63, 90.94, 91.74", None, "173.58 ± 0.74"),
        "mean-25": ("91.63 ± 0.35", "90.94, 91.86, 92.09", "+0.19 ± 0.47", "166.78 ± 2.75"),
        "gate-taylor-25": ("91.70 ± 0.34", "91.06, 91.86, 92.20", "+0.27 ± 0.44", "156.60 ± 0.97"),
        "mean-50": ("90.98 ± 0.43", "91.28, 91.51, 90.14", "−0.46 ± 0.63", "158.36 ± 3.67"),
    },
    "boolq": {
        "ordinary": ("75.98 ± 0.24", "75.99, 76.39, 75.57", None, "222.70 ± 0.32"),
        "mean-25": ("75.27 ± 1.45", "72.39, 77.03, 76.39", "−0.71 ± 1.45", "215.11 ± 0.39"),
        "gate-taylor-25": ("75.46 ± 1.19", "75.69, 73.30, 77.40", "−0.52 ± 1.43", "200.03 ± 0.74"),
        "mean-50": ("75.68 ± 0.31", "75.17, 76.24, 75.63", "−0.31 ± 0.27", "196.13 ± 0.59"),
    },
    "quality": {
        "ordinary": ("27.44 ± 1.25", "24.98, 28.33, 29.00", None, "3504.01 ± 5.63"),
        "mean-25": ("27.60 ± 0.21", "27.71, 27.90, 27.18", "+0.16 ± 1.35", "3267.23 ± 10.13"),
        "gate-taylor-25": ("27.66 ± 0.71", "26.27, 28.62, 28.09", "+0.22 ± 0.64", "2972.08 ± 1.10"),
        "mean-50": ("25.12 ± 0.75", "26.32, 23.73, 25.31", "−2.32 ± 1.85", "2989.63 ± 5.40"),
    },
}
AGAINST_PRUNING = {"sst2": "−0.08 ± 0.04", "boolq": "−0.19 ± 2.07", "quality": "−0.06 ± 0.75"}
"""Of a quarter frozen, from gate-Taylor pruning."""
NUMBERS = ("accuracy", "seeds", "points", "update")

RECIPE = Recipe(
    title="Finetuning of 1B",
    source=Source(
        "tab:scale-up-downstream", "1B at 8K, one pretraining seed, mean ± SE of three finetuning seeds; GH200"
    ),
    also=("tab:scale-up-results",),
    rows=tuple(
        Row(
            arm=f"1b-{task}-{model}",
            label=f"{TASKS[task]} {MODELS[model]}",
            reference=f"1b-{task}-ordinary",
            against=f"1b-{task}-gate-taylor-25" if model == "mean-25" else None,
            paper={metric: text for metric, text in zip(NUMBERS, texts, strict=True) if text}
            | ({"points_against": AGAINST_PRUNING[task]} if model == "mean-25" else {}),
        )
        for task, models in PAPER.items()
        for model, texts in models.items()
    ),
    metrics=("accuracy", "seeds", "points", "points_against", "update", "updates", "epochs", "example_tokens", "heads"),
    smoke=("1b-boolq-mean-25",),
    notes=(
        "Differences are from pruning by gate-Taylor, in each seed. The ordinary models of the paper chose 5, 1 and 1 "
        "epochs of SST-2, 4, 2 and 4 of BoolQ, and 5 of QuALITY.",
        "Pretraining is that of recipe 1b, whose perplexities are the table's other half. At other scales the arms are "
        "the scale's own runs at 8K.",
        "The paper's updates are means of whole runs on different allocations; ours are medians.",
    ),
)
