"""How stable a selection is from a quarter to half of training, and to its end: fig:head-selection-profiles (b)."""

from experiments.measurements import Checkpoint, Measurement, Number, RecordOf, RunOf
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


def _profiled(moment: str, at: float, later: str | None, paper: str | None = None) -> Measurement:
    """Return profiles of the ordinary run on windows that are the same at every moment."""
    title = f"rank correlation on common windows, {moment} and at the end"
    return Measurement(
        name=f"profiles {moment}",
        does="analyze profiles",
        on=(Checkpoint("4k-ordinary", at),),
        settings={"windows": 128} | ({} if later is None else {"later": RecordOf(later)}),
        scaled={"smoke": {"windows": 2}},
        numbers=(Number(title=title, path=("variance_ranks",), paper=paper),) if paper else (),
    )


RECIPE = Recipe(
    title="Selection a quarter and half through training, and at its end",
    source=SELECTION_TEXT,
    also=("fig:head-selection-profiles",),
    measurements=(
        _measured("stability", "at 25%", "at 50%", STABILITY),
        _measured("a quarter and the end", "at 25%", "at the end", {}),
        _measured("half and the end", "at 50%", "at the end", {}),
        _profiled("at the end", 1.0, None),
        _profiled("at 25%", 0.25, "profiles at the end", "0.869 to 0.904"),
        _profiled("at 50%", 0.5, "profiles at the end", "0.945 to 0.966"),
    ),
    notes=(
        "On common windows variance is measured as the paper does against the end: of 64 query rows in the latter half "
        "of 128 windows. Other correlations are of the scores that heads are selected by.",
    ),
)
