"""Models whose heads cannot be edited as they are: every verb refuses, says why, and changes nothing."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, prune

import saf
from saf.errors import InputError, UnsupportedError
from saf.models.adapter import adapter_for
from tests.transformers_models import make, tokens

CONFIG = saf.FreezeConfig(heads=[(1, 0)], max_fit_kl=99)
PATTERN = saf.CompactPattern.from_parameters(*torch.zeros(2, 1, 32))
VERBS = {
    "freeze_": lambda model: saf.freeze_(model, [tokens() % 48], CONFIG),
    "install_": lambda model: saf.install_(model, [(1, 0)], PATTERN),
    "prune_": lambda model: saf.prune_(model, [(1, 0)]),
}


def build(family):
    if family == "gpt":
        return saf.GPT(saf.GPTConfig(vocab_size=48, num_layers=3, num_heads=4, hidden_size=48, max_length=32))
    return make(family, vocab_size=48)


def attentions(model):
    return [site.attention for site in adapter_for(model).sites()]


def share_a_middle(first, second):
    """Give two projections parts of one tensor that overlap by a row."""
    rows = torch.cat([first.weight.detach(), second.weight.detach()[1:]])
    first.weight, second.weight = nn.Parameter(rows[: len(rows) // 2 + 1]), nn.Parameter(rows[len(rows) // 2 :])


COMPUTED, TWO_OWNERS = "computed together|weights", "memory of its own|used twice"
COUNT, HOOKS = r"layers, got \d", "hook"
REFUSED = {  # a family, and a change of the model by its first two attention layers
    "a mask": ("gpt", lambda model, a, b: prune.l1_unstructured(b.v_proj, "weight", 0.3), COMPUTED),
    "orthogonal weights": ("gpt", lambda model, a, b: parametrizations.orthogonal(b.v_proj), COMPUTED),
    "one parameter twice": ("llama", lambda model, a, b: setattr(b.v_proj, "weight", a.v_proj.weight), TWO_OWNERS),
    "a buffer": ("gpt", lambda model, a, b: b.register_buffer("rows", a.v_proj.weight.data[4:8]), TWO_OWNERS),
    "overlapping parts": ("gpt", lambda model, a, b: share_a_middle(a.v_proj, b.v_proj), TWO_OWNERS),
    "a draft layer": ("gpt", lambda model, a, b: setattr(model, "draft", copy.deepcopy(model.blocks[-1])), COUNT),
    "a layer twice": ("llama", lambda model, *_: model.model.layers.__setitem__(1, model.model.layers[0]), COUNT),
    "the meta device": ("llama", lambda model, a, b: model.to("meta"), "on the meta device"),
    "a hook on a projection": ("llama", lambda model, a, b: b.o_proj.register_forward_pre_hook(lambda *_: None), HOOKS),
    "a hook on a weight": ("gpt", lambda m, a, b: b.v_proj.weight.register_post_accumulate_grad_hook(id), HOOKS),
}


@pytest.mark.parametrize("case", REFUSED)
def test_every_verb_refuses_and_changes_nothing(case, tmp_path):
    family, change, words = REFUSED[case]
    model = build(family)
    handle = change(model, *attentions(model)[:2])
    before = {} if "meta" in case else {name: tensor.clone() for name, tensor in model.state_dict().items()}
    measured = [lambda model: saf.calibrate(model, [tokens() % 48]), lambda model: saf.save(model, tmp_path / "saved")]
    for verb in (*VERBS.values(), *(measured if words in (COUNT, "on the meta device") else [])):
        with pytest.raises(InputError if "meta" in case else UnsupportedError, match=words):
            verb(model)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert not (tmp_path / "saved").exists()
    if words == HOOKS:
        handle.remove()
        VERBS["install_"](model)


def test_what_shares_nothing_is_frozen_as_ever():
    """Parts of one tensor side by side, tied embeddings, a copy of the model, hooks around layers."""
    plain, packed = make("llama", tie_word_embeddings=True), make("llama", tie_word_embeddings=True)
    attention, reached = packed.model.layers[0].self_attn, []
    linears = (attention.q_proj, attention.k_proj, attention.v_proj)
    for linear, part in zip(linears, torch.cat([each.weight.detach() for each in linears]).chunk(3), strict=True):
        linear.weight = nn.Parameter(part)
    models = [plain, packed, copy.deepcopy(packed)]
    plain.model.layers[0].register_forward_hook(lambda *_: reached.append("layer"))
    attentions(plain)[0].register_forward_hook(lambda *_: reached.append("attention"))
    for model in models:
        saf.freeze_(model, [tokens()], CONFIG)
    reached.clear()
    logits = [model(tokens(), use_cache=False).logits for model in models]
    assert all(torch.equal(each, logits[0]) for each in logits)
    assert reached == ["attention", "layer"]


def test_weights_that_processes_share_out(group, tmp_path):
    model = build("gpt")
    fully_shard(model)
    for verb in (*VERBS.values(), lambda model: saf.save(model, tmp_path / "saved")):
        with pytest.raises(UnsupportedError, match="fully_shard"):
            verb(model)
    assert not (tmp_path / "saved").exists()
