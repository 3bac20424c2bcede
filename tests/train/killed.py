"""Ending a process in the middle of training, as far as the code that runs in it can tell."""

import pytest


class Killed(BaseException):
    """Stands for the end of the process."""


def die_at(monkeypatch: pytest.MonkeyPatch, module, name: str, call: int) -> None:
    """Let the `call`-th call of a module's function end the process."""
    real, calls = getattr(module, name), [0]

    def counting(*arguments, **options):
        calls[0] += 1
        if calls[0] == call:
            raise Killed
        return real(*arguments, **options)

    monkeypatch.setattr(module, name, counting)
