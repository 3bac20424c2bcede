"""The loss guard measures held-out loss around an event, and finds the layer to blame where it rises too far."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from saf.calibration import Batch, read_sequences
from saf.calibration.capture import check_vocabulary, evaluation_mode
from saf.errors import InputError
from saf.heads import HeadSet
from saf.models.adapter import LanguageModel, adapter_for

MAX_RISE = 0.05
"""Largest rise of held-out perplexity that an event may cause where no training follows, as a share."""
GUARD_SEQUENCES = 8
"""Sequences that the loss is measured on by default."""
_BLAME_SEQUENCES = 4
"""Sequences that the layer to blame is found on: one pass over them for every layer that lost heads."""
_MOST_LOGITS = 2**28
"""Logits that a forward pass on a GPU may make: 1 GiB in float32."""


def heldout_loss(model: nn.Module, batches: Iterable[Batch]) -> float:
    """Return the mean loss of every next token of `batches`, nats; the model runs in evaluation mode."""
    adapter, sequences, total, count = adapter_for(model), read_sequences(batches), 0.0, 0
    check_vocabulary(adapter, sequences.ids)
    single = [ids[None] for batch in sequences.without_padding() for ids in batch if len(ids) > 1]
    with torch.no_grad(), evaluation_mode(model):
        for ids in rows_at_once(adapter, single):
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
    model: nn.Module,
    heads: HeadSet,
    batches: Iterable[Batch],
    edit_: Callable[[HeadSet], None],
    undo_: Callable[[HeadSet], None],
) -> tuple[int, float]:
    """Return the layer whose heads, edited alone, cost most, and the rise of perplexity; NaN costs more than any.

    It is measured on the first sequences of `batches`.
    """
    rows = [ids[None] for batch in read_sequences(batches).without_padding() for ids in batch if len(ids) > 1]
    few = rows[:_BLAME_SEQUENCES]
    before, losses = heldout_loss(model, few), dict[int, float]()
    for layer in sorted({layer for layer, _ in heads}):
        own = HeadSet((layer, head) for head in heads.in_layer(layer))
        edit_(own)
        try:
            losses[layer] = heldout_loss(model, few)
        finally:
            undo_(own)
    layer, loss = max(losses.items(), key=lambda item: (math.isnan(item[1]), item[1]))
    return layer, perplexity_rise(before, loss)
