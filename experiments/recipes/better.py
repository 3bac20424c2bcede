"""Variants of the paper's method that may lower the change at the same rate, one an arm, at matched tokens.

All arms share the ordinary run's first half. docs/results.md says which
variants were better on three seeds.
"""

from experiments.arms import percent
from experiments.paper import QUALITY
from experiments.recipe import Recipe, Row

PAPER = {0.25: "+0.768 ± 0.067", 0.5: "+2.492 ± 0.083"}
IDEAS = {
    "Q/K gradient": "qk-gradient",
    "residual cosine": "residual-cosine",
    "rank sum": "rank-sum",
    "alpha constant after 16 keys": "flat",
    "rate rises again": "rewarm",
    "two events": "two-events",
    "three events": "three-events",
    "at most half of a layer": "half-layer",
    "at 40% of training": "at-40",
    "at 25% of training": "at-25",
    "variance, pruned": "pruned",
    "Q/K gradient, pruned": "gradient-pruned",
    "at 25% of training, at most half of a layer": "at-25-half-layer",
    "at 25% of training, pruned": "at-25-pruned",
    "gradient veto": "gradient-veto",
    "relative output change": "relative-output-change",
}
HALF = (
    *("Q/K gradient", "residual cosine", "variance, pruned", "Q/K gradient, pruned", "at most half of a layer"),
    *("at 25% of training", "at 25% of training, pruned"),
)
"""Ideas that were tried at 50% too."""
BOUGHT = {
    "the paper's method": "variance",
    "at 40% of training": "at-40",
    "at 25% of training": "at-25",
    "variance, pruned": "pruned",
    "at 25% of training, pruned": "at-25-pruned",
}
ORDINARY = "4k-tracked-ordinary"


def _row(idea: str, arm: str, rate: float, against: str | None, **paper: str) -> Row:
    return Row(arm=arm, label=f"{idea}, {rate:.0%}", reference=ORDINARY, against=against, paper=paper)


def _rows(rate: float, ideas: tuple[str, ...]) -> tuple[Row, ...]:
    usual = f"4k-tracked-variance-{percent(rate)}"
    first = _row("the paper's method", usual, rate, None, delta=PAPER[rate])
    return (first, *(_row(idea, f"4k-tracked-{IDEAS[idea]}-{percent(rate)}", rate, usual) for idea in ideas))


def _bought() -> tuple[Row, ...]:
    usual = "4k-tracked-variance-25-bought"
    arms = {idea: f"4k-tracked-{name}-25-bought" for idea, name in BOUGHT.items()}
    return tuple(
        _row(f"{idea} with extra tokens for its speedup", arm, 0.25, None if arm == usual else usual)
        for idea, arm in arms.items()
    )


RECIPE = Recipe(
    title="Variants of the paper's method",
    source=QUALITY,
    rows=(Row(arm=ORDINARY, label="ordinary"), *_rows(0.25, tuple(IDEAS)), *_rows(0.5, HALF), *_bought()),
    metrics=("perplexity", "delta", "difference", "rise", "extra", "context", "heads"),
    smoke=(
        *("4k-tracked-qk-gradient-25", "4k-tracked-flat-25", "4k-tracked-rewarm-25", "4k-tracked-two-events-25"),
        "4k-tracked-variance-25",
    ),
    notes=(
        "The difference is from the paper's method at the same rate; below zero is better.",
        "Seed 1337 chose which arms further seeds were to judge: of their intervals it is no unbiased part.",
        "The loss increase is on the controller's text at the event, before any update; of several events their sum.",
        "Arms with extra tokens train as many more updates from their event on as a speedup of 1.085 gives, "
        "pruned ones as 1.127 does, and are compared with one another.",
    ),
)
