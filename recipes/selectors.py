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
# Of these the paper gives the residual cosine at 4K; the gradient scores it has at 1K, with whole patterns.
FURTHER = ("residual_cosine", "relative_output_change", "output_magnitude", "redundancy", "gate_taylor")
GRADIENT = ("qk_gradient", "rank_sum", "gradient_veto")
PAPER_1K = {"ordinary": "26.382", "variance": "26.568", "qk_gradient": "26.558", "rank_sum": "26.627"}
PAPER_1K |= {"gradient_veto": "26.607"}


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
            paper = {"delta": "+0.792", "relative": "+0.126"} if score == "residual_cosine" else {}
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


def _arms_of_1k() -> tuple[Arm, ...]:
    """The gradient scores where the paper has them, with whole patterns."""
    common = {"context": 1_024, "smoke": False}
    return (
        Arm(
            **{"name": "1K ordinary", "settings": {"track_gradients": True}, "reference": None, **common},
            paper={"perplexity": PAPER_1K["ordinary"]},
        ),
        *(
            Arm(
                **{"name": f"1K {score} 25%", "parent": "1K ordinary", "reference": "1K ordinary", **common},
                settings={"freeze.rate": 0.25, "freeze.score": score, "freeze.storage": "dense"},
                against=None if score == "variance" else "1K variance 25%",
                paper={"perplexity": PAPER_1K[score]},
            )
            for score in ("variance", *GRADIENT)
        ),
    )


RECIPE = Recipe(
    title="Selectors after continuation",
    seeds=1,
    source=Source(
        "tab:kl-continuation-selector",
        "124M, one seed; residual cosine, and the gradient scores at 1K, from app:head-selection-analysis",
    ),
    also=("app:head-selection-analysis",),
    arms=(*(arm for context in CONTEXTS for arm in _arms(context)), *_arms_of_1k()),
    columns=("perplexity", "delta", "difference", "relative", "heads"),
    notes=(
        "The difference is that from variance at the same context and rate: of both changes in points, as the paper "
        "has it for forward KL, and of both perplexities in percent, as it has it for the residual cosine. Patterns "
        "are whole at 1K, as the paper's there.",
    ),
)
