"""Zero-shot accuracy of Qwen3-4B with frozen heads: tab:qwen-zeroshot, fig:qwen-pretrained-tasks; and that of 124M."""

from experiments.measurements import Checkpoint, Measurement, Number, QuestionFolder
from experiments.paper import (
    QWEN_ACCURACY,
    QWEN_FIT_KL,
    QWEN_FORWARD_KL,
    QWEN_OVERLAP,
    QWEN_SST2,
    QWEN_THIRDS,
    QWEN_ZERO_SHOT,
)
from experiments.recipe import Recipe

MODEL, TEXT = "Qwen/Qwen3-4B", "qwen3-text"
RATES = (0.1, 0.2, 0.3)
SCORES = ("variance", "forward_kl")
ARMS = [(score, rate) for score in SCORES for rate in RATES]
# Four questions of each task, made up, in the layouts of the public files.
SMOKE = {"too_long": "cut", "batch_size": 4}


def _arm(score: str, rate: float, *path: str | int) -> tuple:
    return ("arms", {"score": score, "rate": rate}, *path)


def _accuracies(task: str) -> list[Number]:
    """One task: ordinary, then every score and rate; of the mean the changes."""
    ordinary, *papers = QWEN_ACCURACY[task]
    if not ordinary:
        return [
            Number(
                title=f"{task}, {score} {rate:.0%}, points",
                path=_arm(score, rate, "mean_difference"),
                paper=paper,
                places=2,
                signed=True,
                scale=100.0,
            )
            for (score, rate), paper in zip(ARMS, papers, strict=True)
        ]
    paths = [("ordinary", "tasks", task, "accuracy"), *(_arm(*arm, "tasks", task, "accuracy") for arm in ARMS)]
    names = ["ordinary", *(f"{score} {rate:.0%}" for score, rate in ARMS)]
    return [
        Number(title=f"{task}, {name}, %", path=path, paper=paper, places=2, scale=100.0)
        for name, path, paper in zip(names, paths, (ordinary, *papers), strict=True)
    ]


def _heads() -> list[Number]:
    """Which heads the scores choose, and how they fit."""
    found = [
        Number(
            title=f"chosen by both at {rate:.0%}, %", path=("overlap", f"{rate:g}"), paper=paper, places=0, scale=100
        )
        for rate, paper in QWEN_OVERLAP.items()
    ]
    for score in SCORES:
        for third, paper in enumerate(QWEN_THIRDS[score]):
            title = f"{score} 10%, heads in third {third + 1} of the layers"
            found.append(Number(title=title, path=_arm(score, 0.1, "layer_thirds", third), paper=paper, places=0))
        path, paper = _arm(score, 0.1, "forward_kl_median"), QWEN_FORWARD_KL[score]
        found.append(Number(title=f"{score} 10%, median forward KL, nats", path=path, paper=paper))
        # At which rate the paper took the median of the fits it does not say; the largest set holds the others.
        path, paper = _arm(score, 0.3, "fit_kl_median"), QWEN_FIT_KL[score]
        found.append(Number(title=f"{score} 30%, median fit KL, nats", path=path, paper=paper))
    return found


def _sst2() -> list[Number]:
    """How often each label of SST-2 is predicted, by the ordinary model and with heads by forward KL."""
    found = []
    for rate, papers in QWEN_SST2.items():
        name, at = ("ordinary", ("ordinary",)) if rate is None else (f"forward KL {rate:.0%}", _arm(SCORES[1], rate))
        for label, paper in enumerate(papers):
            title = f"SST-2, {name}, says {('negative', 'positive')[label]}"
            found.append(Number(title=title, path=(*at, "tasks", "sst2", "taken", str(label)), paper=paper, places=0))
    return found


RECIPE = Recipe(
    title="Zero-shot accuracy",
    source=QWEN_ZERO_SHOT,
    also=("fig:qwen-pretrained-tasks",),
    measurements=(
        Measurement(
            name="Qwen3-4B",
            does="analyze zero-shot",
            on=(MODEL,),
            settings={
                "data": TEXT,
                "scores": SCORES,
                "rates": RATES,
                "sequences": 512,
                "task_data": QuestionFolder(),
            },
            scaled={
                "small": {"sequences": 128, "questions": 500},
                "smoke": {
                    "on": (Checkpoint("4k-ordinary", 1.0),),
                    **{**SMOKE, "data": None, "rates": (0.25, 0.5), "sequences": 8, "max_fit_kl": 10.0},
                },
            },
            numbers=(*(each for task in QWEN_ACCURACY for each in _accuracies(task)), *_heads(), *_sst2()),
        ),
        Measurement(
            name="124M, 25%",
            does="analyze zero-shot",
            on=(Checkpoint("4k-ordinary", 1.0),),
            settings={"frozen": Checkpoint("4k-mean-25", 1.0), "too_long": "cut", "task_data": QuestionFolder()},
            scaled={"small": {"questions": 500}, "smoke": SMOKE},
            label="app:downstream-details",
        ),
    ),
    notes=(
        f"Weights are {MODEL} of the hub, or a folder of that name. Calibration text is the folder {TEXT}, made by "
        f"`saf data prepare FILES --tokenizer {MODEL} --out {TEXT}`; the paper's is FineWeb-Edu.",
        "Questions are the hub's, or those of `--tasks FOLDER` where it has the public files of all five tasks.",
        "Qwen3-4B alone: `--arms Qwen3-4B`. `saf analyze draw` makes the figure of its record.",
    ),
)
