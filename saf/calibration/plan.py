"""`plan_calibration` computes how a calibration goes and how much memory it takes, before the model runs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from saf.calibration.capture import Slots, check_heads
from saf.calibration.collect import collection_bytes, latter_half
from saf.calibration.sequences import Batch, Sequences, read_sequences
from saf.calibration.strips import strip_bytes, unsupported_reason
from saf.errors import InputError
from saf.heads import Head, HeadSet
from saf.models.adapter import Adapter, Site, adapter_for
from saf.statistics import COLLECTIONS, sequences_in_words

SHARE = 0.5
"""Share of free memory that queries and keys, or a collection, may take by default; the rest is a margin."""
CPU_BYTES = 4 << 30
"""Most queries and keys by default on a CPU, whose memory others use too."""
COLLECT_BYTES = 16 << 30
"""Most that `heads_at_a_time` collects at once."""
TILE_SUMS = 3 << 28
"""Sums of the tile kernels over a band of rows, with float64 copies of them."""


@dataclass(frozen=True, kw_only=True)
class CalibrationPlan:
    """How a calibration goes and what it holds at once, in bytes; `str` is a sentence for people."""

    heads: HeadSet
    sequences: int
    length: int
    lengths: tuple[int, ...]
    """Tokens of each sequence, longest first, where they differ; `length` is the longest."""
    groups: list[list[int]]
    """Layers whose queries and keys are held at the same time; the model runs once for each group."""
    layer_bytes: dict[int, int]
    """Queries and keys of each layer; exact."""
    forward_bytes: int
    """Activations of one forward pass of the largest batch; an estimate."""
    statistics_bytes: int
    """Working memory of the statistics of a layer; an estimate."""
    collected_bytes: int
    """Tensors of `collect`, on the CPU; exact."""
    free_bytes: int | None
    """Free memory of the device; None where it is unknown."""
    device: torch.device

    @property
    def layers(self) -> list[int]:
        """Layers to measure, in order."""
        return [layer for group in self.groups for layer in group]

    @property
    def capture_bytes(self) -> int:
        """Queries and keys of the largest group."""
        return max((sum(self.layer_bytes[layer] for layer in group) for group in self.groups), default=0)

    @property
    def device_bytes(self) -> int:
        """All that is held on the model's device at once; forward passes and statistics alternate."""
        return self.capture_bytes + max(self.forward_bytes, self.statistics_bytes)

    def __str__(self) -> str:
        measured = f"{self.sequences} x {self.length:,} tokens"
        if self.lengths:
            measured = sequences_in_words(self.sequences, self.length, self.lengths)
        free = "" if self.free_bytes is None else f" of {readable(self.free_bytes)} free"
        collected = f"; {readable(self.collected_bytes)} collected on the CPU" if self.collected_bytes else ""
        return (
            f"calibration of {len(self.heads)} heads on {measured}: about {readable(self.device_bytes)}{free} on "
            f"{self.device} (queries and keys of {max(map(len, self.groups), default=0)} layers at a time "
            f"{readable(self.capture_bytes)}, a forward pass {readable(self.forward_bytes)}, the tile loop "
            f"{readable(self.statistics_bytes)}), model runs {len(self.groups)} x{collected}"
        )


def plan_calibration(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    collect: Sequence[str] = (),
    heads: Iterable[Head] | None = None,
    positions: Sequence[int] | None = None,
    capture_bytes: int | None = None,
) -> CalibrationPlan:
    """Plan `calibrate` with the same arguments, without running the model.

    With `capture_bytes` only queries and keys of a layer must fit, into that; otherwise queries and keys take half of
    what is free (on a CPU at most 4 GiB), and the whole must fit into free memory. Raises InputError where it does not.
    """
    adapter, sequences = adapter_for(model), read_sequences(batches)
    return plan_for(adapter, sequences, check_heads(adapter, heads), collect, positions, capture_bytes)


def plan_for(
    adapter: Adapter,
    sequences: Sequences,
    heads: HeadSet,
    collect: Sequence[str],
    positions: Sequence[int] | None,
    capture_bytes: int | None,
) -> CalibrationPlan:
    """Plan for sequences and heads that are checked already; errors are those of `plan_calibration`."""
    if sequences.unequal and (whole := [name for name in collect if "N" in COLLECTIONS.get(name, "")]):
        raise InputError(
            f"{' and '.join(whole)} cannot be collected of sequences of unequal lengths, {sequences.lengths[-1]} to "
            f"{sequences.length} tokens; pass sequences of one length, or collect the mean"
        )
    sites, device, count, length = adapter.sites(), adapter.device, len(sequences.lengths), sequences.length
    dtype = (_autocast_dtype(device) if adapter.dtype == torch.float32 else None) or adapter.dtype
    layers = sorted({layer for layer, _ in heads})
    layer_bytes = {}
    for layer in layers:
        slots = Slots.of(sites[layer], heads.in_layer(layer))
        copied = (len(slots.queries) + len(slots.keys)) * sites[layer].head_dim
        layer_bytes[layer] = count * length * copied * dtype.itemsize
    widest, dim = max((len(heads.in_layer(layer)) for layer in layers), default=0), sites[0].head_dim
    if unsupported_reason(device, (dtype, dtype), dim, whole_rows=bool(collect), soft_cap=sites[0].soft_cap):
        statistics = strip_bytes(count, widest, length, dim, dtype=dtype, device=device)
    else:
        statistics = TILE_SUMS + 4 * count * widest * length
    shape = {"heads": len(heads), "sequences": count, "length": length}
    rows = len(latter_half(length) if positions is None else positions)
    free = free_bytes(device)
    plan = CalibrationPlan(
        heads=heads,
        sequences=count,
        length=length,
        lengths=sequences.unequal,
        groups=_groups(layer_bytes, _budget(device, free, layer_bytes) if capture_bytes is None else capture_bytes),
        layer_bytes=layer_bytes,
        forward_bytes=_forward_bytes(sites[0], max(batch.numel() for batch in sequences.ids), dtype),
        statistics_bytes=statistics,
        collected_bytes=collection_bytes(collect, **shape, positions=rows, itemsize=_itemsize(adapter)),
        free_bytes=free,
        device=device,
    )
    _check(plan, capture_bytes)
    return plan


def heads_at_a_time(model: nn.Module, collect: Sequence[str], *, sequences: int, length: int) -> int:
    """Number of heads of which `collect` fits at once on the CPU, in half of what is free; one at least."""
    itemsize = _itemsize(adapter_for(model))
    each = collection_bytes(collect, heads=1, sequences=sequences, length=length, itemsize=itemsize)
    free = free_bytes(torch.device("cpu"))
    limit = COLLECT_BYTES if free is None else min(COLLECT_BYTES, int(SHARE * free))
    return max(1, limit // max(each, 1))


def free_bytes(device: torch.device) -> int | None:
    """Memory that a device can still give, PyTorch's unused reserve included; None where it is unknown."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None


def readable(size: int) -> str:
    """Bytes for people.

    >>> readable(512), readable(4_830_000_000)
    ('512 bytes', '4.83 GB')
    """
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if size >= unit:
            return f"{size / unit:,.2f} {name}"
    return f"{size} bytes"


def _itemsize(adapter: Adapter) -> int:
    """Bytes of a collected number: float64 models are measured in float64, others in float32."""
    return 8 if adapter.dtype == torch.float64 else 4


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Dtype of float32 products in an open autocast context; None outside one."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None


def _forward_bytes(site: Site, tokens: int, dtype: torch.dtype) -> int:
    """Estimate a decoder layer's activations: residual and norm in float32, projections, a fourfold MLP twice."""
    weight, dimension = site.projections()["output"]
    width = weight.shape[1 - dimension]
    return tokens * width * (2 * max(4, dtype.itemsize) + 14 * dtype.itemsize)


def _budget(device: torch.device, free: int | None, layer_bytes: dict[int, int]) -> int:
    """Bytes of queries and keys that may be held at once by default."""
    shares = [] if free is None else [int(SHARE * free)]
    if device.type == "cpu":
        shares.append(CPU_BYTES)
    # One layer is always tried: whether it fits is checked with everything else.
    return max(min(shares), *layer_bytes.values(), 0) if shares else sum(layer_bytes.values())


def _groups(layer_bytes: dict[int, int], budget: int) -> list[list[int]]:
    """Split layers into consecutive groups of at most `budget` bytes, one layer at least."""
    groups: list[list[int]] = []
    held = 0
    for layer, size in layer_bytes.items():
        if groups and held + size <= budget:
            groups[-1].append(layer)
            held += size
        else:
            groups.append([layer])
            held = size
    return groups


def _check(plan: CalibrationPlan, capture_bytes: int | None) -> None:
    """Raise InputError for a plan that takes more than is free, or than `capture_bytes` allows."""
    spare = free_bytes(torch.device("cpu"))
    largest = max(plan.layer_bytes.values(), default=0)
    if capture_bytes is not None and largest > capture_bytes:
        raise InputError(
            f"queries and keys of one layer take {readable(largest)} for {plan.sequences} sequences of "
            f"{plan.length:,} tokens, capture_bytes allows {readable(capture_bytes)}; raise it, or measure fewer heads"
        )
    if capture_bytes is None and plan.free_bytes is not None and plan.device_bytes > plan.free_bytes:
        raise InputError(
            f"not enough memory: {plan}; make batches of fewer sequences, measure fewer heads at a time (heads=), or "
            "set capture_bytes to try all the same"
        )
    if spare is not None and plan.collected_bytes > spare:
        raise InputError(
            f"not enough memory: {readable(plan.collected_bytes)} are to be collected, {readable(spare)} are free on "
            "the CPU; measure fewer heads at a time (heads=)"
        )
