"""Ending a process in the middle of training, as far as the code in it can tell, and what a run then says of itself."""

import pytest

from saf.records.events import read_events
from saf.train import pretrain


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


def killed_and_resumed(config, monkeypatch, module, name, call):
    """Train, die at the `call`-th call of a function, go on, and return the result."""
    with monkeypatch.context() as patch:
        die_at(patch, module, name, call)
        with pytest.raises(Killed):
            pretrain(config)
    return pretrain(config, resume=True)


def told(folder):
    """Return the events that a run recorded, in short."""
    return [
        (event.number, event.kind, event.update, len(event.heads), event.undone_by) for event in read_events(folder)
    ]
