"""What freezing itself takes: tab:intervention-costs, of the runs that freeze halfway."""

from experiments.paper import COSTS
from experiments.recipe import Recipe, Row

PAPER = {
    "25": {"capture": "51.56 ± 5.96", "fit": "3.20 ± 0.16", "intervention": "54.86 ± 6.04"},
    "50": {"capture": "40.89 ± 1.11", "fit": "5.24 ± 0.09", "intervention": "46.30 ± 1.22"},
}

RECIPE = Recipe(
    title="One-time intervention costs",
    source=COSTS,
    rows=tuple(Row(arm=f"4k-mean-{rate}-control", label=f"{rate}%", paper=paper) for rate, paper in PAPER.items()),
    metrics=("capture", "fit", "intervention", "heads"),
    notes=("Our first event of a process also compiles kernels; `python -m benchmarks.freezing` has both.",),
)
