"""When a quarter of the heads is frozen: tab:timing-main."""

from experiments.paper import Source
from experiments.recipe import Recipe, Row

PAPER = {
    "25": ("+0.724", "3750"),
    "40": ("+0.679", "3000"),
    "50": ("+0.662", "2500"),
    "60": ("+0.711", "2000"),
    "75": ("+0.936", "1250"),
    "100": ("+8.168", "0"),
}


def _arm(pattern: str, at: str) -> str:
    return f"4k-{pattern}-25" if at == "50" else f"4k-{pattern}-25-at-{at}"


RECIPE = Recipe(
    title="Timing at 25%, mean and random patterns",
    seeds=1,
    source=Source("tab:timing-main", "124M at 4K, one seed"),
    rows=(
        Row(arm="4k-ordinary", label="ordinary"),
        *(
            Row(
                arm=_arm("mean", at),
                label=f"at {at}%",
                reference="4k-ordinary",
                paper={"delta": change, "remaining": remaining},
            )
            for at, (change, remaining) in PAPER.items()
        ),
        *(
            Row(arm=_arm("structured-random", at), label=f"random patterns at {at}%", reference="4k-ordinary")
            for at in PAPER
        ),
    ),
    metrics=("perplexity", "delta", "remaining", "heads"),
    smoke=("4k-mean-25", "4k-mean-25-at-100"),
    notes=(
        "At 100% the trained model is evaluated as it was frozen, without further training.",
        "The paper says of random patterns that the mean is better at every moment, without numbers.",
    ),
)
