"""Whole patterns against compact ones, for both position encodings: tab:representation-details."""

from saf.experiments.measurement import Checkpoint, Measurement, Number
from saf.experiments.recipe import Arm, Recipe
from saf.records.paper import Source

PAPER = {
    "learned": {"ordinary": "26.0252", "dense": "26.1184", "compact": "26.1150"},
    "rope": {"ordinary": "23.9571", "dense": "24.1180", "compact": "24.1165"},
}


def _arms(position: str) -> tuple[Arm, ...]:
    paper, ordinary = PAPER[position], f"{position}, ordinary"
    storage = {"dense": {"freeze.storage": "dense"}, "compact": {}}
    return (
        Arm(
            name=ordinary,
            settings={"model_overrides": {"position": position}},
            reference=None,
            paper={"perplexity": paper["ordinary"]},
        ),
        *(
            Arm(
                name=f"{position}, {name}",
                parent=ordinary,
                settings={"freeze.rate": 0.25, **settings},
                reference=ordinary,
                against=f"{position}, dense" if name == "compact" else None,
                paper={"perplexity": paper[name]},
                smoke=position == "rope",
            )
            for name, settings in storage.items()
        ),
    )


REDUCTION = {"learned": "59.9×", "rope": "60.6×"}


def _storage(position: str) -> Measurement:
    """Matrices of whole layers to what execution allocates of their patterns' vectors."""
    return Measurement(
        name=f"storage, {position}",
        does="analyze storage",
        on=(Checkpoint(f"{position}, compact", 1.0),),
        numbers=(
            Number(title=f"{position}, storage reduction", path=("reduction",), paper=REDUCTION[position], places=1),
        ),
        smoke=position == "rope",
    )


RECIPE = Recipe(
    title="Whole against compact patterns at 25%",
    seeds=1,
    source=Source("tab:representation-details", "124M at 4K, one seed; absolute positions are learned ones"),
    arms=(*_arms("learned"), *_arms("rope")),
    columns=("perplexity", "delta", "difference"),
    measurements=(_storage("learned"), _storage("rope")),
    notes=("The difference is that of the compact arm from the whole one.",),
)
