"""Measurements of a recipe: benchmarks and analyses as data, the numbers of their records, and what runs them."""

import importlib
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Literal

from experiments.arms import arm_at
from experiments.inputs import Inputs
from experiments.run import Key, Run
from experiments.scales import Scale
from saf.checkpoint import latest, step_name
from saf.cli.output import print_progress
from saf.errors import InputError, SafError
from saf.records.files import read_json, write_json
from saf.records.result import command
from saf.schedules import OneTime


@dataclass(frozen=True)
class Reference:
    """Stands in the settings of a measurement for a path that is known only once runs have ended."""

    path: Callable[["Maker"], Path | None]
    """Returns the path; None leaves the setting out."""
    arms: tuple[str, ...] = ()
    """The arms whose runs it reads."""
    of_seed: bool = True
    """Whether the path differs from seed to seed."""


def checkpoint(arm: str, at: float = 0.5) -> Reference:
    """Refer to a checkpoint of an arm's run, after a share of its updates; 1 is the last."""

    def path(maker: "Maker") -> Path:
        run, folder = maker.run(arm), maker.run(arm).folder / "checkpoints"
        # A run by the clock has no update that it is known to end with.
        if at == 1 and (last := latest(folder)) is not None:
            return last
        return folder / step_name(OneTime(at=float(at)).first_update(run.updates))

    return Reference(path, (arm,))


def run_of(arm: str) -> Reference:
    """Refer to the folder of an arm's run."""
    return Reference(lambda maker: maker.run(arm).folder, (arm,))


def record_of(measurement: str) -> Reference:
    """Refer to the record of an earlier measurement of the recipe."""
    return Reference(lambda maker: maker.file(next(m for m in maker.measurements if m.name == measurement)))


def changes(groups: Mapping[str, Mapping[str, str]]) -> Reference:
    """Refer to a file, written when read, of changes in perplexity (%) from each arm's parent, by group and name."""

    def change(run: Run) -> float:
        losses = [(each.record() or {})["report_loss"] for each in (run, run.needs["parent"])]
        return 100.0 * math.expm1(losses[0] - losses[1])

    def path(maker: "Maker") -> Path:
        by_group = {g: {name: change(maker.run(arm)) for name, arm in arms.items()} for g, arms in groups.items()}
        folder = maker.root / maker.scale.name / "measurements"
        return write_json(folder / f"{maker.recipe}-changes-{maker.seed}.json", by_group)

    return Reference(path, tuple(arm for arms in groups.values() for arm in arms.values()))


def file_of(task: str, part: Literal["train", "test"]) -> Reference:
    """Refer to a file of the examples that a task is finetuned on."""
    return Reference(lambda maker: maker.inputs.examples(task)[("train", "test").index(part)], of_seed=False)


DATA = Reference(lambda maker: maker.inputs.text(), of_seed=False)
"""The folder of the prepared text."""
QUESTIONS = Reference(lambda maker: maker.inputs.questions, of_seed=False)
"""The folder of zero-shot questions; the setting is left out, for the hub's, where none is named."""


@dataclass(frozen=True)
class Number:
    """A number of a measurement's record, and the paper's."""

    title: str
    path: tuple[str | int | Mapping[str, Any], ...]
    """Steps into the record: a name, a place in a list, or values that entries of a list must have."""
    paper: str | None = None
    places: int = 3
    signed: bool = False
    scale: float = 1.0
    """Factor of the record's number."""
    of: Literal["one", "mean", "max"] = "one"
    """Which of several such entries is shown: one alone, their mean or largest."""
    scientific: bool = False

    def value(self, record: Mapping[str, Any]) -> float:
        """Return the number, NaN where the record has none; raise InputError for several entries in place of one."""
        values: list[Any] = [record]
        for step in self.path:
            values = [each for value in values for each in _step(value, step) if each is not None]
        # A mean over entries that a condition forgot to tell apart would look like a measurement.
        if len(values) > 1 and self.of == "one":
            raise InputError(f"{self.title}: {len(values)} entries meet {self.path}; add a condition")
        summarise = max if self.of == "max" else statistics.fmean
        return self.scale * summarise(map(float, values)) if values else math.nan


def _step(value: Any, step: str | int | Mapping[str, Any]) -> list[Any]:
    if isinstance(step, Mapping):
        return [entry for entry in value if step.items() <= entry.items()]
    # Slices, since a list that is too short has no entry, and raises nothing.
    return value[int(step) :][:1] if isinstance(value, list) else [value.get(step)]


SMOKE: Mapping[str, Any] = {
    "sequences": 4, "windows": 2, "heldout_sequences": 2, "points": "32x2",
    "memory": False, "fresh": False, "graphs": "off", "precisions": ("fp32",), "dtype": "fp32",
}  # fmt: skip
"""Flags at the smoke scale, of measurements that set them."""
SMOKE_BENCH: Mapping[str, Any] = {
    "model": "tiny", "rates": (0.5,), "others": (), "profile": False,
    "pairs": 2, "warmup": 1, "repeats": 1, "tolerance": 10.0,
}  # fmt: skip
"""Further flags of every benchmark of speed there; its times mean nothing."""


@dataclass(frozen=True)
class Measurement:
    """One benchmark or analysis."""

    name: str
    program: str
    """Module and subcommand that `python -m` runs: "saf bench update", "benchmarks.accuracy"."""
    on: tuple[Reference | str, ...] = ()
    """Positional arguments."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Flags at the paper's scale, without dashes; a string may have several values of a flag, as words."""
    _: KW_ONLY
    small: Mapping[str, Any] = field(default_factory=dict)
    """What differs at the small scale: flags, or by the names "on" and "processes" these fields."""
    smoke: Mapping[str, Any] | None = field(default_factory=dict)
    """The same at the smoke scale; None leaves the measurement out there."""
    processes: int = 1
    """Processes that measure together, a GPU each."""
    numbers: Sequence[Number] = ()
    """Numbers to show beside the paper's, means over seeds, where the tables of its kind do not have them."""
    quoted_as: Mapping[str, str] = field(default_factory=dict)
    """Where the paper's numbers of a benchmark are found, if not by its record alone (`benchmarks.named`)."""

    def at(self, scale: str) -> dict[str, Any]:
        """Return "on", "processes" and the flags at a scale."""
        values = {"on": self.on, "processes": self.processes, **self.settings}
        if scale == "smoke":
            # Only flags that the measurement sets, as its command may lack others; one that times sets points or pairs.
            values |= {name: value for name, value in SMOKE.items() if name in self.settings}
            values |= SMOKE_BENCH if {"points", "pairs"} & self.settings.keys() else {}
        return values | dict({"small": self.small, "smoke": self.smoke or {}}.get(scale, {}))

    def references(self, scale: str) -> list[Reference]:
        values = self.at(scale)
        return [each for each in (*values.pop("on"), *values.values()) if isinstance(each, Reference)]

    def arms(self, scale: str) -> list[str]:
        if scale == "smoke" and self.smoke is None:
            return []
        return [arm for each in self.references(scale) for arm in each.arms]

    def file(self, folder: Path, recipe: str, scale: str, seed: int) -> Path:
        """Return the file of its record below a scale's folder: one for each seed if a path differs by seed."""
        # Random weights and the prepared text are the same for every seed: one record will do.
        of_seed = any(each.of_seed for each in self.references(scale))
        name = f"{recipe}.{self.name.replace(' ', '-').replace(',', '')}"
        return folder / "measurements" / name / (f"seed-{seed}.json" if of_seed else "once.json")


@dataclass(frozen=True, kw_only=True)
class Maker:
    """Makes the measurements of one recipe and seed: in this process, or by torchrun where several measure together."""

    recipe: str
    measurements: Sequence[Measurement]
    scale: Scale
    seed: int
    runs: Mapping[Key, Run]
    inputs: Inputs
    root: Path

    def file(self, each: Measurement) -> Path:
        """Return the file of a measurement's record."""
        return each.file(self.root / self.scale.name, self.recipe, self.scale.base, self.seed)

    def run(self, arm: str) -> Run:
        """Return the run of an arm, or of the one that stands for it at this scale."""
        return self.runs[arm_at(arm, self.scale.base).name, self.seed]

    def make(self, each: Measurement) -> str | None:
        """Make a measurement unless its record is there; return why it failed."""
        out = self.file(each)
        if out.is_file():
            return None
        print_progress(f"measuring {self.recipe}, {each.name} ({each.program}) in {out}")
        # Written aside: a measurement that is killed halfway must leave no record that looks complete.
        log, partial = out.with_suffix(".log"), out.with_suffix(".partial.json")
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            module, *words = [*each.program.split(), *self._words(each), "--out", str(partial)]
            with open(log, "a") as file, redirect_stdout(file), redirect_stderr(file):
                if (processes := each.at(self.scale.base)["processes"]) > 1:
                    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
                    program = [*torchrun, str(processes), "-m", module, *words]
                    code = subprocess.run(program, stdout=file, stderr=file).returncode
                else:
                    # A process of its own would import torch again, which takes longer than most measurements of the
                    # smoke scale.
                    code = importlib.import_module("saf.cli" if module == "saf" else module).main(words)
        except SystemExit as end:
            code = end.code
        except (SafError, OSError) as error:
            return f"failed: {error}"
        if code:
            lines = log.read_text(errors="replace").strip().splitlines() or [""]
            return f"failed: {lines[-1]} (see {log})"
        place = {"scale": self.scale.name, "recipe": self.recipe, "measurement": each.name}
        record = read_json(partial)
        # Processes of torchrun record their own command, which nobody typed.
        record["provenance"]["command"] = command()
        write_json(out, {**record, "experiment": {**place, "seed": None if out.stem == "once" else self.seed}})
        partial.unlink()
        return None

    def _words(self, each: Measurement) -> list[str]:
        flags = each.at(self.scale.base)
        del flags["processes"]
        words = [str(self._value(one)) for one in flags.pop("on")]
        for name, setting in flags.items():
            value, flag = self._value(setting), name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            elif value is not None:
                values = value.split() if isinstance(value, str) else value if isinstance(value, tuple) else [value]
                words += [f"--{flag}", *map(str, values)]
        return words

    def _value(self, value: Any) -> Any:
        return value.path(self) if isinstance(value, Reference) else value
