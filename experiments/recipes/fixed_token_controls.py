"""Controls at matched tokens: tab:fixed-token-controls-full."""

from experiments.paper import Source
from experiments.recipe import Recipe, Row

NUMBERS = ("perplexity", "delta", "minutes", "intervention", "difference", "time_difference")
PAPER = {
    ("4k-mean-25-control", "mean + variance (25%)"): ("24.054 ± 0.041", "+0.663 ± 0.018", "184.7 ± 1.6", "54.9 ± 6.0"),
    ("4k-mean-50-control", "mean + variance (50%)"): ("24.492 ± 0.035", "+2.495 ± 0.024", "178.7 ± 2.0", "46.3 ± 1.2"),
    ("4k-pruned-25-control", "pruning + variance (25%)"): (
        *("24.088 ± 0.042", "+0.806 ± 0.018", "178.9 ± 1.6", "46.3 ± 3.1", "+0.1428 ± 0.0040", "−343.9 ± 27.8"),
    ),
    ("4k-pruned-50-control", "pruning + variance (50%)"): (
        *("24.621 ± 0.049", "+3.033 ± 0.056", "168.3 ± 1.3", "50.8 ± 5.8", "+0.5378 ± 0.0622", "−620.9 ± 65.3"),
    ),
    ("4k-random-25", "mean + random (25%)"): (
        *("24.202 ± 0.033", "+1.282 ± 0.056", "183.4 ± 1.2", "53.7 ± 5.6", "+0.6186 ± 0.0743", "−74.2 ± 23.7"),
    ),
    ("4k-random-50", "mean + random (50%)"): (
        *("24.763 ± 0.026", "+3.630 ± 0.093", "178.8 ± 1.8", "57.5 ± 2.8", "+1.1344 ± 0.0695", "+9.1 ± 63.6"),
    ),
    ("4k-mean-25-at-25-control", "mean + variance (25%, early)"): (
        *("24.080 ± 0.037", "+0.772 ± 0.021", "183.0 ± 1.1", "49.2 ± 4.1", "+0.1085 ± 0.0170", "−99.7 ± 31.0"),
    ),
}

RECIPE = Recipe(
    title="Controls at matched tokens",
    source=Source("tab:fixed-token-controls-full", "124M at 4K on GH200, mean ± SE of three seeds"),
    rows=(
        Row(
            arm="4k-control-ordinary",
            label="ordinary",
            paper={"perplexity": "23.896 ± 0.038", "minutes": "188.7 ± 2.7"},
        ),
        *(
            Row(
                arm=arm,
                label=label,
                reference="4k-control-ordinary",
                against=f"4k-mean-{50 if '50%' in label else 25}-control" if len(texts) > 4 else None,
                paper=dict(zip(NUMBERS, texts, strict=False)),
            )
            for (arm, label), texts in PAPER.items()
        ),
    ),
    also=("tab:fixed-token-controls-main",),
    metrics=(
        "perplexity",
        "delta",
        "difference",
        "minutes",
        "time_difference",
        "intervention",
        "heads",
        "fit_kl",
        "skipped",
    ),
    notes=(
        "Differences are from mean + variance halfway, at the same rate. Pruned arms have exactly its heads.",
        "In the paper the largest fit KL is 0.159 nats, and no head is skipped.",
    ),
)
