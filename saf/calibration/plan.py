"""How a calibration will go and what it will hold in memory, computed before the model runs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from saf.adapters import Adapter, Site, adapter_for
from saf.calibration.capture import Batch, Sequences, Wanted, check_heads, read_sequences
from saf.calibration.collect import COLLECT_BYTES, collection_bytes, latter_half
from saf.calibration.layer import obstacle, strip_bytes
from saf.errors import InputError
from saf.heads import Head, HeadSet
from saf.statistics import COLLECTIONS, sequences_in_words

SHARE = 0.5
"""Of free memory that queries and keys may take where nothing is said; the rest is a margin."""
CPU_BYTES = 4 << 30
"""Most of it on a CPU, whose memory others use too."""
TILE_SUMS = 3 << 28
"""The tile kernels' sums of a band of rows, with float64 copies of them."""


@dataclass(frozen=True, kw_only=True)
class CalibrationPlan:
    """Say how a calibration will go and what it holds at once, in bytes; `str` is a sentence for people.

    `forward_bytes` and `statistics_bytes` are estimates, the others exact.
    """

    heads: HeadSet
    sequences: int
    length: int
    lengths: tuple[int, ...]
    """Tokens of each sequence, longest first, where they differ; `length` is the longest."""
    groups: list[list[int]]
    """Layers whose queries and keys are kept at the same time; the model runs once for each group."""
    layer_bytes: dict[int, int]
    """Queries and keys of each layer."""
    forward_bytes: int
    """Activations of one forward pass of the largest batch."""
    statistics_bytes: int
    """Return the working memory of the tile loop, bytes."""
    collected_bytes: int
    """What `collect` keeps, on the CPU."""
    free_bytes: int | None
    """Free memory of the device; None where nothing tells."""
    device: torch.device

    @property
    def layers(self) -> list[int]:
        """Return the layers to measure, in order."""
        return [layer for group in self.groups for layer in group]

    @property
    def capture_bytes(self) -> int:
        """Return the bytes of the queries and keys of the largest group."""
        return max((sum(map(self.layer_bytes.__getitem__, group)) for group in self.groups), default=0)

    @property
    def device_bytes(self) -> int:
        """Return all that is held on the model's device at once; passes and tile loops alternate."""
        return self.capture_bytes + max(self.forward_bytes, self.statistics_bytes)

    def __str__(self) -> str:
        layers = max(map(len, self.groups), default=0)
        measured = f"{self.sequences} x {self.length:,} tokens"
        if self.lengths:
            measured = sequences_in_words(self.sequences, self.length, self.lengths)
        free = "" if self.free_bytes is None else f" of {readable(self.free_bytes)} free"
        kept = f"; {readable(self.collected_bytes)} collected on the CPU" if self.collected_bytes else ""
        return (
            f"calibration of {len(self.heads)} heads on {measured}: about "
            f"{readable(self.device_bytes)}{free} on {self.device} (queries and keys of {layers} layers at a time "
            f"{readable(self.capture_bytes)}, a forward pass {readable(self.forward_bytes)}, the tile loop "
            f"{readable(self.statistics_bytes)}), model runs {len(self.groups)} x{kept}"
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
    """Return how `calibrate` with the same arguments will go, without running the model.

    Args:
        model: A supported model.
        batches: As for `calibrate`.
        collect: As for `calibrate`.
        heads: As for `calibrate`.
        positions: As for `calibrate`.
        capture_bytes: Most memory for queries and keys kept at once. If not given, half of what is free (on a CPU at
            most 4 GiB), and the whole must fit into free memory; if given, it alone decides.

    Raises:
        InputError: Queries and keys of a single layer, or all that is held at once, do not fit.
    """
    adapter = adapter_for(model)
    sequences, chosen = read_sequences(batches), check_heads(adapter, heads)
    return plan_for(adapter, sequences, chosen, collect=collect, positions=positions, capture_bytes=capture_bytes)


def plan_for(
    adapter: Adapter,
    given: Sequences,
    chosen: HeadSet,
    *,
    collect: Sequence[str],
    positions: Sequence[int] | None,
    capture_bytes: int | None,
) -> CalibrationPlan:
    """Return the plan of `plan_calibration` for sequences and heads that are checked already.

    Raises InputError where what is kept of every sequence is asked of unequal ones.
    """
    if given.unequal and (whole := [name for name in collect if "N" in COLLECTIONS.get(name, "")]):
        raise InputError(
            f"{' and '.join(whole)} cannot be collected of sequences of unequal lengths, {given.lengths[-1]} to "
            f"{given.length} tokens; give sequences of one length, or collect the mean"
        )
    sites, device, dtype = adapter.sites(), adapter.device, adapter.dtype
    itemsize = 8 if dtype == torch.float64 else 4
    sequences, length = len(given.lengths), given.length
    dtype = (lowered_dtype(device) if dtype == torch.float32 else None) or dtype
    layers = sorted({layer for layer, _ in chosen})
    each = {layer: _layer_bytes(sites[layer], chosen.in_layer(layer), sequences * length, dtype) for layer in layers}
    widest = max((len(chosen.in_layer(layer)) for layer in layers), default=0)
    forward = _forward_bytes(sites[0], max(tokens.numel() for tokens in given.ids), dtype)
    dim = sites[0].head_dim
    if obstacle(device, (dtype, dtype), dim, strips_wanted=bool(collect), soft_cap=sites[0].soft_cap):
        statistics = strip_bytes(sequences, widest, length, dim, dtype=dtype, device=device)
    else:
        statistics = TILE_SUMS + 4 * sequences * widest * length
    collected = collection_bytes(
        collect,
        heads=len(chosen),
        sequences=sequences,
        length=length,
        positions=len(latter_half(length) if positions is None else positions),
        itemsize=itemsize,
    )
    free = free_bytes(device)
    plan = CalibrationPlan(
        heads=chosen,
        sequences=sequences,
        length=length,
        lengths=given.unequal,
        groups=_groups(layers, each, _budget(device, free, each, capture_bytes)),
        layer_bytes=each,
        forward_bytes=forward,
        statistics_bytes=statistics,
        collected_bytes=collected,
        free_bytes=free,
        device=device,
    )
    _check(plan, capture_bytes)
    return plan


def heads_at_a_time(model: nn.Module, collect: Sequence[str], *, sequences: int, length: int) -> int:
    """Return of how many heads `collect` can be kept at once on the CPU, in half of what is free; one at least."""
    itemsize = 8 if adapter_for(model).dtype == torch.float64 else 4
    each = collection_bytes(collect, heads=1, sequences=sequences, length=length, itemsize=itemsize)
    free = free_bytes(torch.device("cpu"))
    limit = COLLECT_BYTES if free is None else min(COLLECT_BYTES, int(SHARE * free))
    return max(1, limit // max(each, 1))


def free_bytes(device: torch.device) -> int | None:
    """Return the memory that a device can still give, what PyTorch holds without using it included; None if unknown."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None


def lowered_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype to which an open autocast context lowers float32 products; None outside one."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None


def _layer_bytes(site: Site, heads: Sequence[int], tokens: int, dtype: torch.dtype) -> int:
    """Return the bytes of the queries and keys that measuring these heads of a layer keeps."""
    wanted = Wanted.of(site, heads)
    return tokens * (len(wanted.queries) + len(wanted.keys)) * site.head_dim * dtype.itemsize


def _forward_bytes(site: Site, tokens: int, dtype: torch.dtype) -> int:
    """Estimate a decoder layer's activations: residual and norm in float32, projections, a fourfold MLP twice."""
    weight, dimension = site.projections()["output"]
    width = weight.shape[1 - dimension]
    return tokens * width * (2 * max(4, dtype.itemsize) + 14 * dtype.itemsize)


def _budget(device: torch.device, free: int | None, each: dict[int, int], capture_bytes: int | None) -> int:
    """Return the bytes of queries and keys that may be kept at once."""
    if capture_bytes is not None:
        return capture_bytes
    shares = [] if free is None else [int(SHARE * free)]
    if device.type == "cpu":
        shares.append(CPU_BYTES)
    # One layer is always tried: whether it fits is checked with everything else.
    return max(min(shares), *each.values(), 0) if shares else sum(each.values())


def _groups(layers: Sequence[int], each: dict[int, int], budget: int) -> list[list[int]]:
    """Split layers into consecutive groups of at most `budget` bytes, one layer at least."""
    groups: list[list[int]] = []
    held = 0
    for layer in layers:
        if groups and held + each[layer] <= budget:
            groups[-1].append(layer)
            held += each[layer]
        else:
            groups.append([layer])
            held = each[layer]
    return groups


def _check(plan: CalibrationPlan, capture_bytes: int | None) -> None:
    """Raise InputError for a plan that holds more than fits, or than `capture_bytes` allows."""
    if capture_bytes is not None:
        if (largest := max(plan.layer_bytes.values(), default=0)) > capture_bytes:
            raise InputError(
                f"queries and keys of one layer take {readable(largest)} for {plan.sequences} sequences of "
                f"{plan.length:,} tokens, capture_bytes allows {readable(capture_bytes)}; raise it, or measure fewer "
                "or shorter sequences or fewer heads at a time (heads=)"
            )
        return
    if plan.free_bytes is not None and plan.device_bytes > plan.free_bytes:
        raise InputError(
            f"not enough memory: {plan}; make batches of fewer sequences, measure fewer or shorter sequences or fewer "
            "heads at a time (heads=), or give capture_bytes to try all the same"
        )
    spare = free_bytes(torch.device("cpu"))
    if spare is not None and plan.collected_bytes > spare:
        raise InputError(
            f"not enough memory: {readable(plan.collected_bytes)} are to be collected, {readable(spare)} are free on "
            "the CPU; measure fewer heads at a time (heads=)"
        )


def readable(size: int) -> str:
    """Return bytes as people say them.

    >>> readable(512), readable(4_830_000_000)
    ('512 bytes', '4.83 GB')
    """
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if size >= unit:
            return f"{size / unit:,.2f} {name}"
    return f"{size} bytes"
