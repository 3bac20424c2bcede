"""Processes of their own for single arms."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import saf
from saf.bench.arms import Arm
from saf.bench.timing import Budget

POLL_SECONDS = 0.05
COMPILE_THREADS = 4
"""Of each process that only compiles; several run at a time."""


class Children:
    """Runs specifications as processes.

    Each arm has a compiler cache of its own, removed at the end; those that only compile fill the usual one.
    """

    def __init__(self, budget: Budget, workers: int = 1):
        self._budget = budget
        self._workers = workers
        self._folder = tempfile.TemporaryDirectory(prefix="saf-bench-")

    def __enter__(self) -> "Children":
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def run(self, specifications: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Run them, `workers` at a time, and return the replies in order; `{"error": reason}` for one without."""
        waiting = list(enumerate(specifications))
        running: dict[int, _Child] = {}
        replies: dict[int, dict[str, Any]] = {}
        try:
            while (waiting or running) and self._budget.fits(0):
                while waiting and len(running) < self._workers:
                    number, specification = waiting.pop(0)
                    running[number] = _Child(specification, Path(self._folder.name), number)
                for number in [number for number, child in running.items() if child.ended]:
                    replies[number] = running.pop(number).reply()
                time.sleep(POLL_SECONDS)
        finally:
            for child in running.values():
                child.stop()
        return [replies.get(number, {"error": "out of time"}) for number in range(len(specifications))]


class _Child:
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
                [sys.executable, "-m", "saf.bench.worker"],
                stdin=given,
                stdout=answer,
                stderr=errors,
                env={**os.environ, "PYTHONPATH": path, **surroundings},
            )

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def reply(self) -> dict[str, Any]:
        lines, errors = self._answer.read_text().splitlines(), self._errors.read_text().strip().splitlines()
        if self._process.returncode or not lines:
            reason = errors[-1] if errors else "no output"
            return {"error": f"its process ended with code {self._process.returncode}: {reason}"}
        return json.loads(lines[-1])

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
