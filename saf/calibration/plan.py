"""`plan_calibration` divides memory: which layers are captured in one pass, and whether what is collected fits."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from saf.calibration.capture import CapturedSlots, measurable_heads
from saf.calibration.collect import COLLECTIONS, Collection
from saf.calibration.sequences import Batch, Sequences, read_sequences
from saf.errors import InputError
from saf.heads import Head, HeadSet
from saf.models.adapter import Adapter, adapter_for
from saf.records.table import byte_size

SHARE = 0.5
"""Share of free memory for queries and keys, or a collection, by default; the rest is a margin."""
CPU_BYTES = 4 << 30
"""Most queries and keys by default on a CPU, whose memory others use too."""
COLLECT_BYTES = 16 << 30
"""Most that `heads_at_a_time` collects at once."""


@dataclass(frozen=True, kw_only=True)
class CalibrationPlan:
    """The passes of a calibration and what it holds, in exact bytes; `str` is a sentence for people."""

    heads: HeadSet
    sequences: Sequences
    groups: list[list[int]]
    """Layers whose queries and keys are held at the same time; the model runs once for each group."""
    layer_bytes: dict[int, int]
    """Queries and keys of each layer, on the model's device."""
    collected_bytes: int
    """Tensors of `collect`, on the CPU."""

    @property
    def capture_bytes(self) -> int:
        """Queries and keys of the largest group."""
        return max((sum(self.layer_bytes[layer] for layer in group) for group in self.groups), default=0)

    def __str__(self) -> str:
        collected = f"; {byte_size(self.collected_bytes)} collected on the CPU" if self.collected_bytes else ""
        return (
            f"calibration of {len(self.heads)} heads on {self.sequences}: queries and keys of "
            f"{max(map(len, self.groups), default=0)} layers at a time {byte_size(self.capture_bytes)}, model runs "
            f"{len(self.groups)} x{collected}"
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

    Queries and keys of as many layers as fit are held at a time: into `capture_bytes`, by default into half of the free
    memory (on a CPU at most 4 GiB), but always of one layer that fits into it. Raises InputError where one layer does
    not fit, or the collected tensors do not.
    """
    adapter, sequences = adapter_for(model), read_sequences(batches)
    chosen, count, length = measurable_heads(adapter, heads), len(sequences.lengths), sequences.length
    shape = {"sequences": count, "length": length, "dtype": collected_dtype(adapter), "device": "meta"}
    collected = Collection(collect, chosen, positions=positions, **shape).nbytes if collect else 0
    if collected and (spare := free_bytes(torch.device("cpu"))) is not None and collected > spare:
        raise InputError(
            f"not enough memory: {byte_size(collected)} to collect, {byte_size(spare)} free on the CPU; measure "
            "fewer heads at a time (heads=)"
        )
    if sequences.unequal and (whole := [name for name in collect if "N" in COLLECTIONS[name].shape]):
        raise InputError(
            f"{' and '.join(whole)} cannot be collected of sequences of unequal lengths, {sequences.lengths[-1]} to "
            f"{length} tokens; pass sequences of one length, or collect the mean"
        )
    layer_bytes = _layer_bytes(adapter, chosen, count * length)
    layers, per_group = list(layer_bytes), _layers_at_a_time(adapter.device, layer_bytes, capture_bytes)
    return CalibrationPlan(
        heads=chosen,
        sequences=sequences,
        groups=[layers[first : first + per_group] for first in range(0, len(layers), per_group)],
        layer_bytes=layer_bytes,
        collected_bytes=collected,
    )


def _layer_bytes(adapter: Adapter, heads: HeadSet, tokens: int) -> dict[int, int]:
    """Return the bytes of each layer's queries and keys, in the dtype that the model computes them in."""
    sites, dtype, device = adapter.sites(), adapter.dtype, adapter.device.type
    if dtype == torch.float32 and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    slots = {layer: CapturedSlots.of(sites[layer], heads.in_layer(layer)) for layer in sorted({at for at, _ in heads})}
    return {
        layer: tokens * (len(each.queries) + len(each.keys)) * sites[layer].head_dim * dtype.itemsize
        for layer, each in slots.items()
    }


def _layers_at_a_time(device: torch.device, layer_bytes: dict[int, int], capture_bytes: int | None) -> int:
    """Return the number of layers whose queries and keys are held at once; raise InputError where one does not fit.

    By default they take a share of the free memory; one layer may take all of it.
    """
    largest = max(layer_bytes.values(), default=0) or 1
    most = free_bytes(device) if capture_bytes is None else capture_bytes
    if most is not None and largest > most:
        raise InputError(
            f"queries and keys of one layer must be at most {byte_size(most)} "
            f"({'free memory' if capture_bytes is None else 'capture_bytes'}), got {byte_size(largest)}; "
            "pass fewer sequences, or measure fewer heads (heads=)"
        )
    if capture_bytes is not None:
        return max(1, capture_bytes // largest)
    default = sum(layer_bytes.values()) if most is None else int(SHARE * most)
    return max(1, (min(default, CPU_BYTES) if device.type == "cpu" else default) // largest)


def heads_at_a_time(model: nn.Module, collect: Sequence[str], *, sequences: int, length: int) -> int:
    """Return the number of heads whose `collect` fits into half of the CPU's free memory at once; one at least."""
    shape = {"sequences": sequences, "length": length, "dtype": collected_dtype(adapter_for(model)), "device": "meta"}
    free, one = free_bytes(torch.device("cpu")), Collection(collect, HeadSet([(0, 0)]), **shape)
    limit = COLLECT_BYTES if free is None else min(COLLECT_BYTES, int(SHARE * free))
    return max(1, limit // max(one.nbytes, 1))


def collected_dtype(adapter: Adapter) -> torch.dtype:
    """Return the dtype of collected numbers: float64 models are measured in float64, others in float32."""
    return torch.float64 if adapter.dtype == torch.float64 else torch.float32


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device, with PyTorch's unused reserve; None where it is unknown."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
