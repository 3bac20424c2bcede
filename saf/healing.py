"""`heal_and_compare` trains a frozen model for a while, so that its other weights follow, and the ordinary one alike.

Their held-out losses afterwards show what the frozen heads cost a model that has adapted to them.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from saf.calibration import Batch
from saf.errors import InputError, LossError
from saf.heldout import MAX_RISE, heldout_loss, perplexity_rise, rows_at_once
from saf.machine import Precision, autocast
from saf.models.adapter import language_model

LEARNING_RATE = 2e-4
UPDATE_TOKENS = 16_384


@dataclass(frozen=True, kw_only=True)
class Healing:
    """Losses on held-out text, nats a token, of a frozen model and the ordinary one before and after training."""

    tokens: int
    """Tokens that each was trained on."""
    loss_ordinary: float
    loss_frozen: float
    loss_healed: float
    loss_twin: float
    """Loss of the ordinary model trained alike: training on new text changes both."""


def heal_and_compare(
    frozen: nn.Module,
    ordinary: nn.Module,
    windows: Tensor,
    heldout: Iterable[Batch],
    *,
    accept_loss: bool = False,
    precision: Precision = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> Healing:
    """Train both models alike on windows `[N, T + 1]`, and measure them on held-out text before and after.

    `progress` is called with (updates done, updates), of both models. Raises LossError where the healed model stays too
    far above the ordinary one, unless `accept_loss`.
    """
    heldout = list(heldout)

    def losses() -> list[float]:
        return [heldout_loss(model, heldout) for model in (frozen, ordinary)]

    def heal(model: nn.Module, number: int) -> None:
        def show(done: int, updates: int) -> None:
            if progress is not None:
                progress(number * updates + done, 2 * updates)

        heal_(model, windows, precision=precision, progress=show)

    with autocast(language_model(frozen).device, precision):
        loss_frozen, loss_ordinary = losses()
        heal(frozen, 0)
        heal(ordinary, 1)
        loss_healed, loss_twin = losses()
    rise = perplexity_rise(loss_twin, loss_healed)
    if not (accept_loss or rise <= MAX_RISE):  # a rise that is NaN is never within the limit
        raise LossError(
            f"perplexity healed must be within {MAX_RISE:.0%} of the ordinary model trained alike, got {rise:.1%}: "
            "freeze fewer heads, heal longer, or pass --accept-loss"
        )
    return Healing(
        tokens=windows[:, 1:].numel(),
        loss_ordinary=loss_ordinary,
        loss_frozen=loss_frozen,
        loss_healed=loss_healed,
        loss_twin=loss_twin,
    )


def heal_(
    model: nn.Module,
    windows: Tensor,
    *,
    precision: Precision = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Train a model's weights on windows `[N, T + 1]` of token ids, once through in order, by AdamW.

    The learning rate rises over a tenth of the updates and falls by a cosine to a tenth. `progress` is called with
    (updates done, updates). Raises InputError for weights of 16 bits, which round small steps away.
    """
    language, parameters = language_model(model), [each for each in model.parameters() if each.requires_grad]
    if narrow := {each.dtype for each in parameters} - {torch.float32, torch.float64}:
        raise InputError(f"weights must be float32 to be trained, got {narrow.pop()}: open the model in float32")
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    batches = windows.split(max(1, UPDATE_TOKENS // (windows.shape[1] - 1)))
    was_training = model.training
    model.train()
    for update, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * _share_of_rate(update, len(batches))
        for ids in rows_at_once(language, batch.split(1)):
            with autocast(language.device, precision):
                loss = language.next_token_loss(ids[:, :-1], ids[:, 1:])
            (loss * len(ids) / len(batch)).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.clear_autocast_cache()  # an enclosing autocast would keep copies of the old weights
        if progress is not None:
            progress(update + 1, len(batches))
    model.train(was_training)


def _share_of_rate(update: int, updates: int) -> float:
    """Return the share of the learning rate at an update: a tenth of warm-up, then a cosine to a tenth."""
    warmup = max(1, updates // 10)
    if update < warmup:
        return (update + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (update - warmup) / max(1, updates - 1 - warmup)))
