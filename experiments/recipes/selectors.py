"""Selectors after continuation: tab:kl-continuation-selector, and the selectors of app:head-selection-analysis."""

from experiments.arms import GRADIENT_SCORES, SCORES, tracked
from experiments.paper import Source
from experiments.recipe import Recipe, Row

# Change by variance, by forward KL, their difference.
PAPER = {
    ("4k", 0.25): ("+0.665", "+1.068", "+0.402"),
    ("4k", 0.5): ("+2.649", "+3.554", "+0.905"),
    ("8k", 0.25): ("+0.557", "+0.836", "+0.279"),
    ("8k", 0.5): ("+2.191", "+2.988", "+0.797"),
    ("16k", 0.25): ("+0.474", "+0.876", "+0.402"),
    ("16k", 0.5): ("+1.802", "+2.417", "+0.615"),
}
PAPER_1K = {"variance": "26.568", "qk_gradient": "26.558", "rank_sum": "26.627", "gradient_veto": "26.607"}
COSINE = {"delta": "+0.792", "relative": "+0.126"}


def _row(k: str, score: str, rate: float, paper: dict[str, str]) -> Row:
    return Row(
        arm=tracked(k, score, rate),
        label=f"{k.upper()} {score} {rate:.0%}",
        reference=f"{k}-tracked-ordinary",
        against=None if score == "variance" else tracked(k, "variance", rate),
        paper=paper,
    )


def _rows(k: str) -> tuple[Row, ...]:
    rows = [Row(arm=f"{k}-tracked-ordinary", label=f"{k.upper()} ordinary")]
    for rate in (0.25, 0.5):
        variance, forward_kl, difference = PAPER[k, rate]
        rows.append(_row(k, "variance", rate, {"delta": variance}))
        rows.append(_row(k, "forward_kl", rate, {"delta": forward_kl, "difference": difference}))
    if k == "4k":
        # Of these the paper gives the residual cosine at 4K; the gradient scores it has at 1K, with dense patterns.
        further = (*SCORES[1:], *GRADIENT_SCORES)
        rows += [_row(k, score, 0.25, COSINE if score == "residual_cosine" else {}) for score in further]
    return tuple(rows)


RECIPE = Recipe(
    title="Selectors after continuation",
    seeds=1,
    source=Source(
        "tab:kl-continuation-selector",
        "124M, one seed; residual cosine, and the gradient scores at 1K, from app:head-selection-analysis",
    ),
    also=("app:head-selection-analysis",),
    rows=(
        *(row for k in ("4k", "8k", "16k") for row in _rows(k)),
        Row(arm="1k-tracked-ordinary", label="1K ordinary", paper={"perplexity": "26.382"}),
        *(_row("1k", score, 0.25, {"perplexity": text}) for score, text in PAPER_1K.items()),
    ),
    metrics=("perplexity", "delta", "difference", "relative", "heads"),
    smoke=(
        *(tracked("4k", score, rate) for rate in (0.25, 0.5) for score in ("variance", "forward_kl")),
        *(tracked("4k", score, 0.25) for score in ("residual_cosine", "rank_sum")),
    ),
    notes=(
        "The difference is that from variance at the same context and rate: of both changes in points, as the paper "
        "has it for forward KL, and of both perplexities in percent, as it has it for the residual cosine. Patterns "
        "are dense at 1K, as the paper's there.",
    ),
)
