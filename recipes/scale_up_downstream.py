"""Finetuning of the 1B checkpoints: tab:scale-up-downstream, and the accuracies of tab:scale-up-results."""

from saf.experiments.recipe import Arm, Recipe
from saf.records.paper import Source

TRAINING = {
    **{"model": "1b", "batch_size": 2, "accumulation": 32, "updates": 37_512, "peak_lr": 3e-4, "min_lr_ratio": 0.1},
    **{"warmup": 375, "eval_every": 1_000, "save_every": 500, "calibration_sequences": 16},
}
"""Those of recipe 1b, whose runs these are."""
MODELS = {
    "ordinary": {},
    "frozen 25%": {"freeze.rate": 0.25},
    "gate-Taylor 25%": {"freeze.operation": "prune", "freeze.rate": 0.25, "freeze.score": "gate_taylor"},
    "frozen 50%": {"freeze.rate": 0.5},
}
# Accuracy, by seed, change, update in ms.
PAPER = {
    "SST-2": {
        "ordinary": ("91.44 ± 0.25", "91.63, 90.94, 91.74", None, "173.58 ± 0.74"),
        "frozen 25%": ("91.63 ± 0.35", "90.94, 91.86, 92.09", "+0.19 ± 0.47", "166.78 ± 2.75"),
        "gate-Taylor 25%": ("91.70 ± 0.34", "91.06, 91.86, 92.20", "+0.27 ± 0.44", "156.60 ± 0.97"),
        "frozen 50%": ("90.98 ± 0.43", "91.28, 91.51, 90.14", "−0.46 ± 0.63", "158.36 ± 3.67"),
    },
    "BoolQ": {
        "ordinary": ("75.98 ± 0.24", "75.99, 76.39, 75.57", None, "222.70 ± 0.32"),
        "frozen 25%": ("75.27 ± 1.45", "72.39, 77.03, 76.39", "−0.71 ± 1.45", "215.11 ± 0.39"),
        "gate-Taylor 25%": ("75.46 ± 1.19", "75.69, 73.30, 77.40", "−0.52 ± 1.43", "200.03 ± 0.74"),
        "frozen 50%": ("75.68 ± 0.31", "75.17, 76.24, 75.63", "−0.31 ± 0.27", "196.13 ± 0.59"),
    },
    "QuALITY": {
        "ordinary": ("27.44 ± 1.25", "24.98, 28.33, 29.00", None, "3504.01 ± 5.63"),
        "frozen 25%": ("27.60 ± 0.21", "27.71, 27.90, 27.18", "+0.16 ± 1.35", "3267.23 ± 10.13"),
        "gate-Taylor 25%": ("27.66 ± 0.71", "26.27, 28.62, 28.09", "+0.22 ± 0.64", "2972.08 ± 1.10"),
        "frozen 50%": ("25.12 ± 0.75", "26.32, 23.73, 25.31", "−2.32 ± 1.85", "2989.63 ± 5.40"),
    },
}
TASKS = {
    "SST-2": ("sst2", {"batch_size": 128}, {"batch_size": 32, "most_examples": 16_384}),
    "BoolQ": ("boolq", {"batch_size": 32}, {}),
    "QuALITY": ("quality", {"batch_size": 4, "accumulation": 4}, {}),
}
# Of 1B an epoch is chosen and trained in the small scale's time alone at its own size, which is not 1B.
SMOKE = {"batch_size": 4, "accumulation": 1, "epochs": 1}


def _parent(model: str) -> Arm:
    settings, first = MODELS[model], model == "ordinary"
    return Arm(
        **{"name": model, "context": 8_192, "axis": "none", "row": False, "reference": None, "settings": settings},
        **{"parent": None if first else "ordinary", "scaled": {"paper": TRAINING} if first else {}},
        smoke=model in ("ordinary", "frozen 25%"),
    )


def _finetuned(title: str, model: str) -> Arm:
    task, settings, small = TASKS[title]
    first, ordinary = model == "ordinary", f"{title} ordinary"
    numbers = zip(("accuracy", "seeds", "points", "update"), PAPER[title][model], strict=True)
    return Arm(
        **{"name": f"{title} {model}", "task": task, "context": 8_192, "axis": "finetuning", "parent": model},
        **{"like": None if first else ordinary, "reference": None if first else ordinary},
        **{"settings": settings if first else {}, "scaled": {"small": small, "smoke": SMOKE} if first else {}},
        paper={column: text for column, text in numbers if text},
        smoke=title == "BoolQ" and model in ("ordinary", "frozen 25%"),
    )


RECIPE = Recipe(
    title="Finetuning of 1B",
    source=Source(
        "tab:scale-up-downstream", "1B at 8K, one pretraining seed, mean ± SE of three finetuning seeds; GH200"
    ),
    also=("tab:scale-up-results",),
    arms=(*map(_parent, MODELS), *(_finetuned(title, model) for title in TASKS for model in MODELS)),
    columns=("accuracy", "seeds", "points", "update", "updates", "heads"),
    notes=(
        "Pretraining is that of recipe 1b, whose perplexities are the table's other half. At other scales the arms are "
        "the scale's own runs at 8K.",
        "The paper's updates are means of whole runs on different allocations; ours are medians.",
    ),
)
