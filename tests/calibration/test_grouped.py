"""Grouped queries with one head frozen: every collector finds each head's own keys, values and output weights."""

import pytest
import torch
from torch import nn

import saf
from saf.adapters import Adapter
from saf.adapters.gpt import GPTSite
from saf.calibration import calibrate, gate_gradients, head_outputs
from saf.calibration.gradients import gate_gradient
from saf.heads import HeadLayout, HeadSet

LENGTH, DIM = 16, 4
LIVE = [0, 4, 5]
FROZEN = [1, 2, 3]
FUTURE = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


class Live(nn.Module):
    def forward(self, query, key, groups):
        """Return patterns `[B, L, T, T]`; queries and keys are seen by hooks as calibration expects them."""
        return (query @ key[:, groups].mT / DIM**0.5).masked_fill(FUTURE, -torch.inf).softmax(-1)


class Attention(nn.Module):
    """Six query heads on three KV heads; the frozen ones attend evenly, and nobody needs the second key head.

    Output columns lie in slot order.
    """

    frozen = None

    def __init__(self):
        super().__init__()
        self.layout, self.head_dim, self.removed = HeadLayout(6, 3, frozen=tuple(FROZEN)), DIM, {}
        self.q_proj = nn.Linear(12, 3 * DIM, bias=False)
        self.k_proj, self.v_proj = nn.Linear(12, 3 * DIM, bias=False), nn.Linear(12, 3 * DIM)
        self.o_proj = nn.Linear(6 * DIM, 12, bias=False)
        self.live = Live()

    def weights(self):
        names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
        return {role: getattr(self, name).weight for role, name in names.items()} | {"value_bias": self.v_proj.bias}

    def forward(self, x, gates):
        query, key, value = (
            linear(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        even = (~FUTURE).double() / torch.arange(1, LENGTH + 1)[:, None]
        live = self.live(query, key[:, [0, 2]], [0, 1, 1]) @ value[:, [head // 2 for head in LIVE]]
        mixed = torch.cat([live, even @ value[:, [head // 2 for head in FROZEN]]], 1)
        mixed = mixed * gates[[*LIVE, *FROZEN], None, None]
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(12), Attention()

    def forward(self, x, gates):
        return x + self.attention(self.norm(x), gates)


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(20, 12), nn.ModuleList([Block(), Block()])
        self.gates = torch.ones(2, 6, dtype=torch.float64)

    def forward(self, ids):
        x = self.embed(ids)
        for block, gates in zip(self.blocks, self.gates, strict=True):
            x = block(x, gates)
        return x @ self.embed.weight.T


class GroupedAdapter(Adapter):
    family = "grouped"
    saves_weights, one_graph = True, True
    max_length = vocab_size = None
    num_layers = 2
    device = torch.device("cpu")
    next_token_loss = token_log_probs = last_logits = attention_settings = None

    def __init__(self, model):
        self.model = model

    @classmethod
    def of(cls, model):
        return cls(model) if isinstance(model, Grouped) else None

    def sites(self):
        return [GPTSite(block.attention) for block in self.model.blocks]

    def run(self, ids):
        self.model(ids)


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr("saf.adapters.ADAPTERS", (GroupedAdapter,))
    made = Grouped().double()
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.8
    return made


def tokens(seed, count=4):
    return torch.randint(0, 20, (count, LENGTH), generator=torch.Generator().manual_seed(seed))


def seen(model, ids):
    """Return for each layer the pattern of each live head, all values, the output and the residual stream."""
    kept = [{} for _ in model.blocks]
    handles = []
    for block, into in zip(model.blocks, kept, strict=True):
        handles += [
            block.attention.live.register_forward_hook(lambda _, a, out, into=into: into.update(pattern=out)),
            block.attention.v_proj.register_forward_hook(lambda _, a, out, into=into: into.update(value=out)),
            block.attention.register_forward_hook(lambda _, a, out, into=into: into.update(output=out)),
            block.register_forward_pre_hook(lambda _, args, into=into: into.update(residual=args[0])),
        ]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return kept


def test_statistics_are_each_heads_own(model):
    ids = tokens(1)
    found = calibrate(model, [ids], collect=("mean",))
    assert found.collected_heads == HeadSet((layer, head) for layer in (0, 1) for head in LIVE)
    expected = torch.cat([layer["pattern"].mean(0) for layer in seen(model, ids)])
    torch.testing.assert_close(found.collected["mean"], expected)
    assert torch.equal(calibrate(model, [ids], collect=("mean",), heads=[(1, 5)]).collected["mean"][0], expected[-1])


def test_outputs_are_each_heads_own(model):
    ids, heldout, rows = tokens(1), tokens(2, 3), (8, 11, 15)
    statistics = calibrate(model, [ids], collect=("mean_rows",), positions=rows)
    outputs = head_outputs(model, [heldout], statistics)
    for layer, (before, after) in enumerate(zip(seen(model, ids), seen(model, heldout), strict=True)):
        weight = model.blocks[layer].attention.o_proj.weight.detach()
        values = after["value"].unflatten(-1, (-1, DIM)).transpose(1, 2)
        y = (after["residual"] + after["output"])[:, list(rows)]
        for slot, head in enumerate(LIVE):
            mixed = torch.stack([after["pattern"][:, slot], before["pattern"][:, slot].mean(0).expand(3, -1, -1)])
            c, swapped = (mixed @ values[:, head // 2] @ weight[:, slot * DIM : (slot + 1) * DIM].T)[:, :, list(rows)]
            torch.testing.assert_close(outputs.gram[layer, head, head], c.square().sum())
            torch.testing.assert_close(outputs.change[layer, head], (swapped - c).norm(dim=-1).flatten())
            torch.testing.assert_close(outputs.residual_change[layer, head], ((swapped - c) * y).sum(-1).flatten())
        torch.testing.assert_close(outputs.residual[layer], y.norm(dim=-1).flatten())
    assert outputs.change[:, FROZEN].isnan().all()


def test_gates_are_each_heads_own(model):
    def loss(model, ids):
        return nn.functional.cross_entropy(model(ids)[0, :-1], ids[0, 1:])

    ids = tokens(1)
    found = gate_gradients(model, [ids], loss=loss)
    total = torch.zeros(2, 6, dtype=torch.float64)
    for sequence in ids.split(1):
        model.gates = torch.ones(2, 6, dtype=torch.float64, requires_grad=True)
        loss(model, sequence).backward()
        total += model.gates.grad.abs()
    torch.testing.assert_close(found[:, LIVE], total[:, LIVE] / 4)
    assert found[:, FROZEN].isnan().all()


def test_output_weights_may_lie_transposed():
    weight = torch.randn(24, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    class Transposed:
        layout = HeadLayout(6, 3, frozen=tuple(FROZEN))

        def projections(self):
            return {"output": (weight, 0)}

    found = gate_gradient(Transposed(), 2 * weight)
    for slot, head in enumerate([*LIVE, *FROZEN]):
        torch.testing.assert_close(found[head], 2 * weight[slot * DIM : (slot + 1) * DIM].square().sum())


def test_whole_groups_leave_nobody_behind(model):
    statistics = calibrate(model, [tokens(1)])
    chosen = saf.select(saf.score(statistics), count=3, group_size=2)
    for layer in (0, 1):
        for first in (0, 2, 4):
            live = {head for head in (first, first + 1) if head in LIVE}
            assert live & set(chosen.in_layer(layer)) in (set(), live)
