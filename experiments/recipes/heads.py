"""Recipes of analyses: which heads are chosen, what each costs, how they attend, and models pretrained elsewhere."""

from experiments import paper
from experiments.measurements import DATA, QUESTIONS, Measurement, Number, checkpoint, record_of, run_of
from experiments.recipe import Recipe, rows
from saf.freeze_config import FreezeConfig

RECIPES: dict[str, Recipe] = {}
MIDPOINT = (checkpoint("4k-ordinary", 0.5),)
_PAPERS_FITTER, _OWN_FITTER = {"fitter": "adam"}, {"fitter": FreezeConfig.fitter}
"""Settings at the paper's scale and at the small one, as those of their runs."""
PROFILES = "experiments.analyses profiles"
STABILITY = "experiments.analyses stability"

# --- single heads: tab:selector-diagnostic, partial correlations, fig:head-selection-profiles (a, c, d)

_CALIBRATION_TEXT = "profiles on the calibration text"

RECIPES["one_head"] = Recipe(
    title="Costs of single heads and the scores that predict them",
    source=paper.SELECTORS,
    also=("app:head-selection-analysis", "fig:head-selection-profiles"),
    measurements=(
        Measurement(
            "one head",
            "experiments.analyses one-head",
            MIDPOINT,
            {"sequences": 32, "windows": 16, "heldout_sequences": 16, **_PAPERS_FITTER},
            small=_OWN_FITTER,
            smoke={"max_fit_kl": 10.0},
        ),
        # The paper profiles heads in its three control runs, but measures their cost in the first quality run.
        Measurement(
            "profiles",
            PROFILES,
            (checkpoint("4k-control-ordinary", 0.5),),
            {"selected": run_of("4k-mean-25-control"), "windows": 128},
        ),
        Measurement(
            _CALIBRATION_TEXT,
            PROFILES,
            MIDPOINT,
            {"selected": run_of("4k-mean-25"), "windows": 16, "text": "calibration"},
            smoke={"sequences": 4},
        ),
        Measurement(
            "partial correlations",
            "experiments.analyses partial-spearman",
            (record_of("one head"),),
            {"profiles": record_of(_CALIBRATION_TEXT)},
        ),
    ),
)

# --- sets of heads

RECIPES["joint_cost"] = Recipe(
    title="Joint cost of two selections, immediate and after continuation",
    seeds=1,
    source=paper.SELECTION_TEXT,
    rows=rows(
        """
        arm                   | label           | reference   | against    | delta  | perplexity_difference
        4k-ordinary           | ordinary        |             |            |        |
        4k-mean-25            | variance        | 4k-ordinary |            | +0.665 |
        4k-residual-cosine-25 | residual cosine | 4k-ordinary | 4k-mean-25 | +0.792 | +0.126
        """
    ),
    metrics=("perplexity", "delta", "perplexity_difference", "heads"),
    measurements=(
        Measurement(
            "at once",
            "experiments.analyses joint-cost",
            MIDPOINT,
            {
                "first": run_of("4k-residual-cosine-25"),
                "second": run_of("4k-mean-25"),
                "sequences": 32,
                "windows": 16,
                "skip": 16,
                **_PAPERS_FITTER,
            },
            small=_OWN_FITTER,
            smoke={"skip": 2},
            numbers=(
                Number("residual cosine at once, %", ("first", "delta_ppl_percent"), "+4.136%", signed=True),
                Number("variance at once, %", ("second", "delta_ppl_percent"), "+5.092%", signed=True),
                Number("heads in both", ("overlap",), "23", 0),
            ),
        ),
    ),
    notes=("The difference is from the perplexity with variance after the same continuation.",),
)

_SELECTED = {
    "at 25%": "4k-mean-25-at-25-control",
    "at 50%": "4k-mean-25-control",
    "at the end": "4k-mean-25-at-100-control",
}


def _overlap(name: str, first: str, second: str, quoted: dict[str, str]) -> Measurement:
    columns = (  # title, name in our record and in `quoted`, decimals
        ("heads in both", "overlap", 1),
        ("expected by chance", "expected", 1),
        ("rank correlation", "rank_correlation", 3),
    )
    numbers = [
        Number(f"{title}, {first} and {second}", (key,), quoted.get(key), places) for title, key, places in columns
    ]
    return Measurement(name, STABILITY, (run_of(_SELECTED[first]), run_of(_SELECTED[second])), numbers=numbers)


def _profiled(moment: str, at: float, quoted: str | None = None) -> Measurement:
    """Return profiles of the ordinary run on windows that are the same at every moment."""
    # Moments with a number of the paper are compared with the end of training, whose record is made first.
    settings = {"windows": 128} | ({"later": record_of("profiles at the end")} if quoted else {})
    title = f"rank correlation on common windows, {moment} and at the end"
    numbers = (Number(title, ("variance_ranks",), quoted),) if quoted else ()
    ordinary = checkpoint("4k-control-ordinary", at)
    return Measurement(f"profiles {moment}", PROFILES, (ordinary,), settings, numbers=numbers)


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
        "On common windows variance is that of 64 query rows in the latter half of 128 windows, as in the paper's "
        "comparison with the end of training. Other correlations are of the scores that heads are selected by.",
    ),
)

# --- recovery of the training loss; patterns over sequences

_REPLACED = paper.split_words("""
    4k-mean-25-at-25 4k-mean-25-at-40 4k-mean-25 4k-mean-25-at-60 4k-mean-25-at-75 4k-mean-25-at-100
""")

RECIPES["recovery"] = Recipe(
    title="Recovery of the training loss at 25%",
    seeds=1,
    source=paper.RECOVERY,
    measurements=(
        Measurement(
            "gaps",
            "experiments.analyses recovery",
            (run_of("4k-ordinary"), *map(run_of, _REPLACED)),
            {"window": 210, "after": 200},
            smoke={"window": 3, "after": 1},
        ),
    ),
    notes=(
        "Gaps are in nats of training loss; at both ends of a run the mean is over fewer updates. An event after "
        "training has no gap, as no update follows.",
    ),
)

# The paper fits to 300 sequences and holds out 200 others.
_ROWS = {"sequences": 500, "fitted": 0.6, "rate": 0.25, "scale": 4.0}
# Prepared folders hold out 5% by default, a third of it for calibration: of some 30M tokens, 427 sequences.
_FEWER = {"sequences": 400}
_MIDPOINT_1K = (checkpoint("1k-ordinary", 0.5),)
_FAMILIES = {"resampled": "whole rows resampled", "gaussian": "Gaussian sampling", "dirichlet": "Dirichlet sampling"}

RECIPES["distributions"] = Recipe(
    title="Measured attention rows beside generated ones",
    seeds=1,
    source=paper.DISTRIBUTIONS,
    also=("fig:attention-entry-distributions", "fig:dirichlet-umap"),
    measurements=(
        Measurement(
            "rows and entries",
            "experiments.analyses distributions",
            _MIDPOINT_1K,
            _ROWS,
            small=_FEWER,
            smoke={"sequences": 8, "shown": 1},
            numbers=[
                Number(f"energy distance, {words}", ("medians", name), paper.ROW_DISTANCES[name], 2)
                for name, words in _FAMILIES.items()
            ],
        ),
        Measurement(
            "projection",
            "experiments.analyses distributions",
            _MIDPOINT_1K,
            {**_ROWS, "umap": True, "profiles": 128},
            small=_FEWER,
            smoke=None,
        ),
    ),
    notes=("The projection needs umap-learn, the extra named analysis.",),
)

# --- models pretrained elsewhere

_QWEN, _TEXT = "Qwen/Qwen3-4B", "qwen3-text"


def _qwen_numbers() -> list[Number]:
    """Return what the paper says of its model: as it was, and by score and rate."""
    numbers = [
        Number(f"chosen by both at {rate:.0%}, %", ("overlap", f"{rate:g}"), text, 0, scale=100)
        for rate, text in paper.QWEN_OVERLAP.items()
    ]
    for line in paper.QWEN_NUMBERS:
        places = int(line["places"])
        for arm in (arm for arm in paper.QWEN_ARMS if arm in line):
            score, _, rate = arm.partition(" ")
            entry = ("arms", {"score": score, "rate": float(rate)}) if rate else ("ordinary",)
            numbers.append(
                Number(
                    title=f"{line['of']}, {arm}",
                    path=(*entry, *line["path"].split("/")),
                    paper=line[arm],
                    places=places,
                    signed="change" in line["of"],
                    # Our record has shares where the paper has percentages, which alone are at two decimals.
                    scale=100.0 if places == 2 else 1.0,
                )
            )
    return numbers


RECIPES["qwen_zeroshot"] = Recipe(
    title="Zero-shot accuracy",
    source=paper.QWEN_ZERO_SHOT,
    also=("fig:qwen-pretrained-tasks",),
    measurements=(
        Measurement(
            "Qwen3-4B",
            "experiments.analyses zero-shot",
            (_QWEN,),
            {
                "data": _TEXT,
                "scores": ("variance", "forward_kl"),
                "rates": (0.1, 0.2, 0.3),
                "sequences": 512,
                "task_data": QUESTIONS,
                **_PAPERS_FITTER,
            },
            small={"sequences": 128, "questions": 500, **_OWN_FITTER},
            smoke={
                "on": (checkpoint("4k-ordinary", 1.0),),
                "data": DATA,
                "rates": (0.25, 0.5),
                "max_fit_kl": 10.0,
                "too_long": "cut",
                "batch_size": 4,
            },
            numbers=_qwen_numbers(),
        ),
    ),
    notes=(
        f"Weights are {_QWEN} of the hub, or a folder of that name. Calibration text is the folder {_TEXT}, made by "
        f"`saf data prepare FILES --tokenizer {_QWEN} --out {_TEXT}`; the paper's is FineWeb-Edu.",
        "Questions are the hub's, or those of `--questions FOLDER` where it has the public files of all five tasks.",
        "`--show --tables FOLDER` makes the figure of the record. docs/tasks.md has the commands for two runs of "
        "124M: `saf evaluate --tasks` answers, `saf compare` corrects by Holm.",
    ),
)

_SMOLLM2, _GEMMA, _OTHER = "smollm2-135m", "gemma-3-270m", "wikitext-2.txt"
_HEALED = {
    "scores": ("joint_cost", "variance", "variance_spread", "forward_kl", "random"), "controls": True,
    "rates": (0.05, 0.1, 0.2, 0.3), "sequences": 32, "length": 1_024, "windows": 128, "heal": 2_457_600,
    "too_long": "cut", "other": _OTHER, "task_data": QUESTIONS,
}  # fmt: skip


def _pretrained(model: str, *, name: str | None = None, questions: int = 500, **settings: object) -> Measurement:
    smoke = {
        "on": (checkpoint("4k-ordinary", 1.0),), "data": DATA, "other": DATA,
        "rates": (0.5,), "sequences": 8, "length": 32, "batch_size": 4, "choosing": 4, "windows": 4, "heal": 256,
        "tasks": ("piqa", "sst2"), "questions": 2,
    }  # fmt: skip
    return Measurement(
        name or model,
        "experiments.analyses zero-shot",
        (model,),
        {"data": f"{model}-text", **_HEALED, **settings},
        small={"questions": questions},
        smoke=None if model == _GEMMA else smoke,
    )


RECIPES["pretrained"] = Recipe(
    title="Pretrained models",
    source=paper.QWEN_ZERO_SHOT,
    measurements=(
        _pretrained(_SMOLLM2, batch_size=16),
        # 12 of Gemma's 72 heads are eligible: 5% and 10% of them are the same one.
        _pretrained(_GEMMA, bos=True, batch_size=8, rates=(0.1, 0.2, 0.3), questions=200),
        # Pruning with heads of its own choice, by the same procedure.
        _pretrained(
            _SMOLLM2,
            name=f"{_SMOLLM2} against pruning",
            batch_size=16,
            scores=("joint_cost", "pruning_cost"),
            controls=False,
            rates=(0.05, 0.1, 0.2),
            choosing=128,
        ),
    ),
    notes=(
        f"Models are the folders {_SMOLLM2} (SmolLM2-135M-Instruct) and {_GEMMA} (gemma-3-270m). Their texts are "
        f"{_SMOLLM2}-text and {_GEMMA}-text, made by `saf data prepare FILES --tokenizer MODEL`, and {_OTHER}.",
    ),
)
