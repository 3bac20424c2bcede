"""How the training loss recovers after replacement at five moments: fig:replacement-recovery."""

from experiments.measurements import Measurement, Number, RunOf
from experiments.paper import RECOVERY
from experiments.recipe import Recipe

MOMENTS = {
    **{0.25: "4k-mean-25-at-25", 0.4: "4k-mean-25-at-40", 0.5: "4k-mean-25", 0.6: "4k-mean-25-at-60"},
    **{0.75: "4k-mean-25-at-75", 1.0: "4k-mean-25-at-100"},
}
# Gaps 200 updates after replacement and at the end, in nats, and what replacement cost at once.
PAPER = {0.25: ("0.0061", "0.0062", "2.72"), 0.75: ("0.0123", "0.0086", None), 1.0: (None, None, "7.99")}


def _numbers(place: int, moment: float) -> tuple[Number, ...]:
    later, end, once = PAPER.get(moment, (None, None, None))
    title, path = f"at {moment:.0%}", ("runs", place)
    at_once = Number(title=f"{title}, at once, %", path=(*path, "at_once"), paper=once, places=2, signed=True)
    if moment == 1:
        return (at_once,)
    return (
        at_once,
        Number(title=f"{title}, 200 updates later", path=(*path, "gap_after"), paper=later, places=4, signed=True),
        Number(title=f"{title}, at the end", path=(*path, "gap_at_end"), paper=end, places=4, signed=True),
    )


RECIPE = Recipe(
    title="Recovery of the training loss at 25%",
    seeds=1,
    source=RECOVERY,
    measurements=(
        Measurement(
            name="gaps",
            does="analyze recovery",
            on=(RunOf("4k-ordinary"), *map(RunOf, MOMENTS.values())),
            settings={"window": 210, "after": 200},
            scaled={"smoke": {"window": 3, "after": 1}},
            numbers=tuple(number for place, moment in enumerate(MOMENTS) for number in _numbers(place, moment)),
        ),
    ),
    notes=(
        "Gaps are in nats of training loss; at the ends the mean is over the updates that there are. After training "
        "there is no gap, as no update follows.",
    ),
)
