"""The peak learning rate and warm-up of a scale, before its runs: perplexity, and how well a quarter of the heads fit.

Run it at a tenth of a scale's tokens: `--scale converged-56M`.
"""

from experiments.arms import PEAK_RATES, WARMUPS
from experiments.recipe import Recipe, Row


def _rows(peak: str, warmup: str) -> tuple[Row, Row]:
    arm = f"4k-peak-{peak}-warmup-{warmup}"
    label = f"peak {peak}, warm-up {warmup}%"
    frozen = Row(arm=f"{arm}-mean-25", label=f"{label}: 25% frozen at the end", reference=arm)
    return Row(arm=arm, label=label), frozen


RECIPE = Recipe(
    title="Peak learning rate and warm-up",
    rows=tuple(row for peak in PEAK_RATES for warmup in WARMUPS for row in _rows(peak, warmup)),
    metrics=("perplexity", "delta", "rise", "heads", "median_kl", "fit_kl", "skipped"),
    seeds=1,
    smoke=("4k-peak-1e-3-warmup-10-mean-25",),
    notes=(
        "The paper's peak rate is 6e-4 with 10% of warm-up.",
        "A rate whose heads fit badly freezes at a higher cost, however low its own perplexity.",
    ),
)
