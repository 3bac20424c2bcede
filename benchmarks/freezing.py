"""How long freezing takes, warm and at first use, stage by stage; with --rates 1 every head is fitted.

Every timed freezing is undone after its clock has stopped, so that the next one starts from the same model.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from benchmarks import command
from saf.bench import Update
from saf.bench.models import plan_of
from saf.bench.protocol import Arm, Point, require
from saf.bench.record import Session
from saf.freeze_config import FreezeConfig
from saf.freeze_report import FreezeReport
from saf.freezing import freeze_
from saf.machine import Execution, clean_process, wait_for
from saf.models import GPT
from saf.surgery import uninstall_
from saf.train.step import build_optimizer

SYNTHETIC = "synthetic: random weights whose heads see distance and content to different degrees; not trained"
"""The description of untrained weights in a record."""
MIN_REPEATS = 3
"""Warm freezings below which nothing is reported: one slow one does not move the median of three."""
POINTS = {"tiny": ("256x16",), "124m": ("4096x32",), "774m": ("4096x32",), "1b": ("8192x16",)}
STRENGTH, CONTENT = (0.2, 1.3), (0.5, 4.0)
"""Ranges over heads of synthetic weights: the part of queries and keys common to all tokens, and how much queries vary
with the token."""


@dataclass(kw_only=True)
class Freezing:
    """Time the whole freezing of a share of heads, stage by stage, on random tokens."""

    model: str = "124m"
    """Preset of the model's shape; weights are random with some structure."""
    points: tuple[str, ...] = ()
    """Shapes, as context x sequences; by default 4096x32 for 124m, 8192x16 for 1b."""
    rates: tuple[float, ...] = (0.25,)
    """Shares of heads to freeze."""
    batch_size: int = 8
    """Sequences in a forward pass."""
    repeats: int = 5
    """Timed freezings, 3 at least; one more before them is the first use."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision to compute in: auto is bf16 autocast on CUDA and fp32 on a CPU."""
    seed: int = 0
    """Random seed for weights and tokens."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to measure on; auto is CUDA if there is one."""


def measure(settings: Freezing, *, out: Path | None = None) -> dict[str, Any]:
    """Time freezings at every point and rate, and return the record."""
    require(settings.repeats >= MIN_REPEATS, f"repeats must be at least {MIN_REPEATS}, got {settings.repeats}")
    texts = settings.points or POINTS.get(settings.model, ())
    require(bool(texts), "points must name context and sequences, such as --points 4096x32")
    execution = Execution.of(settings.device, precision=settings.precision, compile="off")
    with Session("calibration", asdict(settings), execution, out=out) as session:
        for point in [Point(int(length), int(size)) for length, size in (text.split("x") for text in texts)]:
            with clean_process():
                measure_point(session, settings, point)
    return session.record


def measure_point(session: Session, settings: Freezing, point: Point) -> None:
    """Time freezings at every rate."""
    plan = plan_of(Update(model=settings.model, seed=settings.seed, device=settings.device), point.length)
    model = cast(GPT, plan.build(Arm("auto")))
    structure_(model, torch.Generator().manual_seed(settings.seed))
    # A step gives the optimiser moments: freezing edits them with the weights, and that takes time, too.
    optimizer = build_optimizer(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()  # in training no gradients are left when heads are frozen
    generator = torch.Generator().manual_seed(settings.seed)
    # A point's batch size is all sequences; those of a forward pass are `settings.batch_size`.
    ids = torch.randint(model.config.vocab_size, (point.batch_size, point.length), generator=generator)
    batches = list(ids.split(settings.batch_size))
    fields = {"part": "intervention", "model": settings.model, "point": point.to_dict()}
    fields |= {"precision": session.execution.precision, "weights": SYNTHETIC, "text": "random tokens"}

    for rate in settings.rates:
        with session.attempt(f"{point.name} {100 * rate:g}%"):
            once = partial(freeze_once, model, batches, rate, optimizer, session.execution)
            (report, first, stages), *warm = [once() for _ in range(settings.repeats + 1)]
            total = spread([seconds for _, seconds, _ in warm])
            row = {"rate": rate, "heads": len(report.heads), "rejected": len(report.rejected), "repeats": len(warm)}
            row |= {"worst_fit_kl": max(report.fit_kl.values(), default=None)}
            row |= {"seconds": total["median"], "spread": total, "first_seconds": first, "first_stages": stages}
            row["stages"] = {name: spread([each[name] for *_, each in warm]) for name in stages}
            session.add([{**fields, **row}])
            session.log(f"{100 * rate:g}%: first use {first:.3f} s, then {total['median']:.3f} s")


def freeze_once(
    model: GPT, batches: list[Tensor], rate: float, optimizer: Any, execution: Execution
) -> tuple[FreezeReport, float, dict[str, float]]:
    """Calibrate, score, select, fit and install, and undo it after the clock has stopped.

    Returns the report, the wall-clock seconds, and those of each stage; `other` is the rest.
    """
    wait_for(execution.device)
    began = time.perf_counter()
    with execution.autocast():
        # Compact by name: the default is exponential from 4,096 tokens on, whose fits take twice as long.
        report = freeze_(model, batches, FreezeConfig(rate=rate, storage="compact"), optimizer=optimizer)
    wait_for(execution.device)
    seconds = time.perf_counter() - began
    uninstall_(model, report.heads, optimizer=optimizer)
    return report, seconds, {**report.seconds, "other": seconds - sum(report.seconds.values())}


def spread(seconds: Sequence[float]) -> dict[str, Any]:
    """Return median, smallest, largest and all of some times."""
    return {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds), "all": list(seconds)}


@torch.no_grad()
def structure_(model: GPT, generator: torch.Generator) -> None:
    """Change random weights so that fits take as many sweeps as on trained models.

    Every embedding gets a direction in common, which each head's queries and keys read with a strength of its own;
    rotation turns that part into logits by distance.
    """
    config = model.config
    common = (torch.randint(2, (config.hidden_size,), generator=generator) * 2 - 1).to(model.embed.weight)  # signs
    model.embed.weight += model.embed.weight.std() * common
    for attention in model.attention_layers():
        strength, content = (
            low + (high - low) * torch.rand(config.num_heads, generator=generator) for low, high in (STRENGTH, CONTENT)
        )
        # In the first layer half of a normalised input's square lies in the common direction, read as about 1.
        read = common * (2**0.5 / config.hidden_size)
        for weight, scale in ((attention.q_proj.weight, content), (attention.k_proj.weight, torch.ones_like(content))):
            rows = weight.view(config.num_heads, config.head_dim, -1)
            rows *= scale.to(weight)[:, None, None]
            # The square root, as a logit is a product of a query and a key.
            rows += strength.sqrt().to(weight)[:, None, None] * read


main = command(Freezing, measure, prog="freezing")

if __name__ == "__main__":
    sys.exit(main())
