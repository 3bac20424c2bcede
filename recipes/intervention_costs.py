"""What freezing itself takes: tab:intervention-costs, of the runs that freeze halfway."""

from saf.experiments.recipe import Arm, Recipe
from saf.experiments.scales import HELD_OUT
from saf.records.paper import COSTS

PAPER = {
    0.25: {"capture": "51.56 ± 5.96", "fit": "3.20 ± 0.16", "intervention": "54.86 ± 6.04"},
    0.5: {"capture": "40.89 ± 1.11", "fit": "5.24 ± 0.09", "intervention": "46.30 ± 1.22"},
}

RECIPE = Recipe(
    title="One-time intervention costs",
    source=COSTS,
    arms=(
        Arm(name="ordinary", reference=None),
        *(
            Arm(name=f"{rate:.0%}", parent="ordinary", settings={"freeze.rate": rate}, scaled=HELD_OUT, paper=paper)
            for rate, paper in PAPER.items()
        ),
    ),
    columns=("capture", "fit", "intervention", "heads"),
    notes=("Our first event of a process also compiles kernels; `python -m benchmarks.freezing` has both.",),
)
