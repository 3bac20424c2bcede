"""How likely continuations are behind their contexts, in batches of one exact length: no token of padding enters.

Patterns of frozen heads count positions from a sequence's first token; sequences of one length need no mask and no
offset (paper, Appendix on pretrained models).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from saf.adapters import language_model, longest_input
from saf.calibration.capture import evaluation_mode
from saf.errors import DivergenceError, InputError
from saf.machine.execution import autocast
from saf.machine.processes import group_place, shared_out

Tokens = tuple[int, ...]


class Continuation(NamedTuple):
    """Ask how likely some tokens are behind others."""

    context: Tokens
    tokens: Tokens

    @property
    def inputs(self) -> Tokens:
        """Return what the model is given: all but the last token, which is only a target."""
        return (*self.context, *self.tokens)[:-1]


class Likelihood(NamedTuple):
    """Hold how likely a continuation is."""

    log_prob: float
    """Nats, summed over its tokens."""
    greedy: bool
    """Whether each of its tokens is the most likely one behind those before it."""


def likelihoods(
    model: nn.Module,
    asked: Sequence[Continuation],
    *,
    batch_size: int = 8,
    precision: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> list[Likelihood]:
    """Return how likely each continuation is, in the order asked.

    Sequences that share a forward pass have the same number of tokens, and equal ones are computed once: choices that
    differ in their last token alone. Logits are computed at the continuations' positions, their softmax in float32.
    Processes of a group share the batches out, and all return the same.

    Args:
        model: Any causal language model that can be evaluated; left in the mode that it had.
        asked: Contexts of a token or more, with what follows them.
        batch_size: Most sequences in a forward pass.
        precision: "fp32", "bf16" or "auto".
        progress: Called with (continuations done, continuations) before the first batch, and after each.

    Raises:
        InputError: An empty context or continuation, or one longer than the model takes.
        DivergenceError: A log-probability that is not finite.
    """
    longest = longest_input(model)
    for one in asked:
        if not one.context or not one.tokens:
            raise InputError(f"a context and its continuation have a token or more; got {one}")
        if longest is not None and len(one.inputs) > longest:
            raise InputError(f"{len(one.inputs)} tokens are given, the model takes {longest}; shorten the context")
    language, done = language_model(model), 0

    def found(batch: tuple[list[Tokens], list[list[int]]]) -> dict[int, Likelihood]:
        """Return how likely the continuations of a batch are, by their places, and tell how many all have done."""
        nonlocal done
        rows, places = batch
        width = max(len(asked[place].tokens) for row in places for place in row)
        inputs = torch.tensor(rows, device=language.device)
        logits = language.last_logits(language.model, inputs, width)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        likely = {place: _likelihood(wide[row], asked[place]) for row, its in enumerate(places) for place in its}
        done += group_place()[1] * len(likely)
        if progress is not None:
            progress(min(done, len(asked)), len(asked))
        return likely

    if progress is not None:
        progress(0, len(asked))
    with evaluation_mode(model), torch.no_grad(), autocast(language.device, precision):
        told = shared_out(found, list(_batches(asked, batch_size)))
    by_place = {place: likelihood for batch in told for place, likelihood in batch.items()}
    return [by_place[place] for place in range(len(asked))]


def _batches(asked: Sequence[Continuation], batch_size: int) -> Iterator[tuple[list[Tokens], list[list[int]]]]:
    """Yield inputs of one length, the longest first, and the places in `asked` that each of them answers."""
    by_length: dict[int, dict[Tokens, list[int]]] = {}
    for place, one in enumerate(asked):
        by_length.setdefault(len(one.inputs), {}).setdefault(one.inputs, []).append(place)
    for length in sorted(by_length, reverse=True):
        rows = list(by_length[length].items())
        for first in range(0, len(rows), batch_size):
            some = rows[first : first + batch_size]
            yield [inputs for inputs, _ in some], [places for _, places in some]


def _likelihood(logits: Tensor, asked: Continuation) -> Likelihood:
    """Return how likely a continuation is by logits `[W, V]` at the last positions of its inputs, at least its own."""
    own = logits[-len(asked.tokens) :]
    tokens = torch.tensor(asked.tokens, device=logits.device)
    log_probs = own.log_softmax(-1).gather(1, tokens[:, None])
    total = float(log_probs.double().sum())
    if not torch.isfinite(log_probs).all():
        raise DivergenceError(f"a continuation of {len(tokens)} tokens has the log-probability {total}, not finite")
    return Likelihood(total, bool((own.argmax(-1) == tokens).all()))
