"""Held-out text shows what heads cost: its loss, the layer that costs most, and which heads cost least together.

Heads that are harmless alone may be fatal together: on SmolLM2-135M the 14 heads of lowest variance cost 0.004 nats
each, and 1.7 nats together. So `accept_jointly` takes heads one after another, each time the one that adds least to the
loss with those taken before. `within_budget` then holds them to other text, too.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
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

Trial = Callable[[HeadSet], AbstractContextManager[None]]
"""Returns a context in which these heads of a model are frozen or pruned; they are live again afterwards."""
MAX_RISE = 0.05
"""Largest rise of held-out perplexity that an event may cause where no training follows, as a share."""
GUARD_SEQUENCES = 8
"""Sequences that the loss is measured on by default."""
MAX_REFUSED = 8
"""Heads beyond the budget before a search by joint cost ends: the heads that follow cost more."""
_BLAME_SEQUENCES = 4
"""Sequences that the costliest layer is found on: one pass over them for every layer that lost heads."""
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


def worst_layer(model: nn.Module, heads: HeadSet, text: Iterable[Batch], trial: Trial) -> tuple[int, float]:
    """Return the layer whose heads cost most together, the others live, and by which share perplexity rises."""
    few, losses, layers = _rows(text)[:_BLAME_SEQUENCES], dict[int, float](), CachedLayers(model)
    before = layers.loss(few)
    for layer in sorted({layer for layer, _ in heads}):
        with trial(HeadSet((layer, head) for head in heads.in_layer(layer))):
            losses[layer] = layers.loss(few, changed=layer)
    layer, loss = max(losses.items(), key=lambda item: (math.isnan(item[1]), item[1]))  # NaN costs more than any
    return layer, perplexity_rise(before, loss)


# --- joint cost: heads are accepted on the first half of the text, and must keep the budget on the second half, too


def halves(text: Iterable[Batch]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the first and the second half of the sequences, `[1, T]` each: to choose heads by, and to report on."""
    sequences = [row[None] for row in read_sequences(text).tokens]
    if len(sequences) < 2:
        raise InputError("heldout must have 2 sequences to choose heads on one half and report on the other, got 1")
    half = len(sequences) // 2
    return sequences[:half], sequences[half:]


@dataclass(frozen=True)
class JointCost:
    """Which heads were accepted together, in order, and what they cost on the text they were chosen by, in nats."""

    accepted: tuple[Head, ...]
    rises: tuple[float, ...]
    """Rise of the loss with the accepted heads up to each one."""
    refused: tuple[Head, ...]
    """Heads that would have exceeded the budget, on either half of the text."""
    alone: dict[Head, float]
    """Rise of the loss with this head alone, of every candidate."""

    @property
    def rise(self) -> float:
        """Return the rise of the loss with all accepted heads."""
        return self.rises[-1] if self.rises else 0.0

    def first(self, count: int) -> "JointCost":
        """Return the same with only the first of the accepted heads; the others are refused."""
        refused = self.refused + self.accepted[count:]
        return replace(self, accepted=self.accepted[:count], rises=self.rises[:count], refused=refused)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self) | {"alone": [[*head, cost] for head, cost in self.alone.items()], "rise": self.rise}


def accept_jointly(
    model: nn.Module,
    candidates: Iterable[Head],
    text: Iterable[Batch],
    max_heads: int,
    *,
    trial: Trial,
    budget: float = math.inf,
    progress: Callable[[int, int], None] | None = None,
) -> JointCost:
    """Accept at most `max_heads` candidates, each the one that adds least to the loss of those before it.

    Perplexity on `text` rises by at most `budget`, a share, with all of them; the search ends where several heads in
    turn would exceed it. The model ends as it was. `progress` is called with (heads measured alone and accepted, the
    most that this can be).
    """
    text, candidates, layers = list(text), list(candidates), CachedLayers(model)
    steps, show = len(candidates) + max_heads, progress or (lambda done, total: None)
    before = layers.loss(text)

    def rise_with(head: Head) -> float:
        """Return the rise of the loss with this head and the accepted ones; infinite where the loss is NaN."""
        with trial(HeadSet([head])):
            rise = layers.loss(text, changed=head[0]) - before
        return math.inf if math.isnan(rise) else rise

    alone: dict[Head, float] = {}
    for head in candidates:
        show(len(alone), steps)
        alone[head] = rise_with(head)
    accepted, rises, refused = list[Head](), [0.0], list[Head]()
    # An entry holds how many heads were accepted when its head was measured. What a head adds hardly falls as more are
    # accepted: only the head in front is measured again, until the one in front was measured last.
    queue = [(cost, head, 0) for head, cost in alone.items()]
    heapq.heapify(queue)
    with ExitStack() as frozen:
        while queue and len(accepted) < max_heads and len(refused) < MAX_REFUSED:
            added, head, count = heapq.heappop(queue)
            if count < len(accepted):
                heapq.heappush(queue, (rise_with(head) - rises[-1], head, len(accepted)))
            elif added == math.inf or rises[-1] + added > math.log1p(budget):
                refused.append(head)
            else:
                frozen.enter_context(trial(HeadSet([head])))
                layers.forget(head[0])
                accepted.append(head)
                rises.append(rises[-1] + added)
                show(min(len(alone) + len(accepted), steps - 1), steps)
    show(steps, steps)
    return JointCost(tuple(accepted), tuple(rises[1:]), tuple(refused), alone)


def within_budget(
    joint: JointCost, model: nn.Module, text: Iterable[Batch], before: float, *, budget: float, trial: Trial
) -> JointCost:
    """Return the joint cost of the first accepted heads, as many as keep the budget on other text, too.

    The loss there was `before`. Few tokens choose heads that fit them alone: on SmolLM2-135M 14 heads chosen by 4,096
    tokens lower perplexity there by 0.3% and raise it by 3.4% elsewhere.
    """

    def exceeds(count: int) -> bool:
        with trial(HeadSet(joint.accepted[:count])):
            return not perplexity_rise(before, heldout_loss(model, text)) <= budget  # true for a loss that is NaN

    if not exceeds(len(joint.accepted)):
        return joint
    few, many = 0, len(joint.accepted)  # bisect: `few` heads keep the budget, `many` exceed it
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if exceeds(middle) else (middle, many)
    return joint.first(few)


class CachedLayers:
    """Compute losses of one text from the lowest changed layer on: outputs of the layers below are in a cache.

    It takes at most a quarter of the free memory; where a batch's outputs have no room, more of its layers run.
    """

    def __init__(self, model: nn.Module):
        adapter = adapter_for(model)
        owners = {child: module for module in adapter.model.modules() for child in module.children()}
        self.model, self.layers = model, [owners[site.attention] for site in adapter.sites()]
        self._room = (free_bytes(adapter.device) or 0) // 4
        self._outputs: defaultdict[int, dict[int, Any]] = defaultdict(dict)  # by batch and layer
        self._batch = 0  # of the current pass: `_run` counts at layer 0

    def loss(self, text: Sequence[Batch], *, changed: int | None = None) -> float:
        """Return the held-out loss of a model in which only layers from `changed` on differ from the cached ones."""
        changed = len(self.layers) if changed is None else changed
        own, self._batch = [vars(layer).get("forward") for layer in self.layers], -1
        for number, layer in enumerate(self.layers):
            layer.forward = partial(self._run, number, changed, layer.forward)
        try:
            return heldout_loss(self.model, text)
        finally:
            for layer, forward in zip(self.layers, own, strict=True):
                del layer.forward
                if forward is not None:  # one that accelerate put there
                    layer.forward = forward

    def forget(self, layer: int) -> None:
        """Drop the outputs that a lasting edit of this layer changes."""
        for outputs in self._outputs.values():
            self._room += sum(_bytes(outputs.pop(number)) for number in [*outputs] if number >= layer)

    def _run(self, number: int, changed: int, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        """Return the output of a layer; up to the last cached one below `changed`, that one's output without work."""
        self._batch += number == 0
        outputs = self._outputs[self._batch]
        last = max((layer for layer in outputs if layer < changed), default=-1)
        if number <= last:
            return outputs[last]
        output = forward(*inputs, **options)
        if number < changed and (size := _bytes(output)) <= self._room:
            outputs[number] = output
            self._room -= size
        return output


def _bytes(output: Any) -> int:
    return sum(each.nbytes for each in tree_leaves(output) if isinstance(each, Tensor))
