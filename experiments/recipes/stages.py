"""From pretraining to tasks, a chain a seed: at the small scale it fits half an hour of a GPU.

Ordinary, frozen and pruned checkpoints halfway, matched tokens; each is finetuned and learns recall; and heads of the
ordinary model that has learnt recall are replaced at once.
"""

from experiments.arms import RECOVERY
from experiments.paper import Source
from experiments.recipe import Figure, Recipe, Row
from experiments.tables import RECALL_METRICS, recall_figure

MODELS = {"ordinary": "ordinary", "mean-25": "frozen 25%", "pruned-25": "pruned 25%"}
TASKS = {"sst2": "SST-2", "boolq": "BoolQ", "quality": "QuALITY", "mqar": "recall"}

RECIPE = Recipe(
    title="From pretraining to tasks",
    source=Source("sec:across-stages", "its tables are those of recipes downstream, pruning_downstream and recall"),
    also=("tab:pruning-downstream", "tab:mqar-complete"),
    rows=(
        *(Row(arm=f"4k-{model}", label=label, reference="4k-ordinary") for model, label in MODELS.items()),
        *(
            Row(arm=f"stages-{task}-{model}", label=f"{title}, {MODELS[model]}", reference=f"stages-{task}-ordinary")
            for task, title in TASKS.items()
            for model in MODELS
        ),
        *(
            Row(
                arm=f"stages-recovery-{model}@{place}",
                label=f"recall, {MODELS[model]}, {updates} updates after replacement",
            )
            for model in MODELS
            for place, updates in enumerate(RECOVERY)
        ),
    ),
    figures=(
        Figure(
            name="accuracy",
            title="Accuracy on tasks: points from ordinary attention",
            across="",
            joined=False,
            panels={
                "": {
                    MODELS[model]: {TASKS[t]: (f"stages-{t}-{model}", "points") for t in ("sst2", "boolq", "quality")}
                    for model in ("mean-25", "pruned-25")
                }
            },
        ),
        recall_figure(
            {label: f"stages-mqar-{model}" for model, label in MODELS.items()},
            {label: f"stages-recovery-{model}@0" for model, label in MODELS.items()},
        ),
    ),
    metrics=("perplexity", "delta", "accuracy", "points", *RECALL_METRICS, "gate", "heads"),
    smoke=("stages-sst2-pruned-25", "stages-mqar-ordinary", "stages-recovery-mean-25"),
    notes=(
        "Each seed is a whole chain, pretraining and tasks alike. In each task the ordinary model chooses the epochs, "
        "the others are finetuned like it. Pruned models lack exactly the frozen heads.",
        "Metrics of recall are tests, tokens / pairs; rows after replacement are of the ordinary model that has learnt "
        "recall.",
    ),
)
