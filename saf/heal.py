"""`heal_` trains a model for a while after heads were frozen or pruned, so that the others make up for them.

The cost of the heads is then told against the ordinary model trained alike: training on new text changes both.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from saf.errors import InputError
from saf.loss_guard import rows_at_once
from saf.machine import Precision, autocast
from saf.models.adapter import language_model

CLIP = 1.0
"""Largest norm of the gradient."""


@dataclass(frozen=True, kw_only=True)
class Healing:
    """Losses on the held-out text, nats a token, of a frozen model and the ordinary one before and after training."""

    tokens: int
    """Tokens that both were trained on."""
    loss_ordinary: float
    loss_frozen: float
    loss_healed: float
    loss_twin: float
    """Loss of the ordinary model trained alike."""

    @property
    def cost(self) -> float:
        """Return by which share the healed model's perplexity exceeds the twin's."""
        return math.expm1(self.loss_healed - self.loss_twin)


def heal_(
    model: nn.Module,
    windows: Tensor,
    *,
    learning_rate: float = 1e-4,
    update_tokens: int = 16_384,
    precision: Precision = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Train a model's weights on windows `[N, T + 1]` of token ids, once through in order, by AdamW.

    Weights of 16 bits are trained in float32 and rounded in the end. The learning rate rises over a tenth of the
    updates and falls by a cosine to a tenth. `progress` is called with (updates done, updates).
    """
    language, parameters = language_model(model), [each for each in model.parameters() if each.requires_grad]
    dtypes = [each.dtype for each in parameters]
    for each in parameters:
        each.data = each.data.float()
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    batches = windows.split(max(1, update_tokens // (windows.shape[1] - 1)))
    was_training = model.training
    model.train()
    for update, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * share_of_rate(update, len(batches))
        rows = [row[None] for row in batch]
        for ids in rows_at_once(language, rows):
            with autocast(language.device, precision):
                loss = language.next_token_loss(ids[:, :-1], ids[:, 1:])
            (loss * len(ids) / len(batch)).backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if progress is not None:
            progress(update + 1, len(batches))
    model.train(was_training)
    for each, dtype in zip(parameters, dtypes, strict=True):
        each.data, each.grad = each.data.to(dtype), None


def share_of_rate(update: int, updates: int) -> float:
    """Return the share of the learning rate at an update: a tenth of warm-up, then a cosine to a tenth.

    >>> [round(share_of_rate(update, 20), 2) for update in (0, 1, 2, 19)]
    [0.5, 1.0, 1.0, 0.1]
    """
    warmup = max(1, updates // 10)
    if update < warmup:
        return (update + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (update - warmup) / max(1, updates - 1 - warmup)))


def check_healing(tokens: int, length: int) -> None:
    """Raise InputError for fewer tokens than one window."""
    if tokens < length:
        raise InputError(f"heal must be at least one window of {length:,} tokens, got {tokens:,}")
