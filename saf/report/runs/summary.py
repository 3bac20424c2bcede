"""The written parts of a page about runs: headline, key figures, and what to read with care."""

from collections.abc import Mapping, Sequence
from typing import Any

from saf.evaluate.compare import speed_caveat, was_busy
from saf.evaluate.side_by_side import Comparison, arm_colours
from saf.heads import EDITED
from saf.records.quantities import change_percent, gibibytes, number, seconds, signed
from saf.records.run import RecordedRun
from saf.report.page import Value, bars, coloured, key_figure, of_arms, shares_of, text, whiskers

BUSY = "timing unclear: the machine was busy"
"""In the place of a speedup that no freezing could bring."""
Told = tuple[dict[str, Any], str]
"""The record of a comparison, and the colour of its frozen or pruned arm."""


def doing(runs: Sequence[RecordedRun]) -> str:
    """Return what these runs did to heads: freezing, pruning, or freezing and pruning."""
    return _of_kinds(runs, {"frozen": "freezing", "pruned": "pruning"})


def past_of(runs: Sequence[RecordedRun]) -> str:
    """Return what happened to heads of these runs: they froze, were pruned, or froze or were pruned."""
    return _of_kinds(runs, {"frozen": "froze", "pruned": "were pruned"}, "or")


def _done(runs: Sequence[RecordedRun]) -> str:
    return _of_kinds(runs, {kind: kind for kind in EDITED}, "or")


def _of_kinds(runs: Sequence[RecordedRun], words: Mapping[str, str], joined: str = "and") -> str:
    """Return the words for what was done to heads of some of the runs; those of freezing where nothing was."""
    there = {"frozen": any(run.frozen_heads for run in runs), "pruned": any(run.pruned_heads for run in runs)}
    there |= {run.arm: True for run in runs}
    return f" {joined} ".join(words[kind] for kind in EDITED if there[kind]) or words["frozen"]


def headline(runs: Sequence[RecordedRun], comparisons: Sequence[Comparison]) -> str:
    """Return the main finding as one sentence of HTML, about every frozen or pruned run that could be compared."""
    colours = {id(run): colour for run, colour in zip(runs, arm_colours(runs), strict=True)}
    done = [(c.record, colours[id(c.frozen)]) for c in comparisons if c.record]
    if len(done) > 1:
        return _several(done, runs, [c.frozen for c in comparisons if c.record])
    if done:
        ((record, _),) = done
        cost = f"<em>{_cost_words(record)}</em>"
        ratio = record["update_time_ratio"]
        speed = f" and made updates <em>{_speed_words(ratio)}</em>" if not speed_caveat(record) else ""
        comma = "," if "," in cost and speed else ""
        speed = f"; {BUSY}" if was_busy(record) else speed
        (run,) = (c.frozen for c in comparisons if c.record)
        which = f"{record['heads']} of {record['num_heads']} attention heads"
        what = f"{doing(runs).capitalize()} {which}"
        if _is_mixed(run):
            what = f"{run.heads_in_words} of {record['num_heads']} attention heads"
        return f"{what} {cost}{comma}{speed}"
    run = next((run for run in runs if run.arm != "ordinary"), runs[0])
    result = run.result or {}
    perplexity = result.get("report_perplexity")
    after = f"after {number(result.get('updates') or _last_update(run))} updates"
    reached = f"held-out perplexity <em>{number(perplexity)}</em> {after}" if perplexity else f"training {after}"
    if not run.edited_heads:
        return reached[0].upper() + reached[1:]
    if _is_mixed(run):
        return f"{run.heads_in_words} of {run.num_heads} attention heads: {reached}"
    return f"{len(run.edited_heads)} of {run.num_heads} attention heads {_done([run])}: {reached}"


def _is_mixed(run: RecordedRun) -> bool:
    """Return whether some heads of a run are frozen and others pruned."""
    return min(run.head_counts.values()) > 0


def _several(done: Sequence[Told], runs: Sequence[RecordedRun], edited: Sequence[RecordedRun]) -> str:
    """Return the opening words about several `edited` arms: heads, cost in perplexity, and speed where it is clear."""
    heads, totals = ([str(record[name]) for record, _ in done] for name in ("heads", "num_heads"))
    if any(map(_is_mixed, edited)):
        heads = [f"({run.heads_in_words})" for run in edited]
    # Arms of one model at different rates are told apart by their heads, others by their order alone.
    frozen = heads if len(set(heads)) == len(heads) else list(dict.fromkeys(heads))
    which = f"{_listed(frozen)} of {totals[0]} attention heads" if len(set(totals)) == 1 else "attention heads"
    cost = _listed([coloured(signed(record["delta_ppl_percent"]), colour) for record, colour in done])
    words = f"{doing(runs).capitalize()} {which} changed perplexity by {cost}"
    if all(_is_uncertain(record) for record, _ in done):
        words += ", each less than its uncertainty"
    if not any(speed_caveat(record) for record, _ in done):
        ratios = [coloured(f"{record['update_time_ratio']:.2f}×", colour) for record, colour in done]
        words += f", with updates {_listed(ratios)} as fast"
    return words + f"; {BUSY}" * any(was_busy(record) for record, _ in done)


def _listed(words: Sequence[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def dek(runs: Sequence[RecordedRun], comparisons: Sequence[Comparison]) -> str:
    """Return the paragraph under the headline: the same finding with its uncertainty and its conditions."""
    found = [c for c in comparisons if c.record]
    if not found:
        if not any(run.edited_heads for run in runs):
            return "An ordinary run: every head computes attention. A frozen run beside it shows what freezing costs."
        what = f"what {doing(runs)} cost and saved"
        return f"No ordinary arm to compare with, so {what} cannot be told from this page alone."
    records = [c.record for c in found if c.record]
    first = records[0]
    changes = [
        _change_words(c.name if len(found) > 1 else "", record) for c, record in zip(found, records, strict=True)
    ]
    length = (found[0].frozen.evaluation or {}).get("length")
    sentences = [
        f"Perplexity on held-out text went from {first['ppl_ordinary']:.3f} to {_listed(changes)}, over "
        f"{first['windows']:,} paired windows of {number(length)} tokens."
    ]
    if not any(record["differences"] for record in records):
        sentences.append(f"{'Both' if len(found) == 1 else 'All'} runs see the same text in the same order.")
    spans = {(*_span(c.frozen), c.frozen.finished_result()["updates"]) for c in found}
    if len(spans) == 1 and (span := spans.pop())[0] is not None:
        first, last, of = span
        when = f"update {first:,}" if first == last else f"updates {first:,} to {last:,}"
        sentences.append(f"Heads {past_of(runs)} after {when} of {of:,}.")
    return " ".join(sentences)


def _span(run: RecordedRun) -> tuple[int | None, int | None]:
    """Return the updates after which heads were first and last frozen or pruned for good; None where it is unknown."""
    kept = [event.update for event in run.kept_freezes if event.update is not None]
    return min(kept, default=run.freeze_update), max(kept, default=run.freeze_update)


def _change_words(name: str, record: dict[str, Any]) -> str:
    low, high = map(signed, record["ci95"])
    change = f"<strong>{signed(record['delta_ppl_percent'])}</strong>, 95% interval {low} to {high}"
    return f"{record['ppl_frozen']:.3f} ({f'{text(name)}: ' if name else ''}{change})"


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


def probe_sentence(runs: Sequence[RecordedRun], names: Sequence[str]) -> str:
    """Return what freezing cost at once on the controller's text, before any recovery; else nothing.

    Of several events that is what each changed, added up: the run trained on between them.
    """
    events = [(name, (run.result or {}).get("intervention") or {}) for run, name in zip(runs, names, strict=True)]
    one = [
        (name, event["loss_before"], event["loss_after"])
        for name, event in events
        if event.get("events", 1) == 1 and None not in (event.get("loss_before"), event.get("loss_after"))
    ]
    several = [
        (name, event["events"], event["loss_rise"])
        for name, event in events
        if event.get("events", 1) > 1 and event.get("loss_rise") is not None
    ]
    named = len(one) + len(several) > 1
    told = []
    if one:
        changes = [
            f"from {before:.4f} to {after:.4f} nats ({f'{text(name)}: ' * named}{signed(after - before, 4, '')})"
            for name, before, after in one
        ]
        told.append(f"At the event itself the loss on the controller’s held-out text went {_listed(changes)}")
    if several:
        changes = [
            f"{signed(rise, 4, ' nats')} at {count} events{f' ({text(name)})' * named}" for name, count, rise in several
        ]
        told.append(
            f"At the events themselves the loss on the controller’s held-out text changed by {_listed(changes)}"
        )
    return " ".join(f"{sentence}, before the remaining heads had adapted." for sentence in told)


def key_figures(runs: Sequence[RecordedRun], comparisons: Sequence[Comparison]) -> list[str]:
    """Return up to four key figures; those without a measurement are left out."""
    colours = {id(run): colour for run, colour in zip(runs, arm_colours(runs), strict=True)}
    found = [c for c in comparisons if c.record]
    if not found:
        run = next((run for run in runs if run.arm != "ordinary"), runs[0])
        return list(filter(None, [*_single(run), _heads([(run, colours[id(run)])])]))
    told = [(c.record or {}, colours[id(c.frozen)]) for c in found]
    heads = [(c.frozen, colours[id(c.frozen)]) for c in found]
    return list(filter(None, [_quality(told), _speed(told), _memory(told), _heads(heads)]))


def _quality(told: Sequence[Told]) -> str:
    """Return the key figure of perplexity: each arm's change with its interval."""
    values = [(signed(record["delta_ppl_percent"]), colour) for record, colour in told]
    ordinary, *frozen = (f"{value:.3f}" for value in [told[0][0]["ppl_ordinary"], *(r["ppl_frozen"] for r, _ in told)])
    pair = _arrow(ordinary, list(zip(frozen, (colour for _, colour in told), strict=True)))
    intervals = [f"{signed(low)} to {signed(high)}" for low, high in (record["ci95"] for record, _ in told)]
    words = f"95% interval{'s' * (len(told) > 1)} {_listed(intervals)}"
    drawing = whiskers(
        [(record["delta_ppl_percent"], *record["ci95"], colour) for record, colour in told],
        label=f"{_listed([value for value, _ in values])}, {words}",
    )
    return key_figure("Perplexity", of_arms(values), f"{words}; {pair}", drawing)


def _speed(told: Sequence[Told]) -> str:
    """Return the key figure of update speed, or nothing where no arm was timed."""
    told = [(record, colour) for record, colour in told if record["update_time_ratio"]]
    if not told:
        return ""
    ordinary = told[0][0]["update_seconds_ordinary"]
    frozen = [(record["update_seconds_frozen"], colour) for record, colour in told]
    first, last = told[0][0]["timed_updates"]
    pair = _arrow(seconds(ordinary), [(seconds(value), colour) for value, colour in frozen])
    note = f"{pair} median update, over {first:,}–{last:,} of separate runs"
    if any(was_busy(record) for record, _ in told):
        note += f"; {BUSY} during one of them, as heads that cost nothing would not save so much"
    elif any(speed_caveat(record) for record, _ in told):
        note += "; times overlap, so this machine was too noisy to tell"
    values = [
        (f"{record['update_time_ratio']:.2f}×" if not speed_caveat(record) else "unclear", colour)
        for record, colour in told
    ]
    if all(value == "unclear" for value, _ in values):
        del values[1:]
    return key_figure("Update speed", of_arms(values), note, bars([(ordinary, "ordinary"), *frozen]))


def _memory(told: Sequence[Told]) -> str:
    """Return the key figure of peak memory, or nothing where an arm's is not known."""
    ordinary = told[0][0]["peak_memory_ordinary"]
    frozen = [(record["peak_memory_frozen"], colour) for record, colour in told]
    changes = [change_percent(ordinary, value) for value, _ in frozen]
    if any(change is None for change in changes):
        return ""
    pair = _arrow(gibibytes(ordinary), [(gibibytes(value), colour) for value, colour in frozen])
    values = [(signed(change, 1), colour) for change, (_, colour) in zip(changes, frozen, strict=True)]
    return key_figure(
        "Peak memory", of_arms(values), f"{pair} during an update", bars([(ordinary, "ordinary"), *frozen])
    )


def _heads(arms: Sequence[tuple[RecordedRun, str]]) -> str:
    """Return the key figure of frozen heads: their share, their number, and by which score they were chosen."""
    arms = [(run, colour) for run, colour in arms if run.edited_heads and run.num_heads]
    if not arms:
        return ""
    freeze = arms[0][0].freeze or {}
    shares = [(len(run.edited_heads) / run.num_heads, colour) for run, colour in arms]
    counts = [run.heads_in_words if _is_mixed(run) else str(len(run.edited_heads)) for run, _ in arms]
    note = f"{_listed(counts)} of {arms[0][0].num_heads}"
    if len(ways := {_way(run.freeze or {}) for run, _ in arms}) == 1:
        note += ways.pop()
    if freeze.get("num_sequences"):
        note += f", measured on {freeze['num_sequences']} sequences of {number(freeze.get('length'))} tokens"
    values = [(f"{100 * share:.0f}%", colour) for share, colour in shares]
    words = f"{_listed([value for value, _ in values])} of the heads"
    return key_figure(f"Heads {_done([run for run, _ in arms])}", of_arms(values), note, shares_of(shares, words))


def _way(freeze: dict[str, Any]) -> str:
    """Return in words how heads were chosen, after a comma: as they were named, or by a score; nothing if unknown."""
    if (freeze.get("config") or {}).get("heads"):
        return ", as named"
    return f", lowest {text(freeze['score_name']).replace('_', ' ')} first" if freeze.get("score_name") else ""


def _single(run: RecordedRun) -> list[str]:
    """Return the key figures of a run that is not compared with another."""
    result = run.result or {}
    parts = []
    if result.get("accuracy") is not None:
        note = f"of {result['questions']:,} {result['judged_by']} questions"
        parts.append(key_figure("Accuracy", f"{100 * result['accuracy']:.2f}%", note))
    if result.get("report_perplexity"):
        note = f"{result['report_loss']:.4f} nats a token on held-out text"
        parts.append(key_figure("Perplexity", number(result["report_perplexity"]), note))
    median = (result.get("update_seconds") or {}).get("median")
    if median:
        parts.append(key_figure("Median update", seconds(median), f"{number(result.get('updates'))} updates"))
    if result.get("peak_memory_bytes"):
        parts.append(key_figure("Peak memory", gibibytes(result["peak_memory_bytes"]), f"on {text(_device(result))}"))
    return parts


def _arrow(ordinary: str, frozen: Sequence[Value]) -> str:
    after = _listed([coloured(value, colour) for value, colour in frozen])
    return f"{coloured(ordinary, 'ordinary')} → {after}"


def _device(result: dict[str, Any]) -> str:
    return str((result.get("provenance") or {}).get("device", "this device"))


def _last_update(run: RecordedRun) -> int:
    return run.metrics[-1]["update"] if run.metrics else 0


def _cost_words(record: dict[str, Any]) -> str:
    """Return what freezing did to perplexity in words, told from its uncertainty."""
    percent = record["delta_ppl_percent"]
    if _is_uncertain(record):
        return f"moved perplexity by {signed(percent)}, less than its uncertainty"
    shown = f"{abs(percent):.2f}%"
    return f"{'raised' if percent > 0 else 'lowered'} perplexity by {'less than 0.01%' if shown == '0.00%' else shown}"


def _is_uncertain(record: dict[str, Any]) -> bool:
    """Return whether the interval of a change in perplexity holds no change at all."""
    low, high = record["ci95"]
    return bool(low <= 0.0 <= high)


def _speed_words(ratio: float) -> str:
    if abs(ratio - 1) < 0.005:
        return "no faster"
    return f"{ratio:.2f}× as fast"
