"""Analyses build on this file: their settings, the model with its data, losses with heads frozen, rank correlations.

An analysis is a dataclass of settings with `measure() -> record`, `tables(record)` and, for some, `draw(records)`.
One of a model trained here has `analyse(opened)` in place of `measure`.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
import tyro
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import trange

from experiments.records import Record
from saf.calibration import calibrate, heads_at_a_time
from saf.data import TokenData, calibration_windows, sequential_windows
from saf.errors import InputError
from saf.heads import Head, HeadSet
from saf.machine import Device, Precision, autocast, device_name, pick_device
from saf.models.adapter import adapter_for, evaluation_mode, unwrap
from saf.opening import ModelFolder, find_model
from saf.patterns import Pattern
from saf.records.result import read_result, result_header
from saf.records.table import Part
from saf.selection import heads_at_rate
from saf.statistics import AttentionStatistics
from saf.surgery import install_, uninstall_
from saf.tasks.text import window_losses


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """Where a command writes its record."""

    kind: ClassVar[str]
    """Its name in records and on the command line."""
    out: Path | None = None
    """JSON file for the record."""

    def measure(self) -> dict[str, Any]:
        """Return the record: the header of every result, then the analysis's own entries."""
        raise NotImplementedError

    @staticmethod
    def tables(record: Record) -> list[Part]:
        """Return a sentence with the conditions of a record, then its tables; the record is as read from JSON."""
        raise NotImplementedError

    @staticmethod
    def draw(records: Sequence[Record]) -> Figure | None:
        """Return the figure of a record, or of the records of several seeds; None for an analysis without one."""
        del records
        return None

    def header(self, **origin: Any) -> dict[str, Any]:
        """Return the header of the record; `origin` has the arguments of `saf.records.result.result_header`."""
        # Fields alone: vars() has what a cached property computed, too.
        settings = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "out"}
        return result_header(self.kind, settings, **origin)


@dataclass(frozen=True, kw_only=True)
class RunsModel(Analysis):
    """Settings of every analysis that runs a model."""

    batch_size: int = 8
    """Sequences in a forward pass."""
    device: Device = "auto"
    """Device to compute on; auto is CUDA if there is one."""
    precision: Precision = "auto"
    """Precision to compute in; auto is bf16 autocast on CUDA and fp32 on CPU."""


@dataclass(frozen=True, kw_only=True)
class ModelAnalysis(RunsModel):
    """Settings of every analysis of a model that `saf` trained or saved."""

    model: tyro.conf.Positional[Path]
    """A checkpoint (step-N), a run (its newest checkpoint), or a folder written by saf.save."""
    data: Path | None = None
    """Prepared data folder; by default the one that the model was trained on."""
    sequences: int = 32
    """Number of calibration sequences."""
    length: int | None = None
    """Tokens of a sequence or window; by default the run's."""

    def measure(self) -> dict[str, Any]:
        """Open the model and its data, analyse it in its precision, and return the record.

        Raises InputError or CheckpointError where model or data are missing.
        """
        source = find_model(self.model)
        data, device = source.data(self.data), pick_device(self.device)
        model: Any = source.model(device)
        length = self.length or source.settings.get("length") or model.config.max_length
        with autocast(device, self.precision):
            values = self.analyse(ModelWithData(self, source, model, data, length))
        origin = {"checkpoints": {"model": source.hash}, "data": {"analysed": data.fingerprint}}
        header = self.header(device=device_name(device), **origin)
        return {**header, "model": str(source.folder), "length": length, **values}

    def analyse(self, opened: "ModelWithData") -> dict[str, Any]:
        """Return the analysis's own entries of the record."""
        raise NotImplementedError


@dataclass(frozen=True)
class ModelWithData:
    """A model with its data, and the length of its sequences."""

    analysis: ModelAnalysis
    source: ModelFolder
    model: nn.Module
    data: TokenData
    length: int

    def calibration(self) -> list[Tensor]:
        """Return the calibration sequences, drawn with the run's seed."""
        count, seed = self.analysis.sequences, self.source.settings.get("seed", 0)
        windows = calibration_windows(self.data, length=self.length, count=count, seed=seed)
        return list(windows.split(self.analysis.batch_size))

    def windows(self, count: int) -> Tensor:
        """Return the first windows `[count, length + 1]` of the controller partition."""
        return sequential_windows(self.data.tokens("controller"), self.length, count)

    def check_rates(self, rates: Sequence[float]) -> None:
        check_rates(rates, sum(site.layout.num_heads for site in adapter_for(self.model).sites()))


def read_record(path: Path, kind: str) -> dict[str, Any]:
    """Read the record of an analysis; raise InputError for another kind."""
    record = read_result(path)
    if record["kind"] != kind:
        raise InputError(f"{path} must be a record of the analysis {kind}, got {record['kind']!r}")
    return record


# --- heads


def check_rates(rates: Sequence[float], total: int) -> None:
    """Raise InputError unless all rates are shares of `total` heads that select at least one."""
    if wrong := [rate for rate in rates if not (0 < rate <= 1 and heads_at_rate(rate, total))]:
        raise InputError(f"--rates must be in (0, 1] and select at least one of {total} heads, got {wrong}")


def mask_of(heads: HeadSet, shape: Sequence[int]) -> Tensor:
    """Return whether each head is in a set, bool `[L, H]`."""
    mask = torch.zeros(tuple(shape), dtype=torch.bool)
    for head in heads:
        mask[head] = True
    return mask


def matrix(rows: Sequence[Sequence[float | None]]) -> Tensor:
    """Return values `[L, H]` float64 from the rows of a record, None as NaN."""
    # JSON has no NaN.
    return torch.from_numpy(np.array(rows, dtype=float))


def calibrate_in_groups(
    model: nn.Module, ids: Sequence[Tensor], heads: HeadSet, collect: Sequence[str]
) -> Iterator[tuple[HeadSet, AttentionStatistics]]:
    """Yield heads with their statistics, as many at a time as memory allows for the tensors to collect."""
    size = heads_at_a_time(model, collect, sequences=sum(map(len, ids)), length=ids[0].shape[1])
    for first in trange(0, len(heads), size, desc="calibrating heads", mininterval=5):
        some = HeadSet(list(heads)[first : first + size])
        yield some, calibrate(model, ids, collect=collect, heads=some)


class CostMeter:
    """Measures losses of held-out windows `[W, T + 1]` on a copy of a model, with heads frozen during a measurement."""

    def __init__(self, model: nn.Module, windows: Tensor, *, batch_size: int = 8):
        # A copy, since surgery replaces weights in place.
        self._model, self._windows, self._batch_size = copy.deepcopy(unwrap(model)), windows, batch_size
        self.baseline = self._losses()

    def losses(self, heads: HeadSet, patterns: Mapping[Head, Pattern], *, backend: str = "auto") -> Tensor:
        """Return the loss of each window with `heads` frozen, `[W]` float64, nats."""
        chosen: Any = [patterns[head] for head in heads]
        install_(self._model, heads, chosen, backend=backend)
        try:
            return self._losses()
        finally:
            uninstall_(self._model, heads)

    def _losses(self) -> Tensor:
        adapter = adapter_for(self._model)
        with torch.no_grad(), evaluation_mode(self._model):
            batches = [batch.to(adapter.device) for batch in self._windows.split(self._batch_size)]
            parts = [adapter.token_log_probs(ids[:, :-1], ids[:, 1:]).float().cpu() for ids in batches]
        return window_losses(torch.cat(parts))


# --- rank correlations of values by layer and head


def spearman(one: Tensor, other: Tensor) -> float:
    """Return Spearman's correlation, ties by average rank, over the entries that are NaN in neither tensor.

    NaN for fewer than two entries, or a constant one.
    """
    return correlation(*_frame([one, other]).rank().to_numpy().T)


def stratified_spearman(strata: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the correlation of ranks taken and centred within each stratum, all strata pooled.

    Differences between strata play no part. If strata have equally many entries and no ties, it is the mean of their
    own correlations.
    """
    ranks = [_frame(pair).rank() for pair in strata]
    return correlation(*pd.concat([each - each.mean() for each in ranks]).to_numpy().T)


def partial_spearman(one: Tensor, other: Tensor, *, covariates: Sequence[Tensor] = ()) -> float:
    """Return the correlation of ranked values `[L, H]` after regressing out layers and ranked covariates.

    Values are ranked over all heads that have every value and regressed by least squares on an indicator of each layer
    and on the covariates' ranks; the residuals are correlated. NaN if nothing is left of one of them.
    """
    frame = _frame([one, other, *covariates])
    ranks = frame.rank().to_numpy()
    layers = pd.get_dummies(frame.index // one.shape[1]).to_numpy(dtype=float)
    # The indicators of all layers add up to the constant, so that no intercept is needed.
    design = np.hstack([layers, ranks[:, 2:]])
    residuals = ranks[:, :2] - design @ np.linalg.lstsq(design, ranks[:, :2], rcond=None)[0]
    return correlation(*residuals.T)


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Return Pearson's correlation; NaN for fewer than two values, or constant ones."""
    # Residuals of a regression that explains everything are rounding errors; ranks differ by half at least.
    if len(x) < 2 or min(np.ptp(x), np.ptp(y)) < 1e-9:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])


def _frame(values: Sequence[Tensor]) -> pd.DataFrame:
    """Return one column a tensor `[L, H]`, a row a head, without rows that lack a value."""
    return pd.DataFrame({column: each.cpu().double().flatten() for column, each in enumerate(values)}).dropna()


# --- figures


def subplots(rows: int = 1, columns: int = 1, *, size: tuple[float, float] = (12, 9)) -> tuple[Figure, Any]:
    """Return a figure and its axes as `Figure.subplots` has them; `size` is in inches."""
    # With many axes the constrained layout takes as long as all the drawing.
    figure = Figure(figsize=size, layout="constrained" if rows * columns == 1 else None)
    axes = figure.subplots(rows, columns)
    if rows * columns > 1:
        figure.subplots_adjust(left=0.06, right=0.97, bottom=0.08, top=0.94, wspace=0.25, hspace=0.4)
    return figure, axes
