"""Two head sets replaced as wholes, at once and after continuation: residual cosine in app:head-selection-analysis."""

from experiments.measurements import Checkpoint, Measurement, Number, RunOf
from experiments.paper import JOINT_COST, SELECTION_TEXT
from experiments.recipe import Recipe, Row

RECIPE = Recipe(
    title="Joint cost of two selections, immediate and after continuation",
    seeds=1,
    source=SELECTION_TEXT,
    rows=(
        Row(arm="4k-ordinary", label="ordinary"),
        Row(arm="4k-mean-25", label="variance", reference="4k-ordinary", paper={"delta": "+0.665"}),
        Row(
            arm="4k-residual-cosine-25",
            label="residual cosine",
            reference="4k-ordinary",
            against="4k-mean-25",
            paper={"delta": "+0.792", "relative": "+0.126"},
        ),
    ),
    metrics=("perplexity", "delta", "relative", "heads"),
    measurements=(
        Measurement(
            name="at once",
            does="analyze joint-cost",
            on=(Checkpoint("4k-ordinary", 0.5),),
            settings={
                **{"first": RunOf("4k-residual-cosine-25"), "second": RunOf("4k-mean-25")},
                **{"sequences": 32, "windows": 16, "skip": 16},
            },
            scaled={"smoke": {"sequences": 4, "windows": 2, "skip": 2}},
            numbers=(
                *(
                    Number(title=f"{words} at once, %", path=(place, "delta_ppl_percent"), paper=paper, signed=True)
                    for place, words, paper in (
                        ("first", "residual cosine", JOINT_COST["residual_cosine"]),
                        ("second", "variance", JOINT_COST["variance"]),
                    )
                ),
                Number(title="heads in both", path=("overlap",), paper="23", places=0),
            ),
        ),
    ),
    notes=("The difference is that of the perplexity from variance's after the same continuation.",),
)
