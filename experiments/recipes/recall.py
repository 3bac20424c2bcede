"""Associative recall of replaced and pruned checkpoints: tab:mqar-complete and fig:mqar-generalisation.

The four checkpoints are those of later intervention at matched time. Two axes of seeds; then all interventions on the
ordinary model that has learnt the task, right away and after some updates.
"""

from experiments.arms import LATER_ARMS, RECOVERY
from experiments.paper import Source
from experiments.recipe import Recipe, Row
from experiments.tables import RECALL, RECALL_METRICS, recall_figure, recall_metric

LABELS = dict(zip(LATER_ARMS, ("ordinary", "mean 25%", "pruning 25%", "gate-Taylor 25%"), strict=True))
FOUR = ((512, 8), (2_048, 8), (4_096, 8), (512, 32))
"""The tests of task seeds and of recovery, in the order of the table."""
PRETRAINING = {
    "ordinary": "99.58 ± 0.05|81.32 ± 3.21|60.56 ± 4.22|47.54 ± 3.87|34.01 ± 3.38|26.19 ± 2.75|"
    "98.27 ± 0.30|90.35 ± 0.58",
    "mean-25": "99.73 ± 0.04|91.08 ± 1.58|79.76 ± 2.72|70.83 ± 4.86|61.14 ± 7.37|54.42 ± 8.70|"
    "97.96 ± 0.55|89.67 ± 1.09",
    "pruned-25": "99.72 ± 0.03|85.43 ± 3.07|66.25 ± 3.22|52.32 ± 2.41|37.70 ± 1.54|29.03 ± 1.42|"
    "98.66 ± 0.11|90.74 ± 0.36",
    "gate-taylor-25": "99.62 ± 0.06|80.79 ± 4.50|60.59 ± 6.42|47.95 ± 6.06|34.49 ± 5.42|26.59 ± 4.41|"
    "98.65 ± 0.26|91.43 ± 0.60",
}
TASK_SEEDS = {
    "ordinary": "99.71 ± 0.09|98.01 ± 0.28|89.67 ± 0.32|44.55 ± 1.73",
    "mean-25": "99.76 ± 0.05|97.58 ± 0.01|88.21 ± 0.28|73.20 ± 4.26",
    "pruned-25": "99.75 ± 0.05|98.87 ± 0.21|91.06 ± 0.46|52.13 ± 5.56",
    "gate-taylor-25": "99.72 ± 0.07|98.78 ± 0.19|90.76 ± 0.27|53.20 ± 5.25",
}
RECOVERED = {
    "ordinary": (
        *("99.54|97.75|89.21|47.05", "99.61|96.88|87.65|51.93"),
        *("99.68|97.46|88.79|61.99", "99.73|97.73|89.16|44.74"),
    ),
    "mean-25": (
        *("99.68|97.00|88.75|48.75", "99.66|98.27|90.28|43.45"),
        *("99.46|96.14|87.11|52.70", "99.73|97.51|88.28|58.39"),
    ),
    "pruned-25": (
        *("99.68|97.71|89.48|60.83", "99.78|97.61|89.38|51.54"),
        *("99.83|98.61|90.48|56.05", "99.85|97.90|89.45|56.79"),
    ),
    "gate-taylor-25": (
        *("99.66|97.19|88.79|52.58", "99.37|95.61|86.57|53.65"),
        *("99.17|96.61|87.96|46.50", "99.76|97.09|88.33|48.14"),
    ),
}


def quoted(tests: tuple[tuple[int, int], ...], numbers: str) -> dict[str, str]:
    """Return the paper's numbers by the metrics of tests."""
    return {recall_metric(*test): number for test, number in zip(tests, numbers.split("|"), strict=True)}


RECIPE = Recipe(
    title="Associative recall",
    source=Source(
        "tab:mqar-complete", "124M at 4K; each group says which seed varies, mean ± SE of three; recovery: one"
    ),
    also=("fig:mqar-generalisation",),
    rows=(
        *(
            Row(arm=f"recall-later-{model}", label=f"{LABELS[model]}, pretraining seeds", paper=quoted(RECALL, texts))
            for model, texts in PRETRAINING.items()
        ),
        *(
            Row(
                arm=f"recall-later-{model}-task-seeds",
                label=f"{LABELS[model]}, task seeds",
                paper=quoted(FOUR, texts),
            )
            for model, texts in TASK_SEEDS.items()
        ),
        *(
            Row(
                arm=f"recovery-{model}@{place}",
                label=f"{LABELS[model]}, {RECOVERY[place]} updates after replacement",
                first_seed=True,
                paper=quoted(FOUR, text),
            )
            for model, texts in RECOVERED.items()
            for place, text in enumerate(texts)
        ),
    ),
    figures=(
        recall_figure(
            {LABELS[model]: f"recall-later-{model}" for model in LATER_ARMS},
            {LABELS[model]: f"recovery-{model}@0" for model in LATER_ARMS},
        ),
    ),
    metrics=(*RECALL_METRICS, "recall seeds", "gate", "heads"),
    smoke=("recall-later-ordinary", "recovery-mean-25"),
    notes=(
        "Metrics are tests, tokens / pairs; all models learn 8 pairs in 512 tokens. Development is the share of that "
        "length's queries that are answered; 80% are asked of the ordinary arm.",
        "Pretraining seeds: three checkpoints, one task seed. Task seeds: the first checkpoint, three task seeds. The "
        "axes are never pooled.",
        "After replacement: heads of the ordinary model that has learnt the task are replaced, and it goes on with new "
        "examples; every row of a model is of one run.",
    ),
)
