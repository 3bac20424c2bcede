"""Finetuning of ordinary and frozen checkpoints: tab:downstream-details, tab:main-results (b), and its speedups.

One checkpoint of each arm, three finetuning seeds. QuALITY is trained on at 16K of context, the others at 4K.
"""

from experiments.arms import CONTEXTS, DOWNSTREAM
from experiments.measurements import DataFolder, FileOf, Measurement, Number
from experiments.paper import FINETUNING, Source
from experiments.recipe import Recipe, Row

TITLES = {"sst2": "SST-2", "boolq": "BoolQ", "quality": "QuALITY"}
RATES = {"mean-25": 0.25, "mean-50": 0.5}
ORDERS = (1337, 1338, 1339)
"""Seeds of the orders of examples that updates are timed in."""
# Accuracy, change, milliseconds of an update, speedup, change of peak memory: the last three of the timed orders.
PAPER = {
    "sst2": {
        "ordinary": ("86.39 ± 0.27", None, "50.11 ± 0.61", None, None),
        "mean-25": ("86.54 ± 0.36", "+0.15 ± 0.53", "58.22 ± 9.58", "0.901 ± 0.122", "−3.65"),
        "mean-50": ("86.77 ± 0.74", "+0.38 ± 1.00", "56.70 ± 9.43", "0.925 ± 0.123", "−5.95"),
    },
    "boolq": {
        "ordinary": ("71.40 ± 0.22", None, "67.36 ± 0.51", None, None),
        "mean-25": ("70.62 ± 0.55", "−0.77 ± 0.56", "70.91 ± 7.25", "0.967 ± 0.083", "−4.63"),
        "mean-50": ("70.84 ± 0.49", "−0.56 ± 0.70", "69.35 ± 7.61", "0.992 ± 0.093", "−7.19"),
    },
    "quality": {
        "ordinary": ("26.59 ± 0.44", None, "578.72 ± 2.16", None, None),
        "mean-25": ("26.09 ± 0.40", "−0.50 ± 0.63", "552.90 ± 0.90", "1.047 ± 0.005", "−2.12"),
        "mean-50": ("26.94 ± 0.62", "+0.35 ± 0.18", "517.88 ± 3.71", "1.118 ± 0.010", "−3.92"),
    },
}


def _row(task: str, model: str) -> Row:
    accuracy, points, *_ = PAPER[task][model]
    label = "ordinary" if model == "ordinary" else f"frozen {RATES[model]:.0%}"
    return Row(
        arm=f"downstream-{task}-{model}",
        label=f"{TITLES[task]} {label}",
        reference=f"downstream-{task}-ordinary",
        paper={"accuracy": str(accuracy)} | ({"points": points} if points else {}),
    )


def _updates(task: str) -> Measurement:
    """Return updates as they are timed apart from runs: on the task's own examples, each order by itself."""
    _, k, settings = DOWNSTREAM[task]
    numbers, place = [], {"backend": "toeplitz", "variant": frozenset(f"{task} order-{seed}" for seed in ORDERS)}
    for model, rate in RATES.items():
        _, _, milliseconds, speedup, peak = PAPER[task][model]
        told = {"ratio": ("speedup", speedup, 3), "arm_ms": ("update, ms", milliseconds, 2)}
        if model == "mean-25":
            told["baseline_ms"] = ("ordinary update, ms", PAPER[task]["ordinary"][2], 2)
        for name, (words, paper, places) in told.items():
            path = ("rows", {**place, "rate": rate, "refused": False}, name)
            title = f"{TITLES[task]}, {rate:.0%}, {words}"
            numbers.append(Number(title=title, path=path, paper=paper, places=places, of="mean"))
        path = ("memory", {"backend": "toeplitz", "rate": rate}, "change_percent")
        numbers.append(
            Number(title=f"{TITLES[task]}, {rate:.0%}, peak, %", path=path, paper=peak, places=2, signed=True)
        )
    return Measurement(
        name=f"updates on {TITLES[task]}",
        does="benchmarks finetuning",
        settings={
            **{"task": task, "data": FileOf(task, "train"), "test": FileOf(task, "test"), "tokenizer": DataFolder()},
            **{"model": "124m", "length": CONTEXTS[k], **settings["paper"], "rates": tuple(RATES.values())},
            **{"orders": ORDERS, "others": (), "memory": True, "pairs": 6},
        },
        scaled={
            "small": {"pairs": 4, "seconds": 540.0},
            "smoke": {
                **{"model": "tiny", "length": 32, "batch_size": 4, "rates": (0.25,), "orders": ORDERS[:2], "pairs": 1},
                **{"warmup": 1, "repeats": 1, "tolerance": 10.0, "profile": False, "memory": False, "free": False},
            },
        },
        numbers=tuple(numbers),
        label=FINETUNING.label,
        smoke=task == "sst2",
    )


RECIPE = Recipe(
    title="Finetuning",
    source=Source("tab:downstream-details", "124M, one checkpoint, mean ± SE of three finetuning seeds; GH200"),
    also=("tab:main-results", "fig:systems-across-stages"),
    rows=tuple(_row(task, model) for task, models in PAPER.items() for model in models),
    metrics=(
        "accuracy",
        "seeds",
        "points",
        "update",
        "speedup",
        "peak_change",
        "updates",
        "epochs",
        "example_tokens",
        "heads",
    ),
    measurements=tuple(map(_updates, TITLES)),
    smoke=("downstream-sst2-mean-25", "downstream-quality-ordinary"),
    notes=(
        "The ordinary model chooses the number of epochs on a share of the training file; frozen ones are finetuned "
        "like it. The speedup is the ordinary run's median update over the arm's, of runs one after the other; the "
        "paper's times are of three orders of the examples, and stand beside updates timed in pairs.",
        "At the small scale SST-2 is a stratified part of 16,384 examples, and SST-2 and BoolQ have batches of 32.",
    ),
)
