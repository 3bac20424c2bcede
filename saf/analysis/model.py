"""What the analyses of a model share: their settings, the opened model and data, the record's head, and progress."""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from torch import Tensor, nn

from saf.adapters import adapter_for
from saf.arguments import at_least, check_fields
from saf.data import TokenData, calibration_windows, sequential_windows
from saf.errors import InputError
from saf.machine.execution import Device, Precision, autocast, device_name, pick_device
from saf.opening import ModelFolder, find_model, open_data
from saf.records.files import read_json
from saf.records.result import result_header
from saf.settings import documented
from saf.train.checkpoint import checkpoint_hash, find_checkpoint
from saf.train.observer import duration

Record = Mapping[str, Any]
"""What an analysis measured, as JSON has it: the header of every result, then the analysis's own entries."""
EVERY = 5.0
"""Seconds between two lines about a long measurement: often enough to see it move, seldom enough to read."""


@documented
@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Hold what every analysis of a model asks for."""

    model: Annotated[Path, tyro.conf.Positional]
    """A checkpoint (step-N), a run (its newest checkpoint), or a folder written by saf.save."""
    data: Path | None = None
    """Folder made by `saf data prepare`; the one it was trained on when None."""
    sequences: Annotated[int, at_least(1)] = 32
    """Calibration sequences."""
    calibration_seed: Annotated[int | None, at_least(0)] = None
    """Of the choice of calibration sequences; the run's when None."""
    length: Annotated[int | None, at_least(1)] = None
    """Tokens of a sequence or window; the run's when None."""
    batch_size: Annotated[int, at_least(1)] = 8
    """Sequences in a forward pass."""
    device: Device = "auto"
    """Where to compute; auto is CUDA if there is one."""
    precision: Precision = "auto"
    """auto is bf16 autocast on CUDA and fp32 on CPU."""

    def __post_init__(self):
        """Raise InputError naming the first field that cannot be used."""
        check_fields(self)

    def open(self) -> "Opened":
        """Return the model with its data; raise InputError or CheckpointError when they cannot be had."""
        source = find_model(self.model)
        data = open_data(self.data, source)
        device = pick_device(self.device)
        model: Any = source.model(device)
        run = source.settings
        seed = run.get("seed", 0) if self.calibration_seed is None else self.calibration_seed
        length = self.length or run.get("length") or model.config.max_length
        return Opened(self, source, model, data, length, seed, autocast(device, self.precision))


@dataclass(frozen=True)
class Opened:
    """Hold a model with its data, and the precision to run it in."""

    settings: ModelSettings
    source: ModelFolder
    model: nn.Module
    data: TokenData
    length: int
    """Tokens of a sequence or window."""
    calibration_seed: int
    autocast: AbstractContextManager[Any]

    def calibration(self) -> list[Tensor]:
        """Return the calibration sequences in batches `[B, length]`."""
        windows = calibration_windows(
            self.data,
            length=self.length,
            count=self.settings.sequences,
            seed=self.calibration_seed,
            setting="--sequences",
        )
        return list(windows.split(self.settings.batch_size))

    def windows(self, count: int) -> Tensor:
        """Return the first windows `[count, length + 1]` of the controller partition."""
        return sequential_windows(self.data.tokens("controller"), self.length, count)

    def record(self, kind: str, values: Record) -> dict[str, Any]:
        """Return the record of an analysis: the header of every result, the model, and `values`."""
        head = result_header(
            kind,
            vars(self.settings),
            device=device_name(adapter_for(self.model).device),
            checkpoints={"model": self.source.hash},
            data={"analysed": self.data.fingerprint},
        )
        return {**head, "model": str(self.source.folder), "length": self.length, **values}


def checkpoint_beside(path: Path) -> str | None:
    """Return the hash of the checkpoint that `path` is or lies in, a run's newest; None where there is none."""
    found = _checkpoint_beside(path)
    return None if found is None else checkpoint_hash(found)


def fingerprint_beside(path: Path) -> str | None:
    """Return the fingerprint of the data that the checkpoint of `checkpoint_beside` was trained on, as recorded."""
    found = _checkpoint_beside(path)
    return None if found is None else read_json(found / "state.json").get("data_fingerprint")


def _checkpoint_beside(path: Path) -> Path | None:
    try:
        return find_checkpoint(path if path.is_dir() else path.parent)
    except InputError:  # a run whose checkpoints were not kept
        return None


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Hold what a long measurement calls for whoever waits for it; by default nobody does."""

    say: Callable[[str], None] = lambda text: None
    """Called with lines about what happens next."""
    keep: Callable[[Record], None] = lambda record: None
    """Called now and then with the record of what is measured so far."""
    before: Record | None = None
    """What was kept of the same measurement when it was cut off, for one that can go on; None begins it."""

    def countdown(self, what: str, total: int) -> "Countdown":
        """Return what tells how far a measurement of `total` things is."""
        return Countdown(self, what, total)

    def countdowns(self, what: str) -> Callable[[str, int, int], None]:
        """Return what tells how far several measurements are, one after the other.

        It is called with the name of one, how many things of it are done, and how many there are; first with none.
        """
        each: dict[str, Countdown] = {}

        def tell(name: str, done: int, total: int) -> None:
            """Begin to count, or tell how far one is."""
            if not done:
                each[name] = self.countdown(f"{what} of {name}", total)
            else:
                each[name](done)

        return tell


SILENT = Watch()
"""Nobody waits."""


class Countdown:
    """Tell how far a long measurement is, and how much time is left; call it with how many are done."""

    def __init__(self, watch: Watch, what: str, total: int):
        """Take who is told, what is counted, and how many there are."""
        self._watch, self._what, self._total = watch, what, total
        self._start, self._last = time.monotonic(), 0.0

    def __call__(self, done: int, so_far: Callable[[], Record] | None = None) -> None:
        """Say that `done` are done, now and then, and keep the record `so_far` as often; always the first and last."""
        now = time.monotonic()
        if self._last and done < self._total and now - self._last < EVERY:
            return
        self._last = now
        each = (now - self._start) / done
        left = f"{duration(each * (self._total - done))} left"
        self._watch.say(f"{done} of {self._total} {self._what}, {each:.2f} s each, {left}")
        if so_far is not None:
            self._watch.keep(so_far())
