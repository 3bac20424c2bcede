"""Controls at matched time: tab:equal-time-controls, and its exchange rate.

Every arm, the ordinary one too, restarts from the reference's checkpoint halfway and gets the time that it had left.
Beside each stand the same arm at matched tokens and, at 25 and 50%, at measured time. One more ordinary run has a few
percent more tokens.
"""

from experiments.arms import ARMS, control_trunk
from experiments.paper import Source
from experiments.recipe import Figure, Recipe, Row

CONTEXTS = {"4k": ("25", "50", "10", "75"), "16k": ("25", "50", "75"), "8k": ("25", "50")}
OPERATIONS = {"mean": "mean + variance", "pruned": "pruning + variance", "random": "mean + random"}
NUMBERS = ("perplexity", "delta", "difference", "updates", "minutes")
PAPER = {
    "4k-ordinary-time": ("23.882 ± 0.023", None, None, "5008 ± 13", "187.65 ± 0.25"),
    "4k-mean-25-time": ("23.991 ± 0.006", "+0.456 ± 0.108", None, "5109 ± 11", "187.64 ± 0.25"),
    "4k-mean-50-time": ("24.338 ± 0.020", "+1.911 ± 0.112", None, "5221 ± 18", "187.64 ± 0.25"),
    "4k-pruned-25-time": ("23.909 ± 0.024", "+0.113 ± 0.169", None, "5267 ± 30", "187.64 ± 0.25"),
    "4k-pruned-50-time": ("24.115 ± 0.003", "+0.978 ± 0.108", None, "5685 ± 36", "187.65 ± 0.25"),
    "4k-random-25-time": ("24.178 ± 0.024", "+1.243 ± 0.112", "+0.786 ± 0.082", "5097 ± 28", "187.64 ± 0.25"),
    "4k-random-50-time": ("24.545 ± 0.048", "+2.778 ± 0.125", "+0.866 ± 0.154", "5242 ± 11", "187.65 ± 0.26"),
}
"""Perplexity, change, difference from mean + variance, updates, minutes."""


def _row(k: str, operation: str, rate: str, clock: str) -> Row:
    """Return an arm's row: at matched "time", on the "raw" clock or at matched "tokens"."""
    ends = {"time": "-time", "raw": "-raw", "tokens": "" if operation == "random" else "-control"}
    words = {"time": "", "raw": ", measured time", "tokens": ", matched tokens"}
    references = {"time": f"{k}-ordinary-time", "raw": f"{k}-ordinary-raw", "tokens": control_trunk(k)}
    name = f"{k}-{operation}-{rate}"
    companions = {"tokens": name + ends["tokens"], "exchange": f"{k}-ordinary-more"}
    companions |= {"raw": f"{name}-raw"} if f"{name}-raw" in ARMS else {}
    texts = PAPER.get(f"{name}-time", ()) if clock == "time" else ()
    return Row(
        arm=name + ends[clock],
        label=f"{k.upper()} {OPERATIONS[operation]} ({rate}%){words[clock]}",
        reference=references[clock],
        against=None if operation == "mean" or clock == "tokens" else f"{k}-mean-{rate}{ends[clock]}",
        companions=companions if clock == "time" else {},
        paper={metric: text for metric, text in zip(NUMBERS, texts, strict=False) if text},
    )


def _rows(k: str, rates: tuple[str, ...]) -> tuple[Row, ...]:
    title, more = k.upper(), f"{k}-ordinary-more"
    ordinary = {n: text for n, text in zip(NUMBERS, PAPER.get(f"{k}-ordinary-time", ()), strict=False) if text}
    asked = [(operation, rate) for operation in ("mean", "pruned") for rate in ("25", "50")]
    random = [("random", rate) for rate in ("25", "50") if k == "4k"]
    further = [*random, *((operation, rate) for rate in rates[2:] for operation in ("mean", "pruned"))]
    return (
        Row(arm=control_trunk(k), label=f"{title} reference"),
        Row(arm=f"{k}-ordinary-time", label=f"{title} ordinary", paper=ordinary),
        *(_row(k, *each, "time") for each in asked),
        *(_row(k, *each, "tokens") for each in asked[:2]),
        Row(
            arm=more,
            label=f"{title} ordinary, 3% more tokens",
            reference=control_trunk(k),
            companions={"exchange": more},
        ),
        *(_row(k, *each, "tokens") for each in asked[2:]),
        # Two of a kind: what lies between them lies between any two arms.
        Row(
            arm=f"{k}-ordinary-time-reordered",
            label=f"{title} ordinary, reordered data",
            reference=f"{k}-ordinary-time",
        ),
        *(_row(k, *each, "time") for each in further),
        *(_row(k, *each, "tokens") for each in further),
        Row(arm=f"{k}-ordinary-raw", label=f"{title} ordinary, measured time"),
        *(_row(k, *each, "raw") for each in asked),
    )


LINES = {
    "frozen": ("mean", "delta"),
    "pruned": ("pruned", "delta"),
    "frozen, estimated at 0.14%": ("mean", "paper_exchange"),
    "pruned, estimated at 0.14%": ("pruned", "paper_exchange"),
}
"""Of the figure: operations and metrics."""

RECIPE = Recipe(
    title="Controls at matched time",
    source=Source("tab:equal-time-controls", "124M at 4K on GH200, 187.65 minutes, mean ± SE of three seeds"),
    also=("tab:fixed-token-controls-main",),
    rows=tuple(row for k, rates in CONTEXTS.items() for row in _rows(k, rates)),
    metrics=(
        *("perplexity", "delta", "raw", "extra", "tokens", "paper_exchange", "own_exchange", "exchange"),
        *("difference", "updates", "minutes", "intervention", "compilation", "context", "heads"),
    ),
    headline=("delta", "extra", "tokens", "paper_exchange", "difference"),
    figures=(
        Figure(
            name="contexts",
            title="Change of perplexity at matched time, %",
            across="tokens of context",
            panels={
                f"{rate}% of heads": {
                    line: {k.upper(): (f"{k}-{operation}-{rate}-time", metric) for k in ("4k", "8k", "16k")}
                    for line, (operation, metric) in LINES.items()
                }
                for rate in ("25", "50")
            },
        ),
    ),
    smoke=(
        *("4k-mean-25-time", "4k-pruned-25-time", "4k-mean-25-control", "4k-ordinary-time", "4k-ordinary-more"),
        "4k-ordinary-time-reordered",
    ),
    notes=(
        "The reference is trained once from initialisation; its second half is what every arm gets. Pruned arms have "
        "exactly the heads of the frozen arm of their rate; they measure as it does, so that choosing is charged to "
        "them too. The difference is from the frozen arm of that rate.",
        "At the paper's scale, and at measured time, an arm gets the seconds that its reference had left; small arms "
        "at measured time run uncompiled. Other small arms do as many updates as their speed, measured on 124M, buys; "
        "an event costs them 28.3 of the paper's 187.65 minutes' seconds.",
        "Reordered data is the ordinary arm with another data order in its second half: its change is the scatter of "
        "the comparison itself.",
        "Estimates of the change at matched time are the change at matched tokens less a rate times the extra tokens: "
        "0.14% for 1% as in the paper's regime, or as measured by the ordinary run with 3% more tokens.",
    ),
)
