"""Frozen heads in linear time: whether exponential patterns cost perplexity beside compact ones of the same heads.

All arms of a seed continue from the checkpoint halfway through one ordinary run, on the same data. Run it with
`--scale 124m-84M`: 124M parameters, 4K, 640 updates of 131,072 tokens.
"""

from experiments.recipe import Recipe, Row

KINDS = {
    "exponential-64": "exponential, band 64",
    "exponential-128": "exponential, band 128",
    "exponential-short": "exponential, band 128, short form of alpha",
    "pruned": "pruned",
}


def _rows(rate: str) -> tuple[Row, ...]:
    compact = f"4k-mean-{rate}"
    return (
        Row(arm=compact, label=f"{rate}% compact", reference="4k-ordinary"),
        *(
            Row(arm=f"4k-{kind}-{rate}", label=f"{rate}% {label}", reference="4k-ordinary", against=compact)
            for kind, label in KINDS.items()
        ),
    )


RECIPE = Recipe(
    title="Frozen heads in linear time",
    rows=(Row(arm="4k-ordinary", label="ordinary"), *_rows("25"), *_rows("50")),
    metrics=(
        *("perplexity", "delta", "difference", "rise", "heads", "exponential", "extra_kl", "fit_kl"),
        *("speedup", "minutes"),
    ),
    headline=("perplexity", "delta", "difference"),
    intervals="t",
    smoke=("4k-exponential-64-25", "4k-exponential-short-25", "4k-mean-25"),
    notes=(
        "The difference is from compact storage of the same rate, in each seed; below zero is better.",
        "Pruned arms lack exactly the heads of the compact arm of their rate.",
    ),
)
