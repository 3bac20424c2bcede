"""Preset and adaptive schedules: tab:schedule-details, and at matched rates tab:schedule-confirmation."""

from saf.experiments.recipe import Arm, Recipe
from saf.records.paper import Source

BUDGET = "schedule.validation_budget.budget"
MULTIPLIER = "schedule.train_loss.multiplier"
# The cap of both adaptive schedules: half of all heads (docs/schedules.md).
CAP = 0.5


def _preset(rate: float, one_time: str, gradual: str) -> tuple[Arm, ...]:
    """The same heads at once and in five groups."""
    title = f"one time, {rate:.0%}"
    freeze = {"freeze.rate": rate}
    return (
        Arm(name=title, parent="ordinary", settings=freeze, paper={"delta": one_time}),
        Arm(
            name=f"gradual, {rate:.0%}",
            parent="ordinary",
            settings={**freeze, "schedule": "gradual"},
            against=title,
            paper={"delta": gradual},
            smoke=rate == 0.5,
        ),
    )


def _budget(budget: float, change: str) -> Arm:
    settings = {"freeze.rate": CAP, "schedule": "validation_budget", BUDGET: budget}
    return Arm(name=f"validation budget {budget:.0%}", parent="ordinary", settings=settings, paper={"delta": change})


def _triggered(multiplier: float, change: str) -> Arm:
    """From the first update on, so from initialisation."""
    settings = {"freeze.rate": CAP, "schedule": "train_loss", MULTIPLIER: multiplier}
    return Arm(
        name=f"train loss, z = {multiplier}", settings=settings, paper={"delta": change}, smoke=multiplier == 3.0
    )


def _branched(multiplier: float) -> Arm:
    """From a quarter of the ordinary arm's training on: what it changes is then no difference of two trainings."""
    settings = {"freeze.rate": CAP, "schedule": "train_loss", MULTIPLIER: multiplier}
    name = f"train loss, z = {multiplier}, from 25% of training on"
    return Arm(name=name, parent="ordinary", at=0.25, settings=settings, smoke=False)


RECIPE = Recipe(
    title="Schedules",
    seeds=1,
    source=Source("tab:schedule-details", "124M at 4K, one seed; it reached 6.25, 12.5, 14.58 and 50% of the heads"),
    arms=(
        Arm(name="ordinary", reference=None),
        *_preset(0.25, "+0.662", "+0.689"),
        *_preset(0.5, "+2.649", "+2.832"),
        _budget(0.01, "+0.093"),
        _budget(0.02, "+0.348"),
        _triggered(3.0, "+0.409"),
        _triggered(1.5, "+2.119"),
        _branched(3.0),
        _branched(1.5),
    ),
    columns=("perplexity", "delta", "difference", "context", "heads", "minutes", "intervention"),
    notes=(
        "Schedules by the training loss begin at initialisation, so that their arms are trainings of their own: in "
        "their change is what two trainings of the same settings differ by. Those that branch off the ordinary arm at "
        "25% have no number of the paper, and see no loss before that.",
        "The difference is that of the gradual schedule from one time, at the same rate.",
        "Runs of several events are compiled by layers, the others whole: their minutes are what each takes.",
    ),
)
