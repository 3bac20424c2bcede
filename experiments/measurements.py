"""Measurements of a recipe beside its training runs: benchmarks and analyses as data, and the code that makes them.

`Checkpoint`, `RunOf`, `RecordOf`, `Changes`, `FileOf`, `DataFolder` and `QuestionFolder` stand in settings for paths
that are known once runs have ended.
"""

import importlib
import math
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from experiments.arms import arm_at
from experiments.inputs import Inputs
from experiments.run import Key, Run, Say
from experiments.scales import Scale
from saf.checkpoint import latest, step_name
from saf.errors import InputError, SafError
from saf.records.files import read_json, write_json
from saf.records.result import command
from saf.schedules import OneTime


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of an arm's run, after a share of its updates; 1 is the last."""

    arm: str
    at: float = 0.5


@dataclass(frozen=True)
class RunOf:
    """The folder of an arm's run."""

    arm: str


@dataclass(frozen=True)
class RecordOf:
    """The record of an earlier measurement of the recipe."""

    measurement: str


@dataclass(frozen=True)
class Changes:
    """A JSON file of changes in perplexity, %, of arms from what they branched off: {group: {name: change}}."""

    arms: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class FileOf:
    """A file of the examples that a task is finetuned on."""

    task: str
    part: Literal["train", "test"]


@dataclass(frozen=True)
class DataFolder:
    """The folder of the prepared text."""


@dataclass(frozen=True)
class QuestionFolder:
    """The folder of zero-shot questions; the setting is left out, for the hub's, where none is named."""


Reference = Checkpoint | RunOf | RecordOf | Changes | FileOf | DataFolder | QuestionFolder


@dataclass(frozen=True)
class Number:
    """A number of a measurement's record, beside the paper's."""

    title: str
    path: tuple[str | int | Mapping[str, Any], ...]
    """Names, places in a list, or conditions on its entries, of which a frozenset lists values that will do."""
    paper: str | None = None
    places: int = 3
    signed: bool = False
    scale: float = 1.0
    """Factor of the record's number."""
    of: Literal["one", "mean", "max", "pairs"] = "one"
    """Which of several entries that meet the conditions is shown: one alone, their mean or largest. A list of "pairs",
    baseline's and arm's times, gives the mean of their ratios with its standard error."""
    saved: bool = False
    """Whether a speedup is shown as the percentage of time that it saves."""
    scientific: bool = False

    def find(self, record: Mapping[str, Any]) -> list[float]:
        """Return the number, or one a pair; empty where the record has none.

        Raises InputError where several entries meet the conditions and one is expected.
        """
        values: list[Any] = [record]
        for step in self.path:
            values = [each for value in values for each in _step(value, step) if each is not None]
        if len(values) > 1 and self.of in ("one", "pairs"):
            raise InputError(f"{self.title}: {len(values)} entries meet {self.path}; add a condition")
        if not values:
            return []
        if self.of == "pairs":
            return [baseline / arm for baseline, arm in values[0]]
        value = (max if self.of == "max" else statistics.fmean)(map(float, values))
        return [100.0 * (1.0 - 1.0 / value) if self.saved else self.scale * value]


def _step(value: Any, step: str | int | Mapping[str, Any]) -> list[Any]:
    if isinstance(step, Mapping):
        return [entry for entry in value if _meets(entry, step)]
    if isinstance(step, int):
        return [value[step]] if step < len(value) else []
    return [value.get(step)]


def _meets(value: Any, condition: Any) -> bool:
    if isinstance(condition, Mapping):
        return isinstance(value, Mapping) and all(_meets(value.get(name), one) for name, one in condition.items())
    return value in condition if isinstance(condition, frozenset) else value == condition


def speedup(
    title: str,
    rate: float,
    point: tuple[int, int],
    paper: str | None,
    *,
    backend: str = "toeplitz",
    way: str = "update",
    mean: bool = False,
) -> Number:
    """Return the accepted ratio, baseline's time over an arm's, at a point: tokens of context, sequences.

    It is the median over pairs, or with `mean` their mean with its standard error.
    """
    shape = {"length": point[0], "batch_size": point[1]}
    entry = {"backend": backend, "rate": rate, "variant": way, "refused": False, "point": shape}
    if mean:
        return Number(title=title, path=("rows", entry, "pair_ms"), paper=paper, places=4, of="pairs")
    return Number(title=title, path=("rows", entry, "ratio"), paper=paper)


def peak_change(
    title: str, rate: float, point: tuple[int, int], paper: str | None, *, backend: str = "toeplitz"
) -> Number:
    """Return the change of an arm's peak memory against the ordinary one, %, at a point."""
    entry = {"backend": backend, "rate": rate, "point": {"length": point[0], "batch_size": point[1]}}
    return Number(title=title, path=("memory", entry, "change_percent"), paper=paper, places=2, signed=True)


SMOKE_BENCH: Mapping[str, Any] = {
    **{"model": "tiny", "rates": (0.5,), "pairs": 2, "warmup": 1, "repeats": 1, "tolerance": 10.0},
    **{"profile": False, "others": ()},
}
"""Settings of a benchmark at the smoke scale, whose times mean nothing."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One benchmark or analysis."""

    name: str
    does: str
    """The words of its command: "bench update" of `saf`, "benchmarks accuracy" of the scripts, "analyze one-head"."""
    on: tuple[Reference | str, ...] = ()
    """Positional arguments."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Flags at the paper's scale, without dashes."""
    scaled: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What other scales change of them; "on" and "processes" change those."""
    processes: int = 1
    """Processes that measure together, a GPU each."""
    numbers: tuple[Number, ...] = ()
    label: str | None = None
    """Where the paper has these numbers, if not where the recipe's others are."""
    smoke: bool = True

    def at(self, scale: str, name: str) -> Any:
        """Return "on" or "processes" at a scale."""
        return self.scaled.get(scale, {}).get(name, getattr(self, name))

    def flags(self, scale: str) -> dict[str, Any]:
        """Return the flags at a scale."""
        changed = {name: value for name, value in self.scaled.get(scale, {}).items() if name not in ("on", "processes")}
        return {**self.settings, **changed}

    def references(self, scale: str) -> list[Reference]:
        """Return what it reads at a scale."""
        return [each for each in (*self.at(scale, "on"), *self.flags(scale).values()) if isinstance(each, Reference)]

    def arms(self, scale: str) -> list[str]:
        """Return the arms that it reads at a scale."""
        if scale == "smoke" and not self.smoke:
            return []
        arms: list[str] = []
        for each in self.references(scale):
            if isinstance(each, Changes):
                arms += [arm for group in each.arms.values() for arm in group.values()]
            elif isinstance(each, Checkpoint | RunOf):
                arms.append(each.arm)
        return arms

    def file(self, folder: Path, recipe: str, scale: str, seed: int) -> Path:
        """Return the file of its record below a scale's folder: of one seed where it reads runs."""
        reads = any(isinstance(each, Checkpoint | RunOf | RecordOf | Changes) for each in self.references(scale))
        name = f"{recipe}.{self.name.replace(' ', '-').replace(',', '')}"
        return folder / "measurements" / name / ("once.json" if not reads else f"seed-{seed}.json")


IN_PROCESS = {"saf": "saf.cli", "experiments.analyses": "experiments.analyses.__main__"}
"""Where the `main` of a package's command is."""


def _program(words: list[str]) -> tuple[str, list[str]]:
    """Return the module that `python -m` runs for the words of a measurement, and its arguments."""
    if words[0] == "bench":
        return "saf", words
    return ("experiments.analyses", words[1:]) if words[0] == "analyze" else (f"benchmarks.{words[1]}", words[2:])


@dataclass(frozen=True, kw_only=True)
class Maker:
    """Makes the measurements of one recipe and seed, in this process but where several share one."""

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

    def make(self, each: Measurement, say: Say) -> str | None:
        """Make a measurement unless its record is there; return why it failed."""
        out = self.file(each)
        if out.is_file():
            return None
        say(f"measuring {self.recipe}, {each.name} ({each.does}) in {out}")
        log, partial = out.with_suffix(".log"), out.with_suffix(".partial.json")
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            words = self._words(each, partial)
        except (SafError, OSError) as error:
            return f"failed: {error}"
        processes = each.at(self.scale.base, "processes")
        with open(log, "a") as file:
            module, words = _program(words)
            if processes > 1:
                torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
                program = [*torchrun, str(processes), "-m", module, *words]
                code = subprocess.run(program, stdout=file, stderr=file).returncode
            else:
                main = importlib.import_module(IN_PROCESS.get(module, module)).main
                with redirect_stdout(file), redirect_stderr(file):
                    try:
                        code = main(words)
                    except SystemExit as end:
                        code = end.code
        if code:
            lines = log.read_text(errors="replace").strip().splitlines() or [""]
            return f"failed: {lines[-1]} (see {log})"
        seed = None if out.stem == "once" else self.seed
        place = {"scale": self.scale.name, "recipe": self.recipe, "measurement": each.name, "seed": seed}
        record = read_json(partial)
        record["provenance"]["command"] = command()
        write_json(out, {**record, "experiment": place})
        partial.unlink()
        return None

    def _words(self, each: Measurement, out: Path) -> list[str]:
        base = self.scale.base
        words = [*each.does.split(), *(str(self._value(one, each)) for one in each.at(base, "on")), "--out", str(out)]
        for name, setting in each.flags(base).items():
            value, flag = self._value(setting, each), name.replace("_", "-")
            if isinstance(setting, QuestionFolder) and value is None:
                continue
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                words += [f"--{flag}", *map(str, value if isinstance(value, list | tuple) else [value])]
        return words

    def _value(self, reference: Any, each: Measurement) -> Any:
        """Return what a reference stands for, or a value itself."""
        if isinstance(reference, Checkpoint):
            run, folder = self._run(reference.arm), self._run(reference.arm).folder / "checkpoints"
            if reference.at == 1 and (last := latest(folder)) is not None:
                return last
            return folder / step_name(OneTime(at=float(reference.at)).first_update(run.updates))
        if isinstance(reference, RunOf):
            return self._run(reference.arm).folder
        if isinstance(reference, RecordOf):
            return self.file(next(one for one in self.measurements if one.name == reference.measurement))
        if isinstance(reference, FileOf):
            return self.inputs.examples(reference.task)[reference.part == "test"]
        if isinstance(reference, DataFolder):
            return self.inputs.text()
        if isinstance(reference, QuestionFolder):
            return self.inputs.questions
        if isinstance(reference, Changes):
            path = self.file(each).with_name(f"changes-{self.seed}.json")
            return write_json(
                path, {group: dict(map(self._change, arms.items())) for group, arms in reference.arms.items()}
            )
        return reference

    def _change(self, named: tuple[str, str]) -> tuple[str, float]:
        """Return a name with the change in perplexity, %, of its arm from the run that it branched off."""
        run = self._run(named[1])
        own, reference = run.record(), run.needs["parent"].record()
        assert own is not None, named
        assert reference is not None, named
        return named[0], 100.0 * math.expm1(own["report_loss"] - reference["report_loss"])

    def _run(self, arm: str) -> Run:
        return self.runs[arm_at(arm, self.scale.base).name, self.seed]
