"""What scores read of gradients: the running average of Q/K gradients, and the gradients of gates on head outputs.

`QKGradient` (paper, Eqs. 8 and 9) is fed once an update by the training loop; `gate_gradients` (Eq. 19) runs the model
over calibration sequences.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from saf.adapters import Adapter, Rows, Site, adapter_for, rows_of
from saf.calibration.capture import Batch, check_vocabulary, evaluation_mode, read_rows, read_targets
from saf.errors import CheckpointError, InputError

BETA = 0.9
"""Weight of the past in the average: that of the paper."""
Loss = Callable[[Any, Tensor], Tensor]


class QKGradient:
    """Average each head's relative query and key gradient norm exponentially, Eq. (9).

    Call `update()` after `backward` and before the optimiser's step. Norms are taken on the device and nothing waits
    for them. Factors common to all heads (clipping, loss scaling, accumulation) cancel; an update whose gradients are
    not all finite is left out.

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
        """Take in the gradients of this update; raise InputError when there are none."""
        norms = torch.stack([head_norms(site) for site in adapter_for(self.model).sites()])
        self._average = self._average.to(norms.device)
        mean = norms.nanmean()
        relative = norms / mean.clamp(min=torch.finfo(norms.dtype).tiny)
        blended = self.beta * self._average + (1 - self.beta) * relative
        new = torch.where(self._average.isnan(), relative, blended)
        self._average = torch.where(mean.isfinite() & norms.isfinite(), new, self._average)
        self.updates += 1

    def scores(self) -> Tensor:
        """Return the average `[L, H]`, float64 on the CPU; NaN for frozen heads and before the first update."""
        scores = self._average.cpu().clone()
        for layer, site in enumerate(adapter_for(self.model).sites()):
            scores[layer, _edited(site)] = torch.nan
        return scores

    def state_dict(self) -> dict[str, Any]:
        """Return the average and its settings as JSON values."""
        rows = [[None if value != value else value for value in row] for row in self._average.tolist()]
        return {"beta": self.beta, "updates": self.updates, "average": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`; raise CheckpointError when it belongs to another shape of model or beta."""
        try:
            rows = [[torch.nan if value is None else value for value in row] for row in state["average"]]
            average, updates = torch.tensor(rows, dtype=torch.float64), int(state["updates"])
            beta = float(state["beta"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"state must hold an average of gradients, its updates and beta; {error!r}") from None
        if average.shape != self._average.shape or beta != self.beta:
            raise CheckpointError(
                f"expected a gradient average of heads {list(self._average.shape)} with beta={self.beta}; "
                f"got {list(average.shape)} with beta={beta}"
            )
        self._average, self.updates = average, updates


def head_norms(site: Site) -> Tensor:
    """Return Eq. (8) of one layer's heads, `[H]` float64; NaN for frozen heads.

    With grouped queries a query head takes the key gradient of its group.
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
    """Return the norm of each head's block of a role's gradient; raise InputError when there is none."""
    if rows.parameter.grad is None:
        raise InputError(
            "the query and key weights have no gradients; call update() after loss.backward() and before zero_grad()"
        )
    blocks = rows.of(rows.parameter.grad).movedim(rows.dimension, 0).unflatten(0, (-1, head_dim))
    wide = torch.float64 if blocks.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(blocks, dim=(1, 2), dtype=wide).double()


def gate_gradients(model: nn.Module, batches: Iterable[Batch], *, loss: Loss | None = None) -> Tensor:
    """Return the importance I of Eq. (19), `[L, H]` float64 on the CPU; NaN for frozen heads.

    A gate multiplies a head's output just before the output projection, so its gradient is the inner product of the
    head's block of output weights with that block's gradient: exact, and the same for every model family.

    Args:
        model: A supported model, run in evaluation mode; weights, gradients and random states stay as they were.
        batches: LongTensors `[B, T]` of token ids, or mappings with `input_ids`, and `targets` of the same shape where
            the loss is of other tokens than every next one (-100 is no target). Sequences are run one by one, without
            their padding, since the absolute value is taken of each one's gradient.
        loss: `loss(model, ids)`, ids `[1, T]`, to the mean loss per token; that of the targets, or of the next token,
            if not given.

    Raises:
        InputError: Batches that cannot be used, as in `calibrate`; targets in some batches, of another shape or of no
            token that counts; targets beside a loss.
    """
    adapter = adapter_for(model)
    kept = batches if isinstance(batches, Tensor | Mapping) else list(batches)
    ids, lengths = read_rows(kept)
    targets = read_targets(kept, ids) if isinstance(kept, list) else None
    if loss is not None and targets is not None:
        raise InputError("targets have no effect beside loss=; leave one of them out")
    sites = adapter.sites()
    weights = [site.projections()["output"][0] for site in sites]
    total = torch.zeros(len(sites), sites[0].layout.num_heads, dtype=torch.float64)
    count = 0
    with torch.enable_grad(), evaluation_mode(model), requiring_gradients(weights):
        check_vocabulary(adapter, ids)
        for number, batch in enumerate(ids):
            counted = None if targets is None else targets[number].to(adapter.device)
            for row, padded in enumerate(batch.to(adapter.device).split(1)):
                sequence = padded[:, : (length := lengths[number][row])]
                if loss is not None:
                    value = loss(adapter.model, sequence)
                elif counted is not None:
                    value = adapter.next_token_loss(sequence, counted[row : row + 1, :length])
                else:
                    value = _next_token_loss(adapter, sequence)
                gradients = torch.autograd.grad(value, weights, allow_unused=True, materialize_grads=True)
                total += torch.stack([gate_gradient(*each) for each in zip(sites, gradients, strict=True)]).abs().cpu()
                count += 1
    for layer, site in enumerate(sites):
        total[layer, _edited(site)] = torch.nan
    return total / count


def gate_gradient(site: Site, gradient: Tensor) -> Tensor:
    """Return the derivative of the loss by each head's gate, `[H]` float64, from the output weight's gradient."""
    weight, dimension = site.projections()["output"]
    product = (weight.detach().double() * gradient.double()).movedim(dimension, 0)
    slots = torch.tensor(site.layout.slots, dtype=torch.long, device=product.device)
    by_slot = product.reshape(len(slots), -1).sum(1) if len(slots) else product.new_zeros(0)
    return product.new_zeros(site.layout.num_heads).index_copy_(0, slots, by_slot)


def _edited(site: Site) -> list[int]:
    """Return the heads of a layer that are not live."""
    return [head for head in range(site.layout.num_heads) if head not in site.layout.live]


def _next_token_loss(adapter: Adapter, ids: Tensor) -> Tensor:
    """Return the mean negative log-likelihood (nats per token) of `ids[:, 1:]` given what precedes each."""
    if ids.shape[1] < 2:
        raise InputError(f"a next-token loss needs sequences of two tokens or more; got {ids.shape[1]}")
    return adapter.next_token_loss(ids[:, :-1], ids[:, 1:])


@contextmanager
def requiring_gradients(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Let parameters take part in gradients, and give each its own setting back afterwards."""
    fixed = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in fixed:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in fixed:
            parameter.requires_grad_(False)
