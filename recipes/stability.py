"""How stable a selection is from a quarter to half of training, and to its end: fig:head-selection-profiles (b)."""

from saf.experiments.measurement import Measurement, Number, RunOf
from saf.experiments.recipe import Arm, Recipe
from saf.records.paper import SELECTION_TEXT, STABILITY

MOMENTS = {"at 25%": 0.25, "at 50%": 0.5, "at the end": 1.0}


def _measured(name: str, first: str, second: str, paper: dict[str, str]) -> Measurement:
    found = (("heads in both", "overlap", 1), ("expected by chance", "expected", 1))
    return Measurement(
        name=name,
        does="analyze stability",
        on=(RunOf(first), RunOf(second)),
        numbers=(
            *(
                Number(title=f"{title}, {first} and {second}", path=(path,), paper=paper.get(path), places=places)
                for title, path, places in found
            ),
            Number(
                title=f"rank correlation, {first} and {second}",
                path=("rank_correlation",),
                paper=paper["rank_correlation"],
            ),
        ),
    )


RECIPE = Recipe(
    title="Selection a quarter and half through training, and at its end",
    source=SELECTION_TEXT,
    also=("fig:head-selection-profiles",),
    arms=(
        Arm(name="ordinary", reference=None),
        *(Arm(name=name, parent="ordinary", at=at, settings={"freeze.rate": 0.25}) for name, at in MOMENTS.items()),
    ),
    measurements=(
        _measured("stability", "at 25%", "at 50%", STABILITY),
        _measured("a quarter and the end", "at 25%", "at the end", {"rank_correlation": "0.869 to 0.904"}),
        _measured("half and the end", "at 50%", "at the end", {"rank_correlation": "0.945 to 0.966"}),
    ),
    notes=(
        "The paper's correlations with the end are of 64 query rows in the latter half of 128 windows; ours are of the "
        "scores that heads are selected by, as its others are.",
    ),
)
