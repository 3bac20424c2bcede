"""Held-out text shows what heads cost: its loss, the layer that costs most, and which heads cost least together.

Heads that are harmless alone may be fatal together: on SmolLM2-135M the 14 heads of lowest variance cost 0.004 nats
each, and 1.7 nats together. So `accept_jointly` takes heads in the order in which they cost least given those before.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from saf.calibration import Batch, free_bytes, read_sequences
from saf.calibration.capture import check_vocabulary, evaluation_mode
from saf.errors import InputError
from saf.heads import Head, HeadSet
from saf.models.adapter import LanguageModel, adapter_for

Edit = Callable[[HeadSet], None]
"""Freezes or prunes heads of a model, or makes them live again."""
MAX_RISE = 0.05
"""Largest rise of held-out perplexity that an event may cause where no training follows, as a share."""
GUARD_SEQUENCES = 8
"""Sequences that the loss is measured on by default."""
MAX_REFUSED = 8
"""Heads beyond the budget before a search by joint cost ends: the heads that follow cost more."""
_BLAME_SEQUENCES = 4
"""Sequences that the layer to blame is found on: one pass over them for every layer that lost heads."""
_MOST_LOGITS = 2**28
"""Logits that a forward pass on a GPU may make: 1 GiB in float32."""


# --- the loss


def heldout_loss(model: nn.Module, batches: Iterable[Batch]) -> float:
    """Return the mean loss of every next token of `batches`, nats; the model runs in evaluation mode."""
    adapter, sequences, total, count = adapter_for(model), read_sequences(batches), 0.0, 0
    check_vocabulary(adapter, sequences.ids)
    with torch.no_grad(), evaluation_mode(model):
        for ids in rows_at_once(adapter, _rows(sequences)):
            targets = ids[:, 1:]
            total += float(adapter.next_token_loss(ids[:, :-1], targets)) * targets.numel()
            count += targets.numel()
    if not count:
        raise InputError("heldout must have sequences of two tokens or more, got none")
    return total / count


def rows_at_once(language: LanguageModel, sequences: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield sequences `[1, T]` on the model's device, on a GPU as many of one length as their logits allow."""
    start = 0
    while start < len(sequences):
        length = sequences[start].shape[1]
        most = max(1, _MOST_LOGITS // (length * (language.vocab_size or 1))) if language.device.type == "cuda" else 1
        end = start + 1
        while end < min(start + most, len(sequences)) and sequences[end].shape[1] == length:
            end += 1
        yield torch.cat([*sequences[start:end]]).to(language.device)
        start = end


def _rows(batches: Iterable[Batch]) -> list[Tensor]:
    """Return the sequences with a next token, `[1, T]` each."""
    return [row[None] for row in read_sequences(batches).tokens if len(row) > 1]


def perplexity_rise(before: float | None, after: float | None) -> float:
    """Return by which share perplexity rises between two losses, nats; NaN without one, `inf` where it overflows.

    >>> round(perplexity_rise(3.0, 3.1), 4)
    0.1052
    """
    if before is None or after is None:
        return math.nan
    try:
        return math.expm1(after - before)
    except OverflowError:
        return math.inf


def worst_layer(
    model: nn.Module, heads: HeadSet, batches: Iterable[Batch], edit_: Edit, undo_: Edit
) -> tuple[int, float]:
    """Return the layer whose heads, edited alone, cost most, and the rise of perplexity; NaN costs more than any."""
    few, losses, lower = _rows(batches)[:_BLAME_SEQUENCES], dict[int, float](), LowerLayers(model)
    before = lower.loss(few, edited=len(lower.layers))
    for layer in sorted({layer for layer, _ in heads}):
        own = HeadSet((layer, head) for head in heads.in_layer(layer))
        edit_(own)
        try:
            losses[layer] = lower.loss(few, edited=layer)
        finally:
            undo_(own)
    layer, loss = max(losses.items(), key=lambda item: (math.isnan(item[1]), item[1]))
    return layer, perplexity_rise(before, loss)


# --- acceptance by joint cost


@dataclass(frozen=True)
class JointCost:
    """Which heads were accepted together, in order, and what they cost on the text they were chosen by, in nats."""

    accepted: tuple[Head, ...]
    rises: tuple[float, ...]
    """Rise of the loss with the accepted heads up to each one."""
    refused: tuple[Head, ...]
    """Heads that would have exceeded the budget."""
    alone: dict[Head, float]
    """Rise of the loss with this head alone, of every candidate."""

    @property
    def rise(self) -> float:
        """Return the rise of the loss with all accepted heads."""
        return self.rises[-1] if self.rises else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self) | {"alone": [[*head, cost] for head, cost in self.alone.items()], "rise": self.rise}


def halves(text: Iterable[Batch]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the first and the second half of the sequences, `[1, T]` each: to choose heads by, and to report on."""
    sequences = [row[None] for row in read_sequences(text).tokens]
    if len(sequences) < 2:
        raise InputError("heldout must have 2 sequences to choose heads on one half and report on the other, got 1")
    half = len(sequences) // 2
    return sequences[:half], sequences[half:]


def accept_jointly(
    model: nn.Module,
    candidates: Iterable[Head],
    text: Iterable[Batch],
    max_heads: int,
    *,
    budget: float = math.inf,
    edit_: Edit,
    undo_: Edit,
    progress: Callable[[int, int], None] | None = None,
) -> JointCost:
    """Choose at most `max_heads` candidates, each the cheapest given those before it; the model ends as it was.

    Their joint loss on `text` rises by at most log(1 + budget) nats. Costs are measured anew lazily: a candidate whose
    cost is of an earlier step waits by it, and is measured again when it comes first. `progress` is called with (heads
    measured alone and heads accepted, the most that this can be), and with all of them at the end.
    """
    text, candidates = list(text), list(candidates)
    steps, lower, show = len(candidates) + max_heads, LowerLayers(model), progress or (lambda done, total: None)
    before = lower.loss(text, edited=len(lower.layers))
    accepted: list[Head] = []
    rises: list[float] = []
    refused: list[Head] = []

    def rise_with(head: Head) -> float:
        """Return the rise of the loss with this head beside the accepted ones; infinite where the loss is NaN."""
        edit_(HeadSet([head]))
        try:
            rise = lower.loss(text, edited=head[0]) - before
        finally:
            undo_(HeadSet([head]))
        return math.inf if math.isnan(rise) else rise

    alone: dict[Head, float] = {}
    for head in candidates:
        show(len(alone), steps)
        alone[head] = rise_with(head)
    queue = [(cost, head, 0) for head, cost in alone.items()]  # by what a head adds, and the step this is of
    heapq.heapify(queue)
    try:
        while queue and len(accepted) < max_heads and len(refused) < MAX_REFUSED:
            added, head, step = heapq.heappop(queue)
            rise = (rises[-1] if rises else 0.0) + added
            if step < len(accepted):
                heapq.heappush(queue, (rise_with(head) - rises[-1], head, len(accepted)))
            elif rise == math.inf or rise > math.log1p(budget):
                refused.append(head)
            else:
                edit_(HeadSet([head]))
                lower.forget(head[0])
                accepted.append(head)
                rises.append(rise)
                show(min(len(alone) + len(accepted), steps - 1), steps)
    finally:
        if accepted:
            undo_(HeadSet(accepted))
    show(steps, steps)
    return JointCost(tuple(accepted), tuple(rises), tuple(refused), alone)


class LowerLayers:
    """A pass over one text computes only from the edited layer on: outputs of the layers below are kept.

    They take at most a quarter of the free memory; where a batch's have no room, more of its layers run.
    """

    def __init__(self, model: nn.Module):
        adapter = adapter_for(model)
        owners = {child: module for module in adapter.model.modules() for child in module.children()}
        self.model, self.layers = model, [owners[site.attention] for site in adapter.sites()]
        self._room = (free_bytes(adapter.device) or 0) // 4
        self._outputs: defaultdict[int, dict[int, Any]] = defaultdict(dict)  # by batch and layer
        self._batch = 0

    def loss(self, text: Sequence[Batch], *, edited: int) -> float:
        """Return the held-out loss of a model in which no layer below `edited` has changed since `forget`."""
        own, self._batch = [vars(layer).get("forward") for layer in self.layers], -1
        for number, layer in enumerate(self.layers):
            layer.forward = partial(self._run, number, edited, layer.forward)
        try:
            return heldout_loss(self.model, text)
        finally:
            for layer, forward in zip(self.layers, own, strict=True):
                del layer.forward
                if forward is not None:  # one that accelerate put there
                    layer.forward = forward

    def forget(self, layer: int) -> None:
        """Drop the outputs that an edit of this layer changes."""
        for kept in self._outputs.values():
            self._room += sum(_bytes(kept.pop(number)) for number in [*kept] if number >= layer)

    def _run(self, number: int, edited: int, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        """Return the output of a layer; in place of those below the last kept one stands that one's."""
        self._batch += number == 0
        kept = self._outputs[self._batch]
        last = max((layer for layer in kept if layer < edited), default=-1)
        if number <= last:
            return kept[last]
        output = forward(*inputs, **options)
        if number < edited and (size := _bytes(output)) <= self._room:
            kept[number] = output
            self._room -= size
        return output


def _bytes(output: Any) -> int:
    return sum(each.nbytes for each in tree_leaves(output) if isinstance(each, Tensor))
