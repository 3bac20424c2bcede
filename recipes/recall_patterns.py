"""Associative recall of frozen and trainable patterns: tab:pattern-controls (b)."""

from saf.experiments.columns import RECALL, recall_name
from saf.experiments.recipe import Arm, Recipe
from saf.experiments.scales import HELD_OUT
from saf.records.paper import Source

# As recipe trainability has them, whose runs the checkpoints are.
FREEZE = {"freeze.rate": 0.25, "freeze.strict": True}
MODELS = {"ordinary": {}, "frozen": FREEZE, "trainable": {**FREEZE, "freeze.trainable": True}}
SMOKE = {
    **{"updates": 2, "batch_size": 4, "mqar.length": 32, "mqar.pairs": 2, "mqar.vocabulary": 64},
    **{"mqar.test_lengths": (32,), "mqar.test_pairs": (2,), "mqar.test_examples": 4, "mqar.development": 4},
}
PAPER = {
    "ordinary": "99.58 ± 0.15|71.78 ± 2.47|52.71 ± 2.06|42.13 ± 1.49|30.00 ± 1.30|23.53 ± 1.34|"
    "97.01 ± 0.46|88.76 ± 0.88",
    "frozen": "99.60 ± 0.06|81.36 ± 1.58|60.89 ± 1.61|49.08 ± 3.04|35.39 ± 3.74|28.30 ± 4.18|97.53 ± 0.44|88.89 ± 0.93",
    "trainable": "99.54 ± 0.07|78.44 ± 3.69|59.67 ± 5.69|47.77 ± 5.62|34.67 ± 5.00|27.04 ± 4.19|"
    "97.99 ± 0.73|89.65 ± 1.42",
}


def _adapted(model: str) -> Arm:
    first = model == "ordinary"
    return Arm(
        **{"name": f"{model}, recall", "task": "mqar", "parent": model, "reference": None},
        like=None if first else "ordinary, recall",
        scaled={"smoke": SMOKE} if first else {},
        paper={recall_name(*test): number for test, number in zip(RECALL, PAPER[model].split("|"), strict=True)},
    )


RECIPE = Recipe(
    title="Associative recall of frozen and trainable patterns",
    source=Source(
        "tab:pattern-controls", "124M at 4K, 25% halfway, mean ± SE of three pretraining seeds, one task seed"
    ),
    arms=(
        *(
            Arm(
                name=model,
                parent=None if model == "ordinary" else "ordinary",
                reference=None,
                row=False,
                settings=freeze,
                scaled=HELD_OUT if freeze else {},
            )
            for model, freeze in MODELS.items()
        ),
        *map(_adapted, MODELS),
    ),
    columns=(*(recall_name(*test) for test in RECALL), "gate", "heads"),
    notes=("Columns are tests, tokens / pairs; trainable patterns go on training with the task, without decay.",),
)
