"""Replacing a quarter of the heads during finetuning: tab:finetuning-schedules."""

from experiments.paper import Source
from experiments.recipe import Recipe, Row

TITLES = {"sst2": "SST-2", "boolq": "BoolQ"}
LABELS = {"ordinary": "ordinary", "one-time": "one time", "train-loss": "train loss", "after": "after training"}
PAPER = {
    ("sst2", "one-time"): ("−0.19 ± 0.40", "33.27", "0.70"),
    ("sst2", "train-loss"): ("−0.65 ± 0.77", "36.15", "45.12"),
    ("sst2", "after"): ("−1.03 ± 0.24", "30.75", "0.71"),
    ("boolq", "one-time"): ("−1.27 ± 1.29", "40.85", "6.18"),
    ("boolq", "train-loss"): ("−0.38 ± 0.15", "66.34", "70.15"),
    ("boolq", "after"): ("−1.03 ± 0.33", "31.44", "6.17"),
}

RECIPE = Recipe(
    title="Replacement of 25% during finetuning",
    source=Source("tab:finetuning-schedules", "124M, ordinary checkpoint, mean ± SE of three finetuning seeds; GH200"),
    rows=tuple(
        Row(
            arm=f"during-{task}-{name}",
            label=f"{TITLES[task]} {LABELS[name]}",
            reference=f"during-{task}-ordinary",
            paper=dict(zip(("points", "update", "intervention"), PAPER.get((task, name), ()), strict=False)),
        )
        for task in TITLES
        for name in LABELS
    ),
    metrics=("accuracy", "points", "update", "intervention", "updates", "heads"),
    smoke=("during-sst2-one-time",),
    notes=(
        "Heads are measured on the task's own training examples. The paper does not say when one time is: halfway.",
    ),
)
