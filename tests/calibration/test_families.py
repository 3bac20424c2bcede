"""Models of transformers, grouped or with transposed weights, a group frozen: each head's keys, values and weights."""

import copy

import pytest
import torch
from torch import nn

import saf
from saf.calibration import calibrate, head_outputs
from saf.heads import HeadSet
from saf.models.adapter import adapter_for, rows_of
from saf.patterns import CompactPattern
from tests.transformers_models import LENGTH, make, tokens, weight_of

FROZEN = HeadSet([(1, 0), (1, 1)])
ROWS = [16, 23, 31]
LAYERS = (0, 1)
"""Inputs of later layers are not those of the ordinary model."""


@pytest.fixture(params=["llama-grouped", "gpt2"])
def ordinary(request) -> nn.Module:
    settings = {"scale_attn_by_inverse_layer_idx": True} if request.param == "gpt2" else {}
    model = make(request.param, **settings).double()
    model.set_attn_implementation("eager")
    return model


@pytest.fixture
def frozen(ordinary, generator) -> nn.Module:
    model = copy.deepcopy(ordinary)
    saf.install_(
        model, FROZEN, CompactPattern.from_parameters(*torch.randn(2, 2, LENGTH, generator=generator).double())
    )
    return model


def forward(model: nn.Module, ids: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Patterns, values and output weights of all heads, layer by layer, and the residual stream before the layer."""
    values, sites = {}, adapter_for(model).sites()
    for layer, site in enumerate(sites):
        linear, count = getattr(site.attention, "v_proj", None) or site.attention.c_attn, rows_of(site, "value").count
        linear.register_forward_hook(lambda _m, _args, out, at=layer, n=count: values.update({at: out[..., -n:]}))
    with torch.no_grad():
        outputs = model(ids, output_attentions=True, output_hidden_states=True)
    actual = []
    for layer in LAYERS:
        value = values[layer].unflatten(-1, (-1, sites[layer].head_dim)).transpose(1, 2)
        actual.append(
            {
                "pattern": outputs.attentions[layer],
                "value": value.repeat_interleave(4 // value.shape[1], 1),
                "weight": weight_of(model, layer, "output").unflatten(0, (4, -1)),
                "residual": outputs.hidden_states[layer],
            }
        )
    return actual


def check_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)  # softmax of eager attention is in float32


def test_statistics_are_each_heads_own(ordinary, frozen):
    ids = tokens()
    actual = calibrate(frozen, [ids], collect=("mean",))
    assert len(actual.collected_heads & FROZEN) == 0
    for layer, expected in enumerate(forward(ordinary, ids)):
        for head in actual.collected_heads.in_layer(layer):
            mean = actual.take("mean", [(layer, head)])[0]
            check_close(mean, expected["pattern"][:, head].mean(0))
    alone = calibrate(frozen, [ids], collect=("mean",), heads=[(1, 3)]).collected["mean"]
    assert torch.equal(alone, actual.take("mean", [(1, 3)]))


def test_outputs_are_each_heads_own(ordinary, frozen):
    ids, heldout, written = tokens(), tokens(3, seed=2), {}
    statistics = calibrate(frozen, [ids], collect=("mean_rows",), positions=ROWS)
    for layer, site in enumerate(adapter_for(frozen).sites()):
        site.attention.register_forward_hook(
            lambda _module, _args, out, at=layer: written.update({at: out[0].detach()})
        )
    outputs = head_outputs(frozen, [heldout], statistics)
    before, after = forward(ordinary, ids), forward(ordinary, heldout)
    for layer, (was, now) in enumerate(zip(before, after, strict=True)):
        y = (now["residual"] + written[layer])[:, ROWS]
        check_close(outputs.residual[layer], y.norm(dim=-1).flatten())
        check_close(outputs.output[layer], written[layer][:, ROWS].norm(dim=-1).flatten())
        for head in adapter_for(frozen).sites()[layer].layout.live:
            mean = was["pattern"][:, head].mean(0).expand(3, -1, -1)
            mixed = torch.stack([now["pattern"][:, head], mean]) @ now["value"][:, head] @ now["weight"][head]
            c, swapped = mixed[:, :, ROWS]
            check_close(outputs.gram[layer, head, head], c.square().sum())
            check_close(outputs.change[layer, head], (swapped - c).norm(dim=-1).flatten())
            check_close(outputs.residual_change[layer, head], ((swapped - c) * y).sum(-1).flatten())
    assert outputs.change[1, :2].isnan().all()
