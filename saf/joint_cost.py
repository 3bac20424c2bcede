"""Acceptance by joint cost: heads are frozen in the order in which they cost least given those accepted before.

Heads that are harmless alone may be fatal together: on SmolLM2-135M the 14 heads of lowest variance cost 0.004 nats
each, and 1.7 nats together.
"""

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from saf.calibration import Batch, read_sequences
from saf.calibration.capture import evaluation_mode
from saf.errors import InputError
from saf.heads import Head, HeadSet
from saf.loss_guard import rows_at_once
from saf.models.adapter import language_model

MAX_REFUSED = 8
"""Heads beyond the budget before the search ends: the heads that follow cost more."""
_LARGEST = 1e300  # a loss that is not finite is beyond every budget
_TOP = 256
"""Tokens of the unfrozen model's distribution that are kept at each position; the others count as one."""


class Cost(NamedTuple):
    """What edited heads cost on a text, nats a token."""

    kl: float
    """KL from the model as it was to the edited one: with as much text it chooses better heads than the loss does."""
    rise: float
    """Rise of the loss of next tokens, which a budget bounds."""


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


def accept_jointly(
    model: nn.Module,
    candidates: Iterable[Head],
    text: Iterable[Batch],
    max_heads: int,
    *,
    budget: float = math.inf,
    edit_: Callable[[HeadSet], None],
    undo_: Callable[[HeadSet], None],
) -> JointCost:
    """Choose at most `max_heads` candidates, each the cheapest given those before it; the model ends as it was.

    Their joint loss on `text` rises by at most log(1 + budget) nats. Costs are measured anew lazily: a candidate whose
    cost is of an earlier step waits by it, and is measured again when it comes first.
    """
    meter = CostMeter(model, text)
    accepted: list[Head] = []
    rises: list[float] = []
    refused: list[Head] = []
    base = 0.0  # KL with the accepted heads

    def measure_with(head: Head) -> Cost:
        edit_(HeadSet([head]))
        try:
            return meter.cost()
        finally:
            undo_(HeadSet([head]))

    alone = {head: measure_with(head) for head in candidates}
    queue = [(cost.kl, head, cost, 0) for head, cost in alone.items()]
    heapq.heapify(queue)
    try:
        while queue and len(accepted) < max_heads and len(refused) < MAX_REFUSED:
            _, head, cost, step = heapq.heappop(queue)
            if step < len(accepted):
                cost = measure_with(head)
                heapq.heappush(queue, (cost.kl - base, head, cost, len(accepted)))
            elif cost.rise <= min(math.log1p(budget), _LARGEST):
                edit_(HeadSet([head]))
                accepted.append(head)
                rises.append(cost.rise)
                base = cost.kl
            else:
                refused.append(head)
    finally:
        if accepted:
            undo_(HeadSet(accepted))
    return JointCost(tuple(accepted), tuple(rises), tuple(refused), {head: cost.rise for head, cost in alone.items()})


class CostMeter:
    """Measures what a model's edits cost on a text, from the model as it is when the meter is made."""

    def __init__(self, model: nn.Module, text: Iterable[Batch]):
        self._model, self._language = model, language_model(model)
        sequences = [ids[None] for batch in read_sequences(text).without_padding() for ids in batch]
        self._batches = list(rows_at_once(self._language, sequences))
        with torch.no_grad(), evaluation_mode(model):
            self._before = [self._reference(ids) for ids in self._batches]

    def _log_probs(self, ids: Tensor) -> Tensor:
        """Return log-probabilities behind all tokens but the last, `[B, T - 1, V]` float32."""
        logits = self._language.last_logits(self._language.model, ids[:, :-1], ids.shape[1] - 1)
        return logits.float().log_softmax(-1)

    def _reference(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the most likely tokens at each position, their log-probabilities, and those of the text's tokens."""
        log_probs = self._log_probs(ids)
        kept, tokens = log_probs.topk(min(_TOP, log_probs.shape[-1]), -1)
        return tokens, kept, log_probs.gather(-1, ids[:, 1:, None])

    def cost(self) -> Cost:
        """Return the cost of the model as it is now; infinite where its loss is not finite."""
        kl, rise, count = 0.0, 0.0, 0
        with torch.no_grad(), evaluation_mode(self._model):
            for ids, (tokens, before, own) in zip(self._batches, self._before, strict=True):
                log_probs = self._log_probs(ids)
                now, share = log_probs.gather(-1, tokens), before.exp()
                rest, rest_now = (_rest(each) for each in (before, now))
                kl += float((share * (before - now)).sum() + (rest * (rest / rest_now).log()).sum())
                rise += float((own - log_probs.gather(-1, ids[:, 1:, None])).sum())
                count += own.numel()
        return Cost(kl / count, rise / count) if math.isfinite(kl + rise) else Cost(math.inf, math.inf)


def _rest(log_probs: Tensor) -> Tensor:
    """Return the probability of the tokens that are not among `[..., K]`, with a floor of rounding errors."""
    return (1 - log_probs.exp().sum(-1)).clamp_min(1e-7)


def halves(text: Iterable[Batch]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the first and the second half of the sequences, `[1, T]` each: to choose heads by, and to report on."""
    sequences = [ids[None] for batch in read_sequences(text).without_padding() for ids in batch]
    if len(sequences) < 2:
        raise InputError("heldout must have 2 sequences to choose heads on one half and report on the other, got 1")
    half = len(sequences) // 2
    return sequences[:half], sequences[half:]
