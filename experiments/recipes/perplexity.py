"""Recipes of the main question, perplexity at matched tokens and time: frozen, pruned and ordinary models.

The ending of an arm's name says what it has in common with the ordinary arm: none or `-control` the tokens, `-time` the
time by the speed of 124M, `-clock` and `-raw` the time by its own clock. `-more` has more tokens, `-reordered` another
order of the data. docs/experiments.md has all names. In templates `k` is the context in arms' names, such as "4k", `K`
that in labels, "4K", `trunk` the ordinary arm that others branch off, `r` the rate in percent, `p` a peak rate, `w` a
warm-up.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any

from experiments.arms import PEAK_RATES, WARMUPS, control_trunk
from experiments.measurements import Measurement, Number, run_of
from experiments.paper import COSTS, ONE_B_TEXT, QUALITY, Source, lines, split_words
from experiments.recipe import Figure, Recipe, Row, curves, rows

RECIPES: dict[str, Recipe] = {}

RECIPES["contexts"] = Recipe(
    title="Freezing halfway at three contexts",
    source=QUALITY,
    rows=rows(
        """
        arm          | label        | reference    | perplexity | delta          | update
        4k-ordinary  | 4K ordinary  | 4k-ordinary  | 23.862     |                | 2249.49, 2229.80
        4k-mean-25   | 4K 25%       | 4k-ordinary  | 24.045     | +0.768 ± 0.067 | 2129.42
        4k-mean-50   | 4K 50%       | 4k-ordinary  | 24.457     | +2.492 ± 0.083 | 1991.85
        8k-ordinary  | 8K ordinary  | 8k-ordinary  | 24.179     |                | 2710.24, 2782.97
        8k-mean-25   | 8K 25%       | 8k-ordinary  | 24.318     | +0.578 ± 0.011 | 2636.22
        8k-mean-50   | 8K 50%       | 8k-ordinary  | 24.676     | +2.058 ± 0.066 | 2524.39
        16k-ordinary | 16K ordinary | 16k-ordinary | 24.428     |                | 3741.42, 3697.14
        16k-mean-25  | 16K 25%      | 16k-ordinary | 24.538     | +0.450 ± 0.012 | 3649.78
        16k-mean-50  | 16K 50%      | 16k-ordinary | 24.865     | +1.792 ± 0.112 | 3454.31
        """
    ),
    metrics=("perplexity", "delta", "context_gain", "heads", "update", "peak"),
    smoke=("4k-mean-25", "4k-mean-50", "8k-mean-25"),
    notes=(
        "The paper's updates have 15 micro-batches on one GH200, and it timed the ordinary model anew for each rate; "
        "recipe training_systems times both in pairs.",
    ),
)

RECIPES["1b"] = Recipe(
    title="1B at 8K",
    seeds=1,
    source=ONE_B_TEXT,
    also=("tab:scale-up-results", "tab:intervention-costs"),
    rows=rows(
        """
        arm               | label                      | perplexity | delta  | capture | fit   | intervention
        1b-ordinary       | ordinary                   | 12.446     |        |         |       |
        1b-mean-25        | mean + variance (25%)      | 12.509     | +0.507 | 1422.37 | 39.56 | 1464.41
        1b-gate-taylor-25 | pruning + gate-Taylor (25%)| 12.529     |        |         |       |
        1b-mean-50        | mean + variance (50%)      | 12.698     | +2.027 | 1313.35 | 76.28 | 1392.64
        """,
        reference="1b-ordinary",
    ),
    metrics=("perplexity", "delta", "heads", "updates", "intervention", "capture", "fit"),
    smoke=("1b-mean-25",),
    notes=("At other scales the arms are the scale's own runs at 8K. docs/scale.md has the command for several GPUs.",),
)

RECIPES["intervention_costs"] = Recipe(
    title="One-time intervention costs",
    source=COSTS,
    rows=rows(
        """
        arm                | label | capture      | fit         | intervention
        4k-mean-25-control | 25%   | 51.56 ± 5.96 | 3.20 ± 0.16 | 54.86 ± 6.04
        4k-mean-50-control | 50%   | 40.89 ± 1.11 | 5.24 ± 0.09 | 46.30 ± 1.22
        """
    ),
    metrics=("capture", "fit", "intervention", "heads"),
    notes=("Our first event of a process also compiles kernels; `python -m benchmarks.freezing` has both.",),
)

# --- matched tokens

RECIPES["fixed_token_controls"] = Recipe(
    title="Controls at matched tokens",
    source=Source("tab:fixed-token-controls-full", "124M at 4K on GH200, mean ± SE of three seeds"),
    rows=rows(
        """
        arm                      | label                        | reference           | perplexity     | delta
        4k-control-ordinary      | ordinary                     |                     | 23.896 ± 0.038 |
        4k-mean-25-control       | mean + variance (25%)        | 4k-control-ordinary | 24.054 ± 0.041 | +0.663 ± 0.018
        4k-mean-50-control       | mean + variance (50%)        | 4k-control-ordinary | 24.492 ± 0.035 | +2.495 ± 0.024
        4k-pruned-25-control     | pruning + variance (25%)     | 4k-control-ordinary | 24.088 ± 0.042 | +0.806 ± 0.018
        4k-pruned-50-control     | pruning + variance (50%)     | 4k-control-ordinary | 24.621 ± 0.049 | +3.033 ± 0.056
        4k-random-25             | mean + random (25%)          | 4k-control-ordinary | 24.202 ± 0.033 | +1.282 ± 0.056
        4k-random-50             | mean + random (50%)          | 4k-control-ordinary | 24.763 ± 0.026 | +3.630 ± 0.093
        4k-mean-25-at-25-control | mean + variance (25%, early) | 4k-control-ordinary | 24.080 ± 0.037 | +0.772 ± 0.021
        """,
        """
        against            | difference       | time_difference | minutes     | intervention
                           |                  |                 | 188.7 ± 2.7 |
                           |                  |                 | 184.7 ± 1.6 | 54.9 ± 6.0
                           |                  |                 | 178.7 ± 2.0 | 46.3 ± 1.2
        4k-mean-25-control | +0.1428 ± 0.0040 | −343.9 ± 27.8   | 178.9 ± 1.6 | 46.3 ± 3.1
        4k-mean-50-control | +0.5378 ± 0.0622 | −620.9 ± 65.3   | 168.3 ± 1.3 | 50.8 ± 5.8
        4k-mean-25-control | +0.6186 ± 0.0743 | −74.2 ± 23.7    | 183.4 ± 1.2 | 53.7 ± 5.6
        4k-mean-50-control | +1.1344 ± 0.0695 | +9.1 ± 63.6     | 178.8 ± 1.8 | 57.5 ± 2.8
        4k-mean-25-control | +0.1085 ± 0.0170 | −99.7 ± 31.0    | 183.0 ± 1.1 | 49.2 ± 4.1
        """,
    ),
    also=("tab:fixed-token-controls-main",),
    metrics=split_words("perplexity delta difference minutes time_difference intervention heads fit_kl skipped"),
    headline=("perplexity", "delta", "difference"),
    notes=(
        "Differences are from mean + variance halfway, at the same rate. Pruned arms lack exactly the "
        "heads that it freezes.",
        "In the paper the largest fit KL is 0.159 nats, and no head is skipped.",
    ),
)


def _overlap(name: str, one: str, other: str, paper: str) -> Measurement:
    """Return the measurement of how many heads two arms selected alike."""
    number = Number(f"heads in common, {name}", ("overlap",), paper, 1)
    return Measurement(
        name, "experiments.analyses stability", (run_of(one), run_of(other)), smoke=None, numbers=(number,)
    )


RECIPES["later_intervention"] = Recipe(
    title="Later intervention at 25%",
    source=Source("tab:pruning-additional-training", "124M at 4K, 3.6864B tokens, mean ± SE of three seeds"),
    also=("app:pruning-selection-budget",),
    rows=(
        Row(arm="4k-control-ordinary", label="full run"),
        *rows(
            """
            arm                       | label                               | perplexity     | minutes
            later-ordinary            | ordinary                            | 22.563 ± 0.010 | 286.86
            later-mean-25             | mean + variance                     | 22.923 ± 0.013 | 282.87
            later-pruned-25           | pruning + variance                  | 23.019 ± 0.028 | 275.43
            later-gate-taylor-25      | pruning + gate-Taylor               | 22.865 ± 0.019 | 275.93
            later-ordinary-time       | ordinary, matched time              | 22.561 ± 0.011 |
            later-mean-25-time        | mean + variance, matched time       | 22.895 ± 0.012 |
            later-pruned-25-time      | pruning + variance, matched time    | 22.953 ± 0.026 |
            later-gate-taylor-25-time | pruning + gate-Taylor, matched time | 22.798 ± 0.021 |
            later-ordinary-more       | ordinary, 2% more tokens            |                |
            """,
            """
            reference           | tokens
            later-ordinary      |
            later-ordinary      |
            later-ordinary      |
            later-ordinary      |
            later-ordinary-time |
            later-ordinary-time | later-mean-25
            later-ordinary-time | later-pruned-25
            later-ordinary-time | later-gate-taylor-25
            later-ordinary      |
            """,
            more_tokens="later-ordinary-more",
        ),
        *rows(
            """
            arm             | label                        | perplexity
            later-pruned-25 | pruning + variance, one seed | 23.049
            """,
            reference="later-ordinary",
            first_seed=True,
        ),
        *rows(
            """
            arm               | label                       | perplexity | minutes
            pruned-from-start | pruning from initialisation | 22.683     | 248.26
            """,
            reference="later-ordinary",
        ),
    ),
    metrics=split_words("""
        perplexity delta extra_tokens tokens estimate_at_paper_gain estimate_at_measured_gain token_gain updates
        minutes heads delta_seeds
    """),
    measurements=(
        _overlap("gate-Taylor and variance", "later-gate-taylor-25-time", "later-mean-25-time", "19, 19 and 21"),
        _overlap("gate-Taylor at both budgets", "later-gate-taylor-25", "later-gate-taylor-25-time", "36, 35 and 35"),
    ),
    smoke=("later-pruned-25-time", "later-mean-25", "later-ordinary-time", "later-ordinary-more", "pruned-from-start"),
    notes=(
        "The learning rate falls from 6e-5, where the paper's full run ends, to 6e-6; at the small scale from 1e-4 to "
        "1e-5. Matched time is the time of the ordinary arm after the full run. The paper's minutes are of seed 1337. "
        "Recipe pruning_downstream has its accuracies of these models.",
        "Estimates of the change at matched time are the change at matched tokens less a rate times the extra tokens: "
        "0.14% for 1% as in the paper's regime, or as measured by the ordinary arm with 2% more tokens.",
        "In the arm from initialisation the same heads are pruned before the first update, and one schedule of "
        "learning rates spans as many updates as the other arms have in all. The paper does not give its rates, and "
        "has one seed.",
    ),
)

# --- matched time: every arm starts from the reference's checkpoint halfway and gets the time that this one had left

_KINDS = {"mean": "mean + variance", "pruned": "pruning + variance", "random": "mean + random"}
_AT_TOKENS = {"mean": "-control", "pruned": "-control", "random": ""}
"""Endings of arms at matched tokens."""
_HALVES = ("mean-25", "mean-50", "pruned-25", "pruned-50")
_FURTHER = ("random-25", "random-50", "mean-10", "pruned-10", "mean-75", "pruned-75")
_EQUAL_TIME = lines("""
    arm       | perplexity     | delta          | difference     | updates   | minutes
    ordinary  | 23.882 ± 0.023 |                |                | 5008 ± 13 | 187.65 ± 0.25
    mean-25   | 23.991 ± 0.006 | +0.456 ± 0.108 |                | 5109 ± 11 | 187.64 ± 0.25
    mean-50   | 24.338 ± 0.020 | +1.911 ± 0.112 |                | 5221 ± 18 | 187.64 ± 0.25
    pruned-25 | 23.909 ± 0.024 | +0.113 ± 0.169 |                | 5267 ± 30 | 187.64 ± 0.25
    pruned-50 | 24.115 ± 0.003 | +0.978 ± 0.108 |                | 5685 ± 36 | 187.65 ± 0.25
    random-25 | 24.178 ± 0.024 | +1.243 ± 0.112 | +0.786 ± 0.082 | 5097 ± 28 | 187.64 ± 0.25
    random-50 | 24.545 ± 0.048 | +2.778 ± 0.125 | +0.866 ± 0.154 | 5242 ± 11 | 187.65 ± 0.26
""")
_PAPERS = {f"4k-{line.pop('arm')}-time": line for line in _EQUAL_TIME}
"""The paper's numbers at matched time."""


def _row(k: str, arm: str, end: str, words: str = "", **fields: Any) -> Row:
    """Return the row of `K-KIND-RATE`, with an ending; pruned and random heads are compared with those of `mean`."""
    kind, rate = arm.split("-")
    against = None if kind == "mean" else f"{k}-mean-{rate}{end}"
    label = f"{k.upper()} {_KINDS[kind]} ({rate}%){words}"
    name = f"{k}-{arm}{end}"
    return Row(arm=name, label=label, **{"against": against, "paper": _PAPERS.get(name, {}), **fields})


def _at_time(k: str, arms: Iterable[str]) -> Iterator[Row]:
    for arm in arms:
        fields = {"reference": f"{k}-ordinary-time", "more_tokens": f"{k}-ordinary-more"}
        if k == "4k" and arm in _HALVES:
            fields["measured_time"] = f"4k-{arm}-raw"
        yield _row(k, arm, "-time", tokens=f"{k}-{arm}{_AT_TOKENS[arm.split('-')[0]]}", **fields)


def _at_tokens(k: str, arms: Iterable[str], **fields: Any) -> list[Row]:
    fields |= {"reference": control_trunk(k), "against": None}
    return [_row(k, arm, _AT_TOKENS[arm.split("-")[0]], ", matched tokens", **fields) for arm in arms]


def _context(k: str) -> Iterator[Row]:
    """Yield the rows of a context at the paper's rates, first at matched time."""
    trunk, timed, more, words = control_trunk(k), f"{k}-ordinary-time", f"{k}-ordinary-more", f"{k.upper()} ordinary"
    ordinary, tokens = partial(Row, more_tokens=more), _at_tokens(k, _HALVES, more_tokens=more)
    yield ordinary(arm=trunk, label=f"{k.upper()} reference")
    yield ordinary(arm=timed, label=words, paper=_PAPERS.get(timed, {}))
    yield from _at_time(k, _HALVES)
    yield from tokens[:2]
    yield ordinary(arm=more, label=f"{words}, 3% more tokens", reference=trunk)
    yield from tokens[2:]
    # It differs from the ordinary arm in its data order alone: any two arms may differ by as much by chance.
    yield ordinary(arm=f"{timed}-reordered", label=f"{words}, reordered data", reference=timed)


_CONTEXTS = {"4K": "4k", "8K": "8k", "16K": "16k"}
"""Ticks of a figure."""


def _time_lines(rate: str) -> dict[str, tuple[str, str]]:
    metrics = {"": "delta", ", estimated at 0.14%": "estimate_at_paper_gain"}
    arms = {"frozen": f"*-mean-{rate}-time", "pruned": f"*-pruned-{rate}-time"}
    return {f"{words}{end}": (arm, metric) for end, metric in metrics.items() for words, arm in arms.items()}


RECIPES["matched_time"] = Recipe(
    title="Controls at matched time",
    source=Source("tab:equal-time-controls", "124M at 4K on GH200, 187.65 minutes, mean ± SE of three seeds"),
    also=("tab:fixed-token-controls-main",),
    rows=(
        *_context("4k"),
        *_at_time("4k", _FURTHER),
        *_at_tokens("4k", _FURTHER),
        # By the clock, uncompiled: compiling takes longer than half of such a run.
        Row(arm="4k-ordinary-raw", label="4K ordinary, measured time", retired=True),
        *(_row("4k", arm, "-raw", ", measured time", reference="4k-ordinary-raw", retired=True) for arm in _HALVES),
        *_context("16k"),
        *_at_time("16k", ("mean-75", "pruned-75")),
        *_at_tokens("16k", ("mean-75", "pruned-75")),
        *_context("8k"),
    ),
    metrics=split_words("""
        perplexity delta measured_time extra_tokens tokens estimate_at_paper_gain estimate_at_measured_gain token_gain
        difference difference_seeds updates minutes intervention compilation context_gain heads
    """),
    headline=("delta", "extra_tokens", "tokens", "estimate_at_paper_gain", "difference"),
    figures=(
        Figure(
            name="contexts",
            title="Change of perplexity at matched time, %",
            xlabel="tokens of context",
            panels={f"{rate}% of heads": curves(_CONTEXTS, _time_lines(rate)) for rate in ("25", "50")},
        ),
    ),
    smoke=split_words("""
        4k-mean-25-time 4k-pruned-25-time 4k-mean-25-control 4k-ordinary-time 4k-ordinary-more
        4k-ordinary-time-reordered
    """),
    notes=(
        "The reference is trained once from initialisation, and every arm starts from its checkpoint halfway. Pruned "
        "arms lose exactly the heads that the frozen arm of their rate freezes, and are charged for choosing them "
        "too. The difference is from that frozen arm; a paper's difference without ± is computed from the paper's two "
        "changes.",
        "At the paper's scale an arm trains for the seconds that its reference had left. At the small scale the "
        "number of updates follows from its speed on 124M, less 28.3 s of the paper's 187.65 minutes for an event. "
        "Small arms at measured time ran uncompiled for 50 seconds, of which their event took a quarter: hence "
        "changes as large as +11.5%. They are no longer run.",
        "Reordered data is the ordinary arm with another data order in its second half: its change shows how much two "
        "equal arms differ by chance.",
        "Estimated changes are those at matched tokens less a rate times the extra tokens: 0.14% for 1% as in the "
        "paper's regime, or as measured by the ordinary run with 3% more tokens.",
    ),
)

# --- near convergence: heads frozen in linear time and their controls, at matched tokens and time

# `f` is the frozen arm at matched tokens.
_ANSWERS = """
    arm                      | label                                       | against  | tokens
    {f}-time                 | {K} {r}% frozen                             |          | {f}
    {f}-pruned-time          | {K} {r}% same heads pruned                  | {f}-time | {f}-pruned
    {k}-gate-taylor-{r}-time | {K} {r}% pruned by gate-Taylor              | {f}-time | {k}-gate-taylor-{r}
    {f}-random-time          | {K} {r}% random heads frozen                | {f}-time | {f}-random
    {f}-early-time           | {K} {r}% frozen after a quarter of training | {f}-time | {f}-early
"""
_ANSWERS_AT_TOKENS = """
    arm                 | label                                                       | against
    {f}                 | {K} {r}% frozen, matched tokens                             |
    {f}-pruned          | {K} {r}% same heads pruned, matched tokens                  | {f}
    {k}-gate-taylor-{r} | {K} {r}% pruned by gate-Taylor, matched tokens              | {f}
    {f}-random          | {K} {r}% random heads frozen, matched tokens                | {f}
    {f}-early           | {K} {r}% frozen after a quarter of training, matched tokens | {f}
"""
_OWN_CLOCK = """
    arm                             | label                                 | against
    {k}-ordinary-clock              | {K} ordinary, own clock               |
    {k}-exponential-50-clock        | {K} 50% frozen, own clock             |
    {k}-exponential-50-pruned-clock | {K} 50% same heads pruned, own clock  | {k}-exponential-50-clock
"""
_STAGED = """
    arm             | label                                                 | against
    {f}-time        | 4K, then 16K: {r}% frozen, matched time               |
    {f}-pruned-time | 4K, then 16K: {r}% same heads pruned, matched time    | {f}-time
    {f}             | 4K, then 16K: {r}% frozen, matched tokens             |
    {f}-pruned      | 4K, then 16K: {r}% same heads pruned, matched tokens  | {f}
"""
_ENDS = {"tokens": "", "time": "-time"}
"""Ticks of the figure `arms`: the ending of their arms."""


def _answer_rows(k: str) -> Iterator[Row]:
    """Yield the rows of a context: at matched time, at matched tokens, by their own clock."""
    trunk, more, names = control_trunk(k), f"{k}-ordinary-more", {"k": k, "K": k.upper()}
    yield Row(arm=trunk, label=f"{k.upper()} ordinary")
    yield Row(arm=more, label=f"{k.upper()} ordinary, 3% more tokens", reference=trunk, more_tokens=more)
    for rate in ("50", "25"):
        names |= {"r": rate, "f": f"{k}-exponential-{rate}"}
        yield from rows(_ANSWERS.format(**names), reference=trunk, more_tokens=more)
        yield from rows(_ANSWERS_AT_TOKENS.format(**names), reference=trunk)
    yield from rows(_OWN_CLOCK.format(**names), reference=trunk, first_seed=True)


def _staged_rows() -> Iterator[Row]:
    """Yield the rows of models whose first 40% train at 4K."""
    trunk = "16k-staged-ordinary"
    yield Row(arm=trunk, label="4K, then 16K: ordinary")
    for rate in ("50", "25"):
        yield from rows(_STAGED.format(f=f"16k-staged-exponential-{rate}", r=rate), reference=trunk)


_STAGED_LINES = {
    "frozen": ("16k-staged-exponential-*-time", "delta"),
    "pruned": ("16k-staged-exponential-*-pruned-time", "delta"),
}


def _answer_lines(k: str, rate: str) -> dict[str, tuple[str, str]]:
    frozen = f"{k}-exponential-{rate}"
    arms = {"frozen": f"{frozen}*", "pruned": f"{frozen}-pruned*", "pruned by gate-Taylor": f"{k}-gate-taylor-{rate}*"}
    return {words: (arm, "delta") for words, arm in arms.items()}


RECIPES["answer"] = Recipe(
    title="Freezing, pruning and ordinary attention near convergence",
    also=("tab:equal-time-controls",),
    rows=(*_answer_rows("16k"), *_staged_rows(), *_answer_rows("4k")),
    metrics=split_words("""
        perplexity delta difference extra_tokens tokens estimate_at_measured_gain estimate_at_paper_gain token_gain
        updates minutes intervention context_gain heads exponential fit_kl window perplexity_to_4k
    """),
    headline=("perplexity", "window", "perplexity_to_4k", "delta", "difference", "extra_tokens", "tokens"),
    intervals="t",
    figures=(
        Figure(
            name="arms",
            title="Change of perplexity from ordinary attention, %, with 95% intervals",
            xlabel="matched",
            panels={
                f"{k.upper()} of context, {r}% of heads": curves(_ENDS, _answer_lines(k, r))
                for k, r in product(("16k", "4k"), ("50", "25"))
            },
            continuous=False,
        ),
        Figure(
            name="staged",
            title="Change of perplexity from ordinary attention after the same time, %, with 95% intervals",
            xlabel="heads",
            panels={"4K of context, then 16K": curves({"25%": "25", "50%": "50"}, _STAGED_LINES)},
            continuous=False,
        ),
    ),
    smoke=split_words("""
        16k-exponential-50-time 16k-exponential-50-pruned-time 16k-gate-taylor-50 16k-ordinary-more
        16k-staged-exponential-50-time
    """),
    notes=(
        "The question is that of the paper's Table 15, whose models are of 124M and 2.46B tokens.",
        "Speeds are those of 124M with heads frozen in linear time and with the same heads pruned, measured in one run "
        "(results/bench/linear.json); an event and its compilation are charged 28.3 s of 187.65 minutes.",
        "The difference is from the frozen arm of the same rate and clock; below zero is better than freezing.",
        "Own clock: the arm trains for the seconds that its reference had left, measured while it runs.",
        "Perplexity is measured on windows of the context that an arm was trained at. Compare arms of two contexts, "
        "roughly, by the first 4,096 tokens of their windows, which at 16K are only a quarter of the held-out text.",
    ),
)


_PEAK = """
    arm                             | label                                             | reference
    {k}-peak-{p}-warmup-{w}         | {K} peak {p}, warm-up {w}%                        |
    {k}-peak-{p}-warmup-{w}-mean-25 | {K} peak {p}, warm-up {w}%: 25% frozen at the end | {k}-peak-{p}-warmup-{w}
"""

RECIPES["peak_rate"] = Recipe(
    title="Peak learning rate and warm-up",
    rows=tuple(
        row
        for k, peak, warmup in product(("4k", "16k"), PEAK_RATES, WARMUPS)
        for row in rows(_PEAK.format(k=k, K=k.upper(), p=peak, w=warmup))
    ),
    metrics=("perplexity", "delta", "loss_increase", "heads", "median_kl", "fit_kl", "skipped"),
    seeds=1,
    smoke=("4k-peak-1e-3-warmup-10-mean-25",),
    notes=(
        "The paper's peak rate is 6e-4 with 10% of warm-up.",
        "At a peak rate where heads fit badly freezing costs more, however low the ordinary model's perplexity.",
    ),
)

_LINEAR = """
    arm                      | label                                         | against
    4k-mean-{r}              | {r}% compact                                  |
    4k-exponential-64-{r}    | {r}% exponential, band 64                     | 4k-mean-{r}
    4k-exponential-128-{r}   | {r}% exponential, band 128                    | 4k-mean-{r}
    4k-exponential-short-{r} | {r}% exponential, band 128, short form of alpha | 4k-mean-{r}
    4k-pruned-{r}            | {r}% pruned                                   | 4k-mean-{r}
"""

RECIPES["linear_heads"] = Recipe(
    title="Frozen heads in linear time",
    rows=(
        Row(arm="4k-ordinary", label="ordinary"),
        *(row for rate in ("25", "50") for row in rows(_LINEAR.format(r=rate), reference="4k-ordinary")),
    ),
    metrics=split_words("""
        perplexity delta difference loss_increase heads exponential extra_kl fit_kl speedup minutes
    """),
    headline=("perplexity", "delta", "difference"),
    intervals="t",
    smoke=("4k-exponential-64-25", "4k-exponential-short-25", "4k-mean-25"),
    notes=(
        "The difference is from compact storage of the same rate, in each seed; below zero is better.",
        "Pruned arms lack exactly the heads of the compact arm of their rate.",
    ),
)
