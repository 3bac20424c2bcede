"""Attention over sequences at 1K: energy distances, fig:attention-entry-distributions and fig:dirichlet-umap."""

from experiments.measurements import Checkpoint, Measurement, Number
from experiments.paper import DISTRIBUTIONS, ROW_DISTANCES
from experiments.recipe import Recipe

PAPER = {"sequences": 500, "fitted": 0.6, "rate": 0.25, "scale": 4.0}
# Prepared folders hold out 5% unless asked for more: of some 30M tokens, 427 sequences.
SMALL = {"sequences": 400}
FAMILIES = {"resampled": "whole rows resampled", "gaussian": "Gaussian sampling", "dirichlet": "Dirichlet sampling"}
MIDPOINT = (Checkpoint("1k-ordinary", 0.5),)

RECIPE = Recipe(
    title="Measured attention rows beside generated ones",
    seeds=1,
    source=DISTRIBUTIONS,
    also=("fig:attention-entry-distributions", "fig:dirichlet-umap"),
    measurements=(
        Measurement(
            name="rows and entries",
            does="analyze distributions",
            on=MIDPOINT,
            settings=PAPER,
            scaled={"smoke": {"sequences": 8, "shown": 1}, "small": SMALL},
            numbers=tuple(
                Number(title=f"energy distance, {words}", path=("medians", name), paper=ROW_DISTANCES[name], places=2)
                for name, words in FAMILIES.items()
            ),
        ),
        Measurement(
            name="projection",
            does="analyze distributions",
            on=MIDPOINT,
            settings={**PAPER, "umap": True, "profiles": 128},
            scaled={"small": SMALL},
            smoke=False,
        ),
    ),
    notes=("The projection needs umap-learn, the extra named analysis.",),
)
