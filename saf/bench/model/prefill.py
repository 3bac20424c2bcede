"""`saf bench prefill`: forward passes over whole prompts, with the output layer on the last token alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from saf.bench.harness.arms import FREE, PRUNED, Arm
from saf.bench.harness.measured import Group, Record
from saf.bench.harness.runner import Subject
from saf.bench.harness.settings import QWEN_POINTS, QWEN_RATES, Point
from saf.bench.harness.shape import ModelShape, shape_of
from saf.bench.harness.synthetic import random_tokens
from saf.bench.harness.timing import GRAPH, ways_of
from saf.bench.harness.work import Work, layers_work
from saf.bench.model.measuring import ModelKind
from saf.bench.model.models import ModelPlan, PassSettings, build_model
from saf.bench.model.passes import Passes
from saf.errors import InputError
from saf.heads import HeadLayout
from saf.machine.cuda_graphs import Call, GraphPool
from saf.machine.execution import Execution
from saf.ops.inference.one_launch import are_few
from saf.prefill import LastToken
from saf.records import paper
from saf.records.paper import Quoted
from saf.settings import documented

PINNED = (
    "Kernel pinned: where tokens are few a frozen layer takes one launch for all heads; with live heads pinned to a "
    "kernel it takes a launch for live and one for frozen heads, each with an output product, and in a call the host "
    "pays for every one. Such rows are no measure of a model left to PyTorch's choice of kernel."
)
"""What to know of rows that `PrefillKind.apart` tells apart."""
PRECISIONS = {"autocast": ("bf16", torch.float32), "bf16": ("fp32", torch.bfloat16), "fp32": ("fp32", torch.float32)}
"""By name: the precision of autocast ("fp32" is none) and the dtype of weights."""


@documented
@dataclass(kw_only=True)
class PrefillSettings(PassSettings):
    """Time forward passes over whole prompts, with the output layer on the last token alone."""

    kind: ClassVar[str] = "prefill"
    grid: Literal["lengths", "batches", "qwen"] = "lengths"
    """T 512 to 16K at B=64, B 1 to 64 at T=4096, or B 4 and 8 at 2K, 4K, 8K."""
    precisions: tuple[str, ...] = ()
    """autocast (fp32 weights, bf16 autocast), bf16 (bf16 weights) or fp32; left out: autocast on CUDA, fp32 on CPU."""
    graphs: Literal["off", "on", "both"] = "off"
    """Call the model, replay a CUDA graph of it, or both."""


def precisions_of(settings: PrefillSettings, device: torch.device) -> tuple[str, ...]:
    """Return the precisions asked for, or the device's usual one; raise InputError for an unknown name."""
    names = settings.precisions or (("autocast",) if device.type == "cuda" else ("fp32",))
    if unknown := [name for name in names if name not in PRECISIONS]:
        raise InputError(f"precisions are {', '.join(PRECISIONS)}; got {unknown}")
    return names


def prefill_passes(settings: PrefillSettings, point: Point, arm: Arm, pool: GraphPool) -> Passes:
    """Return passes of one model over one batch of prompts, ready to be warmed up."""
    autocast, dtype = PRECISIONS[point.precision or "fp32"]
    usual = Execution.of(settings.device, compile=settings.compile)
    execution, device = Execution(usual.device, autocast, usual.compile), usual.device
    plan = ModelPlan.of(settings, point.length)
    model = build_model(plan, arm, device=device, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(settings.seed)
    drawn = random_tokens(1, point.batch_size, point.length, plan.shape.vocab_size, generator, device)
    tokens = drawn[0][0].contiguous()
    if execution.compile:
        torch._dynamo.reset()  # what an earlier point compiled

    def program() -> Call:
        """Return what runs the model once, a program of its own where it is compiled."""
        last = LastToken(model)
        forward = last.compiled() if execution.compile else last

        def call() -> Tensor:
            with torch.no_grad(), execution.autocast():
                return forward(tokens)

        return call

    return Passes(settings, model, program, ways=ways_of(settings.graphs, device), device=device, pool=pool)


def prefill_work(
    shape: ModelShape, layouts: Sequence[HeadLayout], *, batch: int, length: int, weight_bytes: int, free: bool
) -> Work:
    """Return the work of one forward pass with the output layer on the last token alone."""
    matrices = sum(map(shape.layer_entries, layouts))
    head = shape.vocab_size * shape.hidden_size
    products = Work(2.0 * batch * (matrices * length + head), float(weight_bytes * (matrices + head)))
    kv_heads = shape.num_kv_heads if shape.num_kv_heads != shape.num_heads else None
    dim = shape.head_dim
    mixing = layers_work(layouts, batch=batch, length=length, dim=dim, kv_heads=kv_heads, backward=False, free=free)
    return products + mixing


class PrefillKind(ModelKind[PrefillSettings]):
    """Measure prefill."""

    name = "prefill"
    title = "Prefill"
    panel = "Prefill"
    gains = "prefill"
    subject = "prefill"
    settings = PrefillSettings
    grids: ClassVar = {
        "lengths": tuple((length, 64) for length in (512, 1024, 2048, 4096, 8192, 16384)),
        "batches": tuple((4096, size) for size in (1, 2, 4, 8, 16, 32, 64)),
        "qwen": QWEN_POINTS,
    }
    grid_rates: ClassVar = {"batches": (0.1, 0.25, 0.5, 0.75), "qwen": QWEN_RATES}

    def cases(self, settings: PrefillSettings, points: Sequence[Point], device: torch.device) -> list[Point]:
        """Return every point at every precision."""
        precisions = precisions_of(settings, device)
        return [Point(p.length, p.batch_size, precision=precision) for p in points for precision in precisions]

    def variants(self, settings: PrefillSettings, device: torch.device) -> tuple[str, ...]:
        """Return what is timed of each arm; raise UnsupportedError for graphs without CUDA."""
        return ways_of(settings.graphs, device)

    def build(self, settings: PrefillSettings, point: Point, arm: Arm, pool: GraphPool) -> Subject:
        """Return an arm ready to be warmed up in this process."""
        return prefill_passes(settings, point, arm, pool)

    def work(self, settings: PrefillSettings, point: Point, arm: Arm) -> Work:
        """Return the work of one prefill of an arm."""
        plan = ModelPlan.of(settings, point.length)
        dtype = PRECISIONS[point.precision or "fp32"][1]
        return prefill_work(
            plan.shape,
            plan.layouts(arm),
            batch=point.batch_size,
            length=point.length,
            weight_bytes=dtype.itemsize,
            free=arm.backend == FREE,
        )

    def apart(self, row: Record) -> str:
        """Say that the kernel is pinned, where frozen layers left to themselves take one launch for all heads.

        They do with few tokens in 16 bits (`saf.ops.inference.one_launch`).
        """
        if row["backend"] != "toeplitz" or row["kernel"] == "auto" or row["point"].get("precision") == "fp32":
            return ""
        shape = shape_of(row["model"].split(",")[0], row["point"]["length"])
        sizes = row["point"]["batch_size"], shape.num_kv_heads, row["point"]["length"], shape.head_dim
        values = torch.empty(sizes, device="meta")
        few = are_few(values, shape.num_heads, replayed=row["variant"] == GRAPH)
        return "kernel pinned" if few else ""

    def read_by(self, groups: Sequence[Group]) -> list[str]:
        """Return a line on the ways of few tokens, where a row is of live heads that are pinned."""
        return [PINNED] if any(arm.apart for group in groups for arm in group.arms) else []

    def quoted(self, row: Record) -> Quoted | None:
        """Return the paper's speedup of prefill at the shape of a row."""
        point = (row["model"], row["point"]["length"], row["point"]["batch_size"])
        return paper.prefill_speed(point, row["rate"], graph=row["variant"] == GRAPH, pruned=row["backend"] == PRUNED)
