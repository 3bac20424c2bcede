"""The written parts of a page about runs: headline, key figures, and what to read with care."""

from collections.abc import Sequence
from typing import Any

from saf.evaluate.compare import timing_is_clear
from saf.evaluate.side_by_side import Comparison
from saf.records.quantities import change_percent, gibibytes, number, seconds, signed
from saf.records.run import RecordedRun
from saf.report.page import bars, key_figure, share_of, text, whisker


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


def key_figures(runs: Sequence[RecordedRun], comparisons: Sequence[Comparison]) -> str:
    """Return up to four key figures; those without a measurement are left out."""
    run = next((run for run in runs if run.arm == "frozen"), runs[0])
    found = next((c for c in comparisons if c.record), None)
    if found and found.record:
        run = found.frozen
        parts = [_quality(found.record), _speed(found.record), _memory(found.record), _heads(run)]
    else:
        parts = [*_single(run), _heads(run)]
    return "".join(parts)


def _quality(record: dict[str, Any]) -> str:
    low, high = record["ci95"]
    pair = _arrow(number(record["ppl_ordinary"]), number(record["ppl_frozen"]))
    note = f"95% interval {signed(low)} to {signed(high)}; {pair}"
    change = record["delta_ppl_percent"]
    drawing = whisker(change, low, high, label=f"{signed(change)}, interval {signed(low)} to {signed(high)}")
    return key_figure("Perplexity", signed(change), note, drawing)


def _speed(record: dict[str, Any]) -> str:
    ratio = record["update_time_ratio"]
    if not ratio:
        return ""
    pair = record["update_seconds_ordinary"], record["update_seconds_frozen"]
    first, last = record["timed_updates"]
    note = f"{_arrow(*map(seconds, pair))} median update, over {first:,}–{last:,} of two separate runs"
    if not timing_is_clear(record):
        note += "; their times overlap, so this machine was too noisy to tell"
    return key_figure("Update speed", f"{ratio:.2f}×", note, bars(*pair))


def _memory(record: dict[str, Any]) -> str:
    pair = record["peak_memory_ordinary"], record["peak_memory_frozen"]
    change = change_percent(*pair)
    if change is None:
        return ""
    return key_figure(
        "Peak memory", signed(change, 1), f"{_arrow(*map(gibibytes, pair))} during an update", bars(*pair)
    )


def _heads(run: RecordedRun) -> str:
    count, freeze = len(run.frozen_heads), run.freeze or {}
    if not count or not run.num_heads:
        return ""
    note = f"{count} of {run.num_heads}"
    if freeze.get("score_name"):
        note += f", lowest {text(freeze['score_name']).replace('_', ' ')} first"
    if freeze.get("num_sequences"):
        note += f", measured on {freeze['num_sequences']} sequences of {number(freeze.get('length'))} tokens"
    drawing = share_of(count / run.num_heads, f"{100 * count / run.num_heads:.0f}% of the heads")
    return key_figure("Heads frozen", f"{100 * count / run.num_heads:.0f}%", note, drawing)


def _single(run: RecordedRun) -> list[str]:
    """Return the key figures of a run that is not compared with another."""
    result = run.result or {}
    parts = []
    if result.get("report_perplexity"):
        note = f"{result['report_loss']:.4f} nats a token on held-out text"
        parts.append(key_figure("Perplexity", number(result["report_perplexity"]), note))
    median = (result.get("update_seconds") or {}).get("median")
    if median:
        parts.append(key_figure("Median update", seconds(median), f"{number(result.get('updates'))} updates"))
    if result.get("peak_memory_bytes"):
        parts.append(key_figure("Peak memory", gibibytes(result["peak_memory_bytes"]), f"on {text(_device(result))}"))
    return parts


def _arrow(ordinary: str, frozen: str) -> str:
    return f'<span class="is-ordinary">{ordinary}</span> → <span class="is-frozen">{frozen}</span>'


def _device(result: dict[str, Any]) -> str:
    return str((result.get("provenance") or {}).get("device", "this device"))


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
