"""The written parts of a report: headline, key figures, tables."""

from collections.abc import Sequence
from typing import Any

from saf.records.quantities import change_percent, gibibytes, number, seconds, signed
from saf.records.run import RecordedRun
from saf.records.table import Cell, Table
from saf.report.comparisons import Comparison
from saf.report.page import text


def headline(runs: Sequence[RecordedRun], comparisons: Sequence[Comparison]) -> str:
    """Return the main finding as one sentence of HTML."""
    done = next((c.record for c in comparisons if c.record), None)
    if done:
        cost = f"<em>{_cost_words(done)}</em>"
        ratio = done["update_time_ratio"]
        speed = f" and made updates <em>{_speed_words(ratio)}</em>" if ratio and timing_is_clear(done) else ""
        comma = "," if "," in cost and speed else ""
        return f"Freezing {done['heads']} of {done['num_heads']} attention heads {cost}{comma}{speed}"
    run = next((run for run in runs if run.arm == "frozen"), runs[0])
    result = run.result or {}
    perplexity = result.get("report_perplexity")
    after = f"after {number(result.get('updates') or _last_update(run))} updates"
    reached = f"held-out perplexity <em>{number(perplexity)}</em> {after}" if perplexity else f"training {after}"
    if not run.frozen_heads:
        return reached[0].upper() + reached[1:]
    return f"{len(run.frozen_heads)} of {run.num_heads} attention heads frozen: {reached}"


def timing_is_clear(record: dict[str, Any]) -> bool:
    """Whether the arms' update times (20th to 80th percentile) keep apart, so that a ratio means something."""
    spreads = sorted([record["update_seconds_spread_ordinary"], record["update_seconds_spread_frozen"]])
    return spreads[0][1] < spreads[1][0]


def dek(runs: Sequence[RecordedRun], comparisons: Sequence[Comparison]) -> str:
    """Return the paragraph under the headline: the same finding with its uncertainty and its conditions."""
    found = next((c for c in comparisons if c.record), None)
    if found is None or found.record is None:
        if not any(run.frozen_heads for run in runs):
            return "An ordinary run: every head computes attention. A frozen run beside it shows what freezing costs."
        return "No ordinary arm to compare with, so what freezing cost and saved cannot be told from this page alone."
    record = found.record
    low, high = record["ci95"]
    length = (found.frozen.evaluation or {}).get("length")
    sentences = [
        f"Perplexity on held-out text went from {record['ppl_ordinary']:.3f} to {record['ppl_frozen']:.3f}, "
        f"a change of <strong>{signed(record['delta_ppl_percent'])}</strong> (95% interval {signed(low)} "
        f"to {signed(high)}, {record['windows']:,} paired windows of {number(length)} tokens)."
    ]
    if not record["differences"]:
        sentences.append("Both runs see the same text in the same order.")
    update = found.frozen.freeze_update
    if update is not None:
        sentences.append(f"Heads froze after update {update:,} of {found.frozen.finished_result()['updates']:,}.")
    return " ".join(sentences)


def warning(comparisons: Sequence[Comparison]) -> str:
    """Return a box about comparisons that failed or whose arms differ in more than the freezing; else nothing."""
    lines = []
    for comparison in comparisons:
        if comparison.reason:
            lines.append(f"{text(comparison.name)} could not be compared: {text(comparison.reason)}")
        for difference in (comparison.record or {}).get("differences", []):
            lines.append(f"{text(comparison.name)} differs in more than the freezing: {text(difference)}")
    items = "".join(f"<li>{line}</li>" for line in lines)
    return f'<div class="warning" role="note"><strong>Read with care</strong><ul>{items}</ul></div>' if lines else ""


def comparison_table(runs: Sequence[RecordedRun], names: Sequence[str], comparisons: Sequence[Comparison]) -> str:
    """Return one row an arm: perplexity, change, update time, memory, intervention."""
    compared = {c.name: c.record for c in comparisons if c.record}
    base = next((c.ordinary for c in comparisons), None)
    rows = []
    for run, name in zip(runs, names, strict=True):
        result, record = run.result or {}, compared.get(name)
        intervention = result.get("intervention") or {}
        spent = sum((intervention.get("seconds") or {}).values()) if intervention else None
        base_memory = (base.result or {}).get("peak_memory_bytes") if base else None
        memory = change_percent(base_memory, result.get("peak_memory_bytes")) if record else None
        rows.append(
            [
                Cell(text=name, arm=run.arm),
                f"{len(run.frozen_heads)} of {run.num_heads}",
                f"{result['report_perplexity']:.3f}" if result.get("report_perplexity") else number(None),
                _interval(record) if record else number(None),
                seconds(_median_update(run, record)),
                f"{record['update_time_ratio']:.3f}×" if record and record["update_time_ratio"] else number(None),
                gibibytes(result.get("peak_memory_bytes")) + (f" ({signed(memory, 1)})" if memory is not None else ""),
                seconds(spent),
                seconds(result.get("total_seconds")),
            ]
        )
    head = ["Arm", "Heads frozen", "Perplexity", "Change, 95% interval", "Median update", "Speed"]
    columns = [*head, "Peak memory", "Freezing took", "Whole run"]
    return Table.of("Arms side by side", columns, rows).html()


def probe_sentence(runs: Sequence[RecordedRun]) -> str:
    """Return what freezing cost at once on the controller's text, before any recovery; else nothing."""
    for run in runs:
        event = (run.result or {}).get("intervention") or {}
        before, after = event.get("loss_before"), event.get("loss_after")
        if before is not None and after is not None:
            return (
                f"At the event itself the loss on the controller’s held-out text went from {before:.4f} to "
                f"{after:.4f} nats ({signed(after - before, 4, ' nats')}), before the remaining heads had adapted."
            )
    return ""


def provenance_table(runs: Sequence[RecordedRun], names: Sequence[str]) -> str:
    """Return hashes, versions, seed, device, commit and command of every run."""
    records = [_provenance(run) for run in runs]
    keys = list(dict.fromkeys(key for record in records for key in record))
    rows = [[key, *(_code(record.get(key)) for record in records)] for key in keys]
    return Table.of("Where these numbers come from", ["", *names], rows).html()


def _provenance(run: RecordedRun) -> dict[str, Any]:
    told = dict((run.result or {}).get("provenance") or {})
    versions = told.pop("versions", None) or {}
    checkpoints, data = told.pop("checkpoints", {}), told.pop("data", {})
    told |= {f"{role} checkpoint": value for role, value in checkpoints.items()}
    told |= {f"{role} data": value for role, value in data.items()}
    told["heads"] = f"{len(run.frozen_heads)} frozen"
    evaluation = run.evaluation or {}
    told["data fingerprint"] = (run.config.get("data") or {}).get("fingerprint")
    told["evaluation windows"] = evaluation.get("windows_hash")
    told |= {f"{name} version": version for name, version in versions.items()}
    return {key.replace("_", " "): value for key, value in told.items()}


def _code(value: Any) -> Any:
    return Cell.code_of(value) if isinstance(value, str) else value


def _interval(record: dict[str, Any]) -> Cell:
    low, high = record["ci95"]
    return Cell(text=signed(record["delta_ppl_percent"]), aside=f"({signed(low)} to {signed(high)})")


def _median_update(run: RecordedRun, record: dict[str, Any] | None) -> float | None:
    """Return the median over the compared updates where there are such, else the run's own."""
    if record:
        return record["update_seconds_frozen"]
    return ((run.result or {}).get("update_seconds") or {}).get("median")


def _last_update(run: RecordedRun) -> int:
    return run.metrics[-1]["update"] if run.metrics else 0


def _cost_words(record: dict[str, Any]) -> str:
    percent, (low, high) = record["delta_ppl_percent"], record["ci95"]
    if low <= 0.0 <= high:
        return f"moved perplexity by {signed(percent)}, less than its uncertainty"
    shown = f"{abs(percent):.2f}%"
    return f"{'raised' if percent > 0 else 'lowered'} perplexity by {'less than 0.01%' if shown == '0.00%' else shown}"


def _speed_words(ratio: float) -> str:
    if abs(ratio - 1) < 0.005:
        return "no faster"
    return f"{ratio:.2f}× faster" if ratio > 1 else f"{1 / ratio:.2f}× slower"
