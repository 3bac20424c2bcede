"""Models whose heads cannot be edited as they are: every verb refuses, says why, and changes nothing."""

import copy

import pytest
import torch
from torch import distributed, nn
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


def assert_refused(model, words, error=UnsupportedError):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for verb in VERBS.values():
        with pytest.raises(error, match=words):
            verb(model)
    after = model.state_dict()
    assert after.keys() == before.keys()
    # Passes of calibration change the vectors of a spectral norm.
    same = [torch.equal(tensor, before[key]) for key, tensor in after.items() if not key.endswith(("_u", "_v"))]
    assert all(same)


COMPUTED = {
    "mask": lambda linear: prune.l1_unstructured(linear, "weight", 0.3),
    "spectral norm": nn.utils.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}


@pytest.mark.parametrize(
    ("family", "name", "kind"),
    [
        *(("gpt", "v_proj", kind) for kind in COMPUTED),
        ("llama", "o_proj", "mask"),
        ("gpt2", "c_attn", "mask"),
    ],
)
def test_weights_that_every_pass_computes(family, name, kind):
    model = build(family)
    COMPUTED[kind](getattr(attentions(model)[1], name))
    assert_refused(model, "weights|projections are computed together")


def one_parameter(a, b, _):
    b.v_proj.weight = a.v_proj.weight


def two_roles(a, _b, _):
    a.k_proj.weight = a.q_proj.weight


def view_in_a_buffer(a, b, _):
    b.register_buffer("first_rows", a.v_proj.weight.data[:4])


def embedding(a, _b, model):
    a.o_proj.weight = model.embed.weight if isinstance(model, saf.GPT) else model.model.embed_tokens.weight


SHARED = [one_parameter, two_roles, view_in_a_buffer, embedding]


@pytest.mark.parametrize(("family", "share"), [*(("gpt", share) for share in SHARED), ("llama", one_parameter)])
def test_weights_with_two_owners(family, share, tmp_path):
    model = build(family)
    share(*attentions(model)[:2], model)
    assert_refused(model, "memory of its own|used twice|layers, got")
    if family == "llama" and share is one_parameter:
        donor = build("llama")
        saf.install_(donor, [(0, 1)], PATTERN)
        saf.save(donor, tmp_path)
        with pytest.raises(UnsupportedError):
            saf.load(model, tmp_path)


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
    logits = [model(tokens(), use_cache=False).logits for model in models]
    assert all(torch.equal(each, logits[0]) for each in logits)


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("change", ["draft beside", "layer twice", "meta"])
def test_layers_and_weights_that_are_not_what_the_configuration_says(family, change, tmp_path):
    model = build(family)
    layers = model.blocks if family == "gpt" else model.model.layers
    if change == "draft beside":
        model.draft = copy.deepcopy(layers[-1])
    elif change == "layer twice":
        layers[1] = layers[0]
    else:
        model = model.to("meta")
    error, words = (InputError, "on the meta device") if change == "meta" else (UnsupportedError, r"layers, got \d")
    others = (lambda model: saf.calibrate(model, [tokens() % 48]), lambda model: saf.save(model, tmp_path / "saved"))
    for verb in (*VERBS.values(), *others):
        with pytest.raises(error, match=words):
            verb(model)
    assert not (tmp_path / "saved").exists()


def test_weights_that_processes_share_out(tmp_path):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        model = build("gpt")
        fsdp.fully_shard(model)
        for verb in (*VERBS.values(), lambda model: saf.save(model, tmp_path / "saved")):
            with pytest.raises(UnsupportedError, match="before fully_shard"):
                verb(model)
        assert not (tmp_path / "saved").exists()
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("family", "name", "kind"),
    [
        ("llama", "o_proj", "register_forward_pre_hook"),
        ("qwen3", "q_norm", "register_full_backward_hook"),
        ("gpt", "v_proj.weight", "register_post_accumulate_grad_hook"),
    ],
)
def test_hooks_by_the_number_of_a_head_until_they_are_removed(family, name, kind):
    model = build(family)
    hooked = attentions(model)[1]
    for part in name.split("."):
        hooked = getattr(hooked, part)
    handle = getattr(hooked, kind)(lambda *_: None)
    assert_refused(model, "hook")
    handle.remove()
    VERBS["install_"](model)


def test_hooks_around_layers_are_no_matter():
    model, reached = make("llama"), []
    model.model.layers[0].register_forward_hook(lambda *_: reached.append("layer"))
    attentions(model)[0].register_forward_hook(lambda *_: reached.append("attention"))
    saf.install_(model, [(0, 1)], PATTERN)
    model(tokens(), use_cache=False)
    assert reached == ["attention", "layer"]
