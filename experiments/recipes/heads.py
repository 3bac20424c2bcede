"""Recipes of analyses: which heads are chosen, what each costs, how they attend, and models pretrained elsewhere."""

from experiments import paper
from experiments.measurements import (
    DATA,
    QUESTIONS,
    Measurement,
    Number,
    checkpoint,
    record_of,
    run_of,
)
from experiments.recipe import Recipe, Row

RECIPES: dict[str, Recipe] = {}
MIDPOINT = (checkpoint("4k-ordinary", 0.5),)

# --- single heads: tab:selector-diagnostic, partial correlations, fig:head-selection-profiles (a, c, d)


def _of_score(score: str, *quoted: str) -> tuple[Number, ...]:
    title, path, (spearman, quarter, half) = score.replace("_", " "), ("quality", score), quoted
    return (
        Number(f"{title}, Spearman", (*path, "spearman"), spearman, signed=True),
        Number(f"{title}, mean cost of the lowest 25%, %", (*path, "mean_cost", "0.25"), quarter),
        Number(f"{title}, mean cost of the lowest 50%, %", (*path, "mean_cost", "0.5"), half),
    )


def _profile(title: str, name: str, *quoted: str | None, places: int) -> tuple[Number, ...]:
    """Return the means of selected heads, then of unselected ones of the same layers."""
    scale = 100.0 if title.endswith("%") else 1.0
    return tuple(
        Number(f"{title}, {side}", ("matched", name, place), number, places, scale=scale)
        for place, (side, number) in enumerate(zip(("selected", "others of their layers"), quoted, strict=True))
    )


_CORRELATIONS = {
    "spearman": "variance and cost, no control",
    "layer": "variance and cost, beyond layer",
    "layer_entropy": "variance and cost, beyond layer and entropy",
    "with_entropy": "variance and entropy",
}

RECIPES["one_head"] = Recipe(
    title="Costs of single heads and the scores that predict them",
    source=paper.SELECTORS,
    also=("app:head-selection-analysis", "fig:head-selection-profiles"),
    measurements=(
        Measurement(
            name="one head",
            does="experiments.analyses one-head",
            on=MIDPOINT,
            settings={"sequences": 32, "windows": 16, "heldout_sequences": 16},
            scaled={"smoke": {"sequences": 4, "windows": 2, "heldout_sequences": 2, "max_fit_kl": 10.0}},
            numbers=tuple(n for score, quoted in paper.SELECTOR_DIAGNOSTIC.items() for n in _of_score(score, *quoted)),
        ),
        Measurement(
            name="profiles",
            does="experiments.analyses profiles",
            on=MIDPOINT,
            settings={"selected": run_of("4k-mean-25"), "windows": 128},
            scaled={"smoke": {"windows": 2}},
            numbers=(
                *_profile("normalised entropy", "entropy", "0.837", "0.678", places=3),
                *_profile("mass of the 64 latest tokens, %", "local_mass", "19.0", "40.7", places=1),
                *_profile("mass of the first token, %", "first_token", "0.023", None, places=3),
                Number("heads selected in the first four layers", ("in_first_layers",), "21 to 24 of 36", 1),
            ),
            label=paper.SELECTION_TEXT.label,
        ),
        Measurement(
            name="profiles on the calibration text",
            does="experiments.analyses profiles",
            on=MIDPOINT,
            settings={"windows": 16, "text": "calibration"},
            scaled={"smoke": {"windows": 2, "sequences": 4}},
        ),
        Measurement(
            name="partial correlations",
            does="experiments.analyses partial-spearman",
            on=(record_of("one head"),),
            settings={"profiles": record_of("profiles on the calibration text")},
            numbers=tuple(
                Number(title, ("correlations", "variance", name), paper.PARTIAL[name], signed=True)
                for name, title in _CORRELATIONS.items()
            ),
            label=paper.SELECTION_TEXT.label,
        ),
    ),
)

# --- sets of heads

RECIPES["joint_cost"] = Recipe(
    title="Joint cost of two selections, immediate and after continuation",
    seeds=1,
    source=paper.SELECTION_TEXT,
    rows=(
        Row(arm="4k-ordinary", label="ordinary"),
        Row(arm="4k-mean-25", label="variance", reference="4k-ordinary", paper={"delta": "+0.665"}),
        Row(
            arm="4k-residual-cosine-25",
            label="residual cosine",
            reference="4k-ordinary",
            against="4k-mean-25",
            paper={"delta": "+0.792", "relative": "+0.126"},
        ),
    ),
    metrics=("perplexity", "delta", "relative", "heads"),
    measurements=(
        Measurement(
            name="at once",
            does="experiments.analyses joint-cost",
            on=MIDPOINT,
            settings={
                **{"first": run_of("4k-residual-cosine-25"), "second": run_of("4k-mean-25")},
                **{"sequences": 32, "windows": 16, "skip": 16},
            },
            scaled={"smoke": {"sequences": 4, "windows": 2, "skip": 2}},
            numbers=(
                *(
                    Number(f"{words} at once, %", (place, "delta_ppl_percent"), paper.JOINT_COST[name], signed=True)
                    for place, name, words in (
                        ("first", "residual_cosine", "residual cosine"),
                        ("second", "variance", "variance"),
                    )
                ),
                Number("heads in both", ("overlap",), "23", 0),
            ),
        ),
    ),
    notes=("The difference is that of the perplexity from variance's after the same continuation.",),
)

_SELECTED = {"at 25%": "4k-mean-25-at-25", "at 50%": "4k-mean-25", "at the end": "4k-mean-25-at-100"}


def _overlap(name: str, first: str, second: str, quoted: dict[str, str]) -> Measurement:
    columns = (
        ("heads in both", "overlap", 1),
        ("expected by chance", "expected", 1),
        ("rank correlation", "rank_correlation", 3),
    )
    return Measurement(
        name=name,
        does="experiments.analyses stability",
        on=(run_of(_SELECTED[first]), run_of(_SELECTED[second])),
        numbers=tuple(
            Number(f"{title}, {first} and {second}", (path,), quoted.get(path), places)
            for title, path, places in columns
        ),
    )


def _profiled(moment: str, at: float, quoted: str | None = None) -> Measurement:
    """Return profiles of the ordinary run on windows that are the same at every moment."""
    title = f"rank correlation on common windows, {moment} and at the end"
    return Measurement(
        name=f"profiles {moment}",
        does="experiments.analyses profiles",
        on=(checkpoint("4k-ordinary", at),),
        settings={"windows": 128} | ({"later": record_of("profiles at the end")} if quoted else {}),
        scaled={"smoke": {"windows": 2}},
        numbers=(Number(title, ("variance_ranks",), quoted),) if quoted else (),
    )


RECIPES["stability"] = Recipe(
    title="Selection a quarter and half through training, and at its end",
    source=paper.SELECTION_TEXT,
    also=("fig:head-selection-profiles",),
    measurements=(
        _overlap("stability", "at 25%", "at 50%", paper.STABILITY),
        _overlap("a quarter and the end", "at 25%", "at the end", {}),
        _overlap("half and the end", "at 50%", "at the end", {}),
        _profiled("at the end", 1.0),
        _profiled("at 25%", 0.25, "0.869 to 0.904"),
        _profiled("at 50%", 0.5, "0.945 to 0.966"),
    ),
    notes=(
        "On common windows variance is measured as the paper does against the end: of 64 query rows in the latter half "
        "of 128 windows. Other correlations are of the scores that heads are selected by.",
    ),
)

# --- recovery of the training loss; patterns over sequences

_MOMENTS = {
    **{0.25: "4k-mean-25-at-25", 0.4: "4k-mean-25-at-40", 0.5: "4k-mean-25", 0.6: "4k-mean-25-at-60"},
    **{0.75: "4k-mean-25-at-75", 1.0: "4k-mean-25-at-100"},
}
# At once, %; gaps 200 updates after replacement and at the end, in nats.
_RECOVERIES = {0.25: ("2.72", "0.0061", "0.0062"), 0.75: (None, "0.0123", "0.0086"), 1.0: ("7.99", None, None)}


def _gaps(place: int, moment: float) -> tuple[Number, ...]:
    once, later, end = _RECOVERIES.get(moment, (None, None, None))
    title, path = f"at {moment:.0%}", ("runs", place)
    numbers = (
        Number(f"{title}, at once, %", (*path, "at_once"), once, 2, signed=True),
        Number(f"{title}, 200 updates later", (*path, "gap_after"), later, 4, signed=True),
        Number(f"{title}, at the end", (*path, "gap_at_end"), end, 4, signed=True),
    )
    return numbers[:1] if moment == 1 else numbers


RECIPES["recovery"] = Recipe(
    title="Recovery of the training loss at 25%",
    seeds=1,
    source=paper.RECOVERY,
    measurements=(
        Measurement(
            name="gaps",
            does="experiments.analyses recovery",
            on=(run_of("4k-ordinary"), *map(run_of, _MOMENTS.values())),
            settings={"window": 210, "after": 200},
            scaled={"smoke": {"window": 3, "after": 1}},
            numbers=tuple(number for place, moment in enumerate(_MOMENTS) for number in _gaps(place, moment)),
        ),
    ),
    notes=(
        "Gaps are in nats of training loss; at the ends the mean is over the updates that there are. After training "
        "there is no gap, as no update follows.",
    ),
)

_ROWS = {"sequences": 500, "fitted": 0.6, "rate": 0.25, "scale": 4.0}
# Prepared folders hold out 5% unless asked for more: of some 30M tokens, 427 sequences.
_FEWER = {"sequences": 400}
_FAMILIES = {"resampled": "whole rows resampled", "gaussian": "Gaussian sampling", "dirichlet": "Dirichlet sampling"}

RECIPES["distributions"] = Recipe(
    title="Measured attention rows beside generated ones",
    seeds=1,
    source=paper.DISTRIBUTIONS,
    also=("fig:attention-entry-distributions", "fig:dirichlet-umap"),
    measurements=(
        Measurement(
            name="rows and entries",
            does="experiments.analyses distributions",
            on=(checkpoint("1k-ordinary", 0.5),),
            settings=_ROWS,
            scaled={"smoke": {"sequences": 8, "shown": 1}, "small": _FEWER},
            numbers=tuple(
                Number(f"energy distance, {words}", ("medians", name), paper.ROW_DISTANCES[name], 2)
                for name, words in _FAMILIES.items()
            ),
        ),
        Measurement(
            name="projection",
            does="experiments.analyses distributions",
            on=(checkpoint("1k-ordinary", 0.5),),
            settings={**_ROWS, "umap": True, "profiles": 128},
            scaled={"small": _FEWER},
            smoke=False,
        ),
    ),
    notes=("The projection needs umap-learn, the extra named analysis.",),
)

# --- models pretrained elsewhere

_QWEN, _TEXT = "Qwen/Qwen3-4B", "qwen3-text"
_SCORES, _RATES = ("variance", "forward_kl"), (0.1, 0.2, 0.3)
_ARMS = [(score, rate) for score in _SCORES for rate in _RATES]
# Four questions of each task, made up, in the layouts of the public files.
_SMOKE = {"too_long": "cut", "batch_size": 4}


def _arm(score: str, rate: float, *path: str | int) -> tuple:
    return ("arms", {"score": score, "rate": rate}, *path)


def _accuracies(task: str) -> list[Number]:
    """Return a task's accuracies, ordinary and by score and rate; of the mean the changes."""
    ordinary, *quoted = paper.QWEN_ACCURACY[task]
    pairs = list(zip(_ARMS, quoted, strict=True))
    if not ordinary:
        return [
            Number(f"{task}, {s} {r:.0%}, points", _arm(s, r, "mean_difference"), text, 2, signed=True, scale=100.0)
            for (s, r), text in pairs
        ]
    place = ("tasks", task, "accuracy")
    numbers = [Number(f"{task}, ordinary, %", ("ordinary", *place), ordinary, 2, scale=100.0)]
    return numbers + [
        Number(f"{task}, {s} {r:.0%}, %", _arm(s, r, *place), text, 2, scale=100.0) for (s, r), text in pairs
    ]


def _chosen() -> list[Number]:
    """Return which heads the scores choose, and how they fit."""
    numbers = [
        Number(f"chosen by both at {rate:.0%}, %", ("overlap", f"{rate:g}"), quoted, 0, scale=100)
        for rate, quoted in paper.QWEN_OVERLAP.items()
    ]
    for score in _SCORES:
        for third, quoted in enumerate(paper.QWEN_THIRDS[score]):
            title = f"{score} 10%, heads in third {third + 1} of the layers"
            numbers.append(Number(title, _arm(score, 0.1, "layer_thirds", third), quoted, 0))
        path = _arm(score, 0.1, "forward_kl_median")
        numbers.append(Number(f"{score} 10%, median forward KL, nats", path, paper.QWEN_FORWARD_KL[score]))
        # At which rate the paper took the median of the fits it does not say; the largest set holds the others.
        path = _arm(score, 0.3, "fit_kl_median")
        numbers.append(Number(f"{score} 30%, median fit KL, nats", path, paper.QWEN_FIT_KL[score]))
    return numbers


def _sst2() -> list[Number]:
    """Return how often each label of SST-2 is predicted, by the ordinary model and with heads by forward KL."""
    numbers = []
    for rate, quoted in paper.QWEN_SST2.items():
        name, at = ("ordinary", ("ordinary",)) if rate is None else (f"forward KL {rate:.0%}", _arm(_SCORES[1], rate))
        for label, text in enumerate(quoted):
            title = f"SST-2, {name}, says {('negative', 'positive')[label]}"
            numbers.append(Number(title, (*at, "tasks", "sst2", "taken", str(label)), text, 0))
    return numbers


RECIPES["qwen_zeroshot"] = Recipe(
    title="Zero-shot accuracy",
    source=paper.QWEN_ZERO_SHOT,
    also=("fig:qwen-pretrained-tasks",),
    measurements=(
        Measurement(
            name="Qwen3-4B",
            does="experiments.analyses zero-shot",
            on=(_QWEN,),
            settings={
                **{"data": _TEXT, "scores": _SCORES, "rates": _RATES, "sequences": 512},
                "task_data": QUESTIONS,
            },
            scaled={
                "small": {"sequences": 128, "questions": 500},
                "smoke": {
                    "on": (checkpoint("4k-ordinary", 1.0),),
                    **{**_SMOKE, "data": None, "rates": (0.25, 0.5), "sequences": 8, "max_fit_kl": 10.0},
                },
            },
            numbers=(*(each for task in paper.QWEN_ACCURACY for each in _accuracies(task)), *_chosen(), *_sst2()),
        ),
        Measurement(
            name="124M, 25%",
            does="experiments.analyses zero-shot",
            on=(checkpoint("4k-ordinary", 1.0),),
            settings={"frozen": checkpoint("4k-mean-25", 1.0), "too_long": "cut", "task_data": QUESTIONS},
            scaled={"small": {"questions": 500}, "smoke": _SMOKE},
            label="app:downstream-details",
        ),
    ),
    notes=(
        f"Weights are {_QWEN} of the hub, or a folder of that name. Calibration text is the folder {_TEXT}, made by "
        f"`saf data prepare FILES --tokenizer {_QWEN} --out {_TEXT}`; the paper's is FineWeb-Edu.",
        "Questions are the hub's, or those of `--questions FOLDER` where it has the public files of all five tasks.",
        "Qwen3-4B alone: `--arms Qwen3-4B`; `--show --tables FOLDER` makes the figure of its record.",
    ),
)

_SMOLLM2, _GEMMA, _OTHER = "smollm2-135m", "gemma-3-270m", "wikitext-2.txt"
_HEALED = {
    **{"scores": ("joint_cost", "variance", "variance_spread", "forward_kl", "random"), "controls": True},
    **{"rates": (0.05, 0.1, 0.2, 0.3), "sequences": 32, "length": 1_024, "windows": 128, "heal": 2_457_600},
    **{"too_long": "cut", "other": _OTHER, "task_data": QUESTIONS},
}


def _pretrained(model: str, **settings: object) -> Measurement:
    smoke = {
        "on": (checkpoint("4k-ordinary", 1.0),),
        **{"data": DATA, "other": DATA, "questions": 2, "batch_size": 4, "sequences": 8, "length": 32},
        **{"rates": (0.5,), "tasks": ("piqa", "sst2"), "choosing": 4, "windows": 4, "heal": 256},
    }
    return Measurement(
        name=model,
        does="experiments.analyses zero-shot",
        on=(model,),
        settings={"data": f"{model}-text", **_HEALED, **settings},
        scaled={"small": {"questions": 500}, "smoke": smoke},
        smoke=model == _SMOLLM2,
    )


RECIPES["pretrained"] = Recipe(
    title="Pretrained models",
    source=paper.QWEN_ZERO_SHOT,
    measurements=(_pretrained(_SMOLLM2, batch_size=16), _pretrained(_GEMMA, bos=True, batch_size=4)),
    notes=(
        f"Models are the folders {_SMOLLM2} (SmolLM2-135M-Instruct) and {_GEMMA} (gemma-3-270m) of transformers. Their "
        f"texts are {_SMOLLM2}-text and {_GEMMA}-text, made by `saf data prepare FILES --tokenizer MODEL`; the other "
        f"text is {_OTHER}.",
        "The same command continues a measurement that stopped. The paper has no such table: its models were "
        "pretrained here, or frozen without healing.",
    ),
)
