"""Recipes of models after pretraining: finetuning on questions, and associative recall."""

from collections.abc import Iterator, Mapping

from experiments.arms import CONTEXTS, DOWNSTREAM, LATER_ARMS, RECOVERY
from experiments.measurements import DATA, Measurement, Number, file_of
from experiments.paper import FINETUNING_UPDATES, Source, lines, split_words
from experiments.recipe import Figure, Recipe, Row, curves, rows
from experiments.records import RECALL, RECALL_METRICS, recall_metric

RECIPES: dict[str, Recipe] = {}
TITLES = {"sst2": "SST-2", "boolq": "BoolQ", "quality": "QuALITY"}

# --- questions

_RATES = (0.25, 0.5)
_ORDERS = (1337, 1338, 1339)
"""Seeds of the orders of examples that updates are timed in."""


def _timed_numbers(task: str, rate: float) -> list[Number]:
    """Return speedup, update time and peak memory of finetuning at a rate, with the paper's."""
    entry = {"backend": "toeplitz", "rate": rate}
    papers, title = FINETUNING_UPDATES[task, rate], f"{TITLES[task]}, {rate:.0%}"
    # name in our record, title, name in the paper's numbers, decimals
    columns = [("ratio", "speedup", "speedup", 3), ("arm_ms", "update, ms", "update", 2)]
    if rate == 0.25:
        columns.append(("baseline_ms", "ordinary update, ms", "ordinary", 2))
    path = ("memory", entry, "change_percent")
    return [
        *(
            Number(f"{title}, {words}", ("rows", {**entry, "refused": False}, name), papers[key], decimals, of="mean")
            for name, words, key, decimals in columns
        ),
        Number(f"{title}, peak, %", path, papers["memory"], 2, signed=True),
    ]


def _updates(task: str) -> Measurement:
    """Return the measurement that times finetuning updates in pairs."""
    k, settings = DOWNSTREAM[task]
    return Measurement(
        f"updates on {TITLES[task]}",
        "benchmarks.finetuning",
        (),
        {
            "task": task,
            "data": file_of(task, "train"),
            "test": file_of(task, "test"),
            "tokenizer": DATA,
            # The paper's batches at the small scale too, as only their shape matters for the time.
            "model": "124m",
            "length": CONTEXTS[k],
            **settings["paper"],
            "rates": _RATES,
            "orders": _ORDERS,
            "others": (),
            "memory": True,
            "pairs": 6,
        },
        small={"pairs": 4, "seconds": 540.0},
        smoke={"length": 32, "batch_size": 4, "orders": _ORDERS[:2], "free": False} if task == "sst2" else None,
        numbers=[number for rate in _RATES for number in _timed_numbers(task, rate)],
    )


RECIPES["downstream"] = Recipe(
    title="Finetuning",
    source=Source("tab:downstream-details", "124M, one checkpoint, mean ± SE of three finetuning seeds; GH200"),
    also=("tab:main-results", "fig:systems-across-stages"),
    rows=rows(
        """
        arm                         | label              | reference                   | accuracy     | points
        downstream-sst2-ordinary    | SST-2 ordinary     | downstream-sst2-ordinary    | 86.39 ± 0.27 |
        downstream-sst2-mean-25     | SST-2 frozen 25%   | downstream-sst2-ordinary    | 86.54 ± 0.36 | +0.15 ± 0.53
        downstream-sst2-mean-50     | SST-2 frozen 50%   | downstream-sst2-ordinary    | 86.77 ± 0.74 | +0.38 ± 1.00
        downstream-boolq-ordinary   | BoolQ ordinary     | downstream-boolq-ordinary   | 71.40 ± 0.22 |
        downstream-boolq-mean-25    | BoolQ frozen 25%   | downstream-boolq-ordinary   | 70.62 ± 0.55 | −0.77 ± 0.56
        downstream-boolq-mean-50    | BoolQ frozen 50%   | downstream-boolq-ordinary   | 70.84 ± 0.49 | −0.56 ± 0.70
        downstream-quality-ordinary | QuALITY ordinary   | downstream-quality-ordinary | 26.59 ± 0.44 |
        downstream-quality-mean-25  | QuALITY frozen 25% | downstream-quality-ordinary | 26.09 ± 0.40 | −0.50 ± 0.63
        downstream-quality-mean-50  | QuALITY frozen 50% | downstream-quality-ordinary | 26.94 ± 0.62 | +0.35 ± 0.18
        """
    ),
    metrics=split_words("accuracy seeds points update speedup peak_change updates epochs example_tokens heads"),
    measurements=tuple(map(_updates, TITLES)),
    smoke=("downstream-sst2-mean-25", "downstream-quality-ordinary"),
    notes=(
        "The number of epochs is chosen with the ordinary model, on a share of the training file, and used for the "
        "frozen ones. The speedup is the ordinary run's median update over the arm's; the runs followed one another. "
        "The paper's times, for three orders of the examples, stand beside updates timed in pairs.",
        "At the small scale SST-2 is a stratified part of 16,384 examples, and SST-2 and BoolQ have batches of 32.",
    ),
)

RECIPES["finetuning_schedules"] = Recipe(
    title="Replacement of 25% during finetuning",
    source=Source("tab:finetuning-schedules", "124M, ordinary checkpoint, mean ± SE of three finetuning seeds; GH200"),
    rows=rows(
        """
        arm                     | label                | reference             | points       | update | intervention
        during-sst2-ordinary    | SST-2 ordinary       | during-sst2-ordinary  |              |        |
        during-sst2-one-time    | SST-2 one time       | during-sst2-ordinary  | −0.19 ± 0.40 | 33.27  | 0.70
        during-sst2-train-loss  | SST-2 train loss     | during-sst2-ordinary  | −0.65 ± 0.77 | 36.15  | 45.12
        during-sst2-after       | SST-2 after training | during-sst2-ordinary  | −1.03 ± 0.24 | 30.75  | 0.71
        during-boolq-ordinary   | BoolQ ordinary       | during-boolq-ordinary |              |        |
        during-boolq-one-time   | BoolQ one time       | during-boolq-ordinary | −1.27 ± 1.29 | 40.85  | 6.18
        during-boolq-train-loss | BoolQ train loss     | during-boolq-ordinary | −0.38 ± 0.15 | 66.34  | 70.15
        during-boolq-after      | BoolQ after training | during-boolq-ordinary | −1.03 ± 0.33 | 31.44  | 6.17
        """
    ),
    metrics=("accuracy", "points", "update", "intervention", "updates", "heads"),
    smoke=("during-sst2-one-time",),
    notes=(
        "Heads are measured on the task's own training examples. The paper does not say when one time is; here it is "
        "halfway.",
    ),
)

_MODELS = {
    "ordinary": "ordinary",
    "mean-25": "mean 25%",
    "mean-50": "mean 50%",
    "pruned-25": "pruning 25%",
    "pruned-50": "pruning 50%",
    "gate-taylor-25": "gate-Taylor 25%",
    "from-start": "from initialisation",
}
# The checkpoints that are finetuned: heads replaced halfway or later, then as many tokens or seconds of pretraining.
_GROUPS = {
    "midpoint": "midpoint, time",
    "later-tokens": "later, tokens",
    "later-time": "later, time",
    "later-time-pretraining": "later, time, by pretraining seed",
}
_ACCURACIES = lines("""
    group                  | model          | sst2         | boolq
    midpoint               | ordinary       | 86.24 ± 0.93 | 71.86 ± 0.40
    midpoint               | mean-25        | 86.05 ± 0.54 | 70.52 ± 0.16
    midpoint               | mean-50        | 86.12 ± 0.54 | 70.66 ± 0.26
    midpoint               | pruned-25      | 86.85 ± 0.56 | 70.97 ± 0.66
    midpoint               | pruned-50      | 85.93 ± 0.56 | 69.92 ± 0.26
    later-tokens           | ordinary       | 88.88        | 71.74
    later-tokens           | mean-25        | 87.39        | 72.11
    later-tokens           | pruned-25      | 87.73        | 71.99
    later-tokens           | gate-taylor-25 | 87.61        | 71.87
    later-tokens           | from-start     | 89.11        | 71.25
    later-time             | ordinary       | 87.81 ± 0.28 | 71.54 ± 0.23
    later-time             | mean-25        | 87.69 ± 0.44 | 71.78 ± 0.48
    later-time             | pruned-25      | 87.31 ± 0.37 | 71.49 ± 0.31
    later-time             | gate-taylor-25 | 87.65 ± 0.23 | 71.20 ± 0.03
    later-time-pretraining | ordinary       | 87.00 ± 0.33 | 71.78 ± 0.46
    later-time-pretraining | mean-25        | 87.73 ± 0.46 | 71.27 ± 0.67
    later-time-pretraining | pruned-25      | 87.81 ± 0.34 | 71.75 ± 0.29
    later-time-pretraining | gate-taylor-25 | 86.96 ± 0.49 | 71.33 ± 0.16
""")
# The paper's differences from pruning by gate-Taylor.
_FROM_PRUNING = {
    ("later-time-pretraining", "sst2", "mean-25"): {"points_against": "+0.765 ± 0.894"},
    ("later-time-pretraining", "boolq", "mean-25"): {"points_against": "−0.051 ± 0.795"},
}


def _finetuned(group: str, task: str, model: str, accuracy: str) -> Row:
    name, from_pruning = f"{group}-{task}", model == "mean-25" and group.startswith("later")
    return Row(
        arm=f"{name}-{model}",
        label=f"{_GROUPS[group]}: {TITLES[task]} {_MODELS[model]}",
        reference=f"{name}-ordinary",
        against=f"{name}-gate-taylor-25" if from_pruning else None,
        # The paper has one seed of these, and of the others three.
        first_seed=group == "later-tokens",
        paper={"accuracy": accuracy} | _FROM_PRUNING.get((group, task, model), {}),
    )


RECIPES["pruning_downstream"] = Recipe(
    title="Finetuning of replaced and pruned checkpoints",
    source=Source("tab:pruning-downstream", "124M at 4K; each group says which seed varies, mean ± SE of three"),
    rows=tuple(
        _finetuned(group, task, line["model"], line[task])
        for group in _GROUPS
        for task in ("sst2", "boolq")
        for line in _ACCURACIES
        if line["group"] == group
    ),
    also=("tab:pruning-additional-training",),
    metrics=("accuracy", "points", "points_against", "seeds", "updates", "epochs", "heads"),
    smoke=("later-tokens-sst2-pruned-25", "later-tokens-sst2-ordinary"),
    notes=(
        "Midpoint at matched time: three pretraining seeds, one finetuning seed. Later at matched tokens: one of "
        "each. Later at matched time: one pretraining seed, three finetuning seeds; by pretraining seed: three and "
        "one. Pretraining and finetuning seeds are never pooled.",
        "In each group and task the number of epochs is chosen with the ordinary model and used for all. Differences "
        "are from pruning by gate-Taylor, in each seed.",
    ),
)


RECIPES["scale_up_downstream"] = Recipe(
    title="Finetuning of 1B",
    source=Source(
        "tab:scale-up-downstream", "1B at 8K, one pretraining seed, mean ± SE of three finetuning seeds; GH200"
    ),
    also=("tab:scale-up-results",),
    rows=rows(
        """
        arm                       | label                   | accuracy     | seeds               | points
        1b-sst2-ordinary          | SST-2 ordinary          | 91.44 ± 0.25 | 91.63, 90.94, 91.74 |
        1b-sst2-mean-25           | SST-2 frozen 25%        | 91.63 ± 0.35 | 90.94, 91.86, 92.09 | +0.19 ± 0.47
        1b-sst2-gate-taylor-25    | SST-2 gate-Taylor 25%   | 91.70 ± 0.34 | 91.06, 91.86, 92.20 | +0.27 ± 0.44
        1b-sst2-mean-50           | SST-2 frozen 50%        | 90.98 ± 0.43 | 91.28, 91.51, 90.14 | −0.46 ± 0.63
        1b-boolq-ordinary         | BoolQ ordinary          | 75.98 ± 0.24 | 75.99, 76.39, 75.57 |
        1b-boolq-mean-25          | BoolQ frozen 25%        | 75.27 ± 1.45 | 72.39, 77.03, 76.39 | −0.71 ± 1.45
        1b-boolq-gate-taylor-25   | BoolQ gate-Taylor 25%   | 75.46 ± 1.19 | 75.69, 73.30, 77.40 | −0.52 ± 1.43
        1b-boolq-mean-50          | BoolQ frozen 50%        | 75.68 ± 0.31 | 75.17, 76.24, 75.63 | −0.31 ± 0.27
        1b-quality-ordinary       | QuALITY ordinary        | 27.44 ± 1.25 | 24.98, 28.33, 29.00 |
        1b-quality-mean-25        | QuALITY frozen 25%      | 27.60 ± 0.21 | 27.71, 27.90, 27.18 | +0.16 ± 1.35
        1b-quality-gate-taylor-25 | QuALITY gate-Taylor 25% | 27.66 ± 0.71 | 26.27, 28.62, 28.09 | +0.22 ± 0.64
        1b-quality-mean-50        | QuALITY frozen 50%      | 25.12 ± 0.75 | 26.32, 23.73, 25.31 | −2.32 ± 1.85
        """,
        """
        reference           | against                   | update          | points_against | example_tokens
        1b-sst2-ordinary    |                           | 173.58 ± 0.74   |                | 25.4
        1b-sst2-ordinary    | 1b-sst2-gate-taylor-25    | 166.78 ± 2.75   | −0.08 ± 0.04   |
        1b-sst2-ordinary    |                           | 156.60 ± 0.97   |                |
        1b-sst2-ordinary    |                           | 158.36 ± 3.67   |                |
        1b-boolq-ordinary   |                           | 222.70 ± 0.32   |                | 142.8
        1b-boolq-ordinary   | 1b-boolq-gate-taylor-25   | 215.11 ± 0.39   | −0.19 ± 2.07   |
        1b-boolq-ordinary   |                           | 200.03 ± 0.74   |                |
        1b-boolq-ordinary   |                           | 196.13 ± 0.59   |                |
        1b-quality-ordinary |                           | 3504.01 ± 5.63  |                | 6,207.5
        1b-quality-ordinary | 1b-quality-gate-taylor-25 | 3267.23 ± 10.13 | −0.06 ± 0.75   |
        1b-quality-ordinary |                           | 2972.08 ± 1.10  |                |
        1b-quality-ordinary |                           | 2989.63 ± 5.40  |                |
        """,
    ),
    metrics=split_words("accuracy seeds points points_against update updates epochs example_tokens heads"),
    smoke=("1b-boolq-mean-25",),
    notes=(
        "Differences are from pruning by gate-Taylor, in each seed. The paper chose, with its ordinary models, 5, 1 "
        "and 1 epochs of SST-2, 4, 2 and 4 of BoolQ, and 5 of QuALITY.",
        "Pretraining is that of recipe 1b, which has the other half of the paper's table: perplexities. At other "
        "scales the arms are the scale's own runs at 8K.",
        "The paper's update times are means of whole runs on different allocations; ours are medians.",
    ),
)

# --- associative recall

_RECALL_MODELS = {model: _MODELS[model] for model in LATER_ARMS}


def _recall_figure(models: Mapping[str, str], learnt: str, replaced: str) -> Figure:
    """Return the figure of recall by pairs in 512 tokens, the paper's fig:mqar-generalisation.

    `models` has the label of each model's line. `learnt` and `replaced` name arms, with "{}" for the model: those that
    learnt recall with these heads, and those whose heads were replaced after learning, without further training.
    """
    ticks = {str(pairs): str(pairs) for length, pairs in RECALL if length == 512}
    panels = {"learnt with these heads": learnt, "heads replaced after learning, untrained": replaced}
    return Figure(
        name="recall",
        title="Recall in 512 tokens, %, of models that learnt 8 pairs",
        xlabel="pairs",
        panels={
            title: curves(ticks, {words: (arm.format(model), "recall 512 *") for model, words in models.items()})
            for title, arm in panels.items()
        },
    )


def _recalled(arm: str, label: str, text: str) -> Iterator[Row]:
    """Yield a row for each model, a column of the paper's table `text`; its lines are tests, tokens and pairs.

    `arm` and `label` have "{}" for the model.
    """
    tests = lines(text)
    for model in (name for name in tests[0] if name != "test"):
        quoted = {f"recall {line['test']}": line[model] for line in tests}
        yield Row(arm=arm.format(model), label=label.format(_MODELS.get(model, model)), paper=quoted)


def _recovered(text: str) -> Iterator[Row]:
    """Yield a row for each model and number of updates after replacement; NAME@0 is the first report of a run."""
    for line in lines(text):
        model, updates = line.pop("model"), line.pop("updates")
        yield Row(
            arm=f"recovery-{model}@{RECOVERY.index(int(updates))}",
            label=f"{_MODELS[model]}, {updates} updates after replacement",
            first_seed=True,
            paper={f"recall {test}": accuracy for test, accuracy in line.items()},
        )


RECIPES["recall"] = Recipe(
    title="Associative recall",
    source=Source(
        "tab:mqar-complete", "124M at 4K; each group says which seed varies, mean ± SE of three; recovery: one"
    ),
    also=("fig:mqar-generalisation",),
    rows=(
        *_recalled(
            "recall-later-{}",
            "{}, pretraining seeds",
            """
            test   | ordinary     | mean-25      | pruned-25    | gate-taylor-25
            512 8  | 99.58 ± 0.05 | 99.73 ± 0.04 | 99.72 ± 0.03 | 99.62 ± 0.06
            512 16 | 81.32 ± 3.21 | 91.08 ± 1.58 | 85.43 ± 3.07 | 80.79 ± 4.50
            512 24 | 60.56 ± 4.22 | 79.76 ± 2.72 | 66.25 ± 3.22 | 60.59 ± 6.42
            512 32 | 47.54 ± 3.87 | 70.83 ± 4.86 | 52.32 ± 2.41 | 47.95 ± 6.06
            512 48 | 34.01 ± 3.38 | 61.14 ± 7.37 | 37.70 ± 1.54 | 34.49 ± 5.42
            512 64 | 26.19 ± 2.75 | 54.42 ± 8.70 | 29.03 ± 1.42 | 26.59 ± 4.41
            2048 8 | 98.27 ± 0.30 | 97.96 ± 0.55 | 98.66 ± 0.11 | 98.65 ± 0.26
            4096 8 | 90.35 ± 0.58 | 89.67 ± 1.09 | 90.74 ± 0.36 | 91.43 ± 0.60
            """,
        ),
        *_recalled(
            "recall-later-{}-task-seeds",
            "{}, task seeds",
            """
            test   | ordinary     | mean-25      | pruned-25    | gate-taylor-25
            512 8  | 99.71 ± 0.09 | 99.76 ± 0.05 | 99.75 ± 0.05 | 99.72 ± 0.07
            512 32 | 44.55 ± 1.73 | 73.20 ± 4.26 | 52.13 ± 5.56 | 53.20 ± 5.25
            2048 8 | 98.01 ± 0.28 | 97.58 ± 0.01 | 98.87 ± 0.21 | 98.78 ± 0.19
            4096 8 | 89.67 ± 0.32 | 88.21 ± 0.28 | 91.06 ± 0.46 | 90.76 ± 0.27
            """,
        ),
        *_recovered(
            """
            model          | updates | 512 8 | 2048 8 | 4096 8 | 512 32
            ordinary       | 0       | 99.54 | 97.75  | 89.21  | 47.05
            ordinary       | 50      | 99.61 | 96.88  | 87.65  | 51.93
            ordinary       | 200     | 99.68 | 97.46  | 88.79  | 61.99
            ordinary       | 500     | 99.73 | 97.73  | 89.16  | 44.74
            mean-25        | 0       | 99.68 | 97.00  | 88.75  | 48.75
            mean-25        | 50      | 99.66 | 98.27  | 90.28  | 43.45
            mean-25        | 200     | 99.46 | 96.14  | 87.11  | 52.70
            mean-25        | 500     | 99.73 | 97.51  | 88.28  | 58.39
            pruned-25      | 0       | 99.68 | 97.71  | 89.48  | 60.83
            pruned-25      | 50      | 99.78 | 97.61  | 89.38  | 51.54
            pruned-25      | 200     | 99.83 | 98.61  | 90.48  | 56.05
            pruned-25      | 500     | 99.85 | 97.90  | 89.45  | 56.79
            gate-taylor-25 | 0       | 99.66 | 97.19  | 88.79  | 52.58
            gate-taylor-25 | 50      | 99.37 | 95.61  | 86.57  | 53.65
            gate-taylor-25 | 200     | 99.17 | 96.61  | 87.96  | 46.50
            gate-taylor-25 | 500     | 99.76 | 97.09  | 88.33  | 48.14
            """
        ),
    ),
    figures=(_recall_figure(_RECALL_MODELS, "recall-later-{}", "recovery-{}@0"),),
    metrics=(*RECALL_METRICS, *(f"{recall_metric(512, pairs)} seeds" for pairs in (24, 32, 48, 64)), "gate", "heads"),
    smoke=("recall-later-ordinary", "recovery-mean-25"),
    notes=(
        "Columns are tests, tokens / pairs; all models are trained on 8 pairs in 512 tokens. Development accuracy is "
        "the share of queries of that task that are answered correctly; the ordinary arm must reach 80%.",
        "Pretraining seeds: three checkpoints, one task seed. Task seeds: the first checkpoint, three task seeds. The "
        "two are never pooled.",
        "After replacement: heads are replaced in the ordinary model that has learnt the task, and training continues "
        "on new examples; all rows of a model are of one run.",
    ),
)

RECIPES["recall_patterns"] = Recipe(
    title="Associative recall of frozen and trainable patterns",
    source=Source(
        "tab:pattern-controls", "124M at 4K, 25% halfway, mean ± SE of three pretraining seeds, one task seed"
    ),
    rows=tuple(
        _recalled(
            "recall-patterns-{}",
            "{}, recall",
            """
            test   | ordinary     | frozen       | trainable
            512 8  | 99.58 ± 0.15 | 99.60 ± 0.06 | 99.54 ± 0.07
            512 16 | 71.78 ± 2.47 | 81.36 ± 1.58 | 78.44 ± 3.69
            512 24 | 52.71 ± 2.06 | 60.89 ± 1.61 | 59.67 ± 5.69
            512 32 | 42.13 ± 1.49 | 49.08 ± 3.04 | 47.77 ± 5.62
            512 48 | 30.00 ± 1.30 | 35.39 ± 3.74 | 34.67 ± 5.00
            512 64 | 23.53 ± 1.34 | 28.30 ± 4.18 | 27.04 ± 4.19
            2048 8 | 97.01 ± 0.46 | 97.53 ± 0.44 | 97.99 ± 0.73
            4096 8 | 88.76 ± 0.88 | 88.89 ± 0.93 | 89.65 ± 1.42
            """,
        )
    ),
    metrics=(*RECALL_METRICS, "gate", "heads"),
    notes=("Columns are tests, tokens / pairs; trainable patterns are trained on the task too, without weight decay.",),
)

# --- pretraining, tasks, and heads replaced after recall was learnt: one chain for each seed, half an hour of a GPU

_STAGE_POINTS = {"frozen 25%": ("stages-*-mean-25", "points"), "pruned 25%": ("stages-*-pruned-25", "points")}
_STAGED = {"ordinary": "ordinary", "mean-25": "frozen 25%", "pruned-25": "pruned 25%"}

RECIPES["stages"] = Recipe(
    title="From pretraining to tasks",
    source=Source("sec:across-stages", "its tables are those of recipes downstream, pruning_downstream and recall"),
    also=("tab:pruning-downstream", "tab:mqar-complete"),
    rows=(
        *(Row(arm=f"4k-{model}", label=label, reference="4k-ordinary") for model, label in _STAGED.items()),
        *(
            Row(arm=f"stages-{task}-{model}", label=f"{title}, {label}", reference=f"stages-{task}-ordinary")
            for task, title in {**TITLES, "mqar": "recall"}.items()
            for model, label in _STAGED.items()
        ),
        *(
            Row(arm=f"stages-recovery-{model}@{place}", label=f"recall, {label}, {updates} updates after replacement")
            for model, label in _STAGED.items()
            for place, updates in enumerate(RECOVERY)
        ),
    ),
    figures=(
        Figure(
            name="accuracy",
            title="Accuracy on tasks: points from ordinary attention",
            xlabel="",
            continuous=False,
            panels={"": curves({title: task for task, title in TITLES.items()}, _STAGE_POINTS)},
        ),
        _recall_figure(_STAGED, "stages-mqar-{}", "stages-recovery-{}@0"),
    ),
    metrics=("perplexity", "delta", "accuracy", "points", *RECALL_METRICS, "gate", "heads"),
    headline=("delta", "accuracy", "points", *(recall_metric(512, pairs) for pairs in (8, 32, 64))),
    smoke=("stages-sst2-pruned-25", "stages-mqar-ordinary", "stages-recovery-mean-25"),
    notes=(
        "Each seed is a whole chain of pretraining and tasks. In each task the number of epochs is chosen with the "
        "ordinary model and used for all. Pruned models lack exactly the heads that frozen models have frozen.",
        "Columns of recall are tests, tokens / pairs; rows after replacement are of the ordinary model that has "
        "learnt recall.",
    ),
)
