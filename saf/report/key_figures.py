"""Key figures at the top of a page: a value with its name and note, and a small drawing of what it means."""

_WIDTH = 200
"""Pixels of a drawing; a page shows it at most so wide."""


def key_figure(name: str, value: str, note: str, drawing: str = "") -> str:
    """Return one key figure: HTML of its value and note, and a small drawing."""
    return (
        f'<div class="key-figure"><h2>{name}</h2><p class="value">{value}</p>{drawing}<p class="note">{note}</p></div>'
    )


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


def _svg(content: str, label: str) -> str:
    return f'<svg class="mini" viewBox="0 0 {_WIDTH} 34" role="img" aria-label="{label}">{content}</svg>'
