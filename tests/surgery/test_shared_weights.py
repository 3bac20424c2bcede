"""Attention weights that something else holds, too: an edit of one layer would reorder another, and is refused."""

import copy

import pytest
import torch
from torch import nn

import saf
from saf.errors import UnsupportedError
from tests.transformers_models import make, tokens, transformers

CONFIG = saf.FreezeConfig(heads=[(0, 1)], max_fit_kl=99)
PATTERN = saf.CompactPattern.from_parameters(*torch.zeros(2, 1, 32))


def gpt():
    return saf.GPT(saf.GPTConfig(vocab_size=48, num_layers=3, num_heads=4, hidden_size=48, max_length=32))


def llama():
    return make("llama", vocab_size=48)


def one_parameter(a, b, _):
    b.v_proj.weight = a.v_proj.weight


def one_projection(a, b, _):
    b.k_proj = a.k_proj


def two_roles(a, _b, _):
    a.k_proj.weight = a.q_proj.weight


def one_memory(a, b, _):
    b.o_proj.weight.data = a.o_proj.weight.data


def transposed(a, b, _):
    b.o_proj.weight.data = a.v_proj.weight.data.T


def view_in_a_buffer(a, b, _):
    b.register_buffer("first_rows", a.v_proj.weight.data[:4])


def flat_parameter(a, _b, _):
    a.flat = nn.Parameter(torch.cat([a.q_proj.weight.detach().flatten(), a.k_proj.weight.detach().flatten()]))
    for linear, part in zip((a.q_proj, a.k_proj), a.flat.data.chunk(2), strict=True):
        linear.weight.data = part.view(48, 48)


def embedding(a, _b, model):
    a.o_proj.weight = model.embed.weight if isinstance(model, saf.GPT) else model.model.embed_tokens.weight


SHARED = [one_parameter, one_projection, two_roles, one_memory, transposed, view_in_a_buffer, flat_parameter, embedding]


def layers_of(model):
    return model.blocks if isinstance(model, saf.GPT) else model.base_model.layers


def attention_of(layer):
    return layer.attention if hasattr(layer, "attention") else layer.self_attn


def refused(model, optimizer=None):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = tokens() % 48
    for edit in (
        lambda: saf.freeze_(model, [ids], CONFIG, optimizer=optimizer),
        lambda: saf.install_(model, [(2, 1)], PATTERN, optimizer=optimizer),
        lambda: saf.prune_(model, [(0, 1)], optimizer=optimizer),
    ):
        with pytest.raises(UnsupportedError):
            edit()
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("made", [gpt, llama])
@pytest.mark.parametrize("share", SHARED)
def test_a_weight_with_two_owners_is_refused_and_nothing_changes(made, share):
    model = made()
    share(*map(attention_of, layers_of(model)[:2]), model)
    refused(model, torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_fused_projection_with_two_owners_is_refused(name):
    model = make("gpt2")
    first, second = (block.attn.c_attn for block in model.transformer.h[:2])
    setattr(second, name, getattr(first, name))
    refused(model)


@pytest.mark.parametrize("made", [gpt, llama])
@pytest.mark.parametrize("whole", [True, False])
def test_an_attention_layer_at_two_places_is_refused_before_it_is_measured(made, whole):
    model = made()
    layers = layers_of(model)
    if whole:
        layers[1] = layers[0]
    else:
        setattr(layers[1], "attention" if made is gpt else "self_attn", attention_of(layers[0]))
    refused(model)
    with pytest.raises(UnsupportedError):
        saf.calibrate(model, [tokens() % 48])


def test_heads_of_a_file_are_not_given_to_weights_with_two_owners(tmp_path):
    model = llama()
    saf.install_(model, [(0, 1)], PATTERN)
    saf.save(model, tmp_path)
    other = llama()
    one_parameter(*map(attention_of, layers_of(other)[:2]), other)
    with pytest.raises(UnsupportedError):
        saf.load(other, tmp_path)
    assert other.config._attn_implementation == "sdpa"


def test_what_shares_nothing_is_frozen_as_ever():
    """Parts of one tensor side by side, tied embeddings, a copy of the model."""
    plain, packed = make("llama", tie_word_embeddings=True), make("llama", tie_word_embeddings=True)
    attention = packed.model.layers[0].self_attn
    linears = (attention.q_proj, attention.k_proj, attention.v_proj)
    for linear, part in zip(linears, torch.cat([each.weight.detach() for each in linears]).chunk(3), strict=True):
        linear.weight = nn.Parameter(part)
    models = [plain, packed, copy.deepcopy(packed)]
    for model in models:
        saf.freeze_(model, [tokens()], CONFIG)
    found = [model(tokens(), use_cache=False).logits for model in models]
    assert all(torch.equal(each, found[0]) for each in found)
    assert transformers.LlamaForCausalLM in map(type, models)
