"""How stable a selection is from a quarter to half of training: fig:head-selection-profiles (b)."""

from saf.experiments.measurement import Measurement, Number, RunOf
from saf.experiments.recipe import Arm, Recipe
from saf.records.paper import SELECTION_TEXT, STABILITY

RECIPE = Recipe(
    title="Selection a quarter and half through training",
    source=SELECTION_TEXT,
    also=("fig:head-selection-profiles",),
    arms=(
        Arm(name="ordinary", reference=None),
        Arm(name="at 25%", parent="ordinary", at=0.25, settings={"freeze.rate": 0.25}),
        Arm(name="at 50%", parent="ordinary", settings={"freeze.rate": 0.25}),
    ),
    measurements=(
        Measurement(
            name="stability",
            does="analyze stability",
            on=(RunOf("at 25%"), RunOf("at 50%")),
            numbers=(
                Number(title="heads in both", path=("overlap",), paper=STABILITY["overlap"], places=1),
                Number(title="expected by chance", path=("expected",), paper=STABILITY["expected"], places=1),
                Number(title="rank correlation", path=("rank_correlation",), paper=STABILITY["rank_correlation"]),
            ),
        ),
    ),
)
