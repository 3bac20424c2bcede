"""The page about training runs, or about a frozen Hugging Face model: one HTML file that needs nothing but itself."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from saf.errors import InputError
from saf.evaluate.compare import compare_folders, free_heads_bound, speed_caveat, was_busy
from saf.evaluate.compare_tables import (
    ArmComparison,
    arm_colours,
    arm_names,
    arms_table,
    compare_all,
    model_notes,
    pair_tables,
)
from saf.evaluate.recall import recall_tables
from saf.freeze_report import worst_layer_words
from saf.inspection import inspect
from saf.models.description import STATE
from saf.records.events import read_events
from saf.records.files import read_json, write_atomically
from saf.records.run import Kind, RecordedRun, expect
from saf.records.table import MISSING, Table, byte_size, change_percent, number, plain, seconds, signed
from saf.report import figures


def write_report(paths: Sequence[Path | str], out: Path | str, *, picture: Path | None = None) -> Path:
    """Write `report.html` and return its path; `out` is the file or its folder.

    `paths` are run folders, the first ordinary one the baseline of all others; or a folder of a Hugging Face model,
    then optionally the two folders that `saf evaluate --out` wrote of the model before and after. `picture` is an
    .svg file to write the head map and the curves to, too.

    Raises InputError for a path that is none of these, CompareError for evaluations that are no pair.
    """
    if not paths:
        raise InputError("a report needs at least one run folder")
    first, *others = map(Path, paths)
    tables: list[Table] = []
    if expect(first, Kind.RUN, Kind.TRANSFORMERS) is Kind.TRANSFORMERS:
        runs, comparisons, tables = _model(first, others)
        names = [first.name]
    else:
        runs = [RecordedRun.open(path) for path in paths]
        names = arm_names(runs)
        comparisons = compare_all(runs, names)
    target = Path(out) if Path(out).suffix == ".html" else Path(out) / "report.html"
    page = _render(runs, names, comparisons, tables)
    if picture is not None:
        figures.write_picture(picture, runs, names, arm_colours(runs))
    return write_atomically(target, page.encode())


def _render(
    runs: Sequence[RecordedRun], names: Sequence[str], comparisons: Sequence[ArmComparison], tables: Sequence[Table]
) -> str:
    finalize = lambda value: plain(value) if isinstance(value, str) and not hasattr(value, "__html__") else value  # noqa: E731
    template = files("saf.report").joinpath("page.html").read_text(encoding="utf-8")
    colours = dict(zip(names, arm_colours(runs), strict=True))
    trained = [(run, name) for run, name in zip(runs, names, strict=True) if run.metrics]
    pairs = {each.name: (each.ordinary, each.frozen) for each in comparisons if each.ordinary.metrics}
    shown = [run for run, _ in trained], [name for _, name in trained], [colours[name] for _, name in trained]
    curves = [figures.loss(*shown)] if trained else []
    curves += [figures.gap(pairs, colours)] if pairs else []
    edited = [(run, name) for run, name in zip(runs, names, strict=True) if run.edited_heads]
    return (
        Environment(autoescape=True, finalize=finalize)
        .from_string(template)
        .render(
            light=Markup(figures.variables(0)),
            dark=Markup(figures.variables(1)),
            names=names,
            colours=colours,
            headline=headline(runs, comparisons),
            warnings=list(_warnings(comparisons)),
            tiles=_tiles(runs, comparisons, colours),
            maps=[_map(run, name, number, several=len(edited) > 1) for number, (run, name) in enumerate(edited)],
            curves=[Markup(picture) for picture in curves if picture],
            tables=[*tables, *_tables(runs, names, comparisons)],
            provenance=_provenance(runs, names),
        )
    )


def headline(runs: Sequence[RecordedRun], comparisons: Sequence[ArmComparison]) -> str:
    """Return the verdict in one sentence: what was done to heads, its cost in perplexity, and its speed if clear."""
    done = [(each.frozen, each.perplexity) for each in comparisons if each.perplexity]
    if not done:
        run = next((run for run in runs if run.edited_heads), runs[0])
        result = run.result or {}
        heads = f"{run.heads_in_words} of {run.num_heads} attention heads: " if run.edited_heads else ""
        after = f" after {number(result.get('updates') or len(run.metrics))} updates" if run.metrics else ""
        if result.get("accuracy") is not None:
            return f"{heads}accuracy {100 * result['accuracy']:.2f}%{after}"
        ppl = result.get("report_perplexity")
        reached = f"held-out perplexity {number(ppl)}{after}" if ppl else f"training,{after}"
        return heads + reached if run.metrics else heads.removesuffix(": ")
    arms = []
    for run, record in done:
        low, high = record["ci95"]
        uncertain = ", less than its uncertainty" if low <= 0 <= high else ""
        fast = "" if speed_caveat(record) else f", updates {record['update_time_ratio']:.2f}× as fast"
        of = f" of {run.num_heads} attention heads" * (run is done[0][0])
        arms.append(f"{run.heads_in_words}{of}: perplexity {signed(record['delta_ppl_percent'])}{uncertain}{fast}")
    return "; ".join(arms)


def _warnings(comparisons: Sequence[ArmComparison]) -> Iterator[str]:
    for each in comparisons:
        if each.reason:
            yield f"{each.name} could not be compared: {each.reason}"
        for line in (each.record or {}).get("differences", ()):
            yield f"{each.name} differs in more than the freezing: {line}"


@dataclass(frozen=True)
class _Tile:
    """A key figure: the value of each arm with its colour, and a line below."""

    name: str
    values: list[tuple[str, str]]
    note: str


def _tiles(
    runs: Sequence[RecordedRun], comparisons: Sequence[ArmComparison], colours: Mapping[str, str]
) -> list[_Tile]:
    arms = [(each.perplexity, colours.get(each.name, "frozen")) for each in comparisons if each.perplexity]
    if not arms:
        return list(_own_tiles(next((run for run in runs if run.edited_heads), runs[0])))
    tiles = [_perplexity_tile(arms)]
    tiles += [_speed_tile(timed)] if (timed := [arm for arm in arms if arm[0].get("update_time_ratio")]) else []
    changes = [
        (change_percent(one.get("peak_memory_ordinary"), one.get("peak_memory_frozen")), css) for one, css in arms
    ]
    if all(change is not None for change, _ in changes):
        peaks = [arms[0][0]["peak_memory_ordinary"], *(record["peak_memory_frozen"] for record, _ in arms)]
        values = [(signed(change, 1), css) for change, css in changes]
        tiles.append(_Tile("Peak memory", values, f"{' → '.join(map(byte_size, peaks))} during an update"))
    edited = [(run, css) for run, css in zip(runs, colours.values(), strict=True) if run.edited_heads]
    shares = [(f"{100 * len(run.edited_heads) / run.num_heads:.0f}%", css) for run, css in edited]
    counts = ", ".join(f"{run.heads_in_words} of {run.num_heads}" for run, _ in edited)
    return [*tiles, _Tile("Heads", shares, counts)]


def _perplexity_tile(arms: Sequence[tuple[dict[str, Any], str]]) -> _Tile:
    intervals = ", ".join(f"{signed(low)} to {signed(high)}" for low, high in (record["ci95"] for record, _ in arms))
    steps = [arms[0][0]["ppl_ordinary"], *(record["ppl_frozen"] for record, _ in arms)]
    went = " → ".join(f"{step:.3f}" for step in steps)
    note = f"95% interval {intervals}; {went} over {arms[0][0]['windows']:,} windows"
    return _Tile("Perplexity", [(signed(record["delta_ppl_percent"]), css) for record, css in arms], note)


def _speed_tile(arms: Sequence[tuple[dict[str, Any], str]]) -> _Tile:
    """Return the speedup of each arm where it is clear, else what these heads could save at most."""
    values, notes = [], []
    for record, css in arms:
        ratio, bound = record["update_time_ratio"], free_heads_bound(record["heads"], record["num_heads"])
        if not speed_caveat(record):
            values.append((f"{ratio:.2f}×", css))
            pair = record["update_seconds_ordinary"], record["update_seconds_frozen"]
            notes.append(f"{' → '.join(map(seconds, pair))}, medians of separate runs")
        else:
            values.append((f"≤ {bound:.2f}×" if bound else MISSING, css))
            why = "beyond it, so the machine was busy" if was_busy(record) else "within the runs' spread"
            notes.append(f"bound if these heads cost nothing; measured {ratio:.2f}×, {why}")
    return _Tile("Update speed", values, "; ".join(dict.fromkeys(notes)))


def _own_tiles(run: RecordedRun) -> Iterator[_Tile]:
    result = run.result or {}
    median_seconds = (result.get("update_seconds") or {}).get("median")
    facts = {
        "Accuracy": (result.get("accuracy"), lambda share: f"{100 * share:.2f}%", "held-out questions"),
        "Perplexity": (result.get("report_perplexity"), number, "held-out text"),
        "Median update": (median_seconds, seconds, f"{number(result.get('updates'))} updates"),
        "Peak memory": (result.get("peak_memory_bytes"), byte_size, "during an update"),
    }
    for name, (value, show, note) in facts.items():
        if value is not None:
            yield _Tile(name, [(show(value), "ink")], note)
    if run.edited_heads and run.num_heads:
        share = f"{100 * len(run.edited_heads) / run.num_heads:.0f}%"
        yield _Tile("Heads", [(share, "frozen")], f"{run.heads_in_words} of {run.num_heads}")


def _map(run: RecordedRun, name: str, number_of: int, *, several: bool) -> dict[str, Any]:
    freeze = run.freeze or {}
    kls = {tuple(head): kl for *head, kl in freeze.get("fit_kl", ())}
    config, event = freeze.get("config") or {}, run.newest_freeze
    facts = {
        "rate": config.get("rate"),
        "pattern": config.get("pattern"),
        "storage": config.get("storage"),
        "calibrated on": f"{freeze['num_sequences']} × {number(freeze.get('length'))} tokens"
        if freeze.get("num_sequences")
        else None,
        "KL of fits, median": f"{number(median(kls.values()), 3)} nats" if kls else None,
        "KL of fits, largest": f"{number(max(kls.values()), 3)} nats" if kls else None,
        "held-out loss, before and after": _losses(event.values) if event else None,
    }
    if costs := _event_seconds(run):
        facts["freezing took"] = seconds(sum(costs.values()))
        facts["freezing, by part"] = ", ".join(
            f"{part.replace('_', ' ')} {seconds(cost)}" for part, cost in costs.items()
        )
    rejected = freeze.get("rejected", ())
    return {
        "title": f"Heads of {name}" if several else "Heads",
        "caption": f"{run.heads_in_words} of {run.num_heads}",
        "rejected": len(rejected),
        "picture": Markup(figures.head_map(run, name=f"map-{number_of}")),
        "scores": Markup(figures.scores(run, name=f"scores-{number_of}")) if freeze else "",
        "curves": Markup(figures.curves(run, name=f"curves-{number_of}")),
        "facts": Table.facts("", facts),
        "heads": _head_table(run, kls, {tuple(head): kl for *head, kl in rejected}),
    }


def _event_seconds(run: RecordedRun) -> dict[str, float]:
    costs: dict[str, float] = {}
    for event in run.events:
        costs |= {part: costs.get(part, 0.0) + cost for part, cost in event.seconds.items()}
    return costs


def _head_table(run: RecordedRun, kls: Mapping[Any, float], rejected: Mapping[Any, float]) -> Table:
    layers, heads = figures.shape_of(run)
    freeze, entropy = run.freeze or {}, run.freeze_tensors.get("row_entropy")
    kinds = {tuple(head): kind for kind in ("frozen", "pruned") for head in getattr(run, f"{kind}_heads")}
    rows = []
    for layer in range(layers):
        for head in range(heads):
            place = (layer, head)
            score = freeze["scores"][layer][head] if freeze else None
            spread = None if entropy is None or entropy[place].isnan() else float(entropy[place])
            kl = kls.get(place, rejected.get(place))
            kind = kinds.get(place, "does not fit" if place in rejected else "live")
            rows.append([f"{layer}.{head}", kind, number(score), number(kl, 3), number(spread)])
    columns = (
        "layer.head",
        "state",
        str(freeze.get("score_name", "score")),
        "KL of the fit, nats",
        "row entropy, nats",
    )
    return Table.of("", columns, rows).used()


def _losses(event: Mapping[str, Any]) -> str | None:
    before, after = event.get("loss_before"), event.get("loss_after")
    if before is None or after is None:
        return None
    worst = f"; {worst_layer_words(event['worst_layer'])}" if event.get("worst_layer") else ""
    return f"{before:.4f} → {after:.4f} nats{worst}"


# --- tables


def _tables(runs: Sequence[RecordedRun], names: Sequence[str], comparisons: Sequence[ArmComparison]) -> Iterator[Table]:
    """Yield the table of arms, of their events where a run had several, and of answers to tasks."""
    named = list(zip(runs, names, strict=True))
    if any("train" in run.config for run in runs):
        yield arms_table(runs, names, comparisons)
    events = [[name, *_event_row(event)] for run, name in named for event in run.events]
    if any(len(run.events) > 1 for run in runs):
        columns = ("arm", "event", "after update", "heads", "controller loss", "kept", "took", "reason")
        yield Table.of("Events", columns, events)
    answered = [(run.result, name) for run, name in named if (run.result or {}).get("accuracy") is not None]
    if answered:
        columns = ("run", "accuracy ± standard error", "questions", "judged by", "text shortened")
        yield Table.of("Accuracy", columns, [[name, *_answers(result)] for result, name in answered if result])
    for run, name in named:
        if "recall" in (run.result or {}):
            yield from (replace(each, title=f"{name}: {each.title}") for each in recall_tables(run.finished_result()))
    for each in comparisons:
        if each.record and each.perplexity is None:
            yield from pair_tables(each.record)


def _event_row(event: Any) -> list[Any]:
    stands = "yes" if event.undone_by is None else f"undone by event {event.undone_by}"
    took = seconds(sum(event.seconds.values())) if event.seconds else None
    what = f"{event.number}: {event.kind}"
    return [
        what,
        number(event.update),
        len(event.heads),
        _losses(event.values),
        stands,
        took,
        event.values.get("reason"),
    ]


def _answers(result: Mapping[str, Any]) -> list[Any]:
    share, error = (f"{100 * result[part]:.2f}" for part in ("accuracy", "standard_error"))
    return [f"{share}% ± {error}", result["questions"], result["judged_by"], result["shortened"]]


def _provenance(runs: Sequence[RecordedRun], names: Sequence[str]) -> Table:
    columns = []
    for run in runs:
        entries = dict((run.result or {}).get("provenance") or {})
        for name in ("heads", "pruned"):
            entries.pop(name, None)
        flat = {}
        for key, value in entries.items():
            group = value if isinstance(value, Mapping) else {"": value}
            flat |= {f"{key} {name}".strip().replace("_", " "): each for name, each in group.items()}
        flat["evaluation windows"] = (run.evaluation or {}).get("windows_hash")
        columns.append({key: None if value is None else str(value) for key, value in flat.items()})
    keys = list(dict.fromkeys(key for column in columns for key in column))
    return Table.of("", ["", *names], [[key, *(column.get(key) for column in columns)] for key in keys])


# --- Hugging Face models


def _model(folder: Path, evaluations: Sequence[Path]) -> tuple[list[RecordedRun], list[ArmComparison], list[Table]]:
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
    change, answered = compare_folders(*evaluations) if evaluations else (None, None)
    for record in filter(None, (change, answered)):
        if record["provenance"]["checkpoints"]["frozen"] != inspected["hash"]:
            raise InputError(f"{evaluations[1]} is not an evaluation of {folder} as it is; run `saf evaluate {folder}`")
    layers = read_json(folder / STATE)["layers"]
    config = {"model": {"num_layers": len(layers), "num_heads": max(layer["num_heads"] for layer in layers)}}
    origin = read_json(folder / "freezing.json")["provenance"] if (folder / "freezing.json").is_file() else {}
    result = {"arm": "frozen" if inspected["frozen"] else "pruned", "provenance": origin | {"model": inspected["hash"]}}
    result["provenance"] |= {"heads": inspected["frozen"], "pruned": inspected["pruned"]}
    run = RecordedRun(folder=folder, config=config, result=result, events=read_events(folder))
    if run.freeze and sorted(map(tuple, run.freeze["heads"])) != sorted(map(tuple, run.edited_heads)):
        run = replace(run, events=[])  # of other heads: the model was edited again elsewhere
    tables = [_fits(inspected, (read_json(folder / "config.json").get("saf") or {}).get("events", []))]
    comparisons = []
    if change:
        low, high = change["ci95"]
        cost = f"{signed(change['delta_ppl_percent'], 3)} ({signed(low, 3, '')} to {signed(high, 3, '')})"
        facts = {"perplexity before": f"{change['ppl_ordinary']:.4f}", "after": f"{change['ppl_frozen']:.4f}"}
        facts |= {"change, 95% interval": cost, "paired windows": f"{change['windows']:,}"}
        tables.append(Table.facts("Held-out text", facts, model_notes(change)))
        timeless = dict.fromkeys(("update_time_ratio", "peak_memory_ordinary", "peak_memory_frozen"))
        comparisons.append(ArmComparison(folder.name, run, run, {**timeless, **change}))
    else:
        advice = "not known: `saf evaluate` the model before and after with --out, then name both folders"
        tables.append(Table.facts("Held-out text", {"change of perplexity": advice}))
    tables += pair_tables(answered) if answered else []
    return [run], comparisons, tables


def _fits(inspected: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> Table:
    kls = {(layer, head): kl for event in events for layer, head, kl in event["fit_kl"]}
    rows = []
    for layer, patterns in zip(sorted({layer for layer, _ in inspected["frozen"]}), inspected["patterns"], strict=True):
        heads = [head for at, head in inspected["frozen"] if at == layer]
        known = [kls[layer, head] for head in heads if (layer, head) in kls]
        kinds = ", ".join(f"{count} {kind}" for kind, count in patterns["kinds"].items())
        fits = [number(median(known), 3), number(max(known), 3)] if known else [None, None]
        rows.append([str(layer), " ".join(map(str, heads)), kinds, patterns["length"], *fits])
    columns = ("layer", "heads frozen", "patterns", "positions", "KL of the fits, nats, median", "largest")
    return Table.of("Fits", columns, rows).used()
