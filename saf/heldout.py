"""What heads cost on held-out text: the loss, the costliest layer, and the heads that cost least together.

Heads that are harmless alone may be fatal together: on SmolLM2-135M the 14 heads of lowest variance cost 0.004 nats
each, and 1.7 nats together. So `choose_jointly` takes heads one after another, each time the one that adds least to the
loss with those before it, and requires the same budget on other text.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from saf.calibration import Batch, read_sequences
from saf.errors import InputError, SelectionError
from saf.heads import Head, HeadSet
from saf.machine import free_bytes
from saf.models.adapter import Adapter, adapter_for, evaluation_mode

Trial = Callable[[HeadSet], AbstractContextManager[None]]
"""Returns a context in which these heads of a model are frozen or pruned; they are live again afterwards."""
MAX_RISE = 0.05
"""Largest rise of held-out perplexity that an event may cause where no training follows, as a share."""
GUARD_SEQUENCES = 8
"""Sequences that the loss is measured on by default."""
_MAX_REFUSED = 8
"""Heads beyond the budget before a search by joint cost ends: the heads that follow cost more."""
_LAYER_SEQUENCES = 4
"""Sequences that show the costliest layer: one pass over them for every layer that lost heads."""
_SHARE_OF_MEMORY = 1 / 16
"""Largest share of a GPU's memory for the logits of a pass, in float32; training needs some four times as much."""


# --- the loss


def heldout_loss(model: nn.Module, batches: Iterable[Batch]) -> float:
    """Return the mean loss of every next token of `batches`, nats; the model runs in evaluation mode."""
    return _mean(*_losses(model, batches))


def _losses(model: nn.Module, batches: Iterable[Batch], *, singly: bool = False) -> tuple[list[float], list[int]]:
    """Return the mean loss of each forward pass, of as many sequences as fit or of one, and its predicted tokens."""
    adapter, sequences = adapter_for(model), read_sequences(batches)
    adapter.check_tokens(sequences.ids)
    if not (rows := [row[None] for row in sequences.tokens if len(row) > 1]):
        raise InputError("heldout must have sequences of two tokens or more, got none")
    means, tokens = list[float](), list[int]()
    with torch.no_grad(), evaluation_mode(model):
        for ids in (row.to(adapter.device) for row in rows) if singly else rows_at_once(adapter, rows):
            means.append(float(adapter.next_token_loss(ids[:, :-1], ids[:, 1:])))
            tokens.append(ids[:, 1:].numel())
    return means, tokens


def _mean(means: Sequence[float], tokens: Sequence[int]) -> float:
    return sum(mean * count for mean, count in zip(means, tokens, strict=True)) / sum(tokens)


def rows_at_once(language: Adapter, sequences: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield sequences `[1, T]` on the model's device, on a GPU as many of one length as their logits allow."""
    device, logits = language.device, 0
    if device.type == "cuda":
        # Of all memory while a quarter of it is free: losses that are compared need passes of one shape. Less while a
        # training run holds the rest: an event in it must not run out of memory.
        memory = min(torch.cuda.get_device_properties(device).total_memory, 4 * (free_bytes(device) or 0))
        logits = int(_SHARE_OF_MEMORY * memory) // 4
    # A small vocabulary counts as 32,768 tokens: activations take memory too.
    vocabulary = max(language.vocab_size or 0, 2**15)
    for length, rows in groupby(sequences, key=lambda row: row.shape[1]):
        most = max(1, logits // (length * vocabulary))
        for part in torch.cat([*rows]).split(most):
            yield part.to(device)


def perplexity_rise(before: float, after: float) -> float:
    """Return by which share perplexity rises between two losses, nats; `inf` where it overflows.

    >>> round(perplexity_rise(3.0, 3.1), 4)
    0.1052
    """
    try:
        return math.expm1(after - before)
    except OverflowError:
        return math.inf


@dataclass(frozen=True, kw_only=True)
class LossChange:
    """The mean loss of one text, nats a token, before and after an event."""

    before: float
    after: float
    tokens: int
    """Number of predicted tokens."""
    sequences: int
    error: float | None
    """Standard error of the difference, paired by sequence; None for one sequence."""

    @classmethod
    def measure(cls, model: nn.Module, text: Iterable[Batch], trial: AbstractContextManager[None]) -> "LossChange":
        """Measure a model as it is, and within `trial`."""
        earlier, sizes = _losses(model, text, singly=True)
        with trial:
            later, _ = _losses(model, text, singly=True)
        before, after, tokens, count = _mean(earlier, sizes), _mean(later, sizes), sum(sizes), len(sizes)
        # Of the difference, paired by sequence: how hard a sequence is cancels.
        rises = [two - one - (after - before) for one, two in zip(earlier, later, strict=True)]
        squares = sum((size / tokens * rise) ** 2 for size, rise in zip(sizes, rises, strict=True))
        error = math.sqrt(squares * count / (count - 1)) if count > 1 else None
        return cls(before=before, after=after, tokens=tokens, sequences=count, error=error)

    @property
    def rise(self) -> float:
        """The share by which perplexity rises."""
        return perplexity_rise(self.before, self.after)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval of `rise` over texts like this one, by Student's t; None for one sequence."""
        if self.error is None or not math.isfinite(self.error):
            return None
        from scipy.stats import t  # takes half a second to import

        reach = float(t.ppf(0.975, self.sequences - 1)) * self.error
        return perplexity_rise(self.before, self.after - reach), perplexity_rise(self.before, self.after + reach)


def worst_layer(model: nn.Module, heads: HeadSet, text: Iterable[Batch], trial: Trial) -> tuple[int, float]:
    """Return the layer whose heads cost most together, the others live, and by which share perplexity rises."""
    few = [row[None] for row in read_sequences(text).tokens if len(row) > 1][:_LAYER_SEQUENCES]
    losses, layers = dict[int, float](), CachedLayers(model)
    before = layers.loss(few)
    for layer in sorted({layer for layer, _ in heads}):
        with trial(HeadSet((layer, head) for head in heads.in_layer(layer))):
            losses[layer] = layers.loss(few, changed=layer)
    layer, loss = max(losses.items(), key=lambda item: (math.isnan(item[1]), item[1]))  # NaN costs more than any
    return layer, perplexity_rise(before, loss)


# --- joint cost: heads are chosen on the first half of the text, and must keep the budget on the second half, too


def halves(text: Iterable[Batch]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the first and the second half of the sequences, `[1, T]` each: to choose heads by, and to report on."""
    sequences = [row[None] for row in read_sequences(text).tokens]
    if len(sequences) < 2:
        raise InputError("heldout must have 2 sequences to choose heads on one half and report on the other, got 1")
    half = len(sequences) // 2
    return sequences[:half], sequences[half:]


@dataclass(frozen=True)
class JointCost:
    """The heads that were accepted together, in order, and their cost on the text that chose them, in nats."""

    accepted: tuple[Head, ...]
    rises: tuple[float, ...]
    """Rise of the loss with the accepted heads up to each one."""
    refused: tuple[Head, ...]
    """Heads that would have exceeded the budget, on either half of the text."""
    alone: dict[Head, float]
    """Rise of the loss with this head alone, of every candidate."""

    @property
    def rise(self) -> float:
        """Rise of the loss with all accepted heads."""
        return self.rises[-1] if self.rises else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self) | {"alone": [[*head, cost] for head, cost in self.alone.items()], "rise": self.rise}


def choose_jointly(
    model: nn.Module,
    candidates: Iterable[Head],
    texts: tuple[Iterable[Batch], Iterable[Batch]],
    max_heads: int,
    *,
    trial: Trial,
    budget: float | None,
    allow_empty: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> JointCost:
    """Accept candidates one after another, each the one that adds least to the loss of those before it.

    Perplexity rises by at most `budget`, a share, on both texts: on the first, which orders the heads, and on the
    second, which only shortens the list. `progress` is called with (heads measured alone and accepted, the most that
    this can be). The model ends as it was. Raises SelectionError where no head is left, unless `allow_empty`.
    """
    limit = math.inf if budget is None else budget
    show = progress or (lambda done, total: None)
    joint = _accept(model, list(candidates), list(texts[0]), max_heads, trial=trial, budget=limit, show=show)
    if budget is not None:
        # Few tokens choose heads that fit them alone: on SmolLM2-135M 14 heads chosen by 2,048 tokens lower perplexity
        # there by 0.3%, and raise it by 3.4% on the other half of the text.
        count = _count_within(model, joint.accepted, texts[1], trial=trial, budget=budget)
        refused = joint.refused + joint.accepted[count:]
        joint = replace(joint, accepted=joint.accepted[:count], rises=joint.rises[:count], refused=refused)
    if not joint.accepted and not allow_empty:
        least = perplexity_rise(0.0, min(joint.alone.values()))
        raise SelectionError(
            f"at least 1 of {len(joint.alone)} heads must keep perplexity within {100 * limit:+.3g}%, and the cheapest "
            f"costs {100 * least:+.3g}% alone on the text that chooses: raise budget (--budget)"
        )
    return joint


def _accept(
    model: nn.Module,
    candidates: list[Head],
    text: list[Batch],
    max_heads: int,
    *,
    trial: Trial,
    budget: float,
    show: Callable[[int, int], None],
) -> JointCost:
    """Accept at most `max_heads` candidates, each the one that adds least to the loss of those before it."""
    layers, steps = CachedLayers(model), len(candidates) + max_heads
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
        while queue and len(accepted) < max_heads and len(refused) < _MAX_REFUSED:
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


def _count_within(
    model: nn.Module, heads: Sequence[Head], text: Iterable[Batch], *, trial: Trial, budget: float
) -> int:
    """Return how many heads, from the first on, keep the budget on a text: all, or the number by bisection."""
    before, count = heldout_loss(model, text), len(heads)
    few, many = 0, count + 1  # `few` heads keep the budget, `many` exceed it or are more than all
    while many - few > 1:
        with trial(HeadSet(heads[:count])):
            within = perplexity_rise(before, heldout_loss(model, text)) <= budget  # false for a loss that is NaN
        few, many = (count, many) if within else (few, count)
        count = (few + many) // 2
    return few


class CachedLayers:
    """Compute losses of one text from the lowest changed layer on; a cache holds the outputs of the layers below.

    It takes at most a quarter of the free memory. Where the outputs of a batch have no room, more of its layers run.
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
        # Not by hooks: a hook may replace an output, but cannot keep the layer from running.
        before, self._batch = [vars(layer).get("forward") for layer in self.layers], -1
        for number, layer in enumerate(self.layers):
            layer.forward = partial(self._run, number, changed, layer.forward)
        try:
            return heldout_loss(self.model, text)
        finally:
            for layer, forward in zip(self.layers, before, strict=True):
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
