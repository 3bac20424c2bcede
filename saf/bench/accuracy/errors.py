"""`saf bench errors`: how far execution is from float64, beside the paper's gradient table, within which budgets."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from saf.arguments import at_least, check_fields
from saf.bench.accuracy.layer import TENSORS, Layer, frozen_errors, sdpa_errors
from saf.bench.accuracy.tables import conditions, error_tables, overview
from saf.bench.accuracy.transitions import states
from saf.bench.harness.check import TOLERANCE
from saf.bench.harness.environment import environment
from saf.bench.harness.kind import Benchmark
from saf.bench.harness.measured import Record
from saf.bench.harness.recorder import Recorder, Say, say_on_stderr, unmeasured
from saf.bench.harness.settings import BenchSettings
from saf.bench.harness.timing import Budget
from saf.errors import InputError
from saf.heads import HeadLayout
from saf.machine.execution import Execution
from saf.ops import BACKENDS, choose_backend
from saf.records.table import Cell, Part
from saf.settings import documented

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SDPA_FACTOR = 2.0
"""Largest multiple of the error that PyTorch's own attention has at the same shape; `TOLERANCE` bounds it too."""
LAYER_FACTOR = 1.1
"""Largest multiple of the unfrozen layer's error, under bfloat16 autocast."""
NORM_FLOOR = 1e-8
"""Under the norm of what is exact, as in the paper's table."""


@documented
@dataclass(kw_only=True)
class ErrorSettings(BenchSettings):
    """Ask for the paper's case: 2 x 129 tokens, 4 heads of 64 channels, patterns of 192, heads 1 and 3 frozen."""

    kind: ClassVar[str] = "errors"
    length: int = 129
    """Tokens of an input."""
    stored: int = 192
    """Positions that the patterns cover."""
    batch_size: int = 2
    """Sequences."""
    num_heads: int = 4
    """Heads of the layer."""
    head_dim: int = 64
    """Channels of a head."""
    frozen: tuple[int, ...] = (1, 3)
    """Frozen heads, counted from 0."""
    backends: tuple[str, ...] = ()
    """Backends of frozen heads; left out: every one that runs on the device."""
    precisions: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16")
    """fp32 throughout; bf16 autocast over fp32 weights (operators: operands in bf16)."""
    kernel: str = "auto"
    """Attention kernel of live heads, on both sides."""
    transitions: Annotated[int, at_least(0)] = 0
    """Also freeze, prune and undo heads of a model so many times, in fp32, and tell its largest error after any."""
    seed: Annotated[int, at_least(0)] = 0
    """Of weights, inputs, output gradients, patterns and operations."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """CUDA if there is one."""

    def __post_init__(self):
        """Raise InputError for sizes that fit no layer."""
        check_fields(self)
        if not (1 <= self.length <= self.stored and self.batch_size >= 1):
            raise InputError(f"expected 1 <= length <= stored, batch_size >= 1; got {self.length}, {self.stored}")
        if self.head_dim < 2 or self.head_dim % 2 or not self.frozen or not self.precisions:
            raise InputError("expected an even head_dim, one frozen head and one precision at least")
        HeadLayout(self.num_heads, self.num_heads, tuple(sorted(self.frozen)))
        self._refuse("transitions", "fp32" not in self.precisions, "without fp32 among the precisions")


class ErrorsKind(Benchmark[ErrorSettings]):
    """Measure numerical errors."""

    name = "errors"
    title = "Numerical errors"
    settings = ErrorSettings

    def measure(self, settings: ErrorSettings, *, out: Path | None = None, say: Say = say_on_stderr) -> dict[str, Any]:
        """Compare a layer, frozen and pruned, and its frozen heads alone with float64; return the record of `out`.

        Rows hold `max_abs` and `relative_l2` = ||found - exact|| / max(||exact||, 1e-8), the same `beside` it (the
        layer unfrozen, or PyTorch's attention), against eager attention under the same autocast (the paper's
        comparison), and the `limit` of relative_l2 with `within`.

        Raises:
            InputError: A backend there is none of, or `out` exists.
            UnsupportedError: A device that is not there, or a named backend that cannot run on it.
        """
        execution = Execution.of(settings.device, compile="off")
        recorder = Recorder(out, kind=self.name, settings=settings.to_dict(), budget=Budget(None), say=say)
        with recorder:
            recorder.trace(**environment(execution.device, execution.device_name))
            layer = _draw(settings, execution.device)
            for precision in settings.precisions:
                _keep(recorder, None, precision, [*_layer_rows(settings, layer, None, precision)])
                for backend in _backends(settings, precision, execution.device, recorder):
                    rows = [*_layer_rows(settings, layer, backend, precision)]
                    rows += _operator_rows(settings, layer, backend, precision)
                    if settings.transitions and precision == "fp32":
                        rows.append(_transitions_row(settings, backend, execution.device))
                    _keep(recorder, backend, precision, rows)
        return recorder.record

    def conditions(self, record: Record) -> str:
        """Return the case whose errors are measured, and against what."""
        return conditions(record)

    def measured(self, row: Record) -> Hashable | None:
        """Return part, backend (None of the pruned layer), precision and tensor."""
        return row["part"], row["backend"], row["precision"], row["tensor"]

    def overview(self, records: Sequence[tuple[Cell, Record]]) -> list[Part]:
        """Return one row a part, backend and precision."""
        return overview(records)

    def tables(self, record: Record, *, brief: bool = False) -> list[Part]:
        """Return a table for each part, backend and precision, and the notes to read them by."""
        return [*error_tables(record, brief=brief), *unmeasured(record)]

    def finding(self, record: Record) -> str:
        """Return how many rows are within their limits."""
        rows = record["rows"]
        within = f"{sum(row['within'] for row in rows)} of {len(rows)} errors are within their limits"
        return within if rows else self.title

    def failures(self, record: Record) -> list[str]:
        """Name the rows of a record that are above their limits."""
        return [
            f"{row['part']} {row['backend'] or ''} {row['precision']} {row['tensor']}: {row['relative_l2']:.2e} "
            f"above {row['limit']:.2e}"
            for row in record["rows"]
            if not row["within"]
        ]


def _draw(settings: ErrorSettings, device: torch.device) -> Layer:
    """Return the layer that these settings describe, its weights and inputs drawn from their seed."""
    return Layer.draw(
        heads=HeadLayout(settings.num_heads, settings.num_heads, tuple(sorted(settings.frozen))),
        head_dim=settings.head_dim,
        batch_size=settings.batch_size,
        length=settings.length,
        stored=settings.stored,
        generator=torch.Generator().manual_seed(settings.seed),
        device=device,
    )


def _keep(recorder: Recorder, backend: str | None, precision: str, rows: Sequence[dict[str, Any]]) -> None:
    """Record the rows of one backend in one precision; without a backend, those of the pruned layer."""
    recorder.show([{"backend": backend, "precision": precision, **row} for row in rows])
    recorder.keep()
    worst = max(row["relative_l2"] / row["limit"] for row in rows)
    recorder.say(f"{backend or 'pruned'} {precision}: at most {worst:.2f} of what is allowed")


def _backends(settings: ErrorSettings, precision: str, device: torch.device, recorder: Recorder) -> Iterator[str]:
    """Yield the named backends, which must run, or those that do."""
    dtype = DTYPES[precision]
    for name in settings.backends or BACKENDS:
        reason = None if settings.backends else BACKENDS[name].supports(device, dtype)
        if reason:
            recorder.leave_out(f"{name} {precision}", reason)
        else:
            yield choose_backend(name, device=device, dtypes=[dtype])


def _layer_rows(settings: ErrorSettings, layer: Layer, backend: str | None, precision: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each tensor of a whole layer: its distance from float64, the unfrozen layer's, and the limit.

    Without a backend the layer is pruned: its heads are left out, and in what is exact their outputs are zero.
    """
    autocast = torch.bfloat16 if precision == "bf16" else None
    dense = partial(layer.eager, frozen=backend is not None, pruned=backend is None)
    exact = dense(dtype=torch.float64)
    found = layer.model(backend=backend, pruned=backend is None, kernel=settings.kernel, autocast=autocast)
    eager = dense(dtype=torch.float32, autocast=autocast)
    unfrozen = layer.model(backend=None, kernel=settings.kernel, autocast=autocast)
    unfrozen_exact = layer.eager(frozen=False, dtype=torch.float64)
    for name in TENSORS:
        errors, beside = distance(found[name], exact[name]), distance(unfrozen[name], unfrozen_exact[name])
        limit = LAYER_FACTOR * beside["relative_l2"]
        # In float32 rounding is near the bar of operators anyway: a lucky unfrozen layer does not lower it.
        limit = limit if autocast else max(limit, TOLERANCE[DTYPES[precision]])
        part = "layer" if backend else "pruned layer"
        yield _row(part, name, errors, beside, limit) | {"eager": distance(found[name], eager[name])}


def _operator_rows(settings: ErrorSettings, layer: Layer, backend: str, precision: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each tensor of the frozen heads alone, beside PyTorch's attention at the same shape."""
    shape = (settings.batch_size, layer.heads.num_frozen, settings.length, settings.head_dim)
    generator = torch.Generator().manual_seed(settings.seed + 1)
    drawn = [torch.randn(shape, generator=generator).to(layer.x.device, DTYPES[precision]) for _ in range(4)]
    found = frozen_errors(layer.pattern, backend, *drawn[2:])
    theirs = sdpa_errors(*drawn, kernel=settings.kernel)
    for name, (errors, beside) in {n: (distance(*found[n]), distance(*theirs[n])) for n in found}.items():
        limit = min(TOLERANCE[DTYPES[precision]], SDPA_FACTOR * beside["relative_l2"])
        yield _row("operator", name, errors, beside, limit) | {"eager": None}


def _transitions_row(settings: ErrorSettings, backend: str, device: torch.device) -> dict[str, Any]:
    """Return the largest error of a model's logits after any operation, beside that of the model before them all.

    The limit is that of operators: a single state's error is chance, the largest of many is at most a few times it.
    """
    first, *later = (
        distance(state.found, state.exact)
        for state in states(
            settings.transitions,
            num_heads=settings.num_heads,
            head_dim=settings.head_dim,
            length=settings.length,
            stored=settings.stored,
            batch_size=settings.batch_size,
            backend=backend,
            seed=settings.seed,
            device=device,
        )
    )
    worst = {name: max(each[name] for each in later) for name in first}
    limit = max(TOLERANCE[torch.float32], SDPA_FACTOR * first["relative_l2"])
    return _row("transitions", f"logits, worst of {settings.transitions}", worst, first, limit) | {"eager": None}


def distance(found: Tensor, exact: Tensor) -> dict[str, float]:
    """Return the largest absolute and the relative L2 error, with the paper's floor of 1e-8 under the norm."""
    error = found.double() - exact.double()
    return {
        "max_abs": error.abs().max().item(),
        "relative_l2": (error.norm() / exact.double().norm().clamp(min=NORM_FLOOR)).item(),
    }


def _row(part: str, tensor: str, errors: dict, beside: dict, limit: float) -> dict[str, Any]:
    within = errors["relative_l2"] <= limit
    return {"part": part, "tensor": tensor, **errors, "beside": beside, "limit": limit, "within": within}
