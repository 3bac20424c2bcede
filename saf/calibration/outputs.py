"""`head_outputs` measures the contributions of heads to the residual stream, with their own and their mean pattern."""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from saf.calibration.capture import check_vocabulary, evaluation_mode
from saf.calibration.sequences import Batch, read_batches
from saf.errors import InputError, UnsupportedError
from saf.models.adapter import Site, adapter_for, find_rows, rows_of, unwrap
from saf.ops.live import capped, score_scale
from saf.scores import HeadOutputs
from saf.statistics import AttentionStatistics


def head_outputs(model: nn.Module, batches: Iterable[Batch], statistics: AttentionStatistics) -> HeadOutputs:
    """Measure the contributions of all live heads to the residual stream, with their own and with their mean pattern.

    Args:
        model: A supported model, run in evaluation mode; it stays as it was.
        batches: Held-out sequences `[B, T]` of the calibration length.
        statistics: Of `calibrate(..., collect=("mean_rows",))`: the rows of the mean pattern and their positions.

    Returns:
        Sums and norms at the statistics' positions of every sequence; NaN for heads without `mean_rows`.

    Raises:
        InputError: Statistics without `mean_rows`, or sequences of another length.
        UnsupportedError: A model whose values cannot be seen.
    """
    adapter, batches = adapter_for(model), read_batches(batches)
    sites = adapter.sites()
    check_vocabulary(adapter, batches)
    if "mean_rows" not in statistics.collected:
        raise InputError("head_outputs needs calibrate(..., collect=('mean_rows',)); these statistics have none")
    if batches[0].shape[1] != statistics.length:
        raise InputError(f"sequences must have {statistics.length} tokens, as calibrated; got {batches[0].shape[1]}")
    if any(site.norm_after for site in sites):
        raise UnsupportedError(
            "outputs of heads mix where a norm follows the attention layer (Gemma 2 and 3); use a score of patterns, "
            "such as 'variance'"
        )
    layers = [_Layer(unwrap(model), site, number, statistics) for number, site in enumerate(sites)]
    with torch.no_grad(), evaluation_mode(model), ExitStack() as stack:
        for layer in layers:
            layer.hook(stack)
        for batch in batches:
            adapter.run(batch.to(adapter.device))
    samples = sum(map(len, batches)) * len(statistics.positions)
    return HeadOutputs(
        gram=torch.stack([layer.all_heads(layer.gram, 2) for layer in layers]),
        change=torch.stack([layer.all_heads(layer.samples("change", samples)) for layer in layers]),
        residual_change=torch.stack([layer.all_heads(layer.samples("residual_change", samples)) for layer in layers]),
        residual=torch.stack([layer.samples("residual", samples) for layer in layers]),
        output=torch.stack([layer.samples("output", samples) for layer in layers]),
        hidden_size=layers[0].weight.shape[-1],
    )


class _Layer:
    """Sums of one layer, added up sequence by sequence by hooks around its attention."""

    def __init__(self, model: nn.Module, site: Site, number: int, statistics: AttentionStatistics):
        self.site, self.live, self.rows = site, list(site.layout.live), list(statistics.positions)
        self.attention, self.layer = _modules(model, site)
        weight, dimension = site.projections()["output"]
        self.wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        by_slot = weight.detach().movedim(dimension, 0).unflatten(0, (-1, site.head_dim))
        self.weight = by_slot[: len(self.live)].to(self.wide)
        mean = torch.full((len(self.live), len(self.rows), statistics.length), torch.nan, dtype=self.wide)
        if known := [head for head in self.live if (number, head) in statistics.collected_heads]:
            slots = [self.live.index(head) for head in known]
            mean[slots] = statistics.take("mean_rows", [(number, head) for head in known]).to(self.wide)
        self.mean = mean.to(weight.device)
        self.gram = torch.zeros(len(self.live), len(self.live), dtype=torch.float64, device=weight.device)
        self.parts: dict[str, list[Tensor]] = {"change": [], "residual_change": [], "residual": [], "output": []}
        self._seen: dict[str, Tensor] = {}

    def hook(self, stack: ExitStack) -> None:
        """Add every forward pass until the stack is closed."""

        def input_hook(name: str) -> Any:
            def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                self._seen[name] = (args[0] if args else kwargs["hidden_states"]).detach()

            return hook

        def see_queries(query: Tensor, key: Tensor) -> None:
            self._seen |= {"query": query.detach(), "key": key.detach()}

        def attention_output(_module: nn.Module, _args: Any, output: Any) -> None:
            if "query" in self._seen:  # a layer without live heads has none
                self._add((output if isinstance(output, Tensor) else output[0]).detach(), **self._seen)
            self._seen = {}

        for module, name in ((self.layer, "residual"), (self.attention, "normed")):
            stack.callback(module.register_forward_pre_hook(input_hook(name), with_kwargs=True).remove)
        stack.enter_context(self.site.capture(see_queries))
        stack.callback(self.attention.register_forward_hook(attention_output).remove)

    def _add(self, output: Tensor, *, query: Tensor, key: Tensor, normed: Tensor, residual: Tensor) -> None:
        """Add a batch: its attention layer's output and input, rotated queries and keys, and the residual stream."""
        layout, wide, rows = self.site.layout, self.wide, self.rows
        groups, keys = list(layout.kv_head[: len(self.live)]), list(layout.key_head)
        with torch.autocast(query.device.type, enabled=False):
            for n in range(len(query)):
                self._add_sequence(
                    query[n][:, rows].to(wide),
                    key[n][keys].to(wide),
                    _values(self.site, normed[n], wide)[groups],
                    residual[n][rows].to(wide),
                    output[n][rows].to(wide),
                )

    def _add_sequence(self, query: Tensor, key: Tensor, value: Tensor, residual: Tensor, output: Tensor) -> None:
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
        self.parts["change"].append(change.norm(dim=-1).cpu())
        self.parts["residual_change"].append((change * after).sum(-1).cpu())
        self.parts["residual"].append(after.norm(dim=-1).cpu())
        self.parts["output"].append(output.double().norm(dim=-1).cpu())

    def samples(self, name: str, samples: int) -> Tensor:
        """Return the values of all samples, `[live, S]` or `[S]`; NaN for a layer without live heads."""
        if self.parts[name]:
            return torch.cat(self.parts[name], -1)
        shape = (0, samples) if "change" in name else (samples,)
        return torch.full(shape, torch.nan, dtype=torch.float64)

    def all_heads(self, tensor: Tensor, dimensions: int = 1) -> Tensor:
        """Spread `[live, ...]` over all heads along the first dimensions, NaN elsewhere."""
        heads, index = self.site.layout.num_heads, torch.tensor(self.live, dtype=torch.long)
        whole = torch.full([heads] * dimensions + list(tensor.shape[dimensions:]), torch.nan, dtype=torch.float64)
        whole[(index[:, None], index) if dimensions == 2 else index] = tensor.cpu()
        return whole


def _modules(model: nn.Module, site: Site) -> tuple[nn.Module, nn.Module]:
    """Return a site's attention module and decoder layer, by the parameters of its projections."""
    owners = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), name)
    value, output = (rows_of(site, role).parameter for role in ("value", "output"))
    if id(value) not in owners or id(output) not in owners:
        raise UnsupportedError("this attention layer has no parameters of its own for values and output")
    path = owners[id(output)].split(".")
    if len(path) < 3:
        raise UnsupportedError(f"expected layer.attention.projection with its own values; got {'.'.join(path)}")
    return model.get_submodule(".".join(path[:-1])), model.get_submodule(".".join(path[:-2]))


def _values(site: Site, normed: Tensor, wide: torch.dtype) -> Tensor:
    """Return the values `[H_kv, T, D]` of the projections' input `[T, channels]`, computed in `wide`."""
    rows, bias = rows_of(site, "value"), find_rows(site, "value_bias")
    weight = rows.of(rows.parameter).movedim(rows.dimension, 0)
    values = normed.to(wide) @ weight.to(wide).T
    if bias is not None:
        values = values + bias.of(bias.parameter).to(wide)
    return values.unflatten(-1, (-1, site.head_dim)).transpose(-3, -2)
