"""Controls at matched time: tab:equal-time-controls, and its exchange rate.

Every arm, the ordinary one too, restarts from the reference's checkpoint halfway and gets the time that it had left.
"""

from saf.experiments.recipe import Arm, Recipe
from saf.records.paper import Source

CONTEXTS = {4_096: ("4K", (0.1, 0.25, 0.5)), 8_192: ("8K", (0.25, 0.5)), 16_384: ("16K", (0.25, 0.5))}
RANDOM = {"freeze.score": "random", "freeze.match": "variance"}
PAPER = {
    "4K ordinary": {"perplexity": "23.882 ± 0.023", "updates": "5008 ± 13"},
    "4K mean + variance (25%)": {"perplexity": "23.991 ± 0.006", "delta": "+0.456 ± 0.108", "updates": "5109 ± 11"},
    "4K mean + variance (50%)": {"perplexity": "24.338 ± 0.020", "delta": "+1.911 ± 0.112", "updates": "5221 ± 18"},
    "4K pruning + variance (25%)": {"perplexity": "23.909 ± 0.024", "delta": "+0.113 ± 0.169", "updates": "5267 ± 30"},
    "4K pruning + variance (50%)": {"perplexity": "24.115 ± 0.003", "delta": "+0.978 ± 0.108", "updates": "5685 ± 36"},
    "4K mean + random (25%)": {
        **{"perplexity": "24.178 ± 0.024", "delta": "+1.243 ± 0.112", "difference": "+0.786 ± 0.082"},
        "updates": "5097 ± 28",
    },
    "4K mean + random (50%)": {
        **{"perplexity": "24.545 ± 0.048", "delta": "+2.778 ± 0.125", "difference": "+0.866 ± 0.154"},
        "updates": "5242 ± 11",
    },
}


def _arms(context: int, name: str, rates: tuple[float, ...]) -> tuple[Arm, ...]:
    reference, ordinary = f"{name} reference", f"{name} ordinary"

    def arm(title: str, settings: dict, smoke: bool = True, **others: str) -> Arm:
        return Arm(
            name=title,
            context=context,
            parent=reference,
            match=reference,
            settings=settings,
            reference=None if title == ordinary else ordinary,
            paper=PAPER.get(title, {}),
            smoke=smoke and context == min(CONTEXTS),
            **others,
        )

    def named(operation: str, rate: float) -> str:
        return f"{name} {operation} ({rate:.0%})"

    def beside(rate: float) -> str:
        return named("mean + variance", rate)

    def pruned(rate: float) -> Arm:
        others = {"heads": beside(rate), "against": beside(rate)}
        return arm(named("pruning + variance", rate), {"freeze.operation": "prune"}, smoke=rate == 0.25, **others)

    def random(rate: float) -> Arm:
        settings = {"freeze.rate": rate, **RANDOM}
        return arm(named("mean + random", rate), settings, smoke=False, against=beside(rate))

    return (
        Arm(name=reference, context=context, reference=None, smoke=context == min(CONTEXTS)),
        arm(ordinary, {}),
        *(arm(beside(rate), {"freeze.rate": rate}, smoke=rate == 0.25) for rate in rates),
        *map(pruned, rates),
        *(map(random, (0.25, 0.5)) if context == min(CONTEXTS) else ()),
    )


RECIPE = Recipe(
    title="Controls at matched time",
    source=Source("tab:equal-time-controls", "124M at 4K on GH200, 187.65 minutes, mean ± SE of three seeds"),
    arms=tuple(arm for context, (name, rates) in CONTEXTS.items() for arm in _arms(context, name, rates)),
    columns=("perplexity", "delta", "difference", "updates", "minutes", "intervention", "heads"),
    notes=(
        "The reference is trained once from initialisation; its second half is what every arm gets. Arms restart and "
        "compile, the ordinary one too. Pruned arms have exactly the heads of the frozen arm of their rate; they "
        "measure as it does, so that choosing is charged to them too. The difference is from the frozen arm of that "
        "rate. The clock is that of everything; `--match-clock` has others.",
    ),
)
