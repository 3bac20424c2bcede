"""What the analyses of a model share: options, opening model and data, writing the record, its table and its figure."""

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from torch import Tensor, nn

from saf.adapters import adapter_for
from saf.cli.command import Command
from saf.cli.models import Source, open_data, open_source
from saf.cli.output import show
from saf.data import TokenData, calibration_windows, sequential_windows
from saf.errors import InputError
from saf.machine.execution import autocast, device_name, pick_device
from saf.records.files import write_json
from saf.records.head import result_head
from saf.report.analysis_figures import check_figure, write_figure
from saf.train.observer import duration


@dataclass(kw_only=True)
class Written(Command):
    """Where the result of an analysis goes."""

    out: Path | None = None
    """Write the result as JSON into this file."""
    figure: Path | None = None
    """Draw the result as an SVG into this file."""
    json: bool = False
    """Print JSON instead of a table."""

    def check(self) -> None:
        """Raise InputError, before any work, when `out` exists or the figure could not be drawn afterwards."""
        if self.out is not None and self.out.exists():
            raise InputError(f"{self.out} exists already; remove it, or write to another file")
        if self.figure is not None:
            check_figure(self.figure)

    def settings(self) -> dict[str, Any]:
        """Return what was asked for, without where the result goes."""
        elsewhere = {field.name for field in fields(Written)}
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in elsewhere}

    def finish(self, record: dict[str, Any], *tables: Any) -> dict[str, Any]:
        """Write, draw and show the record of an analysis, and return it."""
        if self.out is not None:
            write_json(self.out, record)
        if self.figure is not None:
            write_figure(record, self.figure)
        show(record, *tables, as_json=self.json)
        return record


@dataclass(kw_only=True)
class OnModel(Written):
    """What every analysis of a model asks for."""

    model: Annotated[Path, tyro.conf.Positional]
    """A checkpoint (step-N), a run (its newest checkpoint), or a folder written by saf.save."""
    data: Path | None = None
    """Folder made by `saf data prepare`; the one it was trained on if not given."""
    sequences: int = 32
    """Calibration sequences."""
    calibration_seed: int | None = None
    """Of the choice of calibration sequences (the run's)."""
    length: int | None = None
    """Tokens of a sequence or window (the run's)."""
    batch_size: int = 8
    """Sequences in a forward pass."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """auto is bf16 autocast on CUDA and fp32 on CPU."""

    def open(self) -> "Opened":
        """Open model and data."""
        self.check()
        source = open_source(self.model)
        data = open_data(self.data, source)
        device = pick_device(self.device)
        model: Any = source.model(device)
        settings = source.state.get("settings") or {}
        length = self.length or settings.get("length") or model.config.max_length
        return Opened(source, model, data, length, autocast(device, self.precision))

    def calibration(self, opened: "Opened") -> list[Tensor]:
        """Return the calibration sequences."""
        settings = opened.source.state.get("settings") or {}
        seed = settings.get("seed", 0) if self.calibration_seed is None else self.calibration_seed
        windows = calibration_windows(
            opened.data, length=opened.length, count=self.sequences, seed=seed, setting="--sequences"
        )
        return list(windows.split(self.batch_size))

    def record(self, name: str, opened: "Opened", values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the record of an analysis of a model."""
        checkpoint = opened.source.checkpoint
        head = result_head(
            name,
            self.settings(),
            device=opened.device_name,
            checkpoints={"model": checkpoint.hash if checkpoint else None},
            data={"analysed": opened.data.fingerprint},
        )
        return {**head, "model": str(opened.source.folder), "length": opened.length, **values}


@dataclass(frozen=True)
class Opened:
    """A model with its data, and the precision to run it in."""

    source: Source
    model: nn.Module
    data: TokenData
    length: int
    autocast: AbstractContextManager[Any]

    def windows(self, count: int) -> Tensor:
        """Return the first windows `[count, length + 1]` of the controller partition."""
        return sequential_windows(self.data.tokens("controller"), self.length, count)

    @property
    def device_name(self) -> str:
        """The accelerator's name, or the processor's architecture."""
        return device_name(adapter_for(self.model).device)


def say(text: str) -> None:
    """Tell on standard error what happens next."""
    print(text, file=sys.stderr, flush=True)


class Waiting:
    """Tells on standard error how far a long measurement is, and how much time is left."""

    def __init__(self, what: str, total: int, *, every: float = 5.0):
        """Take what is counted, how many there are, and the seconds between two lines."""
        self._what, self._total, self._every = what, total, every
        self._start, self._told = time.monotonic(), 0.0

    def __call__(self, done: int, save: Callable[[], Any] | None = None) -> None:
        """Say that `done` are done, now and then, and call `save` as often; the first and the last are always told."""
        now = time.monotonic()
        if self._told and done < self._total and now - self._told < self._every:
            return
        self._told = now
        each = (now - self._start) / done
        left = f"{duration(each * (self._total - done))} left"
        say(f"{done} of {self._total} {self._what}, {each:.2f} s each, {left}")
        if save is not None:
            save()
