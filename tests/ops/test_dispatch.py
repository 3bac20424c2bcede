"""Which operators run for which heads: frozen ones touch no query, key, score or softmax."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from saf.heads import HeadLayout, HeadSet
from saf.models import GPT, GPTConfig
from saf.ops import FrozenHeads, mixed_attention
from saf.surgery import install_
from tests.ops.hard_patterns import hard_patterns

LENGTH, DIM = 40, 8


class Calls(TorchDispatchMode):
    """Notes the name of every operator that runs and the shape of its first argument."""

    def __init__(self):
        super().__init__()
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        self.seen.append((func.name(), () if first is None else tuple(first.shape)))
        return func(*args, **(kwargs or {}))

    def of(self, part: str) -> list[tuple[int, ...]]:
        """Return the first arguments' shapes of operators whose name holds `part`."""
        return [shape for name, shape in self.seen if part in name]


@pytest.mark.parametrize(("group", "frozen"), [(1, (1, 3)), (2, (0, 3)), (2, (0, 1)), (1, (0, 1, 2, 3)), (4, (2,))])
def test_live_heads_alone_attend_and_frozen_heads_alone_are_convolved(group, frozen, generator):
    slots = HeadLayout(4, 4 // group, frozen)
    used = sorted(set(slots.kv_head[: slots.num_live]))
    counts = (slots.num_live, len(used), 4 // group)
    inputs = [torch.randn(2, n, LENGTH, DIM, generator=generator, requires_grad=True) for n in counts]
    heads = FrozenHeads.from_patterns(hard_patterns(["decay"] * len(frozen), LENGTH), kv_head=slots.kv_head)
    with Calls() as calls:
        mixed_attention(*inputs, heads).square().sum().backward()
    convolved = (2, slots.num_frozen, LENGTH, DIM)
    assert calls.of("saf::toeplitz") == [convolved, convolved]  # forward, and transposed for the value gradient
    assert calls.of("softmax") == []
    attended = [shape for name, shape in calls.seen if "attention" in name and "backward" not in name]
    assert attended == ([(2, slots.num_live, LENGTH, DIM)] if slots.num_live else [])


@pytest.mark.parametrize("backend", ["toeplitz", "reference"])
def test_queries_and_keys_of_frozen_heads_get_no_gradient(backend, generator):
    """All heads' queries and keys are at hand, as in a model before surgery; only live ones are read."""
    slots = HeadLayout(4, 4, (1, 3))
    query, key, value = (torch.randn(2, 4, LENGTH, DIM, generator=generator, requires_grad=True) for _ in range(3))
    options = {"backend": backend, "kv_head": slots.kv_head}
    heads = FrozenHeads.from_patterns(hard_patterns(["decay", "ripple"], LENGTH), **options)
    order, live = list(slots.slots), list(slots.live)
    mixed_attention(query[:, live], key[:, live], value[:, order], heads).square().sum().backward()
    for gradient in (query.grad, key.grad):
        assert not gradient[:, [1, 3]].any()
        assert gradient[:, live].abs().sum((0, 2, 3)).all()
    assert value.grad.abs().sum((0, 2, 3)).all()


def test_a_models_layers_run_what_their_head_map_says():
    model = GPT(GPTConfig(vocab_size=60, num_layers=3, num_heads=4, hidden_size=32, max_length=LENGTH))
    chosen = HeadSet([(0, 1), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)])
    install_(model, chosen, hard_patterns(["decay"] * 6, LENGTH))
    tokens = torch.randint(0, 60, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    with Calls() as calls:
        loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    assert [shape[1] for shape in calls.of("saf::toeplitz")] == [2, 4]
    assert [shape[1] for name, shape in calls.seen if "attention" in name] == [2, 4]
    for layer, attention in enumerate(model.attention_layers()):
        assert list(attention.layout.frozen) == chosen.in_layer(layer)
        for weight in (attention.q_proj.weight, attention.k_proj.weight):
            assert weight.shape[0] == attention.layout.num_live * 8
            assert weight.numel() == 0 or weight.grad.abs().sum(1).all()
