"""Dense patterns beside compact ones, for both position encodings: tab:representation-details."""

from experiments.measurements import Checkpoint, Measurement, Number
from experiments.paper import Source
from experiments.recipe import Recipe, Row

# Perplexity of ordinary, dense and compact arms; reduction of storage.
PAPER = {
    "learned": ("4k-learned", "26.0252", "26.1184", "26.1150", "59.9×"),
    "rope": ("4k", "23.9571", "24.1180", "24.1165", "60.6×"),
}


def _rows(position: str) -> tuple[Row, ...]:
    prefix, ordinary, dense, compact, _ = PAPER[position]
    reference, dense_arm = f"{prefix}-ordinary", f"{prefix}-dense-25"
    return (
        Row(arm=reference, label=f"{position}, ordinary", paper={"perplexity": ordinary}),
        Row(arm=dense_arm, label=f"{position}, dense", reference=reference, paper={"perplexity": dense}),
        Row(
            arm=f"{prefix}-mean-25",
            label=f"{position}, compact",
            reference=reference,
            against=dense_arm,
            paper={"perplexity": compact},
        ),
    )


def _storage(position: str) -> Measurement:
    """Return matrices of whole layers to what execution allocates of their patterns' vectors."""
    prefix, *_, reduction = PAPER[position]
    return Measurement(
        name=f"storage, {position}",
        does="analyze storage",
        on=(Checkpoint(f"{prefix}-mean-25", 1.0),),
        numbers=(Number(title=f"{position}, storage reduction", path=("reduction",), paper=reduction, places=1),),
        smoke=position == "rope",
    )


RECIPE = Recipe(
    title="Dense and compact patterns at 25%",
    seeds=1,
    source=Source("tab:representation-details", "124M at 4K, one seed; absolute positions are learned ones"),
    rows=(*_rows("learned"), *_rows("rope")),
    metrics=("perplexity", "delta", "difference"),
    measurements=(_storage("learned"), _storage("rope")),
    smoke=("4k-dense-25", "4k-mean-25"),
    notes=("The difference is that of the compact arm from the dense one.",),
)
