"""The 1B model at 8K, trained, frozen and pruned halfway: tab:scale-up-results, its perplexities."""

from experiments.paper import INTERVENTION, ONE_B_TEXT
from experiments.recipe import Recipe, Row

PAPER = {
    "1b-ordinary": ("ordinary", {"perplexity": "12.446"}),
    "1b-mean-25": ("mean + variance (25%)", {"perplexity": "12.509", "delta": "+0.507"}),
    "1b-gate-taylor-25": ("pruning + gate-Taylor (25%)", {"perplexity": "12.529"}),
    "1b-mean-50": ("mean + variance (50%)", {"perplexity": "12.698", "delta": "+2.027"}),
}
COSTS = {
    f"1b-mean-{100 * rate:g}": {"capture": each["statistics"], "fit": each["fit"], "intervention": each["total"]}
    for (model, _, rate), each in INTERVENTION.items()
    if model == "1b"
}

RECIPE = Recipe(
    title="1B at 8K",
    seeds=1,
    source=ONE_B_TEXT,
    also=("tab:scale-up-results", "tab:intervention-costs"),
    rows=tuple(
        Row(arm=arm, label=label, reference="1b-ordinary", paper={**paper, **COSTS.get(arm, {})})
        for arm, (label, paper) in PAPER.items()
    ),
    metrics=("perplexity", "delta", "heads", "updates", "intervention", "capture", "fit"),
    smoke=("1b-mean-25",),
    notes=("At other scales the arms are the scale's own runs at 8K. docs/scale.md has the command for several GPUs.",),
)
