from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from saf.evaluate.tokens import TokenLosses
from saf.experiments.execution import execute
from saf.experiments.measurement import Measurement, Number, RunOf
from saf.experiments.measuring import carry_out, lost_inputs, plan_measurements
from saf.experiments.plan import plan
from saf.experiments.recipe import Arm, Recipe
from saf.experiments.scales import SCALES
from saf.experiments.store import Store
from saf.records.files import append_line, write_json
from saf.records.folders import write_manifest
from saf.records.paper import Source
from saf.records.result import result_header
from saf.train.checkpoint import checkpoint_hash, step_name

SOURCE = Source("tab:none", "made up")


@pytest.fixture
def recipe() -> Recipe:
    return Recipe(
        title="Made up",
        source=SOURCE,
        arms=(
            Arm(name="ordinary", reference=None, paper={"perplexity": "20.0"}),
            Arm(name="a", parent="ordinary", settings={"freeze.rate": 0.25}, paper={"delta": "+1.0"}),
            Arm(name="b", parent="ordinary", settings={"freeze.rate": 0.5}, against="a"),
        ),
        columns=("perplexity", "delta", "difference"),
    )


@pytest.fixture
def make_plan(recipe):
    def make(*, seeds: Sequence[int] = (1,), arms: tuple[str, ...] = (), own_clocks: bool = False, **recipes: Recipe):
        scale = replace(SCALES["smoke"], set_speed=None) if own_clocks else SCALES["smoke"]
        return plan(recipes or {"made_up": recipe}, scale, data="data", seeds=seeds, arms=arms)

    return make


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(tmp_path / "store").open(write=True)


class Trainer:
    """Stands in for `saf pretrain`: writes what a run leaves, with losses that are given by the order of runs."""

    def __init__(self):
        self.calls: list[list[str]] = []
        self.codes: list[int] = []
        self.anew: list[list[str]] = []
        self.losses: dict[str, list[float]] = {}
        self.updates: dict[str, int] = {}
        self.heads: list[list[int]] = []
        self.date: dict[str, str] = {}

    def __call__(
        self, words: Sequence[str], log: Path, device: str | None, stop: object, *, compiles_anew: bool = False
    ) -> int:
        words = list(words)
        self.anew += [words] * compiles_anew
        self.calls.append(words)
        log.write_text("said something\n")
        folder = Path(words[words.index("--out") + 1])
        parent = Path(words[words.index("--parent") + 1]) if "--parent" in words else None
        started = parent and {"hash": checkpoint_hash(parent)}
        if "--resume" not in words:
            write_json(folder / "config.json", {"words": words, "parent": started})
        code = self.codes.pop(0) if self.codes else 0
        if code == 0:
            self._finish(folder)
        return code

    def _finish(self, folder: Path) -> None:
        for step in (4, 8):
            checkpoint = folder / "checkpoints" / step_name(step)
            checkpoint.mkdir(parents=True, exist_ok=True)
            write_json(checkpoint / "state.json", {"update": step})
            # Every training has checkpoints of its own.
            write_json(checkpoint / "training.json", {"call": len(self.calls)})
            hash = write_manifest(checkpoint, update=step, parent=None)
            append_line(folder / "clock.jsonl", {"hash": hash})
        losses = torch.tensor(self.losses.get(folder.name, [3.0, 3.2]))
        log_probs = -losses[:, None].expand(-1, 4).contiguous()
        header = result_header("run", {}, device="cpu")
        header["provenance"] |= {"heads": [], "commit": "0" * 40, "checkpoints": {"final": f"{len(self.calls)}-8"}}
        header["provenance"] |= {"data": {"train": "data"}, **self.date}
        loss = float(-log_probs.mean(dtype=torch.float64))
        numbers = {
            "report_loss": loss,
            "report_perplexity": float(torch.tensor(loss).exp()),
            "updates": self.updates.get(folder.name, 8),
        }
        numbers["time"] = {"everything": {"seconds": 90.0}}
        numbers["intervention"] = {"heads": self.heads}
        write_json(folder / "result.json", {**header, **numbers})
        evaluation = {"windows": len(losses), "length": 4, "loss": loss, "windows_hash": "same"}
        evaluation["log_probs_sha256"] = TokenLosses.of(log_probs).write(folder)
        write_json(folder / "evaluation.json", {**result_header("evaluation", {}), **evaluation})


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


_HEADS = [[[0, 0], [0, 1], [1, 0], [1, 1]], [[0, 0], [0, 1], [1, 0], [1, 2]]]
_SCORES = [[[1e-3, 2e-3, 5e-3], [2e-3, 3e-3, 9e-3]], [[1e-3, 3e-3, 6e-3], [1e-3, 8e-3, 4e-3]]]
FACTS: dict[str, object] = {
    "overlap": 3,
    "expected": 1.0,
    "standard_deviation": 0.5,
    "rank_correlation": 0.9,
    "first": 4,
    "second": 4,
    "heads": _HEADS,
    "scores": _SCORES,
}
"""What `saf analyze stability` tells."""
OVERLAP = Number(title="overlap", path=("overlap",), paper="30", places=0)


def measured_recipe(*measurements: Measurement) -> Recipe:
    return Recipe(
        title="Made up",
        source=Source("tab:none", "made up"),
        arms=(
            Arm(name="ordinary", reference=None),
            Arm(name="a", parent="ordinary", settings={"freeze.rate": 0.25}),
            Arm(name="b", parent="ordinary", settings={"freeze.rate": 0.5}),
        ),
        measurements=measurements,
    )


STABILITY = Measurement(name="two", does="analyze stability", on=(RunOf("a"), RunOf("b")), numbers=(OVERLAP,))


class Command:
    """Stands in for `saf bench` and `saf analyze`: notes its words and writes a record."""

    def __init__(self):
        self.calls: list[list[str]] = []
        self.codes: list[int] = []

    def __call__(self, given, log: Path, device, stop, processes: int = 1) -> int:
        self.calls.append(list(given))
        self.processes = processes
        log.write_text("said something\n")
        code = self.codes.pop(0) if self.codes else 0
        if code == 0:
            head = result_header(given[1], {}, device="cpu")
            head["provenance"]["commit"] = "0" * 40
            write_json(Path(given[given.index("--out") + 1]), {**head, **FACTS})
        return code


@pytest.fixture
def command() -> Command:
    return Command()


@pytest.fixture
def prepare(store, trainer, command):
    """Return a function that trains a recipe's runs and measures, and what it returned."""

    def make(recipe: Recipe, seeds=(1,)):
        made = plan({"x": recipe}, SCALES["smoke"], data="data", seeds=seeds)
        found = plan_measurements({"x": recipe}, made)
        said: list[str] = []
        lost = lost_inputs(found, store)
        outcome = execute(made, store, store.folder, say=said.append, launch=trainer, lost=lost)
        carry_out(found, store, outcome, say=said.append, launch=command)
        return made, found, outcome, said

    return make
