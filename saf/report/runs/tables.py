"""Tables of training runs: the arms of one folder beside one another and the paper."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from saf.records import paper
from saf.records.paper import Quoted, footnotes
from saf.records.quantities import MISSING, change_percent, gibibytes, number, seconds, signed
from saf.records.run import RecordedRun
from saf.records.table import Table
from saf.report.provenance import device_and_versions, link, source
from saf.report.runs.comparison import Comparison, arm_names, compare_all


def training(folder: Path, runs: Sequence[RecordedRun], beside: Path) -> str:
    """Return Markdown about the runs of one folder, the ordinary arm first."""
    runs = sorted(runs, key=lambda run: (len(run.frozen_heads), run.folder.name))
    names = arm_names(runs)
    comparisons = compare_all(runs, names)
    by_name = {comparison.name: comparison for comparison in comparisons}
    quoted: list[Quoted | None] = []
    rows = [_cells(run, name, by_name.get(name), quoted) for run, name in zip(runs, names, strict=True)]
    parts = [_conditions(folder, runs, beside), Table.of("", _HEAD, rows).used(keep=["paper's change"]).markdown()]
    parts.append("\n".join(f"- {note}" for note in [*_notes(comparisons), *_paper_notes(quoted)]))
    parts.append("\n".join(["```sh", *dict.fromkeys(_command(run) for run in runs), "```"]))
    return "\n\n".join(parts)


_HEAD = ["arm", "heads frozen", "loss, nats", "perplexity", "change, 95% interval", "paper's change"]
_HEAD += ["median update", "peak memory", "paper's memory", "freezing took", "paper's freezing"]


def _cells(run: RecordedRun, name: str, comparison: Comparison | None, quoted: list[Quoted | None]) -> list[str]:
    result, record = run.result or {}, comparison.record if comparison else None
    model, length, sequences = _shape(run)
    rate = len(run.frozen_heads) / run.num_heads if run.num_heads else 0.0
    told = [
        paper.perplexity(model, length, rate),
        paper.update_memory((model or "", length or 0, sequences or 0), rate),
        paper.intervention(model, length, rate, sequences=(run.freeze or {}).get("num_sequences")),
    ]
    quoted += told
    paper_change, paper_memory, paper_seconds = (MISSING if each is None else each.text for each in told)
    event = (result.get("intervention") or {}).get("seconds") or {}
    loss, perplexity = result.get("report_loss"), result.get("report_perplexity")
    return [
        name,
        f"{len(run.frozen_heads)} of {run.num_heads}",
        MISSING if loss is None else f"{loss:.4f}",
        MISSING if perplexity is None else f"{perplexity:.3f}",
        _change(record),
        paper_change,
        _update(result, record),
        _memory(comparison, result),
        paper_memory,
        seconds(sum(event.values())) if event else MISSING,
        paper_seconds,
    ]


def _change(record: dict[str, Any] | None) -> str:
    if record is None:
        return MISSING
    low, high = record["ci95"]
    return f"{signed(record['delta_ppl_percent'])} ({signed(low)} to {signed(high)})"


def _update(result: dict[str, Any], record: dict[str, Any] | None) -> str:
    median = (result.get("update_seconds") or {}).get("median")
    ratio = (record or {}).get("update_time_ratio")
    return seconds(median) + (f" ({ratio:.3f}×)" if ratio else "")


def _memory(comparison: Comparison | None, result: dict[str, Any]) -> str:
    peak = result.get("peak_memory_bytes")
    if comparison is None or comparison.record is None:
        return gibibytes(peak)
    change = change_percent(comparison.record["peak_memory_ordinary"], peak)
    return gibibytes(peak) + (f" ({signed(change)})" if change is not None else "")


def _shape(run: RecordedRun) -> tuple[str | None, int | None, int | None]:
    settings, train = run.config.get("settings") or {}, run.config.get("train") or {}
    return settings.get("model"), train.get("length"), train.get("batch_size")


def _conditions(folder: Path, runs: Sequence[RecordedRun], beside: Path) -> str:
    origins = [(run.result or {}).get("provenance") or {} for run in runs]
    machines = "; ".join(dict.fromkeys(device_and_versions(each) for each in origins))
    codes = "; ".join(dict.fromkeys(source(each) for each in origins))
    train = runs[0].config.get("train") or {}
    tokens = (runs[0].result or {}).get("tokens")
    compiled = None if train.get("compile") is None else "compiled" if train["compile"] else "not compiled"
    words = [
        f"{number(train.get('updates'))} updates" + (f", {tokens / 1e6:,.1f}M tokens" if tokens else ""),
        f"{train.get('length'):,} tokens × {train.get('batch_size')} sequences" if train.get("length") else "",
        *filter(None, [compiled, train.get("precision")]),
    ]
    return f"{link(folder, beside)}: {machines}; {codes}. {', '.join(filter(None, words))}."


def _notes(comparisons: Sequence[Comparison]) -> list[str]:
    lines = [
        "Baseline: the ordinary arm; frozen arms continue from its checkpoint on the same data. Each arm ran in a "
        "process of its own, so update times carry the machine's drift; those of pairs are further down."
    ]
    for each in comparisons:
        if each.reason:
            lines.append(f"{each.name} could not be compared: {each.reason}")
        lines += [
            f"{each.name} differs in more than the freezing: {found}"
            for found in (each.record or {}).get("differences", [])
        ]
        if each.record:
            lines.append(
                f"{each.name}: {number(each.record['windows'])} paired windows, "
                f"{number(each.record['resamples'])} resamples; update times over updates "
                f"{' to '.join(map(number, each.record['timed_updates']))}."
            )
    return lines


def _paper_notes(quoted: Sequence[Quoted | None]) -> list[str]:
    return [f"Paper, {note}" for note in footnotes(quoted)]


def _command(run: RecordedRun) -> str:
    provenance = (run.result or {}).get("provenance") or {}
    return str(provenance.get("command") or f"# {run.folder.name}: command not recorded")
