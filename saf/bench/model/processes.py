"""Processes of their own for single arms of whole models: what they are told, and how they are run."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import saf
from saf.bench.harness.arms import Arm
from saf.bench.harness.recorder import Say, first_sentence
from saf.bench.harness.settings import Point
from saf.bench.harness.timing import Budget
from saf.bench.model.models import ModelSettings
from saf.errors import UnsupportedError

POLL_SECONDS = 0.05
"""Between two looks at processes that run for seconds to minutes."""
REMOVALS = 100
"""Attempts to remove the folder of processes, `POLL_SECONDS` apart: a killed one may be writing there when it dies."""
COMPILE_THREADS = 4
"""Of each process that only compiles; several run at a time."""
OUT_OF_TIME = "out of time"


class Children:
    """Run specifications as processes.

    Each arm has a compiler cache of its own, removed at the end; those that only compile fill the usual one.
    """

    def __init__(self, budget: Budget, workers: int, say: Say):
        self._budget = budget
        self._workers = workers
        self._say = say
        self._folder = tempfile.TemporaryDirectory(prefix="saf-bench-")

    def __enter__(self) -> "Children":
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the folder; what was measured does not depend on it, so one that stays is told."""
        for left in reversed(range(REMOVALS)):
            try:
                self._folder.cleanup()
                return
            except OSError as error:
                if not left:
                    self._say(f"{self._folder.name} could not be removed: {error}")
            time.sleep(POLL_SECONDS)

    def run(self, specifications: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Run them, `workers` at a time, and return the replies in order; `{"error": reason}` for one without.

        One that failed beside others runs again when they have ended, alone: it may have lacked only their memory.
        """
        replies, crowded = self._side_by_side(specifications)
        for number in crowded:
            if self._budget.fits(0):
                name, error = Arm(**specifications[number]["arm"]).name, replies[number]["error"]
                self._say(f"again, alone: {name}, which failed beside others: {error}")
            replies[number] = self._alone(specifications[number], replies[number])
        return replies

    def _alone(self, specification: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
        (reply,), _ = self._side_by_side([specification])
        if reply.get("error") == OUT_OF_TIME:
            return {"error": f"{before['error']} (beside others; no time to run it alone)"}
        return reply

    def _side_by_side(self, specifications: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[int]]:
        """Return the replies, and which of them are errors of processes that had others beside them."""
        waiting = list(enumerate(specifications))
        running: dict[int, _Child] = {}
        replies: dict[int, dict[str, Any]] = {}
        crowded: set[int] = set()
        try:
            while (waiting or running) and self._budget.fits(0):
                while waiting and len(running) < self._workers:
                    number, specification = waiting.pop(0)
                    running[number] = _Child(specification, Path(self._folder.name), number)
                    crowded |= set(running) if len(running) > 1 else set()
                for number in [number for number, child in running.items() if child.ended]:
                    replies[number] = running.pop(number).reply()
                time.sleep(POLL_SECONDS)
        finally:
            for child in running.values():
                child.stop()
        failed = sorted(number for number in crowded & set(replies) if "error" in replies[number])
        return [replies.get(number, {"error": OUT_OF_TIME}) for number in range(len(specifications))], failed


class _Child:
    """Run a process of its own that measures one arm: a file tells it what to do, another takes its answer.

    It leads a group of processes, so that those of its compiler end with it.
    """

    def __init__(self, specification: dict[str, Any], folder: Path, number: int):
        root = Path(saf.__file__).parents[1]
        path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
        if specification.get("only_compile"):
            surroundings = {"TORCHINDUCTOR_COMPILE_THREADS": str(COMPILE_THREADS)}
        else:
            name = "".join(filter(str.isalnum, Arm(**specification["arm"]).name))
            surroundings = {"TORCHINDUCTOR_CACHE_DIR": str(folder / name)}
        question = folder / f"question-{number}.json"
        self._answer, self._errors = folder / f"answer-{number}.json", folder / f"errors-{number}.txt"
        question.write_text(json.dumps(specification))
        with question.open() as given, self._answer.open("w") as answer, self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "saf.bench.model.worker"],
                stdin=given,
                stdout=answer,
                stderr=errors,
                env={**os.environ, "PYTHONPATH": path, **surroundings},
                process_group=0,
            )

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def reply(self) -> dict[str, Any]:
        """Return the last record that the process wrote, or the reason why there is none under `error`."""
        lines, errors = self._answer.read_text().splitlines(), self._errors.read_text().strip().splitlines()
        if self._process.returncode or not lines:
            reason = first_sentence(errors[-1]) if errors else "no output"
            return {"error": f"its process ended with code {self._process.returncode}: {reason}"}
        return json.loads(lines[-1])

    def stop(self) -> None:
        """End the process and all that it started."""
        with suppress(ProcessLookupError):  # it has ended, and nothing of its group is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def specification(settings: ModelSettings, point: Point, arm: Arm, *, profile: bool) -> dict[str, Any]:
    """Return what a process of its own is told."""
    return {
        "kind": settings.kind,
        "settings": settings.to_dict(),
        "point": point.to_dict(),
        "arm": arm.to_dict(),
        "profile": profile,
    }


def compile_specification(settings: ModelSettings, point: Point, arm: Arm) -> dict[str, Any]:
    """Return what a process is told that only compiles an arm, with as little running as possible."""
    small = Point(point.length, point.batch_size, 1 if point.accumulation else None, point.precision)
    asked = specification(settings, small, arm, profile=False)
    plain = {key: "off" if key == "graphs" else value for key, value in asked["settings"].items()}
    return {**asked, "settings": {**plain, "warmup": 1}, "only_compile": True}


class FreshSubject:
    """Run an arm whose every timed block runs in a new process; its compiled code is kept on disk between them."""

    def __init__(self, settings: ModelSettings, point: Point, arm: Arm, children: Children):
        self._children = children
        self._timed = specification(settings, point, arm, profile=False)
        self._first = specification(settings, point, arm, profile=settings.profile)
        self._kernels: list[dict[str, Any]] = []
        self._blocks: dict[str, float] = {}

    def warm_up(self) -> None:
        """Run once, so that later processes find the compiled code."""
        self._kernels = self._reply(self._first)["kernels"]

    def timed_block(self, variant: str) -> float:
        """Return one timed block's milliseconds; a process times every variant once, so it serves them all."""
        if variant not in self._blocks:
            self._blocks = self._reply(self._timed)["block_ms"]
        return self._blocks.pop(variant)

    def kernels(self) -> list[dict[str, Any]]:
        """Return the kernels of one iteration."""
        return self._kernels

    def _reply(self, specification: dict[str, Any]) -> dict[str, Any]:
        reply = self._children.run([specification])[0]
        if "error" in reply:
            raise UnsupportedError(reply["error"])
        return reply
