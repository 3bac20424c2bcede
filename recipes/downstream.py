"""Finetuning of ordinary and frozen checkpoints: tab:downstream-details, tab:main-results (b), and its speedups.

One checkpoint of each arm, three finetuning seeds. QuALITY is trained on at 16K of context, the others at 4K.
"""

from saf.experiments.measurement import DataFolder, FileOf, Measurement, Number
from saf.experiments.recipe import Arm, Recipe
from saf.records.paper import FINETUNING, Source

TASKS = {
    # Task: context of its parents, settings at each scale.
    "SST-2": ("sst2", 4_096, {"batch_size": 256}, {"batch_size": 32, "most_examples": 16_384}),
    "BoolQ": ("boolq", 4_096, {"batch_size": 64}, {"batch_size": 32}),
    "QuALITY": ("quality", 16_384, {"batch_size": 4, "accumulation": 4, "max_tokens": 16_384}, {}),
}
SMOKE = {"batch_size": 4, "accumulation": 1, "epochs": 1}
RATES = (0.25, 0.5)
ORDERS = (1337, 1338, 1339)
"""Seeds of the orders of examples that updates are timed in."""
# Accuracy, change, milliseconds of an update, speedup, change of peak memory: the last three of the timed orders.
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
NUMBERS = ("accuracy", "points")


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
        return {column: text for column, text in zip(NUMBERS, PAPER[name], strict=False) if text}

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


def _updates(title: str) -> Measurement:
    """Updates as they are timed apart from runs: on the task's own examples, each order by itself."""
    task, context, settings, _ = TASKS[title]
    numbers, place = [], {"backend": "toeplitz", "variant": frozenset(f"{task} order-{seed}" for seed in ORDERS)}
    for rate in RATES:
        _, _, milliseconds, speedup, peak = PAPER[f"{title} frozen {rate:.0%}"]
        rows = {**place, "rate": rate, "refused": False}
        told = {"ratio": ("speedup", speedup, 3), "arm_ms": ("update, ms", milliseconds, 2)}
        if rate == RATES[0]:
            told["baseline_ms"] = ("ordinary update, ms", PAPER[f"{title} ordinary"][2], 2)
        numbers += [
            Number(
                title=f"{title}, {rate:.0%}, {words}", path=("rows", rows, name), paper=paper, places=places, mean=True
            )
            for name, (words, paper, places) in told.items()
        ]
        memory = ("memory", {"backend": "toeplitz", "rate": rate}, "change_percent")
        numbers.append(Number(title=f"{title}, {rate:.0%}, peak, %", path=memory, paper=peak, places=2, signed=True))
    return Measurement(
        name=f"updates on {title}",
        does="benchmarks finetuning",
        settings={
            **{"task": task, "data": FileOf(task, "train"), "test": FileOf(task, "test"), "tokenizer": DataFolder()},
            **{"model": "124m", "length": context, **settings, "rates": RATES, "orders": ORDERS, "others": ()},
            **{"memory": True, "pairs": 6},
        },
        scaled={
            "small": {"pairs": 4, "seconds": 540.0},
            "smoke": {
                **{
                    "model": "tiny",
                    "length": 32,
                    "batch_size": 4,
                    "rates": RATES[:1],
                    "orders": ORDERS[:2],
                    "pairs": 1,
                },
                **{"warmup": 1, "repeats": 1, "tolerance": 10.0, "profile": False, "memory": False, "free": False},
            },
        },
        numbers=tuple(numbers),
        source=FINETUNING,
        smoke=title == "SST-2",
    )


RECIPE = Recipe(
    title="Finetuning",
    source=Source("tab:downstream-details", "124M, one checkpoint, mean ± SE of three finetuning seeds; GH200"),
    also=("tab:main-results", "fig:systems-across-stages"),
    arms=(
        *(arm for context in (4_096, 16_384) for arm in _parents(context)),
        *(arm for title in TASKS for arm in _finetuned(title)),
    ),
    columns=("accuracy", "seeds", "points", "update", "speedup", "peak_change", "updates", "heads"),
    measurements=tuple(map(_updates, TASKS)),
    notes=(
        "The ordinary model chooses the number of epochs on a share of the training file; frozen ones are finetuned "
        "like it. The speedup is the ordinary run's median update over the arm's, of runs one after the other; the "
        "paper's times are of three orders of the examples, and stand beside updates that are timed so, in pairs.",
        "The paper's batches of SST-2 and BoolQ are those of its table; at the small scale SST-2 is a stratified part "
        "of 16,384 examples, and both have batches of 32.",
    ),
)
