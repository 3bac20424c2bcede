"""Replacing a quarter of the heads during finetuning: tab:finetuning-schedules."""

from saf.experiments.recipe import Arm, Recipe
from saf.records.paper import Source

TASKS = {"SST-2": ("sst2", {"most_examples": 16_384}), "BoolQ": ("boolq", {})}
# Halfway, as in pretraining: the paper does not say when.
SCHEDULES = {
    "one time": {"freeze_at": 0.5},
    "train loss": {"schedule": "train_loss"},
    "after training": {"freeze_at": 1.0},
}
PAPER = {
    "SST-2 one time": ("−0.19 ± 0.40", "33.27", "0.70"),
    "SST-2 train loss": ("−0.65 ± 0.77", "36.15", "45.12"),
    "SST-2 after training": ("−1.03 ± 0.24", "30.75", "0.71"),
    "BoolQ one time": ("−1.27 ± 1.29", "40.85", "6.18"),
    "BoolQ train loss": ("−0.38 ± 0.15", "66.34", "70.15"),
    "BoolQ after training": ("−1.03 ± 0.33", "31.44", "6.17"),
}


def _arms(title: str) -> tuple[Arm, ...]:
    task, small = TASKS[title]
    ordinary = f"{title} ordinary"
    common = {"task": task, "axis": "finetuning", "parent": "ordinary"}
    first = title == "SST-2"
    return (
        Arm(
            **{"name": ordinary, "reference": None, "smoke": first, **common},
            scaled={"small": {"batch_size": 32, **small}, "smoke": {"batch_size": 4, "epochs": 1}},
        ),
        *(
            Arm(
                **{"name": (row := f"{title} {name}"), "like": ordinary, "reference": ordinary, **common},
                **{"settings": {"freeze.rate": 0.25, **settings}, "smoke": first and name == "one time"},
                paper=dict(zip(("points", "update", "intervention"), PAPER[row], strict=True)),
                scaled={"smoke": {"calibration_sequences": 4}},
            )
            for name, settings in SCHEDULES.items()
        ),
    )


RECIPE = Recipe(
    title="Replacement of 25% during finetuning",
    source=Source("tab:finetuning-schedules", "124M, ordinary checkpoint, mean ± SE of three finetuning seeds; GH200"),
    arms=(
        Arm(name="ordinary", reference=None, axis="none", row=False),
        *(arm for title in TASKS for arm in _arms(title)),
    ),
    columns=("accuracy", "points", "update", "intervention", "updates", "heads"),
    notes=(
        "Heads are measured on the task's own training examples. The paper does not say when one time is: halfway.",
    ),
)
