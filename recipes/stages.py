"""From pretraining to tasks, a chain a seed: at the small scale it fits half an hour of a GPU.

Ordinary, frozen and pruned checkpoints halfway, matched tokens; each is finetuned and learns recall; and heads of the
ordinary model that has learnt recall are replaced at once.
"""

from typing import Any

from saf.experiments.columns import RECALL, recall_name
from saf.experiments.figure import Figure, recall_figure
from saf.experiments.recipe import Arm, Recipe
from saf.records.paper import Source

MODELS: dict[str, dict[str, Any]] = {
    "ordinary": {},
    "frozen 25%": {"freeze.rate": 0.25},
    "pruned 25%": {"freeze.operation": "prune"},
}
# Batches of 32 leave launches of small kernels few enough; SST-2 is a stratified part of its file.
FILES = {
    "SST-2": ("sst2", {"batch_size": 32, "most_examples": 16_384}),
    "BoolQ": ("boolq", {"batch_size": 32}),
    "QuALITY": ("quality", {"max_tokens": 4_096}),
}
SMOKE = {"batch_size": 4, "epochs": 1}
RECALLED = {
    **{"updates": 2, "batch_size": 4, "mqar.length": 32, "mqar.pairs": 2, "mqar.vocabulary": 64},
    **{"mqar.test_lengths": (32,), "mqar.test_pairs": (2,), "mqar.test_examples": 4, "mqar.development": 4},
}
UPDATES = (0, 50, 200, 500)


def _pretrained(model: str) -> Arm:
    first = model == "ordinary"
    return Arm(
        **{"name": model, "settings": MODELS[model], "parent": None if first else "ordinary"},
        **{"reference": None if first else "ordinary", "heads": "frozen 25%" if model == "pruned 25%" else None},
    )


def _task(title: str, model: str) -> Arm:
    first, ordinary = model == "ordinary", f"{title}, ordinary"
    task, settings = FILES.get(title, ("mqar", {}))
    smoke = RECALLED if task == "mqar" else SMOKE
    return Arm(
        **{"name": f"{title}, {model}", "task": task, "axis": "chain", "parent": model},
        settings=settings if first else {},
        **{"like": None if first else ordinary, "reference": None if first else ordinary},
        scaled={"smoke": smoke} if first else {},
        smoke=(title, model) in {("SST-2", "ordinary"), ("SST-2", "pruned 25%"), ("recall", "ordinary")},
    )


def _replaced(model: str, place: int) -> Arm:
    return Arm(
        name=f"recall, {model}, {UPDATES[place]} updates after replacement",
        # Examples that the parent was not trained on, the same for every model.
        **{"task": "mqar", "axis": "chain", "parent": "recall, ordinary", "reference": None},
        **{"reseed": 1_000, "report": place},
        settings={"updates": 500, "report_at": UPDATES, **MODELS[model]},
        heads=f"recall, frozen 25%, {UPDATES[0]} updates after replacement" if model == "pruned 25%" else None,
        scaled={"smoke": {"updates": 4, "report_at": (0, 1, 2, 4)}},
        smoke=model == "frozen 25%",
    )


DRAWN = ("frozen 25%", "ordinary", "pruned 25%")
"""The lines of the figure of recall, in the order of its colours."""


RECIPE = Recipe(
    title="From pretraining to tasks",
    source=Source("sec:across-stages", "its tables are those of recipes downstream, pruning_downstream and recall"),
    also=("tab:pruning-downstream", "tab:mqar-complete"),
    arms=(
        *map(_pretrained, MODELS),
        *(_task(title, model) for title in (*FILES, "recall") for model in MODELS),
        *(_replaced(model, place) for model in MODELS for place in range(len(UPDATES))),
    ),
    figures=(
        Figure(
            name="accuracy",
            title="Accuracy on tasks: points from ordinary attention",
            across="",
            joined=False,
            panels={
                "": {
                    model: {title: (f"{title}, {model}", "points") for title in FILES}
                    for model in ("frozen 25%", "pruned 25%")
                }
            },
        ),
        recall_figure(
            {model: f"recall, {model}" for model in DRAWN},
            {model: f"recall, {model}, 0 updates after replacement" for model in DRAWN},
        ),
    ),
    columns=("perplexity", "delta", "accuracy", "points", *(recall_name(*test) for test in RECALL), "gate", "heads"),
    notes=(
        "Each seed is a whole chain, pretraining and tasks alike. In each task the ordinary model chooses the epochs, "
        "the others are finetuned like it. Pruned models lack exactly the frozen heads.",
        "Columns of recall are tests, tokens / pairs; rows after replacement are of the ordinary model that has learnt "
        "recall.",
    ),
)
