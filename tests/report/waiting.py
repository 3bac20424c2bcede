"""Waiting for a page in a browser, from outside: the page's own policy forbids it to evaluate a text again."""

import time

SECONDS = 10.0
"""After which a page that is not as expected never will be; a round number, for busy machines."""


def wait_until(page, expression: str) -> None:
    """Return when an expression is true in the page; fail with its name when it does not come true."""
    ends = time.monotonic() + SECONDS
    while not page.evaluate(expression):
        assert time.monotonic() < ends, f"never true: {expression}"
        time.sleep(0.05)
