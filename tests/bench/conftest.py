from collections.abc import Callable

import pytest

from saf.bench.harness.arms import Arm
from saf.bench.harness.recorder import Recorder
from saf.bench.harness.timing import Budget


@pytest.fixture(autouse=True)
def one_thread(monkeypatch) -> None:
    """For the processes that tests start."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def make_recorder(said) -> Callable[..., Recorder]:
    def make(path=None, seconds=None) -> Recorder:
        return Recorder(path, kind="update", settings={}, budget=Budget(seconds), say=said.append)

    return make


class FakeSubject:
    """Takes the times it is given, in turn, and notes that it was asked."""

    def __init__(self, arm: Arm, times: list[float], log: list[str]):
        self.arm, self.times, self.log, self.blocks = arm, times, log, 0

    def warm_up(self) -> None:
        self.log.append(f"warm {self.arm.name}")

    def timed_block(self, variant: str) -> float:
        self.log.append(self.arm.name)
        self.blocks += 1
        return self.times[(self.blocks - 1) % len(self.times)]

    def kernels(self) -> list[dict]:
        return [{"name": f"kernel of {self.arm.name}", "calls": 1, "ms": 1.0}]


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def build(log) -> Callable[..., Callable[[Arm], FakeSubject]]:
    """Make a builder from the milliseconds of every arm by name; 10 for the others."""

    def make(**times: list[float]) -> Callable[[Arm], FakeSubject]:
        return lambda arm: FakeSubject(arm, times.get(arm.name.replace(" ", "_"), [10.0]), log)

    return make
