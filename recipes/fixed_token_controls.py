"""Controls at matched tokens: tab:fixed-token-controls-full."""

from saf.experiments.recipe import Arm, Recipe
from saf.experiments.scales import HELD_OUT
from saf.records.paper import Source

# As the paper's controls: every one of the lowest heads must fit, none is substituted.
MEAN = {"freeze.strict": True}
RANDOM = {"freeze.score": "random", "freeze.match": "variance"}


PRUNED = {"freeze.operation": "prune"}


NUMBERS = ("perplexity", "delta", "minutes", "intervention", "difference", "time_difference")


def _arm(name: str, rate: float, settings: dict, *paper: str, at: float = 0.5) -> Arm:
    """An arm at 25% or 50%, with as many of the paper's numbers as it has of such an arm."""
    moment = "" if at == 0.5 else ", early"
    numbers = dict(zip(NUMBERS, paper, strict=False))
    mean, same = f"mean + variance ({rate:.0%})", settings is PRUNED
    return Arm(
        name=f"{name} ({rate:.0%}{moment})",
        parent="ordinary",
        at=at,
        settings=settings if same else {"freeze.rate": rate, **settings},
        scaled=HELD_OUT,
        heads=mean if same else None,
        against=mean if "difference" in numbers else None,
        paper=numbers,
    )


RECIPE = Recipe(
    title="Controls at matched tokens",
    source=Source("tab:fixed-token-controls-full", "124M at 4K on GH200, mean ± SE of three seeds"),
    arms=(
        Arm(name="ordinary", reference=None, paper={"perplexity": "23.896 ± 0.038", "minutes": "188.7 ± 2.7"}),
        _arm("mean + variance", 0.25, MEAN, "24.054 ± 0.041", "+0.663 ± 0.018", "184.7 ± 1.6", "54.9 ± 6.0"),
        _arm("mean + variance", 0.5, MEAN, "24.492 ± 0.035", "+2.495 ± 0.024", "178.7 ± 2.0", "46.3 ± 1.2"),
        _arm(
            *("pruning + variance", 0.25, PRUNED, "24.088 ± 0.042", "+0.806 ± 0.018", "178.9 ± 1.6", "46.3 ± 3.1"),
            *("+0.1428 ± 0.0040", "−343.9 ± 27.8"),
        ),
        _arm(
            *("pruning + variance", 0.5, PRUNED, "24.621 ± 0.049", "+3.033 ± 0.056", "168.3 ± 1.3", "50.8 ± 5.8"),
            *("+0.5378 ± 0.0622", "−620.9 ± 65.3"),
        ),
        _arm(
            *("mean + random", 0.25, RANDOM, "24.202 ± 0.033", "+1.282 ± 0.056", "183.4 ± 1.2", "53.7 ± 5.6"),
            *("+0.6186 ± 0.0743", "−74.2 ± 23.7"),
        ),
        _arm(
            *("mean + random", 0.5, RANDOM, "24.763 ± 0.026", "+3.630 ± 0.093", "178.8 ± 1.8", "57.5 ± 2.8"),
            *("+1.1344 ± 0.0695", "+9.1 ± 63.6"),
        ),
        _arm(
            *("mean + variance", 0.25, MEAN, "24.080 ± 0.037", "+0.772 ± 0.021", "183.0 ± 1.1", "49.2 ± 4.1"),
            *("+0.1085 ± 0.0170", "−99.7 ± 31.0"),
            at=0.25,
        ),
    ),
    also=("tab:fixed-token-controls-main",),
    columns=("perplexity", "delta", "difference", "minutes", "time_difference", "intervention", "heads"),
    notes=(
        "Differences are those from mean + variance halfway, at the same rate. Pruned arms have exactly its heads, "
        "and measure as it does.",
    ),
)
