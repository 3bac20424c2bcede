"""The page about training runs, or about a frozen Hugging Face model: one HTML file that needs nothing but itself."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from saf.compare import (
    ArmComparison,
    arm_names,
    arms_table,
    compare_all,
    compare_folders,
    pair_tables,
    speed_caveat,
)
from saf.errors import InputError
from saf.freeze_report import budget_words, worst_layer_words
from saf.frozen_state import STATE_FILE
from saf.inspection import inspect
from saf.records.files import read_json, write_atomically
from saf.records.run import EventRecord, Kind, RecordedRun, expect, read_events
from saf.records.table import Table, number, plain, seconds, signed
from saf.report import figures
from saf.tasks.mqar import recall_tables


def write_report(paths: Sequence[Path | str], out: Path | str) -> Path:
    """Write `report.html` and return its path; `out` is the file or its folder.

    `paths` are run folders, the first ordinary one the baseline of all others; or a folder of a Hugging Face model,
    then optionally the two folders that `saf evaluate --out` wrote of the model before and after.

    Raises InputError for a path that is none of these, CompareError for evaluations that are no pair.
    """
    first, *others = map(Path, paths)
    if expect(first, Kind.RUN, Kind.TRANSFORMERS) is Kind.TRANSFORMERS:
        run, comparisons, tables = _model(first, others)
        runs, names = [run], [first.name]
    else:
        runs = [RecordedRun.open(path) for path in paths]
        names = arm_names(runs)
        comparisons = compare_all(runs, names)
        tables = list(_tables(runs, names, comparisons))
    target = Path(out) if Path(out).suffix == ".html" else Path(out) / "report.html"
    return write_atomically(target, _render(runs, names, comparisons, tables).encode())


def _render(
    runs: Sequence[RecordedRun], names: Sequence[str], comparisons: Sequence[ArmComparison], tables: Sequence[Table]
) -> str:
    def finalize(value: Any) -> Any:  # Jinja calls it for every expression of the template
        return plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    colours = dict(zip(names, figures.arm_colours(runs), strict=True))
    edited = [(run, name) for run, name in zip(runs, names, strict=True) if run.edited_heads]
    trained = [(run, name, colours[name]) for run, name in zip(runs, names, strict=True) if run.metrics]
    text = files("saf.report").joinpath("page.html").read_text(encoding="utf-8")
    # Names of folders and reasons come from outside: all is escaped but `Markup`, which this package writes itself.
    template = Environment(autoescape=True, finalize=finalize).from_string(text)
    return template.render(
        light=Markup(figures.variables(0)),
        dark=Markup(figures.variables(1)),
        names=names,
        colours=colours,
        headline=headline(runs, comparisons),
        warnings=[f"{each.name} {warning}" for each in comparisons for warning in each.warnings],
        maps=[_map(run, name, index, several=len(edited) > 1) for index, (run, name) in enumerate(edited)],
        curve=Markup(figures.loss(*zip(*trained, strict=True))) if trained else None,
        tables=tables,
        provenance=_provenance(runs, names),
    )


def headline(runs: Sequence[RecordedRun], comparisons: Sequence[ArmComparison]) -> str:
    """Return the verdict in one sentence: what was done to heads, its cost in perplexity, and its speed if clear."""
    arms = []
    for each in comparisons:
        if record := each.perplexity:
            low, high = record["ci95"]
            uncertain = ", less than its uncertainty" if low <= 0 <= high else ""
            fast = "" if speed_caveat(record) else f", updates {record['update_time_ratio']:.2f}× as fast"
            of = "" if arms else f" of {each.frozen.num_heads} attention heads"
            cost = signed(record["delta_ppl_percent"])
            arms.append(f"{each.frozen.heads_in_words}{of}: perplexity {cost}{uncertain}{fast}")
    return "; ".join(arms) or _own_headline(next((run for run in runs if run.edited_heads), runs[0]))


def _own_headline(run: RecordedRun) -> str:
    """Return what a run that is compared with none reached, or what freezing cost a model at once."""
    result, event = run.result, run.newest_freeze.values if run.newest_freeze else {}
    heads = f"{run.heads_in_words} of {run.num_heads} attention heads" if run.edited_heads else ""
    reached = ""
    if result.get("accuracy") is not None:
        reached = f"accuracy {100 * result['accuracy']:.2f}%"
    elif run.metrics:
        ppl = result.get("report_perplexity")
        reached = f"held-out perplexity {number(ppl)}" if ppl else "training,"  # no report yet, or of a task
    elif event.get("loss_after") is not None:
        reached = f"perplexity {signed(100 * math.expm1(event['loss_after'] - event['loss_before']))} at once"
        reached += budget_words(event)
    if reached and run.metrics:
        reached += f" after {number(result.get('updates') or len(run.metrics))} updates"
    return ": ".join(filter(None, [heads, reached]))


# --- heads


def _map(run: RecordedRun, name: str, index: int, *, several: bool) -> dict[str, Any]:
    freeze = run.freeze_report or {}
    kls, rejected = ({tuple(head): kl for *head, kl in freeze.get(key, ())} for key in ("fit_kl", "rejected"))
    config, event, sequences = freeze.get("config") or {}, run.newest_freeze, freeze.get("num_sequences")
    costs: Counter[str] = Counter()
    for each in run.events:
        costs.update(each.seconds)
    settings = ("score", "rate") if config.get("operation") == "prune" else ("score", "rate", "pattern", "storage")
    facts = {setting: config.get(setting) for setting in settings}
    if sequences:
        facts["calibrated on"] = f"{sequences} × {number(freeze.get('length'))} tokens"
    if kls:
        largest = number(max(kls.values()), 3)
        facts["KL of fits"] = f"median {number(median(kls.values()), 3)}, at most {largest} nats"
    if event:
        facts["held-out loss, before and after"] = _losses(event)
    if costs:
        parts = ", ".join(f"{part.replace('_', ' ')} {seconds(cost)}" for part, cost in costs.items())
        facts["freezing took"] = f"{seconds(sum(costs.values()))}: {parts}"
    return {
        "title": f"Heads of {name}" if several else "Heads",
        "caption": f"{run.heads_in_words} of {run.num_heads}",
        "frozen": len(run.frozen_heads),
        "pruned": len(run.pruned_heads),
        "rejected": len(rejected),
        "picture": Markup(figures.head_map(run, name=f"map-{index}")),
        "facts": Table.facts("", facts),
        "heads": _head_table(run, kls, rejected),
    }


def _head_table(run: RecordedRun, kls: Mapping[Any, float], rejected: Mapping[Any, float]) -> Table:
    layers, heads = figures.shape_of(run)
    freeze, entropies = run.freeze_report or {}, run.freeze_tensors.get("row_entropy")
    states = dict.fromkeys(rejected, "does not fit")
    states |= dict.fromkeys(map(tuple, run.frozen_heads), "frozen")
    states |= dict.fromkeys(map(tuple, run.pruned_heads), "pruned")
    rows = []
    for layer, head in product(range(layers), range(heads)):
        score = freeze["scores"][layer][head] if freeze else None
        kl = kls.get((layer, head), rejected.get((layer, head)))
        # NaN for heads that were frozen before this event, and so were not measured.
        entropy = None if entropies is None or entropies[layer, head].isnan() else float(entropies[layer, head])
        state = states.get((layer, head), "live")
        rows.append([f"{layer}.{head}", state, number(score), number(kl, 3), number(entropy)])
    score = str(freeze.get("score_name", "score"))
    return Table.of("", ("layer.head", "state", score, "KL of the fit, nats", "row entropy, nats"), rows).used()


def _losses(event: EventRecord) -> str | None:
    before, after, worst = (event.values.get(name) for name in ("loss_before", "loss_after", "worst_layer"))
    if before is None or after is None:
        return None
    return f"{before:.4f} → {after:.4f} nats" + (f"; {worst_layer_words(worst)}" if worst else "")


# --- tables


def _tables(runs: Sequence[RecordedRun], names: Sequence[str], comparisons: Sequence[ArmComparison]) -> Iterator[Table]:
    named = list(zip(runs, names, strict=True))
    yield arms_table(runs, names, comparisons)
    if any(len(run.events) > 1 for run in runs):
        columns = ("arm", "event", "after update", "heads", "controller loss", "kept", "took", "reason")
        yield Table.of("Events", columns, [[name, *_event_row(event)] for run, name in named for event in run.events])
    answers = []
    for run, name in named:
        if (accuracy := run.result.get("accuracy")) is not None:
            row = [name, f"{100 * accuracy:.2f}% ± {100 * run.result['standard_error']:.2f}"]
            answers.append(row + [run.result[column] for column in ("questions", "judged_by", "shortened")])
    if answers:
        columns = ("run", "accuracy ± standard error", "questions", "judged by", "text shortened")
        yield Table.of("Accuracy", columns, answers)
    for run, name in named:
        if "recall" in run.result:
            yield from (replace(each, title=f"{name}: {each.title}") for each in recall_tables(run.finished_result()))
    for each in comparisons:
        # Changes of perplexity are in the table of arms; changes of accuracy have tables of their own.
        if each.record and each.perplexity is None:
            yield from pair_tables(each.record)


def _event_row(event: EventRecord) -> list[Any]:
    stands = "yes" if event.undone_by is None else f"undone by event {event.undone_by}"
    took = seconds(sum(event.seconds.values())) if event.seconds else None
    title, update = f"{event.number}: {event.kind}", number(event.update)
    return [title, update, len(event.heads), _losses(event), stands, took, event.values.get("reason")]


def _provenance(runs: Sequence[RecordedRun], names: Sequence[str]) -> Table:
    columns = []
    for run in runs:
        flat: dict[str, Any] = {}
        for key, value in dict(run.result.get("provenance") or {}).items():
            if key not in ("heads", "pruned"):  # the maps show them
                group = value if isinstance(value, Mapping) else {"": value}
                flat |= {f"{key} {name}".strip().replace("_", " "): each for name, each in group.items()}
        flat["evaluation windows"] = run.evaluation.get("windows_hash")
        columns.append({key: None if value is None else str(value) for key, value in flat.items()})
    keys = list(dict.fromkeys(key for column in columns for key in column))
    return Table.of("", ["", *names], [[key, *(column.get(key) for column in columns)] for key in keys])


# --- Hugging Face models


def _model(folder: Path, evaluations: Sequence[Path]) -> tuple[RecordedRun, list[ArmComparison], list[Table]]:
    """Return a Hugging Face model as a run without training, its comparison, and tables of what is known of it.

    Raises:
        InputError: No head is frozen or pruned, or the evaluations are not two, the second one of this model.
        CompareError: The evaluations are of different text, questions or precision, or of unrelated models.
    """
    inspected = inspect(folder)
    if not inspected["frozen"] + inspected["pruned"]:
        raise InputError(f"{folder} is an ordinary model, none of its heads is frozen; name what `saf freeze` wrote")
    for path in evaluations:
        expect(path, Kind.EVALUATION)
    if len(evaluations) not in (0, 2):
        raise InputError(f"expected no evaluations, or two: of the model before and after; got {len(evaluations)}")
    run = _as_run(folder, inspected)
    if not evaluations:
        facts = {"change": "not known: `saf evaluate` the model before and after with --out, then name both folders"}
        return run, [], [Table.facts("Held-out text", facts)]
    change, answered = compare_folders(*evaluations)
    for record in filter(None, (change, answered)):
        if record["provenance"]["checkpoints"]["frozen"] != inspected["hash"]:
            raise InputError(f"{evaluations[1]} is not an evaluation of {folder} as it is; run `saf evaluate {folder}`")
    tables = [table for record in (change, answered) if record for table in pair_tables(record)]
    if change is None:
        return run, [], tables
    # The table of arms reads times and memory of updates, which an evaluation has not.
    timeless = dict.fromkeys(("update_time_ratio", "peak_memory_ordinary", "peak_memory_frozen"))
    return run, [ArmComparison(folder.name, run, run, {**timeless, **change})], tables


def _as_run(folder: Path, inspected: Mapping[str, Any]) -> RecordedRun:
    layers = read_json(folder / STATE_FILE)["layers"]
    config = {"model": {"num_layers": len(layers), "num_heads": max(layer["num_heads"] for layer in layers)}}
    origin = read_json(folder / "freezing.json")["provenance"] if (folder / "freezing.json").is_file() else {}
    heads = {"heads": inspected["frozen"], "pruned": inspected["pruned"]}
    result: dict[str, Any] = {"arm": "frozen" if inspected["frozen"] else "pruned"}
    result["provenance"] = {**origin, "model": inspected["hash"], **heads}
    run = RecordedRun(folder=folder, config=config, result=result, events=read_events(folder))
    if run.freeze_report and sorted(map(tuple, run.freeze_report["heads"])) != sorted(map(tuple, run.edited_heads)):
        return replace(run, events=[])  # events of other heads: the model was edited again elsewhere
    return run
