"""Preset and adaptive schedules: tab:schedule-details, and at matched rates tab:schedule-confirmation."""

from experiments.paper import Source
from experiments.recipe import Recipe, Row

# Label, the arm that the difference is from, the paper's change.
PAPER = {
    "4k-mean-25": ("one time, 25%", None, "+0.662"),
    "4k-gradual-25": ("gradual, 25%", "4k-mean-25", "+0.689"),
    "4k-mean-50": ("one time, 50%", None, "+2.649"),
    "4k-gradual-50": ("gradual, 50%", "4k-mean-50", "+2.832"),
    "4k-validation-budget-1": ("validation budget 1%", None, "+0.093"),
    "4k-validation-budget-2": ("validation budget 2%", None, "+0.348"),
    "4k-train-loss-3.0": ("train loss, z = 3.0", None, "+0.409"),
    "4k-train-loss-1.5": ("train loss, z = 1.5", None, "+2.119"),
    "4k-train-loss-3.0-from-25": ("train loss, z = 3.0, from 25% of training on", None, None),
    "4k-train-loss-1.5-from-25": ("train loss, z = 1.5, from 25% of training on", None, None),
}

RECIPE = Recipe(
    title="Schedules",
    seeds=1,
    source=Source("tab:schedule-details", "124M at 4K, one seed; it reached 6.25, 12.5, 14.58 and 50% of the heads"),
    rows=(
        Row(arm="4k-ordinary", label="ordinary"),
        *(
            Row(
                arm=arm,
                label=label,
                reference="4k-ordinary",
                against=against,
                paper={"delta": change} if change else {},
            )
            for arm, (label, against, change) in PAPER.items()
        ),
    ),
    metrics=("perplexity", "delta", "difference", "context", "heads", "minutes", "intervention"),
    smoke=("4k-gradual-50", "4k-validation-budget-1", "4k-train-loss-3.0"),
    notes=(
        "Schedules by the training loss begin at initialisation: in their change is what two trainings of the same "
        "settings differ by. Those that branch off at 25% have no number of the paper, and see no loss before that.",
        "The difference is that of the gradual schedule from one time, at the same rate.",
        "Runs of several events are compiled by layers, the others whole: their minutes are what each takes.",
    ),
)
