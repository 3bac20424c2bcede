"""`QKGradient`, `gate_gradients` and `head_outputs` measure what some scores read beyond the statistics of `calibrate`.

The first averages gradient norms of query and key weights while a model trains. The second measures gradients of gates
on the heads' outputs. The third measures each head's contribution to the residual stream, with its own pattern and with
its mean pattern.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from saf.calibration.sequences import Batch, read_batches, read_sequences
from saf.errors import CheckpointError, InputError, UnsupportedError
from saf.models.adapter import Adapter, Rows, Site, adapter_for, evaluation_mode, find_rows, rows_of, unwrap
from saf.ops.live import capped, score_scale
from saf.ops.loss_and_gelu import IGNORE_INDEX
from saf.scores import HeadOutputs
from saf.statistics import AttentionStatistics

BETA = 0.9  # weight of the past in the average of Eq. (9)


class QKGradient:
    """Exponential average of each head's relative query and key gradient norm, Eq. (9).

    Call `update()` after `backward` and before the optimiser's step. Nothing waits for the device. Factors common to
    all heads (clipping, loss scaling, accumulation) cancel; an update with a gradient that is not finite is skipped.

    >>> gradient = QKGradient(model)                                     # doctest: +SKIP
    >>> loss.backward(); gradient.update(); optimizer.step()             # doctest: +SKIP
    >>> saf.score(statistics, "qk_gradient", gradient=gradient.scores()) # doctest: +SKIP
    """

    def __init__(self, model: nn.Module):
        self.model = model
        # NaN until a head's first update, which the average starts from.
        sites = adapter_for(model).sites()
        self._average = torch.full((len(sites), sites[0].layout.num_heads), torch.nan, dtype=torch.float64)

    @torch.no_grad()
    def update(self) -> None:
        """Average in the gradients of this update; raise InputError when there are none."""
        norms = torch.stack([head_norms(site) for site in adapter_for(self.model).sites()])  # Eq. (8)
        self._average = self._average.to(norms.device)
        # Over all live heads of the model: a factor common to all of them cancels.
        mean = norms.nanmean()
        relative = norms / mean.clamp(min=torch.finfo(norms.dtype).tiny)
        blended = BETA * self._average + (1 - BETA) * relative  # Eq. (9)
        new = torch.where(self._average.isnan(), relative, blended)
        # A `where` and no branch: a branch would wait for the device in every update.
        self._average = torch.where(mean.isfinite() & norms.isfinite(), new, self._average)

    def scores(self) -> Tensor:
        """Return the average `[L, H]`, float64 on the CPU; NaN for frozen heads and before the first update."""
        scores = self._average.cpu().clone()
        for layer, site in enumerate(adapter_for(self.model).sites()):
            scores[layer, [*site.layout.frozen, *site.layout.pruned]] = torch.nan
        return scores

    def state_dict(self) -> dict[str, Any]:
        """Return the average as values for JSON, None in place of NaN."""
        return {"average": [[None if math.isnan(value) else value for value in row] for row in self._average.tolist()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict()`; raise CheckpointError for another shape of model."""
        rows = [[torch.nan if value is None else value for value in row] for row in state["average"]]
        average = torch.tensor(rows, dtype=torch.float64)
        if average.shape != self._average.shape:
            raise CheckpointError(f"state must have shape {list(self._average.shape)}; got {list(average.shape)}")
        self._average = average


def head_norms(site: Site) -> Tensor:
    """Return the sum of query and key gradient norms of one layer's heads, Eq. (8), `[H]` float64; NaN if not live.

    With grouped queries, all query heads of a group share the norm of its key head.
    """
    layout, parts = site.layout, [rows_of(site, role) for role in ("query", "key")]
    norms = [torch.full((), torch.nan, dtype=torch.float64, device=parts[0].parameter.device)] * layout.num_heads
    if layout.live:
        by_slot, by_group = (_block_norms(part, site.head_dim).unbind() for part in parts)
        for head, query, group in zip(layout.live, by_slot, layout.key_head, strict=True):
            norms[head] = query + by_group[group]  # Eq. (8)
    # Not `norms[list(live)] = ...` on a tensor, which would copy the list to the device and wait for it.
    return torch.stack(norms)


def _block_norms(rows: Rows, head_dim: int) -> Tensor:
    """Return the norm of each head's block of a projection's gradient; raise InputError when there is none."""
    if rows.parameter.grad is None:
        raise InputError(
            "the query and key weights have no gradients; call update() after loss.backward() and before zero_grad()"
        )
    blocks = rows.of(rows.parameter.grad).movedim(rows.dimension, 0).unflatten(0, (-1, head_dim))
    return torch.linalg.vector_norm(blocks, dim=(1, 2), dtype=torch.promote_types(blocks.dtype, torch.float32)).double()


# --- gates


def gate_gradients(model: nn.Module, batches: Iterable[Batch]) -> Tensor:
    """Return I of Eq. (19), the mean over sequences of absolute gate gradients: `[L, H]`, NaN for frozen heads.

    A gate is a factor of a head's output, just before the output projection. Its gradient at 1 is the inner product of
    the head's block of output weights with that block's gradient, so that no model needs actual gates.

    The model runs in evaluation mode and stays as it was. Batches are those of `calibrate`; `targets [B, T]` in them
    replace every next token in the loss, and -100 leaves one out. Each sequence runs by itself, without padding. Raises
    InputError as `calibrate` does, and for a sequence without a target.
    """
    adapter, sequences = adapter_for(model), read_sequences(batches)
    adapter.check_tokens(sequences.ids)
    sites = adapter.sites()
    weights = [site.projections()["output"][0] for site in sites]
    total = torch.zeros(len(sites), sites[0].layout.num_heads, dtype=torch.float64)
    with torch.enable_grad(), evaluation_mode(model), _requiring_gradients(weights):
        for row, targets in sequences.rows():
            loss = _loss(adapter, row, targets)
            # Not backward(), which would add to the parameters' own gradients. The empty weight of a
            # layer whose heads are all pruned is unused.
            gradients = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
            layers = [_gate_gradient(site, gradient) for site, gradient in zip(sites, gradients, strict=True)]
            total += torch.stack(layers).abs().cpu()
    return total / len(sequences.tokens)  # Eq. (19)


def _loss(adapter: Adapter, row: Tensor, targets: Tensor | None) -> Tensor:
    """Return the mean loss of a sequence at its targets, or at every next token."""
    if targets is None:
        if len(row) < 2:
            raise InputError(f"a next-token loss needs sequences of two tokens or more; got {len(row)}")
        row, targets = row[:-1], row[1:]
    elif bool((targets == IGNORE_INDEX).all()):
        raise InputError(f"every sequence needs a target that counts, got only {IGNORE_INDEX} in one")
    return adapter.next_token_loss(row[None].to(adapter.device), targets[None].to(adapter.device))


def _gate_gradient(site: Site, gradient: Tensor) -> Tensor:
    """Return the derivative of the loss by each gate, `[H]` float64, from the output weight's gradient."""
    weight, dimension = site.projections()["output"]
    # A gate scales the head's columns of the output weight, so its gradient is their inner product with the weight's.
    product = (weight.detach().double() * gradient.double()).movedim(dimension, 0)
    gates, live = product.new_full((site.layout.num_heads,), torch.nan), list(site.layout.live)
    if live:
        gates[live] = product.reshape(site.layout.num_slots, -1).sum(1)[: len(live)]
    return gates


@contextmanager
def _requiring_gradients(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Let parameters require gradients, and restore their own settings afterwards."""
    without = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in without:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in without:
            parameter.requires_grad_(False)


# --- outputs


def head_outputs(model: nn.Module, batches: Iterable[Batch], statistics: AttentionStatistics) -> HeadOutputs:
    """Measure the contributions of all live heads to the residual stream, with their own and with their mean pattern.

    The model runs in evaluation mode and stays as it was, on held-out sequences `[B, T]` of the calibration length.
    Statistics are those of `calibrate(..., collect=("mean_rows",))`; samples are taken at their query positions. Heads
    without `mean_rows` get NaN. Raises InputError for statistics without `mean_rows` and sequences of another length,
    UnsupportedError for a model with a norm after its attention layers.
    """
    adapter, batches = adapter_for(model), read_batches(batches)
    sites = adapter.sites()
    adapter.check_tokens(batches)
    if "mean_rows" not in statistics.collected:
        raise InputError("head_outputs needs calibrate(..., collect=('mean_rows',)); these statistics have none")
    if batches[0].shape[1] != statistics.length:
        raise InputError(f"sequences must have {statistics.length} tokens, as calibrated; got {batches[0].shape[1]}")
    if any(site.post_norm for site in sites):
        raise UnsupportedError(
            "a norm behind the attention layer mixes the heads' outputs (Gemma 2, 3); use a score such as 'variance'"
        )
    positions, mean_rows = statistics.positions, statistics.by_head("mean_rows")
    samples = sum(map(len, batches)) * len(positions)
    layers = [
        _LayerOutputs(unwrap(model), site, rows, positions, samples)
        for site, rows in zip(sites, mean_rows, strict=True)
    ]
    with torch.no_grad(), evaluation_mode(model), ExitStack() as stack:
        for layer in layers:
            layer.add_hooks(stack)
        for batch in batches:
            adapter.run(batch.to(adapter.device))
    sums = {name: torch.stack([layer.sums[name] for layer in layers]) for name in layers[0].sums}
    return HeadOutputs(**sums, hidden_size=layers[0].weight.shape[-1])


class _LayerOutputs:
    """The tensors of `HeadOutputs` of one layer, filled by hooks around its attention; NaN where a head is not live."""

    def __init__(self, model: nn.Module, site: Site, mean_rows: Tensor, positions: Sequence[int], samples: int):
        self.site, self.live, self.positions = site, list(site.layout.live), list(positions)
        # The attention's parent module gets the residual stream as its input.
        name = next(name for name, module in model.named_modules() if module is site.attention)
        self.decoder_layer = model.get_submodule(name.rpartition(".")[0])
        weight, dimension = site.projections()["output"]
        self.dtype = torch.promote_types(weight.dtype, torch.float32)
        by_slot = weight.detach().movedim(dimension, 0).unflatten(0, (-1, site.head_dim))
        self.weight = by_slot[: len(self.live)].to(self.dtype)
        self.mean = mean_rows[self.live].to(weight.device, self.dtype)
        heads = site.layout.num_heads
        shapes = {"gram": (heads, heads), "change": (heads, samples), "residual_change": (heads, samples)}
        shapes |= {"residual": (samples,), "output": (samples,)}
        self.sums = {name: torch.full(shape, torch.nan, dtype=torch.float64) for name, shape in shapes.items()}
        self.sums["gram"][np.ix_(self.live, self.live)] = 0
        self._filled = 0

    def add_hooks(self, stack: ExitStack) -> None:
        """Take in every forward pass until the stack is closed."""
        inputs: dict[str, Tensor] = {}  # tensors of the current pass, by the parameters of `_add_batch`

        def store(name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs[name] = args[0] if args else kwargs["hidden_states"]

        def add(_module: nn.Module, _args: Any, output: Any) -> None:
            if "query" in inputs:  # in a layer without live heads nothing is captured
                with torch.autocast(self.weight.device.type, enabled=False):
                    self._add_batch(output if isinstance(output, Tensor) else output[0], **inputs)
            inputs.clear()

        for module, name in ((self.decoder_layer, "residual"), (self.site.attention, "normed")):
            stack.callback(module.register_forward_pre_hook(partial(store, name), with_kwargs=True).remove)
        stack.enter_context(self.site.capture(lambda query, key: inputs.update(query=query, key=key)))
        stack.callback(self.site.attention.register_forward_hook(add).remove)

    def _add_batch(self, output: Tensor, *, query: Tensor, key: Tensor, normed: Tensor, residual: Tensor) -> None:
        """Add a batch: the attention layer's output, rotated queries and keys, its input, and the stream before it."""
        layout, rows = self.site.layout, self.positions
        query, key = query[:, :, rows].to(self.dtype), key[:, list(layout.key_head)].to(self.dtype)
        value = _values(self.site, normed, self.dtype)[:, list(layout.kv_head[: len(self.live)])]
        logits = capped(query @ key.mT * score_scale(self.site.scale, query.shape[-1]), self.site.soft_cap)
        position = torch.arange(key.shape[2], device=key.device)
        future = position > torch.tensor(rows, device=key.device)[:, None]
        pattern = logits.masked_fill_(future, -torch.inf).softmax(-1)
        # C and D of `HeadOutputs`, [heads, samples, channels]: all positions of one sequence, then of the next.
        contribution, change = (
            (weights @ value @ self.weight).double().transpose(0, 1).flatten(1, 2)
            for weights in (pattern, self.mean - pattern)
        )
        output = output[:, rows].to(self.dtype).flatten(0, 1)  # O
        after = (residual[:, rows].to(self.dtype).flatten(0, 1) + output).double()  # Y
        samples = slice(self._filled, self._filled + len(after))
        self._filled = samples.stop
        flat = contribution.flatten(1)
        self.sums["gram"][np.ix_(self.live, self.live)] += (flat @ flat.T).cpu()
        self.sums["change"][self.live, samples] = change.norm(dim=-1).cpu()
        self.sums["residual_change"][self.live, samples] = (change * after).sum(-1).cpu()
        self.sums["residual"][samples] = after.norm(dim=-1).cpu()
        self.sums["output"][samples] = output.double().norm(dim=-1).cpu()


def _values(site: Site, normed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the value vectors `[N, H_kv, T, D]` of the attention layer's input `[N, T, channels]`, in `dtype`."""
    rows, bias = rows_of(site, "value"), find_rows(site, "value_bias")
    weight = rows.of(rows.parameter).movedim(rows.dimension, 0)
    values = normed.to(dtype) @ weight.to(dtype).T
    if bias is not None:
        values = values + bias.of(bias.parameter).to(dtype)
    return values.unflatten(-1, (-1, site.head_dim)).transpose(-3, -2)
