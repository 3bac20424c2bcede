"""The page about a folder of a model of transformers: its heads, how their patterns fit, and what freezing cost.

Folders tell more or less: `saf freeze` leaves the scores and patterns of its event (`events.jsonl`), a `Trainer` what
the configuration keeps of each event. What freezing cost is told by two evaluations, of the model before and after: of
perplexity, of zero-shot tasks, or of both.
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from saf.adapters.description import STATE
from saf.errors import InputError
from saf.evaluate import perplexity, zero_shot
from saf.evaluate.compare import compare_evaluations
from saf.evaluate.evaluated import both_have, nothing_to_compare, pair_words
from saf.evaluate.zero_shot import compare_zero_shot, zero_shot_comparison_tables
from saf.heads import EDITED
from saf.inspection import inspect
from saf.records.events import heads_in_words, read_events
from saf.records.files import read_json, write_atomically
from saf.records.quantities import number, signed
from saf.records.run import RecordedRun
from saf.records.table import Cell, Table, html_of
from saf.report.page import key_figure, page, section, shares_of, text, whiskers
from saf.report.provenance import device_and_versions, source
from saf.report.runs.page import HEADS, SCRIPTS, costs
from saf.report.runs.page_data import freeze_data

_COLOUR = "frozen"


def write_model_report(folder: Path, evaluations: Sequence[Path], out: Path) -> Path:
    """Write one self-contained page about a model's folder and return its path; `out` is a file or a folder.

    `evaluations` are none, or two that `saf evaluate --out` wrote: of the model before, and of this folder.

    Raises:
        InputError: No head of the model is frozen or pruned, or the evaluations are not two, the second one of it.
        CompareError: The evaluations are not of the same windows, questions and precision, or of models that differ in
            more than the freezing.
        CheckpointError: A file of the folder is damaged.
    """
    found = inspect(folder)
    if not found["frozen"] + found["pruned"]:
        raise InputError(f"{folder} is an ordinary model, none of its heads is frozen; name what `saf freeze` wrote")
    if len(evaluations) not in (0, 2):
        raise InputError(
            f"a page about a model takes two evaluations, of the model before and after; got {len(evaluations)}"
        )
    change = compare_evaluations(*evaluations) if both_have(evaluations, perplexity.WRITTEN[0]) else None
    answered = compare_zero_shot(*evaluations) if both_have(evaluations, zero_shot.WRITTEN[0]) else None
    if evaluations and not (change or answered):
        raise nothing_to_compare(evaluations)
    for told in filter(None, (change, answered)):
        if told["provenance"]["checkpoints"]["frozen"] != found["hash"]:
            raise InputError(
                f"{evaluations[1]} is not an evaluation of {folder} as it is; name the ordinary model's evaluation "
                f"first, and make the other one by `saf evaluate {folder}`"
            )
    target = out if out.suffix == ".html" else out / "report.html"
    return write_atomically(target, _render(folder, found, change, answered).encode())


def _render(folder: Path, found: dict[str, Any], change: dict[str, Any] | None, answered: dict[str, Any] | None) -> str:
    """Return the page as text."""
    edited, total = found["frozen"] + found["pruned"], found["num_heads"]
    events = (read_json(folder / "config.json").get("saf") or {}).get("events", [])
    freeze = _freeze(folder, found)
    kinds = heads_in_words({kind: len(found[kind]) for kind in EDITED})
    cost = f": perplexity <em>{signed(change['delta_ppl_percent'])}</em>" if change else ""
    parts = [section("heads", "Which heads, and into what", _heads(folder, freeze)), _fits(found, events)]
    parts.append(section("quality", "What freezing cost", _quality(folder, events, change)))
    if answered:
        parts.append(section("tasks", "What it answers", "".join(map(html_of, zero_shot_comparison_tables(answered)))))
    if freeze and freeze["seconds"]:
        parts.append(section("costs", "What it took", costs([freeze], "freezing")))
    parts.append(section("provenance", "Provenance", _provenance(folder, found, change)))
    return page(
        kicker=folder.name,
        headline=f"{kinds} of {total} attention heads of a {text(found['architecture'])}{cost}",
        dek=f"A model of transformers, in {text(folder)}.",
        warning="",
        key_figures=_key_figures(len(edited) / total, kinds, total, events, change),
        sections="\n".join(parts),
        footer="",
        data={"arms": [], "gaps": [], "freezes": [freeze] if freeze else []},
        scripts=SCRIPTS,
    )


def _freeze(folder: Path, found: dict[str, Any]) -> dict[str, Any] | None:
    """Return what the map of heads draws; None unless the folder has events of these very heads."""
    run = RecordedRun(folder=folder, config={}, events=read_events(folder))
    same = run.frozen_heads == sorted(found["frozen"]) and run.pruned_heads == sorted(found["pruned"])
    return freeze_data(run, folder.name, _COLOUR) if same and run.events else None


def _heads(folder: Path, freeze: dict[str, Any] | None) -> str:
    """Return the map of heads: one to choose heads in, where their scores are known, and one of letters."""
    rows = []
    for place, layer in enumerate(read_json(folder / STATE)["layers"]):
        marks = {head: mark for kind, mark in (("frozen", "F"), ("pruned", "P")) for head in layer.get(kind, ())}
        rows.append(f"layer {place:3d}  {''.join(marks.get(head, '.') for head in range(layer['num_heads']))}")
    letters = f"<pre>{escape(chr(10).join(rows))}</pre>"
    told = "<p>A row a layer, a letter a head: <code>.</code> live, <code>F</code> frozen, <code>P</code> pruned.</p>"
    return f"{HEADS}<noscript>{told}{letters}</noscript>" if freeze else told + letters


def _fits(found: dict[str, Any], events: Sequence[dict[str, Any]]) -> str:
    """Return a table of the heads by layer, with the fits that the configuration tells of; nothing where none froze."""
    if not found["frozen"]:
        return ""
    kls = {(layer, head): kl for event in events for layer, head, kl in event["fit_kl"]}
    rows = []
    for layer, patterns in zip(sorted({layer for layer, _ in found["frozen"]}), found["patterns"], strict=True):
        heads = [head for at, head in found["frozen"] if at == layer]
        known = [kls[layer, head] for head in heads if (layer, head) in kls]
        kinds = ", ".join(f"{count} {kind}" for kind, count in patterns["kinds"].items())
        fits = [number(value, 3) if known else None for value in (median(known or [0]), max(known, default=0))]
        rows.append([str(layer), " ".join(map(str, heads)), kinds, patterns["length"], *fits])
    columns = ("layer", "heads", "patterns", "positions", "KL of the fits, nats, median", "at most")
    return section("fits", "How the patterns fit", Table.of("Fits", columns, rows).used().html())


def _quality(folder: Path, events: Sequence[dict[str, Any]], change: dict[str, Any] | None) -> str:
    """Return what is known of the loss before and after: two evaluations, and held-out losses around events."""
    parts = []
    if change:
        low, high = change["ci95"]
        facts = {
            "perplexity before": f"{change['ppl_ordinary']:.4f}",
            "perplexity after": f"{change['ppl_frozen']:.4f}",
            "change": f"{signed(change['delta_ppl_percent'], 3)} (95% interval {signed(low, 3, '')} to "
            f"{signed(high, 3, '')})",
            "paired windows": f"{change['windows']:,}",
        }
        parts.append(Table.facts("The same held-out windows", facts, pair_words(change)).html())
    rows = [
        [
            event.get("update"),
            len(event["heads"]),
            event["kind"],
            f"{event['loss_before']:.4f} → {event['loss_after']:.4f}",
        ]
        for event in events
        if event.get("loss_before") is not None
    ]
    if rows:
        columns = ("after update", "heads", "", "held-out loss, nats")
        parts.append(Table.of("Around each event", columns, rows).used().html())
    if not change:
        parts.append(
            f"<p>What it cost in perplexity is not known here: <code>saf evaluate</code> the model before and "
            f"{text(folder.name)} with <code>--out</code>, then name both folders after this one.</p>"
        )
    return "".join(parts)


def _key_figures(
    share: float, kinds: str, total: int, events: Sequence[dict[str, Any]], change: dict[str, Any] | None
) -> list[str]:
    """Return the share of heads, the change in perplexity, and the fits."""
    words = f"{100 * share:.0f}% of the heads"
    figures = [key_figure("Heads", f"{100 * share:.0f}%", f"{kinds} of {total}", shares_of([(share, _COLOUR)], words))]
    if change:
        low, high = change["ci95"]
        value, label = change["delta_ppl_percent"], "change in perplexity with its interval"
        drawing = whiskers([(value, low, high, _COLOUR)], label=label)
        note = f"95% interval {signed(low, 2)} to {signed(high, 2)}, {change['windows']:,} paired windows"
        figures.append(key_figure("Perplexity", signed(value), note, drawing))
    if kls := [kl for event in events for *_, kl in event["fit_kl"]]:
        note = f"nats, the median; {number(max(kls), 3)} at most"
        figures.append(key_figure("KL of the fits", number(median(kls), 3), note))
    return figures


def _provenance(folder: Path, found: dict[str, Any], change: dict[str, Any] | None) -> str:
    """Return hashes, device, versions and command, as far as the folder tells."""
    recorded = folder / "freezing.json"
    origin = read_json(recorded)["provenance"] if recorded.is_file() else {}
    facts: dict[str, Any] = {"model": Cell.code_of(found["hash"])}
    for name, values in (("checkpoints", " checkpoint"), ("data", " data")):
        facts |= {role + values: Cell.code_of(value) for role, value in (origin.get(name) or {}).items()}
    if change:
        facts |= {f"evaluated {name}": Cell.code_of(change[name]) for name in ("ordinary", "frozen")}
    facts |= {"measured on": device_and_versions(origin), "by": source(origin)}
    if origin.get("command"):
        facts["command"] = Cell.code_of(origin["command"])
    return Table.of("Where this comes from", ("", "value"), [[name, value] for name, value in facts.items()]).html()
