"""Finetuning of replaced and pruned checkpoints, on either axis of seeds: tab:pruning-downstream.

The group by pretraining seed is the half of tab:pruning-additional-training whose perplexities later_intervention has.
"""

from typing import Any

from saf.experiments.recipe import Arm, Recipe
from saf.experiments.scales import HELD_OUT
from saf.records.paper import Source

PRUNED = {"freeze.operation": "prune"}
# As recipe later_intervention has them, whose runs the later checkpoints are.
LATER = {"peak_lr": 6e-5, "min_lr_ratio": 0.1, "warmup": 0}
SMALL = {"small": {"peak_lr": 1e-4}}
GATES = {**PRUNED, "freeze.rate": 0.25, "freeze.score": "gate_taylor"}
TASKS = {"SST-2": ("sst2", {"most_examples": 16_384}), "BoolQ": ("boolq", {})}
MIDPOINT, TOKENS, TIME = "midpoint, time", "later, tokens", "later, time"
SEEDS = "later, time, by pretraining seed"
PAPER = {
    MIDPOINT: {
        "ordinary": ("86.24 ± 0.93", "71.86 ± 0.40"),
        "mean 25%": ("86.05 ± 0.54", "70.52 ± 0.16"),
        "mean 50%": ("86.12 ± 0.54", "70.66 ± 0.26"),
        "pruning 25%": ("86.85 ± 0.56", "70.97 ± 0.66"),
        "pruning 50%": ("85.93 ± 0.56", "69.92 ± 0.26"),
    },
    TOKENS: {
        "ordinary": ("88.88", "71.74"),
        "mean 25%": ("87.39", "72.11"),
        "pruning 25%": ("87.73", "71.99"),
        "gate-Taylor 25%": ("87.61", "71.87"),
        "from initialisation": ("89.11", "71.25"),
    },
    TIME: {
        "ordinary": ("87.81 ± 0.28", "71.54 ± 0.23"),
        "mean 25%": ("87.69 ± 0.44", "71.78 ± 0.48"),
        "pruning 25%": ("87.31 ± 0.37", "71.49 ± 0.31"),
        "gate-Taylor 25%": ("87.65 ± 0.23", "71.20 ± 0.03"),
    },
    SEEDS: {
        "ordinary": ("87.00 ± 0.33", "71.78 ± 0.46"),
        "mean 25%": ("87.73 ± 0.46", "71.27 ± 0.67"),
        "pruning 25%": ("87.81 ± 0.34", "71.75 ± 0.29"),
        "gate-Taylor 25%": ("86.96 ± 0.49", "71.33 ± 0.16"),
    },
}
AXES = {MIDPOINT: "pretraining", TOKENS: "none", TIME: "finetuning", SEEDS: "pretraining"}
SMOKE = {(TOKENS, "ordinary"), (TOKENS, "pruning 25%")}


def _settings(operation: str) -> dict[str, Any]:
    """What an operation changes; pruning has the heads of the mean arm of its rate."""
    if operation == "gate-Taylor 25%":
        return GATES
    if operation.startswith("mean"):
        return {"freeze.rate": int(operation.split()[1][:-1]) / 100}
    return PRUNED if operation.startswith("pruning") else {}


def _parents(group: str) -> tuple[Arm, ...]:
    """The checkpoints of one group, as matched_time and later_intervention make them."""
    midpoint, timed = group == MIDPOINT, group != TOKENS
    made = []
    for operation in PAPER[group]:
        # The ordinary one is whose time the others get, in each seed.
        axis = "pretraining" if timed or operation == "ordinary" else "none"
        fixed = {"name": f"{group}: {operation}", "axis": axis, "row": False, "reference": None}
        if operation == "from initialisation":
            made.append(
                Arm(
                    **{"more": 0.5, "settings": {**PRUNED, "freeze_at": 0}, "scaled": HELD_OUT, **fixed},
                    **{"heads": f"{group}: mean 25%", "smoke": False},
                )
            )
            continue
        heads = f"{group}: {operation.replace('pruning', 'mean')}" if operation.startswith("pruning") else None
        settings, small = ({"match_clock": "scaled"}, {}) if midpoint else (LATER, SMALL)
        # As recipe matched_time has them.
        strict = {"freeze.strict": True} if midpoint and operation.startswith("mean") else {}
        paper = {"paper": {**HELD_OUT["paper"], **strict}} if operation != "ordinary" else {}
        where = {"parent": "reference"} if midpoint else {"parent": "full run", "at": 1.0, "more": 0.5}
        match = "reference" if midpoint else f"{TOKENS}: ordinary"
        made.append(
            Arm(
                **{**fixed, **where, "settings": {**settings, **_settings(operation)}, "heads": heads},
                **{
                    "scaled": {**small, **paper},
                    "match": match if timed else None,
                    "smoke": group == TOKENS and operation != "gate-Taylor 25%",
                },
            )
        )
    return tuple(made)


def _finetuned(group: str, title: str) -> tuple[Arm, ...]:
    task, small = TASKS[title]
    ordinary, made = f"{group}: {title} ordinary", []
    for operation, numbers in PAPER[group].items():
        first = operation == "ordinary"
        made.append(
            Arm(
                **{"name": f"{group}: {title} {operation}", "task": task, "axis": AXES[group]},
                **{"parent": f"{TIME if group == SEEDS else group}: {operation}", "like": None if first else ordinary},
                **{"reference": None if first else ordinary, "smoke": (group, operation) in SMOKE and title == "SST-2"},
                scaled={"small": {"batch_size": 32, **small}, "smoke": {"batch_size": 4, "epochs": 1}} if first else {},
                paper={"accuracy": numbers[list(TASKS).index(title)]},
            )
        )
    return tuple(made)


RECIPE = Recipe(
    title="Finetuning of replaced and pruned checkpoints",
    source=Source("tab:pruning-downstream", "124M at 4K; each group says which seed varies, mean ± SE of three"),
    arms=(
        Arm(name="reference", reference=None, row=False, smoke=False),
        Arm(name="full run", reference=None, row=False),
        *(arm for group in (MIDPOINT, TOKENS, TIME) for arm in _parents(group)),
        *(arm for group in PAPER for title in TASKS for arm in _finetuned(group, title)),
    ),
    also=("tab:pruning-additional-training",),
    columns=("accuracy", "points", "seeds", "updates", "heads"),
    notes=(
        "Midpoint at matched time: three pretraining seeds, one finetuning seed. Later at matched tokens: one of each. "
        "Later at matched time: one pretraining seed, three finetuning seeds; and the other way round by pretraining "
        "seed. The axes are never pooled.",
        "In each group and task the ordinary model chooses the epochs; the others are finetuned like it.",
    ),
)
