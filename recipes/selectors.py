"""Selectors after continuation: tab:kl-continuation-selector, and the selectors of app:head-selection-analysis."""

from saf.experiments.recipe import Arm, Recipe
from saf.records.paper import Source

CONTEXTS = {4_096: "4K", 8_192: "8K", 16_384: "16K"}
PAPER = {
    (4_096, 0.25): {"variance": "+0.665", "forward_kl": "+1.068", "difference": "+0.402"},
    (4_096, 0.5): {"variance": "+2.649", "forward_kl": "+3.554", "difference": "+0.905"},
    (8_192, 0.25): {"variance": "+0.557", "forward_kl": "+0.836", "difference": "+0.279"},
    (8_192, 0.5): {"variance": "+2.191", "forward_kl": "+2.988", "difference": "+0.797"},
    (16_384, 0.25): {"variance": "+0.474", "forward_kl": "+0.876", "difference": "+0.402"},
    (16_384, 0.5): {"variance": "+1.802", "forward_kl": "+2.417", "difference": "+0.615"},
}
# Of these the paper gives the residual cosine at this scale; the gradient scores it has at 1K with whole patterns.
FURTHER = ("residual_cosine", "relative_output_change", "output_magnitude", "gate_taylor")
GRADIENT = ("qk_gradient", "rank_sum", "gradient_veto")


def _arms(context: int) -> tuple[Arm, ...]:
    name, ordinary = CONTEXTS[context], f"{CONTEXTS[context]} ordinary"
    smoke = context == min(CONTEXTS)
    # Gradient scores read an average over the updates before the event, which the parent keeps.
    arms = [
        Arm(name=ordinary, context=context, settings={"track_gradients": True}, reference=None, smoke=smoke),
    ]
    for rate in (0.25, 0.5):
        paper = PAPER[context, rate]
        for score in ("variance", "forward_kl"):
            other = f"{name} variance {rate:.0%}" if score == "forward_kl" else None
            numbers = {"delta": paper[score], **({"difference": paper["difference"]} if other else {})}
            arms.append(_arm(name, ordinary, score, rate, context, against=other, paper=numbers, smoke=smoke))
    if context == min(CONTEXTS):
        for score in (*FURTHER, *GRADIENT):
            paper = {"delta": "+0.792", "difference": "+0.126"} if score == "residual_cosine" else {}
            smoke = score in ("residual_cosine", "rank_sum")
            arms.append(_arm(name, ordinary, score, 0.25, context, f"{name} variance 25%", paper, smoke))
    return tuple(arms)


def _arm(
    name: str, ordinary: str, score: str, rate: float, context: int, against: str | None, paper: dict, smoke: bool
) -> Arm:
    return Arm(
        name=f"{name} {score} {rate:.0%}",
        context=context,
        parent=ordinary,
        settings={"freeze.rate": rate, "freeze.score": score},
        reference=ordinary,
        against=against,
        paper=paper,
        smoke=smoke,
    )


RECIPE = Recipe(
    title="Selectors after continuation",
    source=Source("tab:kl-continuation-selector", "124M, one seed; residual cosine from app:head-selection-analysis"),
    arms=tuple(arm for context in CONTEXTS for arm in _arms(context)),
    columns=("perplexity", "delta", "difference", "heads"),
    notes=("The difference is that from variance at the same context and rate.",),
)
