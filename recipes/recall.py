"""Associative recall of replaced and pruned checkpoints: tab:mqar-complete and fig:mqar-generalisation.

The four checkpoints are those of later intervention at matched time. Two axes of seeds; then all interventions on the
ordinary model that has learnt the task, right away and after some updates.
"""

from typing import Any

from saf.experiments.columns import RECALL, recall_name
from saf.experiments.figure import recall_figure
from saf.experiments.recipe import Arm, Recipe
from saf.experiments.scales import HELD_OUT
from saf.records.paper import Source

# As recipe later_intervention has them, whose runs the checkpoints are.
LATER = {"peak_lr": 6e-5, "min_lr_ratio": 0.1, "warmup": 0}
SMALL = {"small": {"peak_lr": 1e-4}}
PRUNED = {"freeze.operation": "prune"}
SETTINGS: dict[str, dict[str, Any]] = {
    "ordinary": {},
    "mean 25%": {"freeze.rate": 0.25},
    "pruning 25%": PRUNED,
    "gate-Taylor 25%": {**PRUNED, "freeze.rate": 0.25, "freeze.score": "gate_taylor"},
}
SMOKE = {
    **{"updates": 2, "batch_size": 4, "mqar.length": 32, "mqar.pairs": 2, "mqar.vocabulary": 64},
    **{"mqar.test_lengths": (32,), "mqar.test_pairs": (2,), "mqar.test_examples": 4, "mqar.development": 4},
}
FOUR = ((512, 8), (2_048, 8), (4_096, 8), (512, 32))
"""The tests of task seeds and of recovery, in the order of the table."""
PRETRAINING = {
    "ordinary": "99.58 ± 0.05|81.32 ± 3.21|60.56 ± 4.22|47.54 ± 3.87|34.01 ± 3.38|26.19 ± 2.75|"
    "98.27 ± 0.30|90.35 ± 0.58",
    "mean 25%": "99.73 ± 0.04|91.08 ± 1.58|79.76 ± 2.72|70.83 ± 4.86|61.14 ± 7.37|54.42 ± 8.70|"
    "97.96 ± 0.55|89.67 ± 1.09",
    "pruning 25%": "99.72 ± 0.03|85.43 ± 3.07|66.25 ± 3.22|52.32 ± 2.41|37.70 ± 1.54|29.03 ± 1.42|"
    "98.66 ± 0.11|90.74 ± 0.36",
    "gate-Taylor 25%": "99.62 ± 0.06|80.79 ± 4.50|60.59 ± 6.42|47.95 ± 6.06|34.49 ± 5.42|26.59 ± 4.41|"
    "98.65 ± 0.26|91.43 ± 0.60",
}
TASK_SEEDS = {
    "ordinary": "99.71 ± 0.09|98.01 ± 0.28|89.67 ± 0.32|44.55 ± 1.73",
    "mean 25%": "99.76 ± 0.05|97.58 ± 0.01|88.21 ± 0.28|73.20 ± 4.26",
    "pruning 25%": "99.75 ± 0.05|98.87 ± 0.21|91.06 ± 0.46|52.13 ± 5.56",
    "gate-Taylor 25%": "99.72 ± 0.07|98.78 ± 0.19|90.76 ± 0.27|53.20 ± 5.25",
}
UPDATES = (0, 50, 200, 500)
RECOVERY = {
    "ordinary": (
        *("99.54|97.75|89.21|47.05", "99.61|96.88|87.65|51.93"),
        *("99.68|97.46|88.79|61.99", "99.73|97.73|89.16|44.74"),
    ),
    "mean 25%": (
        *("99.68|97.00|88.75|48.75", "99.66|98.27|90.28|43.45"),
        *("99.46|96.14|87.11|52.70", "99.73|97.51|88.28|58.39"),
    ),
    "pruning 25%": (
        *("99.68|97.71|89.48|60.83", "99.78|97.61|89.38|51.54"),
        *("99.83|98.61|90.48|56.05", "99.85|97.90|89.45|56.79"),
    ),
    "gate-Taylor 25%": (
        *("99.66|97.19|88.79|52.58", "99.37|95.61|86.57|53.65"),
        *("99.17|96.61|87.96|46.50", "99.76|97.09|88.33|48.14"),
    ),
}


def _quoted(tests: tuple[tuple[int, int], ...], numbers: str) -> dict[str, str]:
    return {recall_name(*test): number for test, number in zip(tests, numbers.split("|"), strict=True)}


def _later(model: str, timed: bool) -> Arm:
    """One of the checkpoints, as later_intervention makes it: at matched time, or what that is matched with."""
    return Arm(
        name=f"{model}, later" if timed else f"{model}, later, matched tokens",
        **{"parent": "full run", "at": 1.0, "more": 0.5, "row": False, "reference": None},
        match="ordinary, later, matched tokens" if timed else None,
        heads="mean 25%, later, matched tokens" if model == "pruning 25%" else None,
        settings={**LATER, **SETTINGS[model]},
        scaled={**SMALL, **HELD_OUT} if SETTINGS[model] else SMALL,
        smoke=model == "ordinary" or (model == "mean 25%" and not timed),
    )


def _adapted(model: str, axis: str) -> Arm:
    ordinary, end = model == "ordinary", ", pretraining seeds" if axis == "pretraining" else ", task seeds"
    numbers = (RECALL, PRETRAINING) if axis == "pretraining" else (FOUR, TASK_SEEDS)
    return Arm(
        **{"name": f"{model}{end}", "task": "mqar", "axis": axis, "parent": f"{model}, later", "reference": None},
        like=None if ordinary else f"ordinary{end}",
        scaled={"smoke": SMOKE} if ordinary else {},
        paper=_quoted(numbers[0], numbers[1][model]),
        smoke=ordinary and axis == "pretraining",
    )


def _recovered(model: str, place: int) -> Arm:
    """One run gives the rows of all its reports."""
    return Arm(
        name=f"{model}, {UPDATES[place]} updates after replacement",
        **{"task": "mqar", "axis": "none", "parent": "ordinary, pretraining seeds", "reference": None},
        # The examples that the parent was trained on are not trained on again.
        **{"reseed": 1_000, "settings": {"updates": 500, "report_at": UPDATES, **SETTINGS[model]}, "report": place},
        heads=f"mean 25%, {UPDATES[0]} updates after replacement" if model == "pruning 25%" else None,
        scaled={"smoke": {"updates": 4, "report_at": (0, 1, 2, 4)}},
        paper=_quoted(FOUR, RECOVERY[model][place]),
        smoke=False,
    )


RECIPE = Recipe(
    title="Associative recall",
    source=Source(
        "tab:mqar-complete", "124M at 4K; each group says which seed varies, mean ± SE of three; recovery: one"
    ),
    also=("fig:mqar-generalisation",),
    arms=(
        Arm(name="full run", reference=None, row=False),
        _later("ordinary", False),
        _later("mean 25%", False),
        *(_later(model, True) for model in SETTINGS),
        *(_adapted(model, "pretraining") for model in SETTINGS),
        *(_adapted(model, "finetuning") for model in SETTINGS),
        *(_recovered(model, place) for model in SETTINGS for place in range(len(UPDATES))),
    ),
    figures=(
        recall_figure(
            {model: f"{model}, pretraining seeds" for model in SETTINGS},
            {model: f"{model}, 0 updates after replacement" for model in SETTINGS},
        ),
    ),
    columns=(*(recall_name(*test) for test in RECALL), "gate", "heads"),
    notes=(
        "Columns are tests, tokens / pairs; all models learn 8 pairs in 512 tokens. Development is the share of that "
        "length's queries that are answered; 80% are asked of the ordinary arm.",
        "Pretraining seeds: three checkpoints, one task seed. Task seeds: the first checkpoint, three task seeds. The "
        "axes share a run and are never pooled.",
        "After replacement: heads of the ordinary model that has learnt the task are replaced, and it goes on with new "
        "examples; every row of a model is of one run.",
    ),
)
