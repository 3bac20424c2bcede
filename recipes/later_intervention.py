"""Freezing after a full run, and training on at a tenth of the rate: tab:pruning-additional-training."""

from saf.experiments.recipe import Arm, Recipe
from saf.records.paper import Source

PAPER = {"ordinary": "22.563 ± 0.010", "mean + variance": "22.923 ± 0.013"}


RECIPE = Recipe(
    title="Later intervention at 25%, matched tokens",
    source=Source("tab:pruning-additional-training", "124M at 4K, 3.6864B tokens, mean ± SE of three seeds"),
    arms=(
        Arm(name="full run", reference=None),
        *(
            Arm(
                name=name,
                parent="full run",
                at=1.0,
                more=0.5,
                settings={"peak_lr": 6e-5, "min_lr_ratio": 0.1, "warmup": 0, **freeze},
                reference=None if name == "ordinary" else "ordinary",
                paper={"perplexity": PAPER[name]},
            )
            for name, freeze in (("ordinary", {}), ("mean + variance", {"freeze.rate": 0.25}))
        ),
    ),
    columns=("perplexity", "delta", "updates", "heads"),
    notes=(
        "The rate falls from 6e-5 to 6e-6, as the paper's; at other scales its peak is another, and this the same.",
    ),
)
