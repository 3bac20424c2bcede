"""A model whose heads are frozen, pruned and undone many times over, against one made afresh in each state."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from saf.bench.harness.synthetic import synthetic_patterns
from saf.heads import Head, HeadSet
from saf.models import GPT, GPTConfig
from saf.patterns import CompactPattern
from saf.surgery import install_, prune_, uninstall_

VOCABULARY = 64
LAYERS = 2
MOST = 3
"""Heads that one operation changes at most."""


@dataclass(frozen=True)
class State:
    """Hold the output of a model after some operations, `[B, T, vocabulary]`, and the exact one of its state."""

    found: Tensor
    exact: Tensor


def states(
    operations: int,
    *,
    num_heads: int,
    head_dim: int,
    length: int,
    stored: int,
    batch_size: int,
    backend: str,
    seed: int,
    device: torch.device,
) -> Iterator[State]:
    """Yield the logits of a float32 model before any operation and after each of `operations`.

    An operation freezes, prunes or undoes one to three heads, drawn from `seed`. The exact logits are those of the same
    weights in float64, of which the same heads are frozen on the reference backend, or pruned, for the first time.
    """
    drawn = torch.Generator().manual_seed(seed)
    config = GPTConfig(
        vocab_size=VOCABULARY,
        num_layers=LAYERS,
        num_heads=num_heads,
        hidden_size=num_heads * head_dim,
        max_length=stored,
    )
    model = GPT(config).eval()
    model.reset_parameters(drawn)
    weights = {name: value.double() for name, value in model.state_dict().items()}
    model.to(device)
    every = [(layer, head) for layer in range(LAYERS) for head in range(num_heads)]
    patterns = synthetic_patterns(len(every), stored, drawn)
    tokens = torch.randint(VOCABULARY, (batch_size, length), generator=drawn)
    kinds = dict.fromkeys(every, "live")

    def state() -> State:
        """Return what the model computes now, beside what it should."""
        exact = GPT(config).double().eval()
        exact.load_state_dict(weights)
        _edit(exact, kinds, patterns, every, "reference")
        with torch.no_grad():
            return State(model(tokens.to(device)).double().cpu(), exact(tokens))

    yield state()
    for _ in range(operations):
        change = _draw(kinds, drawn)
        heads = list(change)
        if change[heads[0]] == "live":
            uninstall_(model, heads)
        else:
            _edit(model, change, patterns, every, backend)
        kinds |= change
        yield state()


def _draw(kinds: dict[Head, str], drawn: torch.Generator) -> dict[Head, str]:
    """Return some heads with what they become: live ones frozen or pruned, or others live again."""
    live = [head for head, kind in kinds.items() if kind == "live"]
    edited = [head for head, kind in kinds.items() if kind != "live"]
    number, choice = (int(torch.randint(n, (), generator=drawn)) for n in (MOST, 3))
    undo = bool(edited) and (not live or choice == 0)
    pool = edited if undo else live
    picked = [pool[place] for place in torch.randperm(len(pool), generator=drawn)[: number + 1]]
    return dict.fromkeys(picked, "live" if undo else ("frozen", "pruned")[choice == 1])


def _edit(model: nn.Module, kinds: dict[Head, str], patterns: CompactPattern, every: list[Head], backend: str) -> None:
    """Freeze and prune the heads that `kinds` says are so."""
    frozen = HeadSet(head for head, kind in kinds.items() if kind == "frozen")
    pruned = HeadSet(head for head, kind in kinds.items() if kind == "pruned")
    if len(frozen):
        install_(model, frozen, patterns[[every.index(head) for head in frozen]], backend=backend)
    if len(pruned):
        prune_(model, pruned)
