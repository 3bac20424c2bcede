"""Single heads halfway: tab:selector-diagnostic, partial correlations, fig:head-selection-profiles (a, c, d)."""

from experiments.measurements import Checkpoint, Measurement, Number, RecordOf, RunOf
from experiments.paper import PARTIAL, SELECTION_TEXT, SELECTOR_DIAGNOSTIC, SELECTORS
from experiments.recipe import Recipe

MIDPOINT = (Checkpoint("4k-ordinary", 0.5),)
WORDS = {"spearman": "no control", "layer": "beyond layer", "layer_entropy": "beyond layer and entropy"}


def _of_score(score: str, spearman: str, quarter: str, half: str) -> tuple[Number, ...]:
    title, path = score.replace("_", " "), ("quality", score)
    return (
        Number(title=f"{title}, Spearman", path=(*path, "spearman"), paper=spearman, signed=True),
        Number(title=f"{title}, mean cost of the lowest 25%, %", path=(*path, "mean_cost", "0.25"), paper=quarter),
        Number(title=f"{title}, mean cost of the lowest 50%, %", path=(*path, "mean_cost", "0.5"), paper=half),
    )


def _profile(title: str, name: str, *paper: str | None, places: int) -> tuple[Number, ...]:
    """Return selected heads, then unselected ones of the same layers."""
    scale = 100.0 if title.endswith("%") else 1.0
    return tuple(
        Number(title=f"{title}, {side}", path=("matched", name, place), paper=number, scale=scale, places=places)
        for side, number, place in zip(("selected", "others of their layers"), paper, (0, 1), strict=True)
    )


def _correlation(title: str, name: str) -> Number:
    return Number(title=title, path=("correlations", "variance", name), paper=PARTIAL[name], signed=True)


RECIPE = Recipe(
    title="Costs of single heads and the scores that predict them",
    source=SELECTORS,
    also=("app:head-selection-analysis", "fig:head-selection-profiles"),
    measurements=(
        Measurement(
            name="one head",
            does="analyze one-head",
            on=MIDPOINT,
            settings={"sequences": 32, "windows": 16, "heldout_sequences": 16},
            scaled={
                "smoke": {"sequences": 4, "windows": 2, "heldout_sequences": 2, "max_fit_kl": 10.0},
            },
            numbers=tuple(n for score, paper in SELECTOR_DIAGNOSTIC.items() for n in _of_score(score, *paper)),
        ),
        Measurement(
            name="profiles",
            does="analyze profiles",
            on=MIDPOINT,
            settings={"selected": RunOf("4k-mean-25"), "windows": 128},
            scaled={"smoke": {"windows": 2}},
            numbers=(
                *_profile("normalised entropy", "entropy", "0.837", "0.678", places=3),
                *_profile("mass of the 64 latest tokens, %", "local_mass", "19.0", "40.7", places=1),
                *_profile("mass of the first token, %", "first_token", "0.023", None, places=3),
            ),
            label=SELECTION_TEXT.label,
        ),
        Measurement(
            name="profiles on the calibration text",
            does="analyze profiles",
            on=MIDPOINT,
            settings={"windows": 16, "text": "calibration"},
            scaled={"smoke": {"windows": 2, "sequences": 4}},
        ),
        Measurement(
            name="partial correlations",
            does="analyze partial-spearman",
            on=(RecordOf("one head"),),
            settings={"profiles": RecordOf("profiles on the calibration text")},
            numbers=(
                *(_correlation(f"variance and cost, {words}", name) for name, words in WORDS.items()),
                _correlation("variance and entropy", "with_entropy"),
            ),
            label=SELECTION_TEXT.label,
        ),
    ),
)
