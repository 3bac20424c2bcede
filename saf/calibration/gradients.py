"""Gradients for scores: `QKGradient` averages those of queries and keys, `gate_gradients` measures those of gates."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from saf.calibration.capture import check_vocabulary, evaluation_mode
from saf.calibration.sequences import IGNORED, Batch, read_sequences
from saf.errors import CheckpointError, InputError
from saf.models.adapter import Rows, Site, adapter_for, rows_of

BETA = 0.9
"""Weight of the past in the average, as in the paper."""
Loss = Callable[[Any, Tensor], Tensor]


class QKGradient:
    """Exponential average of each head's relative query and key gradient norm, Eq. (9).

    Call `update()` after `backward` and before the optimiser's step. Nothing waits for the device. Factors common to
    all heads (clipping, loss scaling, accumulation) cancel; an update with a gradient that is not finite is skipped.

    >>> gradient = QKGradient(model)                                     # doctest: +SKIP
    >>> loss.backward(); gradient.update(); optimizer.step()             # doctest: +SKIP
    >>> saf.score(statistics, "qk_gradient", gradient=gradient.scores()) # doctest: +SKIP
    """

    def __init__(self, model: nn.Module, *, beta: float = BETA):
        if not 0 <= beta < 1:
            raise InputError(f"beta is the weight of the past, in [0, 1); got {beta}")
        self.model = model
        self.beta = beta
        self.updates = 0
        sites = adapter_for(model).sites()
        shape = (len(sites), sites[0].layout.num_heads)
        # NaN until a head's first update, which the average starts from.
        self._average = torch.full(shape, torch.nan, dtype=torch.float64)

    @torch.no_grad()
    def update(self) -> None:
        """Add the gradients of this update; raise InputError when there are none."""
        norms = torch.stack([head_norms(site) for site in adapter_for(self.model).sites()])
        self._average = self._average.to(norms.device)
        mean = norms.nanmean()
        relative = norms / mean.clamp(min=torch.finfo(norms.dtype).tiny)
        blended = self.beta * self._average + (1 - self.beta) * relative  # Eq. (9)
        new = torch.where(self._average.isnan(), relative, blended)
        self._average = torch.where(mean.isfinite() & norms.isfinite(), new, self._average)
        self.updates += 1

    def scores(self) -> Tensor:
        """Return the average `[L, H]`, float64 on the CPU; NaN for frozen heads and before the first update."""
        return _live_only(self._average.cpu().clone(), adapter_for(self.model).sites())

    def state_dict(self) -> dict[str, Any]:
        """Return average and settings as JSON values."""
        rows = [[None if value != value else value for value in row] for row in self._average.tolist()]
        return {"beta": self.beta, "updates": self.updates, "average": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict()`; raise CheckpointError for another shape of model or beta."""
        rows = [[torch.nan if value is None else value for value in row] for row in state["average"]]
        average = torch.tensor(rows, dtype=torch.float64)
        if average.shape != self._average.shape or state["beta"] != self.beta:
            raise CheckpointError(
                f"state must be of heads {list(self._average.shape)} with beta={self.beta}; "
                f"got {list(average.shape)} with beta={state['beta']}"
            )
        self._average, self.updates = average, state["updates"]


def head_norms(site: Site) -> Tensor:
    """Return query plus key gradient norms of one layer's heads, Eq. (8), `[H]` float64; NaN for frozen heads.

    With grouped queries a query head has the key gradient of its group.
    """
    layout, parts = site.layout, [rows_of(site, role) for role in ("query", "key")]
    missing = torch.full((), torch.nan, dtype=torch.float64, device=parts[0].parameter.device)
    query, key = [missing] * layout.num_heads, [missing] * layout.num_heads
    if layout.live:
        by_slot, by_group = (_block_norms(part, site.head_dim).unbind() for part in parts)
        for slot, head in enumerate(layout.live):
            query[head], key[head] = by_slot[slot], by_group[layout.key_head[slot]]
    # Stacked rather than indexed: an index would be copied to the device and waited for.
    return torch.stack(query) + torch.stack(key)


def _block_norms(rows: Rows, head_dim: int) -> Tensor:
    """Return the norm of each head's block of a projection's gradient; raise InputError when there is none."""
    if rows.parameter.grad is None:
        raise InputError(
            "the query and key weights have no gradients; call update() after loss.backward() and before zero_grad()"
        )
    blocks = rows.of(rows.parameter.grad).movedim(rows.dimension, 0).unflatten(0, (-1, head_dim))
    wide = torch.float64 if blocks.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(blocks, dim=(1, 2), dtype=wide).double()


def gate_gradients(model: nn.Module, batches: Iterable[Batch], *, loss: Loss | None = None) -> Tensor:
    """Return I of Eq. (19), the mean of absolute gate gradients over sequences: `[L, H]`, NaN for frozen heads.

    A gate multiplies a head's output just before the output projection. Its gradient is exactly the inner product of
    the head's block of output weights with that block's gradient, in every model family.

    Args:
        model: A supported model, run in evaluation mode; weights, gradients and random states stay as they were.
        batches: As for `calibrate`, with `targets [B, T]` where the loss is of other tokens than every next one (-100
            does not count). Each sequence runs by itself, without padding.
        loss: `loss(model, ids)`, ids `[1, T]`, returns the mean loss per token; by default at targets or next tokens.

    Raises:
        InputError: As in `calibrate`; a sequence without a target; both targets and `loss`.
    """
    adapter, sequences = adapter_for(model), read_sequences(batches)
    if loss is not None and sequences.targets is not None:
        raise InputError("targets have no effect with loss=; leave one of them out")
    sites = adapter.sites()
    weights = [site.projections()["output"][0] for site in sites]
    total = torch.zeros(len(sites), sites[0].layout.num_heads, dtype=torch.float64)
    with torch.enable_grad(), evaluation_mode(model), _requiring_gradients(weights):
        check_vocabulary(adapter, sequences.ids)
        for row, targets in sequences.rows():
            ids = row[None].to(adapter.device)
            if loss is not None:
                value = loss(adapter.model, ids)
            elif targets is None:
                if len(row) < 2:
                    raise InputError(f"a next-token loss needs sequences of two tokens or more; got {len(row)}")
                value = adapter.next_token_loss(ids[:, :-1], ids[:, 1:])
            else:
                if bool((targets == IGNORED).all()):
                    raise InputError(f"every sequence needs a target that counts, got only {IGNORED} in one")
                value = adapter.next_token_loss(ids, targets[None].to(adapter.device))
            gradients = torch.autograd.grad(value, weights, allow_unused=True, materialize_grads=True)
            total += torch.stack([gate_gradient(*each) for each in zip(sites, gradients, strict=True)]).abs().cpu()
    return _live_only(total / len(sequences.lengths), sites)


def gate_gradient(site: Site, gradient: Tensor) -> Tensor:
    """Return the derivative of the loss by each head's gate, `[H]` float64, from the output weight's gradient."""
    weight, dimension = site.projections()["output"]
    product = (weight.detach().double() * gradient.double()).movedim(dimension, 0)
    slots = torch.tensor(site.layout.slots, dtype=torch.long, device=product.device)
    by_slot = product.reshape(len(slots), -1).sum(1) if len(slots) else product.new_zeros(0)
    return product.new_zeros(site.layout.num_heads).index_copy_(0, slots, by_slot)


def _live_only(values: Tensor, sites: Sequence[Site]) -> Tensor:
    """Set `[L, H]` to NaN where heads are frozen or pruned, in place."""
    for layer, site in enumerate(sites):
        values[layer, [head for head in range(site.layout.num_heads) if head not in site.layout.live]] = torch.nan
    return values


@contextmanager
def _requiring_gradients(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Let parameters require gradients, and restore their own settings afterwards."""
    fixed = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in fixed:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in fixed:
            parameter.requires_grad_(False)
