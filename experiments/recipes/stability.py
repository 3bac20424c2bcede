"""How stable a selection is from a quarter to half of training, and to its end: fig:head-selection-profiles (b)."""

from experiments.measurements import Measurement, Number, RunOf
from experiments.paper import SELECTION_TEXT, STABILITY
from experiments.recipe import Recipe

MOMENTS = {"at 25%": "4k-mean-25-at-25", "at 50%": "4k-mean-25", "at the end": "4k-mean-25-at-100"}


def _measured(name: str, first: str, second: str, paper: dict[str, str]) -> Measurement:
    found = (
        ("heads in both", "overlap", 1),
        ("expected by chance", "expected", 1),
        ("rank correlation", "rank_correlation", 3),
    )
    return Measurement(
        name=name,
        does="analyze stability",
        on=(RunOf(MOMENTS[first]), RunOf(MOMENTS[second])),
        numbers=tuple(
            Number(title=f"{title}, {first} and {second}", path=(path,), paper=paper.get(path), places=places)
            for title, path, places in found
        ),
    )


RECIPE = Recipe(
    title="Selection a quarter and half through training, and at its end",
    source=SELECTION_TEXT,
    also=("fig:head-selection-profiles",),
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
