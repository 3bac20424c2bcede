"""Where the paper has the numbers of arms, by recipe: for each arm and column a cell or a sentence."""

from collections.abc import Callable, Iterable

from tests.paper_source import Cell, Place, Said

Places = dict[tuple[str, str], Place | tuple[Place, ...]]
"""By arm and column."""
RATES, CONTEXTS = ("25%", "50%"), ("4K", "8K", "16K")
WAYS = ("Mean + variance", "Pruning + variance")
MAIN, MATCHED_TOKENS = "tab:main-results", "tab:fixed-token-controls-main"


def _row(label: str, arm: str, row: tuple[str, ...], panel: int = 0, **columns: int) -> Places:
    """Return the places of an arm's numbers in one row of a table, by the columns of ours."""
    return {(arm, name): Cell(label, row, column, panel) for name, column in columns.items()}


def _all(rows: Iterable[Places]) -> Places:
    return {key: place for row in rows for key, place in row.items()}


def contexts() -> Places:
    found: Places = {}
    for context, size in zip(CONTEXTS, (8, 4, 2), strict=True):
        rows = {rate: (f"{context} ({size})", rate) for rate in RATES}
        for rate, row in rows.items():
            found |= _row(MAIN, f"{context} {rate}", row, perplexity=3, delta=4)
            found[f"{context} {rate}", "update"] = Cell(MAIN, row, 5, part=1)
        found |= _row(MAIN, f"{context} ordinary", rows["25%"], perplexity=2)
        found[f"{context} ordinary", "update"] = tuple(Cell(MAIN, row, 5) for row in rows.values())
    return found


def better() -> Places:
    return _all(_row(MAIN, f"the paper's recipe, {rate}", ("4K (8)", rate), delta=4) for rate in RATES)


def _controls(arm: str, row: str, columns: tuple[int, int]) -> Places:
    """The changes of both rates, which stand in one row."""
    return _all(
        _row(MATCHED_TOKENS, arm.format(rate), (row,), delta=column)
        for rate, column in zip(RATES, columns, strict=True)
    )


def fixed_token_controls() -> Places:
    full = "tab:fixed-token-controls-full"
    columns = {"perplexity": 1, "minutes": 2, "intervention": 3, "difference": 4, "time_difference": 5}
    base = {name: columns[name] for name in ("perplexity", "minutes", "intervention")}
    found = _row(full, "ordinary", ("Ordinary attention",), perplexity=1, minutes=2)
    for row, of_main in zip((*WAYS, "Mean + random"), (*WAYS, "Mean + random heads"), strict=True):
        for rate in RATES:
            has = base if row == WAYS[0] else columns
            found |= _row(full, f"{row.lower()} ({rate})", (f"{row} ({rate})",), **has)
        found |= _controls(f"{row.lower()} ({{}})", of_main, (1, 2))
    early = "mean + variance (25%, early)"
    found |= _row(full, early, ("Mean + variance (25%, early)",), **columns)
    return found | {(early, "delta"): Said("the additional early 25% setting gives {}%.")}


def matched_time() -> Places:
    full = "tab:equal-time-controls"
    columns = {"perplexity": 2, "updates": 3, "minutes": 4}
    found = _row(full, "4K ordinary", ("Ordinary attention", "0%"), **columns)
    for row in (*WAYS, "Mean + random heads"):
        name = row.lower().removesuffix(" heads")
        for rate in RATES:
            found |= _row(full, f"4K {name} ({rate})", (row, rate), **columns)
        found |= _controls(f"4K {name} ({{}})", row, (5, 6))
    exceeds = "penalty exceeds variance selection by {}"
    found["4K mean + random (25%)", "difference"] = Said(f"{exceeds} and 0.866 ± 0.154 percentage points")
    found["4K mean + random (50%)", "difference"] = Said("by 0.786 ± 0.082 and {} percentage points at 25% and 50%")
    return found


def selectors() -> Places:
    found: Places = {}
    for row in ((context, rate) for context in CONTEXTS for rate in RATES):
        for score, columns in {"variance": {"delta": 2}, "forward_kl": {"delta": 3, "difference": 4}}.items():
            found |= _row("tab:kl-continuation-selector", f"{row[0]} {score} {row[1]}", row, **columns)
    similar = "similar final perplexity to variance"
    said = {
        ("4K residual_cosine 25%", "delta"): "their final PPL increases are {}% and 0.665%",
        ("4K residual_cosine 25%", "relative"): "a residual-cosine-minus-variance PPL difference of {}%",
        ("1K qk_gradient 25%", "perplexity"): f"Q/K gradient selection gives {similar} ({{}} versus",
        ("1K variance 25%", "perplexity"): f"{similar} (26.558 versus {{}})",
        ("1K rank_sum 25%", "perplexity"): "the rank sum and gradient-veto rule increase it to {} and 26.607",
        ("1K gradient_veto 25%", "perplexity"): "rank sum and gradient-veto rule increase it to 26.627 and {}, resp",
        ("1K ordinary", "perplexity"): "training with ordinary attention gives {}.",
    }
    return found | {key: Said(sentence) for key, sentence in said.items()}


def joint_cost() -> Places:
    return {
        ("variance", "delta"): Said("their final PPL increases are 0.792% and {}%"),
        ("residual cosine", "delta"): Said("their final PPL increases are {}% and 0.665%"),
        ("residual cosine", "relative"): Said("a residual-cosine-minus-variance PPL difference of {}%"),
    }


def timing() -> Places:
    shares = ("25%", "40%", "50%", "60%", "75%", "100%")
    return _all(_row("tab:timing-main", f"at {share}", (share,), remaining=1, delta=2) for share in shares)


def schedules() -> Places:
    preset = {"one time, {}": "one replacement", "gradual, {}": "gradual, five groups"}
    rows = {
        arm.format(rate): ("Preset schedule", row, f"{rate[:2]}.00%") for arm, row in preset.items() for rate in RATES
    }
    adaptive = {f"validation budget {limit}": f"validation budget {limit}" for limit in ("1%", "2%")}
    adaptive |= {f"train loss, z = {z}": f"train-loss triggered, z={z}" for z in ("3.0", "1.5")}
    rows |= {arm: ("Adaptive schedule", row) for arm, row in adaptive.items()}
    return _all(_row("tab:schedule-details", arm, row, delta=3) for arm, row in rows.items())


def schedule_confirmation() -> Places:
    label, found = "tab:schedule-confirmation", {}
    for rate in RATES:
        found |= _row(label, f"one time, {rate}", (rate,), delta=1)
        found |= _row(label, f"train loss, up to {rate}", (rate,), delta=2, difference=3, time_ratio=4)
    return found


def trainability() -> Places:
    label, found = "tab:pattern-controls", {}
    for arm in ("frozen", "trainable"):
        row = (f"{arm.capitalize()} mean",)
        found |= _row(label, arm, row, perplexity=1, continuation=3, peak=4)
        found[arm, "update"] = Cell(label, row, 2, thousand=True)
    return found | {("trainable", "relative"): Said("relative PPL change from learning the patterns is {}%")}


def recall_patterns() -> Places:
    found: Places = {}
    for arm, column in {"ordinary": 2, "frozen": 3, "trainable": 4}.items():
        for tokens, pairs in [(512, n) for n in (8, 16, 24, 32, 48, 64)] + [(2048, 8), (4096, 8)]:
            row, name = (f"{tokens:,}", str(pairs)), f"recall {tokens} {pairs}"
            found |= _row("tab:pattern-controls", f"{arm}, recall", row, **{name: column})
    return found


def recall() -> Places:
    found: Places = {}
    few = [(512, 8), (2048, 8), (4096, 8), (512, 32)]
    shapes = {("pretraining seeds", "1,500", 0): [*few, *((512, n) for n in (16, 24, 48, 64))]}
    shapes[("task seeds", "1,500", 1)] = few
    shapes |= {(f"{n} updates after replacement", str(n), 0): few for n in (0, 50, 200, 500)}
    for arm, column in {"ordinary": 2, "mean 25%": 3, "pruning 25%": 4, "gate-Taylor 25%": 5}.items():
        for (axis, updates, panel), which in shapes.items():
            for tokens, pairs in which:
                row, name = (updates, f"{tokens:,} / {pairs}"), f"recall {tokens} {pairs}"
                found |= _row("tab:mqar-complete", f"{arm}, {axis}", row, panel, **{name: column})
    return found


def intervention_costs() -> Places:
    label = "tab:intervention-costs"
    return _all(_row(label, rate, ("124M, 4K", rate), capture=2, fit=3, intervention=4) for rate in RATES)


def one_billion() -> Places:
    label, arms = "tab:scale-up-results", {"ordinary": "Ordinary attention"}
    arms |= {"pruning + gate-Taylor (25%)": "Pruning 25% (gate-Taylor)"}
    arms |= {f"mean + variance ({rate})": f"SAF {rate}" for rate in RATES}
    found = _all(_row(label, arm, (row,), perplexity=1) for arm, row in arms.items())
    said = ("25% replacement increases perplexity by {}%", "At 50%, perplexity increases by {}%")
    for rate, sentence in zip(RATES, said, strict=True):
        arm, row = f"mean + variance ({rate})", ("1B, 8K", rate)
        found |= _row("tab:intervention-costs", arm, row, capture=2, fit=3, intervention=4)
        found[arm, "delta"] = Said(sentence)
    return found


def representation() -> Places:
    columns = {"ordinary": 1, "dense": 2, "compact": 3}
    rows = {"learned": "Absolute", "rope": "RoPE"}
    return _all(
        _row("tab:representation-details", f"{arm}, {how}", (row,), perplexity=column)
        for arm, row in rows.items()
        for how, column in columns.items()
    )


def rates_and_patterns() -> Places:
    label = "tab:representation-details"
    found = _row(label, "ordinary", ("RoPE",), perplexity=1) | _row(label, "mean 25%", ("RoPE",), perplexity=3)
    return found | _all(_row("tab:kl-continuation-selector", f"mean {rate}", ("4K", rate), delta=2) for rate in RATES)


LATER = {"ordinary": "Ordinary attention", "mean + variance": "SAF + variance"}
LATER |= {f"pruning + {score}": f"Pruning + {score}" for score in ("variance", "gate-Taylor")}


def later_intervention() -> Places:
    label = "tab:pruning-additional-training"
    found = _all(_row(label, arm, (row,), perplexity=1) for arm, row in LATER.items())
    found |= _all(_row(label, f"{arm}, matched time", (row,), perplexity=2) for arm, row in LATER.items())
    times = "for ordinary attention, SAF, variance pruning, and gate-Taylor pruning are"
    initial = "from initialisation for 7,500 updates gives PPL"
    said = {
        ("ordinary", "minutes"): f"{times} {{}}, 282.87",
        ("mean + variance", "minutes"): f"{times} 286.86, {{}}, 275.43",
        ("pruning + variance", "minutes"): f"{times} 286.86, 282.87, {{}}, and",
        ("pruning + gate-Taylor", "minutes"): f"{times} 286.86, 282.87, 275.43, and {{}} minutes",
        ("pruning from initialisation", "perplexity"): f"{initial} {{}} in seed 1337",
        ("pruning from initialisation", "minutes"): "Its {}-minute training time excludes",
        ("pruning + variance, one seed", "perplexity"): "with {} when introducing the same pruning after 5,000 updates",
    }
    return found | {key: Said(sentence) for key, sentence in said.items()}


def pruning_downstream() -> Places:
    found: Places = {}
    arms = {"ordinary": ("Ordinary attention", "0%"), "mean {}": ("Mean + variance", "{}")}
    arms["pruning {}"] = ("Pruning + variance", "{}")
    taylor, initial = ("Pruning + gate-Taylor", "25%"), ("Pruning from initialisation", "25%")
    panels = (("midpoint, time", RATES, {}), ("later, tokens", RATES[:1], {"from initialisation": (initial, 0)}))
    for panel, (name, rates, more) in enumerate((*panels, ("later, time", RATES[:1], {}))):
        rows = {
            arm.format(r): (tuple(cell.format(r) for cell in row), panel) for arm, row in arms.items() for r in rates
        }
        rows |= {"gate-Taylor 25%": (taylor, panel - 1)} if panel else {}
        for column, task in ((2, "SST-2"), (3, "BoolQ")):
            for arm, (row, at) in (rows | more).items():
                found |= _row("tab:pruning-downstream", f"{name}: {task} {arm}", row, at, accuracy=column)
    by_seed = {"ordinary": "ordinary", "mean 25%": "mean + variance"}
    by_seed |= {"pruning 25%": "pruning + variance", "gate-Taylor 25%": "pruning + gate-Taylor"}
    for column, task in ((3, "SST-2"), (4, "BoolQ")):
        for arm, later in by_seed.items():
            name, row = f"later, time, by pretraining seed: {task} {arm}", (LATER[later],)
            found |= _row("tab:pruning-additional-training", name, row, accuracy=column)
    return found


TASKS = {"SST-2": "SST-2", "BoolQ": "BoolQ", "QuALITY": "QuALITY 16K"}


def downstream() -> Places:
    label, found = "tab:downstream-details", {}
    for task, row in TASKS.items():
        found |= _row(label, f"{task} ordinary", (f"{row}, ordinary attn.",), accuracy=2)
        for rate in RATES:
            found |= _row(label, f"{task} frozen {rate}", (f"{row}, fixed {rate}",), accuracy=2, points=3)
    return found


def finetuning_schedules() -> Places:
    rows = {"one time": "One-time", "train loss": "Train-loss", "after training": "Post-training"}
    return _all(
        _row("tab:finetuning-schedules", f"{task} {arm}", (task, row), points=2, update=3, intervention=4)
        for task in ("SST-2", "BoolQ")
        for arm, row in rows.items()
    )


def scale_up_downstream() -> Places:
    label, found = "tab:scale-up-downstream", {}
    arms = {"ordinary": ("Ordinary attention",) * 2, "gate-Taylor 25%": ("Pruning 25%", "Pruning 25% (gate-Taylor)")}
    arms |= {f"frozen {rate}": (f"SAF {rate}",) * 2 for rate in RATES}
    for column, task in enumerate(TASKS, 2):
        for name, (row, of_results) in arms.items():
            arm = f"{task} {name}"
            found |= _row("tab:scale-up-results", arm, (of_results,), accuracy=column)
            found |= _row(label, arm, (task, row), update=6, **({} if name == "ordinary" else {"points": 5}))
            found[arm, "seeds"] = tuple(Cell(label, (task, row), seed) for seed in (2, 3, 4))
    return found


ARMS: dict[str, Callable[[], Places]] = {
    places.__name__: places
    for places in (
        *(better, contexts, downstream, finetuning_schedules, fixed_token_controls, intervention_costs, joint_cost),
        *(later_intervention, matched_time, pruning_downstream, rates_and_patterns, recall, recall_patterns),
        *(representation, scale_up_downstream, schedule_confirmation, schedules, selectors, timing, trainability),
    )
} | {"1b": one_billion}
