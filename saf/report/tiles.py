"""Key figures at the top of a report, each with a small drawing of what it means."""

from collections.abc import Sequence
from typing import Any

from saf.records.quantities import change_percent, gibibytes, number, seconds, signed
from saf.records.run import RecordedRun
from saf.report.comparisons import Comparison
from saf.report.page import text
from saf.report.sections import timing_is_clear

_WIDTH = 200


def tiles(runs: Sequence[RecordedRun], comparisons: Sequence[Comparison]) -> str:
    """Return up to four key figures; those without a measurement are left out."""
    run = next((run for run in runs if run.arm == "frozen"), runs[0])
    found = next((c for c in comparisons if c.record), None)
    if found and found.record:
        run = found.frozen
        parts = [_quality(found.record), _speed(found.record), _memory(found.record), _heads(run)]
    else:
        parts = [*_single(run), _heads(run)]
    return "".join(parts)


def tile(name: str, value: str, note: str, drawing: str = "") -> str:
    """Return one key figure: HTML of its value and note, and a small drawing."""
    return f'<div class="tile"><h2>{name}</h2><p class="value">{value}</p>{drawing}<p class="note">{note}</p></div>'


def _quality(record: dict[str, Any]) -> str:
    low, high = record["ci95"]
    pair = _arrow(number(record["ppl_ordinary"]), number(record["ppl_frozen"]))
    note = f"95% interval {signed(low)} to {signed(high)}; {pair}"
    change = record["delta_ppl_percent"]
    drawing = whisker(change, low, high, label=f"{signed(change)}, interval {signed(low)} to {signed(high)}")
    return tile("Perplexity", signed(change), note, drawing)


def _speed(record: dict[str, Any]) -> str:
    ratio = record["update_time_ratio"]
    if not ratio:
        return ""
    pair = record["update_seconds_ordinary"], record["update_seconds_frozen"]
    first, last = record["timed_updates"]
    note = f"{_arrow(*map(seconds, pair))} median update, over {first:,}–{last:,} of two separate runs"
    if not timing_is_clear(record):
        note += "; their times overlap, so this machine was too noisy to tell"
    return tile("Update speed", f"{ratio:.2f}×", note, bars(*pair))


def _memory(record: dict[str, Any]) -> str:
    pair = record["peak_memory_ordinary"], record["peak_memory_frozen"]
    change = change_percent(*pair)
    if change is None:
        return ""
    return tile("Peak memory", signed(change, 1), f"{_arrow(*map(gibibytes, pair))} during an update", bars(*pair))


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
    return tile("Heads frozen", f"{100 * count / run.num_heads:.0f}%", note, drawing)


def _single(run: RecordedRun) -> list[str]:
    """Return the tiles of a run that is not compared with another."""
    result = run.result or {}
    parts = []
    if result.get("report_perplexity"):
        note = f"{result['report_loss']:.4f} nats a token on held-out text"
        parts.append(tile("Perplexity", number(result["report_perplexity"]), note))
    median = (result.get("update_seconds") or {}).get("median")
    if median:
        parts.append(tile("Median update", seconds(median), f"{number(result.get('updates'))} updates"))
    if result.get("peak_memory_bytes"):
        parts.append(tile("Peak memory", gibibytes(result["peak_memory_bytes"]), f"on {text(_device(result))}"))
    return parts


def _arrow(ordinary: str, frozen: str) -> str:
    return f'<span class="is-ordinary">{ordinary}</span> → <span class="is-frozen">{frozen}</span>'


def _device(result: dict[str, Any]) -> str:
    return str((result.get("provenance") or {}).get("device", "this device"))


def _svg(content: str, label: str) -> str:
    return f'<svg class="mini" viewBox="0 0 {_WIDTH} 34" role="img" aria-label="{label}">{content}</svg>'


def whisker(value: float, low: float, high: float, *, start: float = 0.0, label: str) -> str:
    """Return an estimate and its interval on an axis that holds `start`."""
    left, right = min(start, low), max(start, high)
    margin = 0.12 * ((right - left) or 1.0)
    scale = (_WIDTH - 8) / (right - left + 2 * margin)
    zero, point, first, last = (4 + (x - left + margin) * scale for x in (start, value, low, high))
    parts = [
        f'<line class="axis" x1="0" x2="{_WIDTH}" y1="14" y2="14"/>',
        f'<line class="zero" x1="{zero:.1f}" x2="{zero:.1f}" y1="3" y2="22"/>',
        f'<text class="tick" x="{min(max(zero, 10), _WIDTH - 10):.1f}" y="33" text-anchor="middle">{start:g}</text>',
        f'<line class="whisker" x1="{first:.1f}" x2="{last:.1f}" y1="14" y2="14"/>',
        f'<circle class="dot" cx="{point:.1f}" cy="14" r="5"/>',
    ]
    return _svg("".join(parts), label)


def bars(ordinary: float, frozen: float) -> str:
    """Return two bars to one scale, the ordinary arm above the frozen one."""
    longest = max(ordinary, frozen)
    widths = [_WIDTH * value / longest for value in (ordinary, frozen)]
    parts = [
        f'<rect class="fill-{name}" x="0" y="{y}" width="{width:.1f}" height="10" rx="2"/>'
        for name, y, width in (("ordinary", 4, widths[0]), ("frozen", 18, widths[1]))
    ]
    return _svg("".join(parts), "ordinary arm above, frozen arm below")


def share_of(share: float, words: str) -> str:
    """Return how much of a whole is taken."""
    parts = [
        f'<rect class="fill-rest" x="0" y="9" width="{_WIDTH}" height="12" rx="2"/>',
        f'<rect class="fill-frozen" x="0" y="9" width="{_WIDTH * share:.1f}" height="12" rx="2"/>',
    ]
    return _svg("".join(parts), words)
