"""How likely continuations are behind their contexts, in batches of one exact length: no token of padding enters.

Patterns of frozen heads count positions from a sequence's first token; sequences of one length need no mask and no
offset (paper, Appendix on pretrained models).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from saf.errors import DivergenceError, InputError
from saf.evaluate.passes import Progress, run_batches
from saf.models.adapter import language_model, longest_input

Tokens = tuple[int, ...]


class Continuation(NamedTuple):
    """Tokens whose log-probability is to be computed, and the tokens before them."""

    context: Tokens
    tokens: Tokens

    @property
    def inputs(self) -> Tokens:
        """The model's inputs: all but the last token, which is only a target."""
        return (*self.context, *self.tokens)[:-1]


class Likelihood(NamedTuple):
    """How likely a continuation is."""

    log_prob: float
    """Nats, summed over its tokens."""
    greedy: bool
    """Whether each of its tokens is the most likely one behind those before it."""


def likelihoods(
    model: nn.Module,
    continuations: Sequence[Continuation],
    *,
    batch_size: int = 8,
    precision: str = "auto",
    progress: Progress | None = None,
) -> list[Likelihood]:
    """Compute how likely each continuation is, in order.

    Sequences that share a forward pass have the same number of tokens, and equal ones are computed once: choices that
    differ in their last token alone. Logits are computed at the continuations' positions, their softmax in float32.
    Processes of a group share the batches out, and all return the same. `progress` is called with (continuations done,
    continuations) before the first batch, and after each.

    Raises:
        InputError: An empty context or continuation, or one longer than the model takes.
        DivergenceError: A log-probability that is not finite.
    """
    longest = longest_input(model)
    for each in continuations:
        if not each.context or not each.tokens:
            raise InputError(f"context and continuation must have a token or more, got {each}")
        if longest is not None and len(each.inputs) > longest:
            raise InputError(f"inputs must be at most {longest} tokens, got {len(each.inputs)}; shorten the context")
    language = language_model(model)

    def measure(batch: tuple[list[Tokens], list[list[int]]]) -> dict[int, Likelihood]:
        """Likelihoods of the continuations of a batch, by their numbers."""
        rows, members = batch
        width = max(len(continuations[number].tokens) for row in members for number in row)
        logits = language.last_logits(language.model, torch.tensor(rows, device=language.device), width)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return {
            number: _likelihood(wide[row], continuations[number].tokens)
            for row, numbers in enumerate(members)
            for number in numbers
        }

    if progress is not None:
        progress(0, len(continuations))
    batches = list(_batches(continuations, batch_size))
    sizes = [sum(map(len, members)) for _, members in batches]
    results = run_batches(model, measure, batches, precision=precision, sizes=sizes, progress=progress)
    by_number = {number: likelihood for batch in results for number, likelihood in batch.items()}
    return [by_number[number] for number in range(len(continuations))]


def _batches(continuations: Sequence[Continuation], batch_size: int) -> Iterator[tuple[list[Tokens], list[list[int]]]]:
    by_length: dict[int, dict[Tokens, list[int]]] = {}
    for number, each in enumerate(continuations):
        by_length.setdefault(len(each.inputs), {}).setdefault(each.inputs, []).append(number)
    for length in sorted(by_length, reverse=True):
        rows = list(by_length[length].items())
        for first in range(0, len(rows), batch_size):
            some = rows[first : first + batch_size]
            yield [inputs for inputs, _ in some], [numbers for _, numbers in some]


def _likelihood(logits: Tensor, tokens: Tokens) -> Likelihood:
    """The likelihood of tokens by logits `[W, V]` at the last positions of their inputs, at least their own."""
    own, ids = logits[-len(tokens) :], torch.tensor(tokens, device=logits.device)
    log_probs = own.log_softmax(-1).gather(1, ids[:, None])
    total = float(log_probs.double().sum())
    if not torch.isfinite(log_probs).all():
        raise DivergenceError(f"a continuation of {len(tokens)} tokens has the log-probability {total}, not finite")
    return Likelihood(total, bool((own.argmax(-1) == ids).all()))
