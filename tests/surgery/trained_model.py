"""A small model in training, random patterns for its heads, and what an edit may change of both."""

import torch

from saf.models import GPT, GPTConfig
from saf.patterns import CompactPattern

LENGTH = 24
SHAPE = GPTConfig(vocab_size=40, num_layers=3, num_heads=4, hidden_size=32, max_length=LENGTH)


def make(optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, **options):
    """A float64 model and its optimiser after two updates."""
    torch.manual_seed(3)
    model = GPT(SHAPE).double()
    trainer = optimizer(model.parameters(), **{"lr": 1e-2, **options})
    for _ in range(2):
        update(model, trainer)
    return model, trainer


def update(model: GPT, trainer: torch.optim.Optimizer, seed: int = 0) -> float:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, SHAPE.vocab_size, (2, LENGTH + 1), generator=generator)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    trainer.step()
    trainer.zero_grad()
    return loss.item()


def patterns(count: int, seed: int = 0) -> CompactPattern:
    generator = torch.Generator().manual_seed(seed)
    return CompactPattern.from_parameters(*torch.randn(2, count, LENGTH, generator=generator, dtype=torch.float64))


def snapshot(model: GPT, trainer: torch.optim.Optimizer | None = None) -> dict[str, torch.Tensor]:
    """Return copies of all that an edit may change."""
    taken = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        state = {} if trainer is None else trainer.state.get(parameter, {})
        taken |= {f"{name}.{key}": torch.as_tensor(value).clone() for key, value in state.items() if value is not None}
    return taken


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
