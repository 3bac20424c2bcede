"""How long freezing takes, warm and at first use: calibration, scoring, selection, fitting, installation.

Beside it stand a dense collection of the same queries and keys, whose statistics must agree, and the fit of all heads.
Every timed freezing is undone after its clock has stopped, so that the next one finds the model as it was.
"""

import math
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from benchmarks import run
from saf.adapters import adapter_for
from saf.bench.models import ModelPlan
from saf.bench.protocol import OUT_OF_TIME, Arm, Point, Session, clean_process, wait_for
from saf.calibration import dense_collection, plan_calibration
from saf.calibration.capture import Slots, capture, evaluation_mode
from saf.calibration.plan import free_bytes
from saf.calibration.strips import LayerStatistics
from saf.data import TokenData, calibration_windows
from saf.errors import InputError
from saf.fit import fit_kl, fit_with_certificate
from saf.freeze import freeze_
from saf.freeze_config import FreezeConfig
from saf.freeze_report import FreezeReport
from saf.machine.execution import Execution
from saf.models import GPT
from saf.opening import find_model
from saf.statistics import AttentionStatistics
from saf.surgery import uninstall_
from saf.train.optimizer import build_optimizer

SYNTHETIC = "synthetic: random weights whose heads see distance and content to different degrees; not trained"
"""What a record of freezing says of weights that nobody trained."""
FEWEST = 3
"""Warm freezings below which nothing is reported: the fewest whose median one slow one does not move."""
POINTS = {"tiny": ("256x16",), "124m": ("4096x32",), "774m": ("4096x32",), "1b": ("8192x16",)}
LIMITS = {("124m", 4096, 32): 2.0, ("1b", 8192, 16): 15.0}
"""Seconds that a warm freezing may take on a GPU, by model, context and sequences."""
FIT_SECONDS, FIT_EXCESS = 1.0, 0.002
"""What fitting all 144 heads of 124M at 4,096 tokens may take on a GPU, and nats by which it may miss a reference."""
AGREEMENT = 1e-4
"""Largest relative difference of a statistic from float64 for which times are compared."""


@dataclass(kw_only=True)
class Freezing:
    """Time the whole freezing of a share of heads, stage by stage."""

    model: str = "124m"
    """Preset of the model's shape; its weights are random, with some structure."""
    model_folder: Path | None = None
    """A trained model instead: a checkpoint, a run, or a folder written by saf.save."""
    data: Path | None = None
    """Calibrate on text of this data folder; random tokens by default."""
    points: tuple[str, ...] = ()
    """Shapes, as context x sequences; by default 4096x32 of 124m, 8192x16 of 1b."""
    rates: tuple[float, ...] = (0.25,)
    """Shares of heads to freeze; none, to fit the heads of --statistics alone."""
    batch_size: int = 8
    """Sequences in a forward pass."""
    repeats: int = 5
    """Timed freezings, 3 at least; one more before them is the first use."""
    fit_all: bool = True
    """Also fit all heads, whatever the rates."""
    dense_layers: int = 2
    """Layers collected densely too; the time of all is extrapolated from them."""
    statistics: Path | None = None
    """Also fit all heads of this file: .npz of marginals and entropies, or what AttentionStatistics.save wrote."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """auto is bf16 autocast on CUDA and fp32 on a CPU."""
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seconds: float | None = None
    """Stop cleanly where another measurement would not end within this, and record what was left out."""

    def parsed_points(self) -> list[Point]:
        """Return the points, or that of the preset."""
        usual = () if self.model_folder else POINTS.get(self.model, ())
        found = [tuple(map(int, text.split("x"))) for text in self.points or usual]
        if not found or any(len(each) != 2 for each in found):
            raise InputError("points must name context and sequences, such as --points 4096x32")
        return [Point(length, count) for length, count in found]


def measure(settings: Freezing, *, out: Path | None = None) -> dict[str, Any]:
    """Return the record of freezings, fits and dense collections."""
    if settings.repeats < FEWEST:
        raise InputError(f"repeats must be at least {FEWEST}; got {settings.repeats}")
    points = settings.parsed_points() if settings.rates else []
    execution = Execution.of(settings.device, precision=settings.precision, compile="off")
    goals = read_goals(settings.statistics) if settings.statistics else None
    checkpoint = find_model(settings.model_folder).hash if settings.model_folder else None
    data = TokenData.open(settings.data).fingerprint if settings.data else None
    inputs: Any = {"checkpoints": {"model": checkpoint}, "data": {"calibration": data}}
    seconds = settings.seconds
    session = Session("calibration", asdict(settings), execution, out=out, seconds=seconds, **inputs)
    with session, empty_kernel_cache():
        if goals is not None:
            fields = {"part": "fit", "of": str(settings.statistics)}
            session.attempt("fit of the file", lambda: add_fits(session, settings, goals, fields))
        for point in points:
            with clean_process():
                measure_point(session, settings, point)
    return session.record


def measure_point(session: Session, settings: Freezing, point: Point) -> None:
    """Measure every part of one model that there is time for; an error in one is recorded, and the others go on."""
    model, weights = build(settings, point, session.execution.device)
    ids, text = sequences(settings, point, model)
    subject = Interventions(model, ids, session.execution)
    live = [attention.layout.num_live for attention in model.attention_layers()]
    fields = {
        "model": settings.model if settings.model_folder is None else str(settings.model_folder),
        "point": point.to_dict(),
        "precision": session.execution.precision,
        "weights": weights,
        "text": text,
        "shape": {**model.config.to_dict(), "live": live},
    }
    found: list[tuple[dict[str, Any], AttentionStatistics]] = []
    for rate in settings.rates:
        name = f"{point.name} {100 * rate:g}%"
        session.attempt(name, lambda rate=rate: found.extend(interventions(session, settings, subject, fields, rate)))
    if not found:
        return
    row, measured = found[-1]
    if settings.fit_all:
        head = fields | {"part": "fit", "of": fields["model"]}
        goals = Goals.of(measured)
        session.attempt(f"{point.name} fit of all heads", lambda: add_fits(session, settings, goals, head))
    if settings.dense_layers:
        add_dense = lambda: compare_dense(session, settings, subject, row, measured, fields)  # noqa: E731
        session.attempt(f"{point.name} dense collection", add_dense)


# Freezings


class Event(NamedTuple):
    """What one freezing reported, its wall-clock seconds, and the largest memory meanwhile."""

    report: FreezeReport
    seconds: float
    peak_bytes: int

    @property
    def stages(self) -> dict[str, float]:
        """Return the seconds of each stage; `other` is what none of them counts."""
        stages = dict(self.report.seconds)
        return {**stages, "other": self.seconds - sum(stages.values())}


class Interventions:
    """One model with its optimiser's moments and its calibration sequences."""

    def __init__(self, model: GPT, ids: list[Tensor], execution: Execution):
        self.model, self.ids, self.execution = model, ids, execution
        self._optimizer = build_optimizer(model)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def once(self, rate: float) -> Event:
        """Calibrate, score, select, fit and install; undo it after the clock has stopped."""
        device = self.execution.device
        wait_for(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        began = time.perf_counter()
        with self.execution.autocast():
            report = freeze_(self.model, self.ids, FreezeConfig(rate=rate), optimizer=self._optimizer)
        wait_for(device)
        seconds = time.perf_counter() - began
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else resident
        uninstall_(self.model, report.heads, optimizer=self._optimizer)
        return Event(report, seconds, peak)


def interventions(
    session: Session, settings: Freezing, subject: Interventions, fields: dict[str, Any], rate: float
) -> Iterator[tuple[dict[str, Any], AttentionStatistics]]:
    """Freeze this share of heads as often as the settings ask, record the row, and yield it with the last statistics.

    Yields nothing where time ran out before a median of warm freezings could be taken.
    """
    cuda, point = session.execution.device.type == "cuda", fields["point"]
    name = f"{point['length']}x{point['batch_size']} {100 * rate:g}%"
    with session.execution.autocast():
        plan = plan_calibration(subject.model, subject.ids)
    session.say(f"{name}: {plan}")
    events = repeated(session, settings.repeats, lambda: subject.once(rate), lambda event: event.seconds)
    if len(events) <= FEWEST:
        session.leave_out(name, f"{max(0, len(events) - 1)} warm interventions; a median needs {FEWEST}")
        return
    limit = LIMITS.get((settings.model, point["length"], point["batch_size"]))
    row = {
        "part": "intervention",
        **fields,
        "rate": rate,
        **summary(events[0], events[1:]),
        "peak_kind": "allocated" if cuda else "resident",
        "planned_bytes": plan.device_bytes,
        "passes": len(plan.groups),
        "bar_seconds": limit if cuda and settings.model_folder is None else None,
    }
    session.add([row])
    session.say(f"{name}: first use {row['first_seconds']:.3f} s, warm {row['seconds']:.3f} s")
    yield row, events[-1].report.statistics


def repeated(session: Session, repeats: int, once: Callable[[], Any], seconds: Callable[[Any], float]) -> list[Any]:
    """Do something once and `repeats` times more, as long as another time would end within the time allowed."""
    found: list[Any] = []
    while len(found) <= repeats and session.fits(seconds(found[-1]) if found else 0.0):
        found.append(once())
    return found


def summary(first: Event, warm: Sequence[Event]) -> dict[str, Any]:
    """Return a row's fields: medians of the warm freezings stage by stage, and what the first one took longer."""
    total, chosen = spread([event.seconds for event in warm]), warm[-1].report
    variance = chosen.statistics.variance.nan_to_num()
    return {
        "heads": len(chosen.heads),
        "rejected": len(chosen.rejected),
        "worst_fit_kl": max(chosen.fit_kl.values(), default=None),
        "repeats": len(warm),
        "seconds": total["median"],
        "spread": total,
        "stages": {name: spread([event.stages[name] for event in warm]) for name in first.stages},
        "first_seconds": first.seconds,
        "first_stages": first.stages,
        "first_use_seconds": first.seconds - total["median"],
        "peak_bytes": max(event.peak_bytes for event in warm),
        "same_each_time": all(
            event.report.heads == chosen.heads and torch.equal(event.report.statistics.variance.nan_to_num(), variance)
            for event in (first, *warm)
        ),
    }


def spread(seconds: Sequence[float]) -> dict[str, Any]:
    """Return median, smallest, largest and all of some times."""
    return {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds), "all": list(seconds)}


# The fit of all heads


class Goals(NamedTuple):
    """What heads are fitted to: marginals `[F, T]`, row entropy `[F]`; the KL of another fitter, or None."""

    eta_abs: Tensor
    eta_rel: Tensor
    row_entropy: Tensor
    reference: Tensor | None

    @classmethod
    def of(cls, found: AttentionStatistics) -> "Goals":
        """Take every measured head."""
        live = found.measured
        return cls(found.eta_abs[live], found.eta_rel[live], found.row_entropy[live], None)


def read_goals(path: Path) -> Goals:
    """Read a file of statistics; InputError where it holds none."""
    if not path.is_file():
        raise InputError(f"statistics must be a file that AttentionStatistics.save wrote, or an .npz; got {path}")
    if path.suffix != ".npz":
        return Goals.of(AttentionStatistics.load(path))
    names = ("eta_abs", "eta_rel", "mean_row_entropy", "reference_fit_kl")
    with np.load(path, allow_pickle=False) as arrays:
        if missing := [name for name in names[:3] if name not in arrays]:
            raise InputError(f"statistics must hold {', '.join(names[:3])}; {path} lacks {', '.join(missing)}")
        found = {name: torch.from_numpy(arrays[name]) for name in names if name in arrays}
    length, reference = found["eta_abs"].shape[-1], found.get("reference_fit_kl")
    eta_abs, eta_rel = (found[name].reshape(-1, length) for name in names[:2])
    entropy, reference = found["mean_row_entropy"].flatten(), None if reference is None else reference.flatten()
    return Goals(eta_abs, eta_rel, entropy, reference)


def add_fits(session: Session, settings: Freezing, goals: Goals, fields: dict[str, Any]) -> None:
    """Fit all heads and take their KL, repeatedly, and record the row."""
    device = session.execution.device
    eta_abs, eta_rel, entropy = (part.to(device, torch.float64) for part in goals[:3])

    def once() -> tuple[float, Tensor, Any]:
        wait_for(device)
        began = time.perf_counter()
        pattern, certificate = fit_with_certificate(eta_abs, eta_rel)
        kl = fit_kl(pattern, eta_abs, eta_rel, entropy)
        wait_for(device)
        return time.perf_counter() - began, kl, certificate

    fits = repeated(session, settings.repeats, once, lambda fit: fit[0])
    if len(fits) < 2:
        session.leave_out(f"fit of {fields['of']}", OUT_OF_TIME)
        return
    warm, (_, kl, certificate) = spread([seconds for seconds, *_ in fits[1:]]), fits[-1]
    excess = None if goals.reference is None else (kl - goals.reference.to(kl)).max().item()
    limited = (len(kl), eta_abs.shape[-1], device.type) == (144, 4096, "cuda")
    row = {
        "heads": len(kl),
        "length": eta_abs.shape[-1],
        "repeats": len(fits) - 1,
        "seconds": warm["median"],
        "spread": warm,
        "first_use_seconds": fits[0][0] - warm["median"],
        "sweeps": {"mean": certificate.sweeps.double().mean().item(), "max": int(certificate.sweeps.max())},
        "not_converged": int((~certificate.converged).sum()),
        "worst_kl": kl.max().item(),
        "excess_kl": excess,
        "bar_seconds": FIT_SECONDS if limited else None,
        "bar_excess_kl": None if excess is None else FIT_EXCESS,
    }
    session.add([{**fields, **row}])
    session.say(
        f"fit of {fields['of']}: {row['heads']} heads in {row['seconds']:.3f} s, worst KL {row['worst_kl']:.4f}"
    )


# The dense collection

HELD = 6
"""Arrays [heads, T, T] that the dense collection holds at its peak."""
CPU_BYTES = 1 << 30
"""Memory for these arrays on a CPU, which does not tell what is free."""


def compare_dense(
    session: Session,
    settings: Freezing,
    subject: Interventions,
    row: dict[str, Any],
    measured: AttentionStatistics,
    fields: dict[str, Any],
) -> None:
    """Time the statistics as collected from whole matrices, and record a row that compares both ways."""
    found = dense_collections(session, subject, measured, settings.dense_layers)
    if found is None:
        session.leave_out(f"{fields['point']} dense collection", OUT_OF_TIME)
        return
    ours = row["stages"]["statistics"]["median"]
    whole = row["seconds"] - ours + found["seconds"]
    ratios = {"ratio": found["seconds"] / ours, "intervention_ratio": whole / row["seconds"]}
    times = {"statistics_seconds": ours, "intervention_seconds": whole, "refused": not found["agrees"]}
    session.add([{"part": "dense", **fields, **found, **ratios, **times}])
    session.say(f"dense collection: {ratios['ratio']:.1f} times as long, agrees: {found['agrees']}")


def dense_collections(
    session: Session, subject: Interventions, measured: AttentionStatistics, layers: int
) -> dict[str, Any] | None:
    """Return seconds of collecting all layers densely in float32, extrapolated from the first, and the agreement.

    `difference` is how far the statistics are from a dense collection in float64 (`float32_difference` the timed
    one's), relative to a head's largest entry. None where there is no time for a layer.
    """
    model, adapter = subject.model, adapter_for(subject.model)
    with torch.no_grad(), evaluation_mode(model), subject.execution.autocast():
        plan = plan_calibration(model, subject.ids)
        chosen = plan.layers[:layers]
        wanted = {layer: Slots.of(adapter.sites()[layer], plan.heads.in_layer(layer)) for layer in chosen}
        captured = capture(adapter, wanted, subject.ids)
    times: list[float] = []
    worst, plain_worst = dict.fromkeys(LayerStatistics._fields, 0.0), 0.0
    for layer, parts in captured.items():
        if not session.fits(times[-1] if times else 0.0):
            break
        if not times:
            next(collect(parts, wanted[layer], torch.float32))
        wait_for(parts[0].device)
        began = time.perf_counter()
        plain = joined(collect(parts, wanted[layer], torch.float32))
        wait_for(parts[0].device)
        times.append(time.perf_counter() - began)
        for name, reference in joined(collect(parts, wanted[layer], torch.float64)).items():
            ours = getattr(measured, name)[layer, plan.heads.in_layer(layer)]
            worst[name] = max(worst[name], difference(ours, reference))
            plain_worst = max(plain_worst, difference(plain[name], reference))
    if not times:
        return None
    return {
        "layers": len(times),
        "of_layers": len(plan.layers),
        "extrapolated": len(times) < len(plan.layers),
        "layer_seconds": times,
        "seconds": sum(times) / len(times) * len(plan.layers),
        "difference": worst,
        "float32_difference": plain_worst,
        "agrees": max(worst.values()) <= AGREEMENT,
        "bar_difference": AGREEMENT,
    }


def collect(parts: Any, wanted: Slots, dtype: torch.dtype) -> Iterator[LayerStatistics]:
    """Yield the statistics of as many heads at a time as fit."""
    query, key = parts
    free = free_bytes(query.device)
    budget = CPU_BYTES if query.device.type == "cpu" or free is None else free // 2
    together = max(1, budget // (HELD * query.shape[2] ** 2 * dtype.itemsize))
    for first in range(0, query.shape[1], together):
        last = min(first + together, query.shape[1])
        yield dense_collection(query[:, first:last], key, kv_head=wanted.kv_head[first:last], dtype=dtype)


def joined(parts: Iterator[LayerStatistics]) -> dict[str, Tensor]:
    """Return the statistics of all heads, on the CPU."""
    columns = zip(*parts, strict=True)
    return {name: torch.cat(column).cpu() for name, column in zip(LayerStatistics._fields, columns, strict=True)}


def difference(found: Tensor, reference: Tensor) -> float:
    """Return the largest difference of a head, relative to the head's largest entry; 0 where both vanish."""
    found, reference = found.reshape(len(found), -1), reference.reshape(len(reference), -1)
    size = reference.abs().amax(1).clamp(min=torch.finfo(torch.float64).tiny)
    worst = ((found - reference).abs().amax(1) / size).max().item()
    return math.inf if math.isnan(worst) else worst


# The model and its sequences

STRENGTH = (0.2, 1.3)
"""Range over heads of the part of queries and keys that every token has: logits that fall with distance, in ripples."""
CONTENT = (0.5, 4.0)
"""Range over heads of how much queries vary with the token."""


def build(settings: Freezing, point: Point, device: torch.device) -> tuple[GPT, str]:
    """Return a model on `device` that takes the point's length, and a word on its weights."""
    if settings.model_folder is None:
        plan = ModelPlan(model=settings.model, length=point.length, device=device, seed=settings.seed)
        model = cast(GPT, plan.build(Arm("auto")))
        structure_(model, torch.Generator().manual_seed(settings.seed))
        return model, SYNTHETIC
    model = cast(GPT, find_model(settings.model_folder).model(device))
    if model.config.max_length < point.length:
        raise InputError(
            f"{settings.model_folder} takes {model.config.max_length} tokens; got points of {point.length}"
        )
    return model, f"trained: {settings.model_folder}"


@torch.no_grad()
def structure_(model: GPT, generator: torch.Generator) -> None:
    """Give random weights what makes fits take as many sweeps as on trained models.

    Every embedding gets a direction in common, which each head's queries and keys read with a strength of its own;
    rotation turns that part into logits by distance.
    """
    config = model.config
    common = (torch.randint(2, (config.hidden_size,), generator=generator) * 2 - 1).to(model.embed.weight)
    model.embed.weight += model.embed.weight.std() * common
    for attention in model.attention_layers():
        strength, content = (
            low + (high - low) * torch.rand(config.num_heads, generator=generator) for low, high in (STRENGTH, CONTENT)
        )
        # Half of a normalised input's length lies in the common direction at first.
        read = common * (2**0.5 / config.hidden_size)
        for weight, scale in ((attention.q_proj.weight, content), (attention.k_proj.weight, torch.ones_like(content))):
            rows = weight.view(config.num_heads, config.head_dim, -1)
            rows *= scale.to(weight)[:, None, None]
            rows += strength.sqrt().to(weight)[:, None, None] * read


def sequences(settings: Freezing, point: Point, model: GPT) -> tuple[list[Tensor], str]:
    """Return the calibration sequences in batches, and a word on what they are."""
    if settings.data is None:
        generator = torch.Generator().manual_seed(settings.seed)
        ids = torch.randint(model.config.vocab_size, (point.batch_size, point.length), generator=generator)
        return list(ids.split(settings.batch_size)), "random tokens"
    data = TokenData.open(settings.data)
    if data.vocab_size > model.config.vocab_size:
        raise InputError(f"{settings.data} has {data.vocab_size:,} tokens, the model {model.config.vocab_size:,}")
    ids = calibration_windows(data, length=point.length, count=point.batch_size, seed=settings.seed)
    return list(ids.split(settings.batch_size)), f"calibration text of {settings.data}"


@contextmanager
def empty_kernel_cache() -> Iterator[None]:
    """Give Triton an empty folder for compiled kernels, so that the first use compiles what it needs."""
    before = os.environ.get("TRITON_CACHE_DIR")
    with tempfile.TemporaryDirectory(prefix="saf-bench-") as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["TRITON_CACHE_DIR"]
            else:
                os.environ["TRITON_CACHE_DIR"] = before


def main(words: Sequence[str] | None = None) -> int:
    """Run the command."""
    run(Freezing, measure, words, prog="freezing")
    return 0


if __name__ == "__main__":
    sys.exit(main())
