"""What heads write into the residual stream of held-out sequences, and how that changes with their mean pattern."""

from collections.abc import Iterable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from saf.adapters import Site, adapter_for, unwrap
from saf.calibration.capture import Batch, check_vocabulary, evaluation_mode, read_batches
from saf.calibration.watch import Modules, Seen, modules_of, values_of, watch
from saf.errors import InputError, UnsupportedError
from saf.ops.live import capped, score_scale
from saf.scores import HeadOutputs
from saf.statistics import AttentionStatistics


def head_outputs(model: nn.Module, batches: Iterable[Batch], statistics: AttentionStatistics) -> HeadOutputs:
    """Measure the contributions C of all live heads, and those of `C~ = mean pattern · V · W_O` in their place.

    Args:
        model: A supported model, run in evaluation mode and left as it was.
        batches: Held-out sequences `[B, T]` of the calibration length, best not the calibration's own.
        statistics: Of `calibrate(..., collect=("mean_rows",))`: the rows of the mean pattern and their positions.

    Returns:
        Sums and norms at the statistics' positions of every sequence; NaN for heads without `mean_rows`.

    Raises:
        InputError: Statistics without `mean_rows`, or sequences of another length.
        UnsupportedError: A model whose values cannot be seen.
    """
    adapter = adapter_for(model)
    sites = adapter.sites()
    ids = read_batches(batches)
    check_vocabulary(adapter, ids)
    if "mean_rows" not in statistics.collected:
        raise InputError("head_outputs needs calibrate(..., collect=('mean_rows',)); these statistics lack them")
    if ids[0].shape[1] != statistics.length:
        raise InputError(f"expected sequences of {statistics.length} tokens, as calibrated; got {ids[0].shape[1]}")
    device = adapter.device
    if any(site.norm_after for site in sites):
        raise UnsupportedError(
            "what heads write into the residual stream cannot be told apart where a norm follows the attention layer "
            "(Gemma 2 and 3); use a score of attention patterns, such as 'variance'"
        )
    found = [modules_of(unwrap(model), site) for site in sites]
    layers = [
        _Layer(site, modules, number, statistics, device)
        for number, (site, modules) in enumerate(zip(sites, found, strict=True))
    ]
    with torch.no_grad(), evaluation_mode(model), ExitStack() as stack:
        for layer in layers:
            stack.enter_context(watch(layer.site, layer.modules, layer.take))
        for batch in ids:
            adapter.run(batch.to(device))
    samples = sum(len(batch) for batch in ids) * len(statistics.positions)
    return HeadOutputs(
        gram=torch.stack([layer.full(layer.gram, 2) for layer in layers]),
        change=torch.stack([layer.samples(layer.change, samples) for layer in layers]),
        residual_change=torch.stack([layer.samples(layer.residual_change, samples) for layer in layers]),
        residual=torch.stack([layer.totals(layer.residual, samples) for layer in layers]),
        output=torch.stack([layer.totals(layer.output, samples) for layer in layers]),
        hidden_size=layers[0].weight.shape[-1],
    )


class _Layer:
    """Add up one layer, sequence by sequence."""

    def __init__(
        self, site: Site, modules: Modules, number: int, statistics: AttentionStatistics, device: torch.device
    ):
        self.site, self.modules = site, modules
        self.live = list(site.layout.live)
        weight, dimension = site.projections()["output"]
        self.wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        by_slot = weight.detach().movedim(dimension, 0).unflatten(0, (-1, site.head_dim))
        self.weight = by_slot[: len(self.live)].to(self.wide)
        self.rows = list(statistics.positions)
        mean = torch.full((len(self.live), len(self.rows), statistics.length), torch.nan, dtype=self.wide)
        held = [head for head in self.live if (number, head) in statistics.collected_heads]
        if held:
            slots = [self.live.index(head) for head in held]
            mean[slots] = statistics.take("mean_rows", [(number, head) for head in held]).to(self.wide)
        self.mean = mean.to(device)
        self.gram = torch.zeros(len(self.live), len(self.live), dtype=torch.float64, device=device)
        self.change, self.residual_change, self.residual, self.output = [], [], [], []

    def take(self, seen: Seen) -> None:
        """Add the sequences of one forward pass."""
        groups = list(self.site.layout.kv_head[: len(self.live)])
        keys = list(self.site.layout.key_head)
        rows = self.rows
        with torch.autocast(seen.query.device.type, enabled=False):
            for n in range(len(seen.query)):
                self._add(
                    seen.query[n][:, rows].to(self.wide),
                    seen.key[n][keys].to(self.wide),
                    values_of(self.site, seen.normed[n], self.wide)[groups],
                    seen.residual[n][rows].to(self.wide),
                    seen.output[n][rows].to(self.wide),
                )

    def _add(self, query: Tensor, key: Tensor, value: Tensor, residual: Tensor, output: Tensor) -> None:
        """Add one sequence: contributions of every live head at the sampled rows, and their changes."""
        scale = score_scale(self.site.scale, query.shape[-1])
        logits = capped(query @ key.mT * scale, self.site.soft_cap)
        position = torch.arange(key.shape[1], device=key.device)
        future = position > torch.tensor(self.rows, device=key.device)[:, None]
        pattern = logits.masked_fill_(future, -torch.inf).softmax(-1)
        contribution = (pattern @ value) @ self.weight
        change = ((self.mean - pattern) @ value @ self.weight).double()
        flat = contribution.flatten(1).double()
        after = (residual + output).double()
        self.gram += flat @ flat.T
        self.change.append(change.norm(dim=-1).cpu())
        self.residual_change.append((change * after).sum(-1).cpu())
        self.residual.append(after.norm(dim=-1).cpu())
        self.output.append(output.double().norm(dim=-1).cpu())

    def full(self, tensor: Tensor, dimensions: int) -> Tensor:
        """Spread `[live, ...]` over all heads along the first dimensions, NaN elsewhere."""
        heads = self.site.layout.num_heads
        whole = torch.full([heads] * dimensions + list(tensor.shape[dimensions:]), torch.nan, dtype=torch.float64)
        index = torch.tensor(self.live, dtype=torch.long)
        whole[(index[:, None], index) if dimensions == 2 else index] = tensor.cpu()
        return whole

    def samples(self, parts: list[Tensor], samples: int) -> Tensor:
        """Return `[H, S]`."""
        return self.full(torch.cat(parts, 1) if parts else torch.zeros(0, samples, dtype=torch.float64), 1)

    def totals(self, parts: list[Tensor], samples: int) -> Tensor:
        """Return `[S]`; NaN for a layer without live heads, whose queries nobody computes."""
        return torch.cat(parts) if parts else torch.full((samples,), torch.nan, dtype=torch.float64)
