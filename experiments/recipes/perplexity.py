"""Recipes of the main question, perplexity at matched tokens and time: frozen, pruned and ordinary models."""

from experiments.arms import ARMS, PEAK_RATES, WARMUPS, control_trunk
from experiments.measurements import Measurement, Number, run_of
from experiments.paper import COSTS, ONE_B_TEXT, QUALITY, Source
from experiments.recipe import Figure, Recipe, Row, rows

RECIPES: dict[str, Recipe] = {}

RECIPES["contexts"] = Recipe(
    title="Freezing halfway at three contexts",
    source=QUALITY,
    rows=(
        *rows(
            """
            arm         | label        | perplexity | delta          | update
            4k-ordinary | 4K ordinary  | 23.862     |                | 2249.49, 2229.80
            4k-mean-25  | 4K 25%       | 24.045     | +0.768 ± 0.067 | 2129.42
            4k-mean-50  | 4K 50%       | 24.457     | +2.492 ± 0.083 | 1991.85
            """,
            reference="4k-ordinary",
        ),
        *rows(
            """
            arm         | label        | perplexity | delta          | update
            8k-ordinary | 8K ordinary  | 24.179     |                | 2710.24, 2782.97
            8k-mean-25  | 8K 25%       | 24.318     | +0.578 ± 0.011 | 2636.22
            8k-mean-50  | 8K 50%       | 24.676     | +2.058 ± 0.066 | 2524.39
            """,
            reference="8k-ordinary",
        ),
        *rows(
            """
            arm          | label        | perplexity | delta          | update
            16k-ordinary | 16K ordinary | 24.428     |                | 3741.42, 3697.14
            16k-mean-25  | 16K 25%      | 24.538     | +0.450 ± 0.012 | 3649.78
            16k-mean-50  | 16K 50%      | 24.865     | +1.792 ± 0.112 | 3454.31
            """,
            reference="16k-ordinary",
        ),
    ),
    metrics=("perplexity", "delta", "context", "heads", "update", "peak"),
    smoke=("4k-mean-25", "4k-mean-50", "8k-mean-25"),
    notes=(
        "The paper's updates are of 15 micro-batches on one GH200, the ordinary model's timed beside each rate; recipe "
        "training_systems times both in pairs.",
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

_CONTROL = "4k-control-ordinary"
_FROM_25, _FROM_50 = "4k-mean-25-control", "4k-mean-50-control"

RECIPES["fixed_token_controls"] = Recipe(
    title="Controls at matched tokens",
    source=Source("tab:fixed-token-controls-full", "124M at 4K on GH200, mean ± SE of three seeds"),
    rows=(
        Row(arm=_CONTROL, label="ordinary", paper={"perplexity": "23.896 ± 0.038", "minutes": "188.7 ± 2.7"}),
        *rows(
            f"""
            arm                      | label                        | perplexity     | delta          | against
            {_FROM_25}               | mean + variance (25%)        | 24.054 ± 0.041 | +0.663 ± 0.018 |
            {_FROM_50}               | mean + variance (50%)        | 24.492 ± 0.035 | +2.495 ± 0.024 |
            4k-pruned-25-control     | pruning + variance (25%)     | 24.088 ± 0.042 | +0.806 ± 0.018 | {_FROM_25}
            4k-pruned-50-control     | pruning + variance (50%)     | 24.621 ± 0.049 | +3.033 ± 0.056 | {_FROM_50}
            4k-random-25             | mean + random (25%)          | 24.202 ± 0.033 | +1.282 ± 0.056 | {_FROM_25}
            4k-random-50             | mean + random (50%)          | 24.763 ± 0.026 | +3.630 ± 0.093 | {_FROM_50}
            4k-mean-25-at-25-control | mean + variance (25%, early) | 24.080 ± 0.037 | +0.772 ± 0.021 | {_FROM_25}
            """,
            """
            minutes     | intervention | difference       | time_difference
            184.7 ± 1.6 | 54.9 ± 6.0   |                  |
            178.7 ± 2.0 | 46.3 ± 1.2   |                  |
            178.9 ± 1.6 | 46.3 ± 3.1   | +0.1428 ± 0.0040 | −343.9 ± 27.8
            168.3 ± 1.3 | 50.8 ± 5.8   | +0.5378 ± 0.0622 | −620.9 ± 65.3
            183.4 ± 1.2 | 53.7 ± 5.6   | +0.6186 ± 0.0743 | −74.2 ± 23.7
            178.8 ± 1.8 | 57.5 ± 2.8   | +1.1344 ± 0.0695 | +9.1 ± 63.6
            183.0 ± 1.1 | 49.2 ± 4.1   | +0.1085 ± 0.0170 | −99.7 ± 31.0
            """,
            reference=_CONTROL,
        ),
    ),
    also=("tab:fixed-token-controls-main",),
    metrics=(
        *("perplexity", "delta", "difference", "minutes", "time_difference", "intervention", "heads", "fit_kl"),
        "skipped",
    ),
    notes=(
        "Differences are from mean + variance halfway, at the same rate. Pruned arms have exactly its heads.",
        "In the paper the largest fit KL is 0.159 nats, and no head is skipped.",
    ),
)

_MORE = "later-ordinary-more"
_LATER = rows(
    """
    arm                       | label                               | perplexity     | minutes
    later-ordinary            | ordinary                            | 22.563 ± 0.010 | 286.86
    later-mean-25             | mean + variance                     | 22.923 ± 0.013 | 282.87
    later-pruned-25           | pruning + variance                  | 23.019 ± 0.028 | 275.43
    later-gate-taylor-25      | pruning + gate-Taylor               | 22.865 ± 0.019 | 275.93
    """,
    reference="later-ordinary",
) + rows(
    f"""
    arm                       | label                               | perplexity     | tokens               | exchange
    later-ordinary-time       | ordinary, matched time              | 22.561 ± 0.011 |                      |
    later-mean-25-time        | mean + variance, matched time       | 22.895 ± 0.012 | later-mean-25        | {_MORE}
    later-pruned-25-time      | pruning + variance, matched time    | 22.953 ± 0.026 | later-pruned-25      | {_MORE}
    later-gate-taylor-25-time | pruning + gate-Taylor, matched time | 22.798 ± 0.021 | later-gate-taylor-25 | {_MORE}
    """,
    reference="later-ordinary-time",
)


def _overlap(name: str, one: str, other: str, paper: str) -> Measurement:
    """Return how many of 36 heads two arms have in common."""
    return Measurement(
        name=name,
        does="experiments.analyses stability",
        on=(run_of(one), run_of(other)),
        numbers=(Number(title=f"heads in common, {name}", path=("overlap",), paper=paper, places=1),),
        label="app:pruning-selection-budget",
        smoke=False,
    )


RECIPES["later_intervention"] = Recipe(
    title="Later intervention at 25%",
    source=Source("tab:pruning-additional-training", "124M at 4K, 3.6864B tokens, mean ± SE of three seeds"),
    rows=(
        Row(arm=_CONTROL, label="full run"),
        *_LATER,
        Row(arm=_MORE, label="ordinary, 2% more tokens", reference="later-ordinary", companions={"exchange": _MORE}),
        Row(
            arm="later-pruned-25",
            label="pruning + variance, one seed",
            reference="later-ordinary",
            first_seed=True,
            paper={"perplexity": "23.049"},
        ),
        Row(
            arm="pruned-from-start",
            label="pruning from initialisation",
            reference="later-ordinary",
            paper={"perplexity": "22.683", "minutes": "248.26"},
        ),
    ),
    metrics=(
        *("perplexity", "delta", "extra", "tokens", "paper_exchange", "own_exchange", "exchange"),
        *("updates", "minutes", "heads", "delta_seeds"),
    ),
    measurements=(
        _overlap("gate-Taylor and variance", "later-gate-taylor-25-time", "later-mean-25-time", "19, 19 and 21"),
        _overlap("gate-Taylor at both budgets", "later-gate-taylor-25", "later-gate-taylor-25-time", "36, 35 and 35"),
    ),
    smoke=("later-pruned-25-time", "later-mean-25", "later-ordinary-time", _MORE, "pruned-from-start"),
    notes=(
        "The rate falls from 6e-5, where the paper's full run ends, to 6e-6; at the small scale from 1e-4 to 1e-5. "
        "Matched time is that of the ordinary arm from the full run on. The paper's minutes are of seed 1337. Its "
        "accuracies of these models are those of recipe pruning_downstream.",
        "Estimates of the change at matched time are the change at matched tokens less a rate times the extra tokens: "
        "0.14% for 1% as in the paper's regime, or as measured by the ordinary arm with 2% more tokens.",
        "From initialisation the same heads are pruned before the first update, and one schedule spans as many updates "
        "as the other arms have in all: the paper does not say its rates, and gives one seed.",
    ),
)

# --- matched time: every arm restarts from the reference's checkpoint halfway and gets the time that it had left

_TIMED_PAPER = {
    row.arm: row.paper
    for row in rows(
        """
        arm               | label | perplexity     | delta          | difference     | updates   | minutes
        4k-ordinary-time  |       | 23.882 ± 0.023 |                |                | 5008 ± 13 | 187.65 ± 0.25
        4k-mean-25-time   |       | 23.991 ± 0.006 | +0.456 ± 0.108 |                | 5109 ± 11 | 187.64 ± 0.25
        4k-mean-50-time   |       | 24.338 ± 0.020 | +1.911 ± 0.112 |                | 5221 ± 18 | 187.64 ± 0.25
        4k-pruned-25-time |       | 23.909 ± 0.024 | +0.113 ± 0.169 |                | 5267 ± 30 | 187.64 ± 0.25
        4k-pruned-50-time |       | 24.115 ± 0.003 | +0.978 ± 0.108 |                | 5685 ± 36 | 187.65 ± 0.25
        4k-random-25-time |       | 24.178 ± 0.024 | +1.243 ± 0.112 | +0.786 ± 0.082 | 5097 ± 28 | 187.64 ± 0.25
        4k-random-50-time |       | 24.545 ± 0.048 | +2.778 ± 0.125 | +0.866 ± 0.154 | 5242 ± 11 | 187.65 ± 0.26
        """
    )
}
_OPERATIONS = {"mean": "mean + variance", "pruned": "pruning + variance", "random": "mean + random"}
_CLOCKS = {"time": "", "raw": ", measured time", "tokens": ", matched tokens"}
_ASKED = [(operation, rate) for operation in ("mean", "pruned") for rate in ("25", "50")]


def _clock_row(k: str, operation: str, rate: str, clock: str) -> Row:
    """Return an arm's row: at matched "time", on the "raw" clock or at matched "tokens"."""
    ends = {"time": "-time", "raw": "-raw", "tokens": "" if operation == "random" else "-control"}
    references = {"time": f"{k}-ordinary-time", "raw": f"{k}-ordinary-raw", "tokens": control_trunk(k)}
    name = f"{k}-{operation}-{rate}"
    companions = {"tokens": name + ends["tokens"], "exchange": f"{k}-ordinary-more"}
    companions |= {"raw": f"{name}-raw"} if f"{name}-raw" in ARMS else {}
    return Row(
        arm=name + ends[clock],
        label=f"{k.upper()} {_OPERATIONS[operation]} ({rate}%){_CLOCKS[clock]}",
        reference=references[clock],
        against=None if operation == "mean" or clock == "tokens" else f"{k}-mean-{rate}{ends[clock]}",
        companions=companions if clock == "time" else {},
        paper=_TIMED_PAPER.get(name + ends[clock], {}),
    )


def _timed_rows(k: str, more_rates: tuple[str, ...]) -> tuple[Row, ...]:
    title, trunk, more, ordinary = k.upper(), control_trunk(k), f"{k}-ordinary-more", f"{k}-ordinary-time"
    further = [("random", rate) for rate in ("25", "50") if k == "4k"]
    further += [(operation, rate) for rate in more_rates for operation in ("mean", "pruned")]
    longer = Row(arm=more, label=f"{title} ordinary, 3% more tokens", reference=trunk, companions={"exchange": more})
    return (
        Row(arm=trunk, label=f"{title} reference"),
        Row(arm=ordinary, label=f"{title} ordinary", paper=_TIMED_PAPER.get(ordinary, {})),
        *(_clock_row(k, *each, "time") for each in _ASKED),
        *(_clock_row(k, *each, "tokens") for each in _ASKED[:2]),
        longer,
        *(_clock_row(k, *each, "tokens") for each in _ASKED[2:]),
        # Two of a kind: the distance between them lies between any two arms.
        Row(arm=f"{ordinary}-reordered", label=f"{title} ordinary, reordered data", reference=ordinary),
        *(_clock_row(k, *each, "time") for each in further),
        *(_clock_row(k, *each, "tokens") for each in further),
        Row(arm=f"{k}-ordinary-raw", label=f"{title} ordinary, measured time"),
        *(_clock_row(k, *each, "raw") for each in _ASKED),
    )


_LINES = {
    "frozen": ("mean", "delta"),
    "pruned": ("pruned", "delta"),
    "frozen, estimated at 0.14%": ("mean", "paper_exchange"),
    "pruned, estimated at 0.14%": ("pruned", "paper_exchange"),
}

RECIPES["matched_time"] = Recipe(
    title="Controls at matched time",
    source=Source("tab:equal-time-controls", "124M at 4K on GH200, 187.65 minutes, mean ± SE of three seeds"),
    also=("tab:fixed-token-controls-main",),
    rows=(*_timed_rows("4k", ("10", "75")), *_timed_rows("16k", ("75",)), *_timed_rows("8k", ())),
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
                    for line, (operation, metric) in _LINES.items()
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
        "them too. The difference is from the frozen arm of that rate; the paper's without ± is of its two changes.",
        "At the paper's scale, and at measured time, an arm gets the seconds that its reference had left. Small arms "
        "at measured time run uncompiled for 50 seconds, of which an event takes a quarter: hence changes as large as "
        "+11.5%. Other small arms do as many updates as their speed, measured on 124M, buys, less 28.3 s of the "
        "paper's 187.65 minutes for an event.",
        "Reordered data is the ordinary arm with another data order in its second half: its change is the scatter of "
        "the comparison itself.",
        "Estimated changes are those at matched tokens less a rate times the extra tokens: 0.14% for 1% as in the "
        "paper's regime, or as measured by the ordinary run with 3% more tokens.",
    ),
)

# --- near convergence: heads frozen in linear time and their controls, at matched tokens and time

_KINDS = {
    "exponential-{}": "frozen",
    "exponential-{}-pruned": "same heads pruned",
    "gate-taylor-{}": "pruned by gate-Taylor",
    "exponential-{}-random": "random heads frozen",
    "exponential-{}-early": "frozen after a quarter of training",
}
_OWN_CLOCK = {
    "ordinary": "ordinary",
    "exponential-50": "50% frozen",
    "exponential-50-pruned": "50% same heads pruned",
}
_ENDS = {"tokens": "", "time": "-time"}
_ANSWERS = {"frozen": "exponential-{}", "pruned": "exponential-{}-pruned", "pruned by gate-Taylor": "gate-taylor-{}"}


def _answer_row(k: str, rate: str, kind: str, end: str) -> Row:
    arm, frozen, words = f"{k}-{kind.format(rate)}", f"{k}-exponential-{rate}", "" if end else ", matched tokens"
    return Row(
        arm=arm + end,
        label=f"{k.upper()} {rate}% {_KINDS[kind]}{words}",
        reference=control_trunk(k),
        against=None if arm == frozen else frozen + end,
        companions={"tokens": arm, "exchange": f"{k}-ordinary-more"} if end else {},
    )


def _answer_rows(k: str) -> tuple[Row, ...]:
    context, trunk, more = k.upper(), control_trunk(k), f"{k}-ordinary-more"
    places = ((rate, end, kind) for rate in ("50", "25") for end in ("-time", "") for kind in _KINDS)
    own = (
        Row(
            arm=f"{k}-{arm}-clock",
            label=f"{context} {label}, own clock",
            reference=trunk,
            against=f"{k}-exponential-50-clock" if arm.endswith("pruned") else None,
            first_seed=True,
        )
        for arm, label in _OWN_CLOCK.items()
    )
    return (
        Row(arm=trunk, label=f"{context} ordinary"),
        Row(arm=more, label=f"{context} ordinary, 3% more tokens", reference=trunk, companions={"exchange": more}),
        *(_answer_row(k, rate, kind, end) for rate, end, kind in places),
        *own,
    )


RECIPES["answer"] = Recipe(
    title="Freezing, pruning and ordinary attention near convergence",
    also=("tab:equal-time-controls",),
    rows=(*_answer_rows("16k"), *_answer_rows("4k")),
    metrics=(
        *("perplexity", "delta", "difference", "extra", "tokens", "own_exchange", "paper_exchange", "exchange"),
        *("updates", "minutes", "intervention", "context", "heads", "exponential", "fit_kl", "window", "to_4k"),
    ),
    headline=("perplexity", "window", "to_4k", "delta", "difference", "extra", "tokens"),
    intervals="t",
    figures=(
        Figure(
            name="arms",
            title="Change of perplexity from ordinary attention, %, with 95% intervals",
            across="matched",
            panels={
                f"{k.upper()} of context, {rate}% of heads": {
                    line: {clock: (f"{k}-{arm.format(rate)}{end}", "delta") for clock, end in _ENDS.items()}
                    for line, arm in _ANSWERS.items()
                }
                for k in ("16k", "4k")
                for rate in ("50", "25")
            },
            joined=False,
        ),
    ),
    smoke=(
        *("16k-exponential-50-time", "16k-exponential-50-pruned-time", "16k-gate-taylor-50"),
        "16k-ordinary-more",
    ),
    notes=(
        "The question is that of the paper's tab:equal-time-controls, whose models are of 124M and 2.46B tokens.",
        "Speeds are those of 124M with heads frozen in linear time and with the same heads pruned, measured in one run "
        "(results/bench/linear.json); an event and its compilation are charged 28.3 s of 187.65 minutes.",
        "The difference is from the frozen arm of the same rate and clock; below zero is better than freezing.",
        "Own clock: the arm gets the seconds that its reference had left, as it takes them itself.",
        "Perplexity is measured on windows of the context that an arm was trained at. Arms of two contexts compare, "
        "roughly, by the first 4,096 tokens of their windows, which at 16K are only a quarter of the held-out text.",
    ),
)


def _peak_rows(peak: str, warmup: str) -> tuple[Row, Row]:
    arm, label = f"4k-peak-{peak}-warmup-{warmup}", f"peak {peak}, warm-up {warmup}%"
    frozen = Row(arm=f"{arm}-mean-25", label=f"{label}: 25% frozen at the end", reference=arm)
    return Row(arm=arm, label=label), frozen


RECIPES["peak_rate"] = Recipe(
    title="Peak learning rate and warm-up",
    rows=tuple(row for peak in PEAK_RATES for warmup in WARMUPS for row in _peak_rows(peak, warmup)),
    metrics=("perplexity", "delta", "rise", "heads", "median_kl", "fit_kl", "skipped"),
    seeds=1,
    smoke=("4k-peak-1e-3-warmup-10-mean-25",),
    notes=(
        "The paper's peak rate is 6e-4 with 10% of warm-up.",
        "A rate whose heads fit badly freezes at a higher cost, however low its own perplexity.",
    ),
)

_STORAGES = {
    "exponential-64": "exponential, band 64",
    "exponential-128": "exponential, band 128",
    "exponential-short": "exponential, band 128, short form of alpha",
    "pruned": "pruned",
}

RECIPES["linear_heads"] = Recipe(
    title="Frozen heads in linear time",
    rows=(
        Row(arm="4k-ordinary", label="ordinary"),
        *(
            Row(
                arm=f"4k-{kind}-{rate}",
                label=f"{rate}% {label}",
                reference="4k-ordinary",
                against=None if kind == "mean" else f"4k-mean-{rate}",
            )
            for rate in ("25", "50")
            for kind, label in {"mean": "compact", **_STORAGES}.items()
        ),
    ),
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
