"""Finetuning of replaced and pruned checkpoints, on either axis of seeds: tab:pruning-downstream.

The group by pretraining seed is the half of tab:pruning-additional-training whose perplexities later_intervention has.
"""

from experiments.paper import Source
from experiments.recipe import Recipe, Row

TASKS = {"sst2": "SST-2", "boolq": "BoolQ"}
MODELS = {
    **{"ordinary": "ordinary", "mean-25": "mean 25%", "mean-50": "mean 50%", "pruned-25": "pruning 25%"},
    **{"pruned-50": "pruning 50%", "gate-taylor-25": "gate-Taylor 25%", "from-start": "from initialisation"},
}
GROUPS = {
    "midpoint": "midpoint, time",
    "later-tokens": "later, tokens",
    "later-time": "later, time",
    "later-time-pretraining": "later, time, by pretraining seed",
}
# Accuracy of SST-2 and BoolQ.
PAPER = {
    "midpoint": {
        "ordinary": ("86.24 ± 0.93", "71.86 ± 0.40"),
        "mean-25": ("86.05 ± 0.54", "70.52 ± 0.16"),
        "mean-50": ("86.12 ± 0.54", "70.66 ± 0.26"),
        "pruned-25": ("86.85 ± 0.56", "70.97 ± 0.66"),
        "pruned-50": ("85.93 ± 0.56", "69.92 ± 0.26"),
    },
    "later-tokens": {
        "ordinary": ("88.88", "71.74"),
        "mean-25": ("87.39", "72.11"),
        "pruned-25": ("87.73", "71.99"),
        "gate-taylor-25": ("87.61", "71.87"),
        "from-start": ("89.11", "71.25"),
    },
    "later-time": {
        "ordinary": ("87.81 ± 0.28", "71.54 ± 0.23"),
        "mean-25": ("87.69 ± 0.44", "71.78 ± 0.48"),
        "pruned-25": ("87.31 ± 0.37", "71.49 ± 0.31"),
        "gate-taylor-25": ("87.65 ± 0.23", "71.20 ± 0.03"),
    },
    "later-time-pretraining": {
        "ordinary": ("87.00 ± 0.33", "71.78 ± 0.46"),
        "mean-25": ("87.73 ± 0.46", "71.27 ± 0.67"),
        "pruned-25": ("87.81 ± 0.34", "71.75 ± 0.29"),
        "gate-taylor-25": ("86.96 ± 0.49", "71.33 ± 0.16"),
    },
}

AGAINST_PRUNING = {
    ("later-time-pretraining", "sst2", "mean-25"): {"points_against": "+0.765 ± 0.894"},
    ("later-time-pretraining", "boolq", "mean-25"): {"points_against": "−0.051 ± 0.795"},
}

RECIPE = Recipe(
    title="Finetuning of replaced and pruned checkpoints",
    source=Source("tab:pruning-downstream", "124M at 4K; each group says which seed varies, mean ± SE of three"),
    rows=tuple(
        Row(
            arm=f"{group}-{task}-{model}",
            label=f"{GROUPS[group]}: {title} {MODELS[model]}",
            reference=f"{group}-{task}-ordinary",
            against=f"{group}-{task}-gate-taylor-25" if model == "mean-25" and group.startswith("later") else None,
            first_seed=group == "later-tokens",
            paper={"accuracy": texts[place]} | AGAINST_PRUNING.get((group, task, model), {}),
        )
        for group, models in PAPER.items()
        for place, (task, title) in enumerate(TASKS.items())
        for model, texts in models.items()
    ),
    also=("tab:pruning-additional-training",),
    metrics=("accuracy", "points", "points_against", "seeds", "updates", "epochs", "heads"),
    smoke=("later-tokens-sst2-pruned-25", "later-tokens-sst2-ordinary"),
    notes=(
        "Midpoint at matched time: three pretraining seeds, one finetuning seed. Later at matched tokens: one of each. "
        "Later at matched time: one pretraining seed, three finetuning seeds; and the other way round by pretraining "
        "seed. The axes are never pooled.",
        "In each group and task the ordinary model chooses the epochs; the others are finetuned like it. Differences "
        "are from pruning by gate-Taylor, in each seed.",
    ),
)
