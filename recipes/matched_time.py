"""Controls at matched time: tab:equal-time-controls, and its exchange rate.

Every arm, the ordinary one too, restarts from the reference's checkpoint halfway and gets the time that it had left, on
the clock that charges all but training as seconds of the paper's 187.65 minutes. Beside each stand the same arm
at matched tokens and, at 25 and 50%, on the raw clock. One more ordinary run has a few percent more tokens.

Where a run is short, compiling takes longer on the raw clock than it saves: there its arms and their reference run
uncompiled.
"""

from typing import Any

from saf.experiments.figure import Figure
from saf.experiments.recipe import Arm, Recipe
from saf.experiments.scales import HELD_OUT
from saf.experiments.speeds import OWN_CLOCK
from saf.records.paper import Source

# In the order in which a budget is best spent: the ends first.
CONTEXTS = {
    4_096: ("4K", (0.25, 0.5, 0.1, 0.75)),
    16_384: ("16K", (0.25, 0.5, 0.75)),
    8_192: ("8K", (0.25, 0.5)),
}
ASKED = (0.25, 0.5)
"""The rates that the question is of; others come last."""
# At the paper's scale, as its controls: every one of the lowest heads must fit, none is substituted.
STRICT = {"freeze.strict": True}
UNCOMPILED = {"small": {"compile": "off"}}
"""Of the raw clock: half a run of the small scale is 36 s, of which compiling took 20 to 35 (docs/log.md)."""
RANDOM = {"freeze.score": "random", "freeze.match": "variance"}
NUMBERS = ("perplexity", "delta", "difference", "updates", "minutes")
PAPER = {
    "4K ordinary": ("23.882 ± 0.023", None, None, "5008 ± 13", "187.65 ± 0.25"),
    "4K mean + variance (25%)": ("23.991 ± 0.006", "+0.456 ± 0.108", None, "5109 ± 11", "187.64 ± 0.25"),
    "4K mean + variance (50%)": ("24.338 ± 0.020", "+1.911 ± 0.112", None, "5221 ± 18", "187.64 ± 0.25"),
    "4K pruning + variance (25%)": ("23.909 ± 0.024", "+0.113 ± 0.169", None, "5267 ± 30", "187.64 ± 0.25"),
    "4K pruning + variance (50%)": ("24.115 ± 0.003", "+0.978 ± 0.108", None, "5685 ± 36", "187.65 ± 0.25"),
    "4K mean + random (25%)": ("24.178 ± 0.024", "+1.243 ± 0.112", "+0.786 ± 0.082", "5097 ± 28", "187.64 ± 0.25"),
    "4K mean + random (50%)": ("24.545 ± 0.048", "+2.778 ± 0.125", "+0.866 ± 0.154", "5242 ± 11", "187.65 ± 0.26"),
}
"""Perplexity, change, difference from mean + variance, updates, minutes."""


ANOTHER = 1_000
"""Added to the seed for another order of the data: no seed of a plan is another one's."""
# Of the half that is left: 3% of all tokens, as many as the paper's frozen arms gain in time.
MORE = {
    "match_speed": 1.06,
    "match_speed_source": "set for the exchange rate, not measured",
    **OWN_CLOCK,
}


def _quoted(title: str) -> dict[str, str]:
    numbers = PAPER.get(title, (None,) * len(NUMBERS))
    return {column: number for column, number in zip(NUMBERS, numbers, strict=True) if number}


def _arms(context: int, name: str, rates: tuple[float, ...]) -> tuple[Arm, ...]:
    reference, ordinary, more = f"{name} reference", f"{name} ordinary", f"{name} ordinary, 3% more tokens"
    raw_reference, raw_ordinary = f"{reference}, raw clock", f"{ordinary}, raw clock"
    smallest = context == min(CONTEXTS)

    def arm(title: str, settings: dict, *, compared: str | None = ordinary, smoke: bool = True, **others: Any) -> Arm:
        return Arm(
            **{"name": title, "context": context, "parent": reference, "match": reference, "reference": compared},
            **{"settings": {"match_clock": "scaled", **settings}, "paper": _quoted(title)},
            **{"smoke": smoke and smallest, **others},
        )

    def three(title: str, settings: dict, *, raw: bool, smoke: bool, **others: Any) -> dict[str, Arm]:
        """The same arm at matched time, at matched tokens, and on the raw clock."""
        others["scaled"] = (
            {"paper": {**HELD_OUT["paper"], **STRICT}} if settings.keys() == {"freeze.rate"} else HELD_OUT
        )
        titles = {"tokens": f"{title}, matched tokens"} | ({"raw": f"{title}, raw clock"} if raw else {})
        found = {"scaled": arm(title, settings, smoke=smoke, beside={**titles, "exchange": more}, **others)}
        heads = {"heads": others["heads"]} if "heads" in others else {}
        plain = {"context": context, "parent": reference, "settings": settings, "scaled": others["scaled"], **heads}
        plain["smoke"] = smoke and smallest and not heads
        found["tokens"] = Arm(name=titles["tokens"], reference=reference, **plain)
        if raw:
            # On the raw clock loading alone is longer than what the smoke scale has left.
            raw_clock = {**plain, "parent": raw_reference, "match": raw_reference, "smoke": False}
            raw_clock["settings"] = {**OWN_CLOCK, **settings}
            raw_clock |= {key: f"{others[key]}, raw clock" for key in ("heads", "against") if key in others}
            found["raw"] = Arm(name=titles["raw"], reference=raw_ordinary, **raw_clock)
        return found

    def named(operation: str, rate: float) -> str:
        return f"{name} {operation} ({rate:.0%})"

    def frozen(rate: float) -> str:
        return named("mean + variance", rate)

    def beside(rate: float) -> dict[str, str]:
        return {"against": frozen(rate)}

    frozen_arms, pruned_arms = {}, {}
    for rate in rates:
        kept = {"raw": rate in ASKED, "smoke": rate == 0.25}
        frozen_arms[rate] = three(frozen(rate), {"freeze.rate": rate}, **kept)
        others = {"heads": frozen(rate), **beside(rate)}
        pruned_arms[rate] = three(named("pruning + variance", rate), {"freeze.operation": "prune"}, **kept, **others)
    random = [
        three(named("mean + random", rate), {"freeze.rate": rate, **RANDOM}, raw=False, smoke=False, **beside(rate))
        for rate in (ASKED if smallest else ())
    ]
    asked = {"frozen": [frozen_arms[rate] for rate in ASKED], "pruned": [pruned_arms[rate] for rate in ASKED]}
    further = [*random, *(arms[rate] for rate in rates if rate not in ASKED for arms in (frozen_arms, pruned_arms))]
    # What is read first is trained first: a budget may end before the others.
    return (
        Arm(name=reference, context=context, reference=None, smoke=smallest),
        arm(ordinary, {}, compared=None),
        *(of["scaled"] for kind in asked.values() for of in kind),
        *(of["tokens"] for of in asked["frozen"]),
        arm(more, MORE, compared=reference, beside={"exchange": more}),
        *(of["tokens"] for of in asked["pruned"]),
        # Two of a kind: what lies between them lies between any two arms.
        arm(f"{name} ordinary, other order", {}, reseed=ANOTHER),
        *(of["scaled"] for of in further),
        *(of["tokens"] for of in further),
        Arm(name=raw_reference, context=context, scaled=UNCOMPILED, reference=None, row=False, smoke=False),
        Arm(
            **{"name": raw_ordinary, "context": context, "parent": raw_reference, "match": raw_reference},
            **{"settings": OWN_CLOCK, "reference": None, "smoke": False},
        ),
        *(of["raw"] for kind in asked.values() for of in kind),
    )


LINES = {
    "frozen": ("mean + variance", "delta"),
    "pruned": ("pruning + variance", "delta"),
    "frozen, tokens at 0.14 a %": ("mean + variance", "paper_exchange"),
    "pruned, tokens at 0.14 a %": ("pruning + variance", "paper_exchange"),
}
"""Of the figure: arms and columns by the names of its lines."""
BY_LENGTH = tuple(name for _, (name, _) in sorted(CONTEXTS.items()))


RECIPE = Recipe(
    title="Controls at matched time",
    source=Source("tab:equal-time-controls", "124M at 4K on GH200, 187.65 minutes, mean ± SE of three seeds"),
    also=("tab:fixed-token-controls-main",),
    arms=tuple(arm for context, (name, rates) in CONTEXTS.items() for arm in _arms(context, name, rates)),
    columns=(
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
                f"{rate:.0%} of heads": {
                    line: {name: (f"{name} {arm} ({rate:.0%})", column) for name in BY_LENGTH}
                    for line, (arm, column) in LINES.items()
                }
                for rate in ASKED
            },
        ),
    ),
    notes=(
        "The reference is trained once from initialisation; its second half is what every arm gets. Arms restart and "
        "compile, the ordinary one too. Pruned arms have exactly the heads of the frozen arm of their rate; they "
        "measure as it does, so that choosing is charged to them too. The difference is from the frozen arm of that "
        "rate.",
        "The clock charges compilation, events, losses and checkpoints as seconds of the paper's 187.65 minutes; the "
        "raw clock charges all as they are, and at the small scale its arms and their reference run uncompiled. Extra "
        "tokens are those of the whole run beside the ordinary arm's at matched time.",
        "Other order is the ordinary arm again, with other data in its second half: its change is the scatter of the "
        "comparison itself, more of it than between arms that see the same data.",
        "With tokens at a rate: the change at matched tokens less the rate times the extra tokens. 0.14 is the paper's "
        "regime; the measured rate is that of the ordinary run with 3% more tokens, beside the reference.",
    ),
)
