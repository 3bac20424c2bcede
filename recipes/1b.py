"""The 1B model at 8K, trained, frozen and pruned halfway: tab:scale-up-results, its perplexities."""

from typing import Any

from saf.experiments.recipe import Arm, Recipe
from saf.records.paper import ONE_B_TEXT

TRAINING = {
    **{"model": "1b", "batch_size": 2, "accumulation": 32, "updates": 37_512, "peak_lr": 3e-4, "min_lr_ratio": 0.1},
    **{"warmup": 375, "eval_every": 1_000, "save_every": 500, "calibration_sequences": 16},
}
"""The appendix's: four GPUs take eight micro-batches of two windows each, 524,288 tokens an update."""


def _arm(name: str, *, settings: dict[str, Any], paper: dict[str, str], smoke: bool = True) -> Arm:
    return Arm(name=name, context=8_192, parent="ordinary", settings=settings, paper=paper, smoke=smoke)


RECIPE = Recipe(
    title="1B at 8K",
    seeds=1,
    source=ONE_B_TEXT,
    also=("tab:scale-up-results", "tab:intervention-costs"),
    arms=(
        Arm(
            name="ordinary",
            context=8_192,
            reference=None,
            scaled={"paper": TRAINING},
            paper={"perplexity": "12.446"},
        ),
        _arm(
            "mean + variance (25%)",
            settings={"freeze.rate": 0.25},
            paper={"perplexity": "12.509", "delta": "+0.507", "capture": "1422.37", "fit": "39.56"}
            | {"intervention": "1464.41"},
        ),
        _arm(
            "pruning + gate-Taylor (25%)",
            settings={"freeze.operation": "prune", "freeze.rate": 0.25, "freeze.score": "gate_taylor"},
            paper={"perplexity": "12.529"},
            smoke=False,
        ),
        _arm(
            "mean + variance (50%)",
            settings={"freeze.rate": 0.5},
            paper={"perplexity": "12.698", "delta": "+2.027", "capture": "1313.35", "fit": "76.28"}
            | {"intervention": "1392.64"},
            smoke=False,
        ),
    ),
    columns=("perplexity", "delta", "heads", "updates", "intervention", "capture", "fit"),
    notes=(
        "At other scales the arms are the scale's own runs at 8K.",
        "The paper trained on four GPUs, 19.667B tokens; `saf run` trains each run on one. docs/scale.md has the "
        "command for several.",
    ),
)
