"""Two head sets replaced as wholes, at once and after continuation: residual cosine in app:head-selection-analysis."""

from saf.experiments.measurement import Checkpoint, Measurement, Number, RunOf
from saf.experiments.recipe import Arm, Recipe
from saf.records.paper import JOINT_COST, SELECTION_TEXT

RECIPE = Recipe(
    title="Joint cost of two selections, at once and after continuation",
    seeds=1,
    source=SELECTION_TEXT,
    arms=(
        Arm(name="ordinary", reference=None),
        Arm(name="variance", parent="ordinary", settings={"freeze.rate": 0.25}, paper={"delta": "+0.665"}),
        Arm(
            name="residual cosine",
            parent="ordinary",
            settings={"freeze.rate": 0.25, "freeze.score": "residual_cosine"},
            against="variance",
            paper={"delta": "+0.792", "relative": "+0.126"},
        ),
    ),
    columns=("perplexity", "delta", "relative", "heads"),
    measurements=(
        Measurement(
            name="at once",
            does="analyze joint-cost",
            on=(Checkpoint("ordinary", 0.5),),
            settings={"first": RunOf("residual cosine"), "second": RunOf("variance"), "sequences": 32, "windows": 16},
            scaled={"smoke": {"sequences": 4, "windows": 2}},
            numbers=(
                Number(
                    title="residual cosine at once, %",
                    path=("first", "delta_ppl_percent"),
                    paper=JOINT_COST["residual_cosine"],
                    signed=True,
                ),
                Number(
                    title="variance at once, %",
                    path=("second", "delta_ppl_percent"),
                    paper=JOINT_COST["variance"],
                    signed=True,
                ),
                Number(title="heads in both", path=("overlap",), paper="23", places=0),
            ),
        ),
    ),
    notes=("The difference is that of the perplexity from variance's after the same continuation.",),
)
