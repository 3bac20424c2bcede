"""Finetuning of ordinary and frozen checkpoints: tab:downstream-details, tab:main-results (b), and its speedups.

One checkpoint of each arm, three finetuning seeds. QuALITY is trained on at 16K of context, the others at 4K.
"""

from saf.experiments.recipe import Arm, Recipe
from saf.records.paper import Source

TASKS = {
    # Task: context of its parents, settings at each scale.
    "SST-2": ("sst2", 4_096, {"batch_size": 256}, {"batch_size": 32, "most_examples": 16_384}),
    "BoolQ": ("boolq", 4_096, {"batch_size": 64}, {"batch_size": 32}),
    "QuALITY": ("quality", 16_384, {"batch_size": 4, "accumulation": 4, "max_tokens": 16_384}, {}),
}
SMOKE = {"batch_size": 4, "accumulation": 1, "epochs": 1}
RATES = (0.25, 0.5)
PAPER = {
    "SST-2 ordinary": ("86.39 ± 0.27", None, "50.11 ± 0.61", None, None),
    "SST-2 frozen 25%": ("86.54 ± 0.36", "+0.15 ± 0.53", "58.22 ± 9.58", "0.901 ± 0.122", "−3.65"),
    "SST-2 frozen 50%": ("86.77 ± 0.74", "+0.38 ± 1.00", "56.70 ± 9.43", "0.925 ± 0.123", "−5.95"),
    "BoolQ ordinary": ("71.40 ± 0.22", None, "67.36 ± 0.51", None, None),
    "BoolQ frozen 25%": ("70.62 ± 0.55", "−0.77 ± 0.56", "70.91 ± 7.25", "0.967 ± 0.083", "−4.63"),
    "BoolQ frozen 50%": ("70.84 ± 0.49", "−0.56 ± 0.70", "69.35 ± 7.61", "0.992 ± 0.093", "−7.19"),
    "QuALITY ordinary": ("26.59 ± 0.44", None, "578.72 ± 2.16", None, None),
    "QuALITY frozen 25%": ("26.09 ± 0.40", "−0.50 ± 0.63", "552.90 ± 0.90", "1.047 ± 0.005", "−2.12"),
    "QuALITY frozen 50%": ("26.94 ± 0.62", "+0.35 ± 0.18", "517.88 ± 3.71", "1.118 ± 0.010", "−3.92"),
}
NUMBERS = ("accuracy", "points", "update", "speedup", "peak_change")


def _parents(context: int) -> tuple[Arm, ...]:
    name, kept = f"{context // 1024}K", {"context": context, "axis": "none", "row": False}
    return (
        Arm(name=f"{name} ordinary", reference=None, **kept),
        *(
            Arm(
                **{"name": f"{name} frozen {rate:.0%}", "parent": f"{name} ordinary", "reference": None},
                **{"settings": {"freeze.rate": rate}, "smoke": rate == RATES[0], **kept},
            )
            for rate in RATES
        ),
    )


def _finetuned(title: str) -> tuple[Arm, ...]:
    task, context, settings, small = TASKS[title]
    parent, ordinary = f"{context // 1024}K", f"{title} ordinary"

    def paper(name: str) -> dict[str, str]:
        return {column: text for column, text in zip(NUMBERS, PAPER[name], strict=True) if text}

    return (
        Arm(
            **{"name": ordinary, "task": task, "axis": "finetuning", "parent": f"{parent} ordinary"},
            **{"context": context, "settings": settings, "scaled": {"small": small, "smoke": SMOKE}},
            **{"reference": None, "paper": paper(ordinary)},
        ),
        *(
            Arm(
                **{"name": (name := f"{title} frozen {rate:.0%}"), "task": task, "axis": "finetuning"},
                **{"context": context, "parent": f"{parent} frozen {rate:.0%}", "like": ordinary},
                **{"reference": ordinary, "paper": paper(name), "smoke": rate == RATES[0]},
            )
            for rate in RATES
        ),
    )


RECIPE = Recipe(
    title="Finetuning",
    source=Source("tab:downstream-details", "124M, one checkpoint, mean ± SE of three finetuning seeds; GH200"),
    also=("tab:main-results", "fig:systems-across-stages"),
    arms=(
        *(arm for context in (4_096, 16_384) for arm in _parents(context)),
        *(arm for title in TASKS for arm in _finetuned(title)),
    ),
    columns=("accuracy", "seeds", *NUMBERS[1:], "updates", "heads"),
    notes=(
        "The ordinary model chooses the number of epochs on a share of the training file; frozen ones are finetuned "
        "like it. The speedup is the ordinary run's median update over the arm's, of runs one after the other.",
        "The paper's batches of SST-2 and BoolQ are those of its table; at the small scale SST-2 is a stratified part "
        "of 16,384 examples, and both have batches of 32.",
    ),
)
