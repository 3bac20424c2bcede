"""Attention that is not transformers' own may be no softmax attention, so it is neither measured nor frozen."""

import functools
import types
import warnings

import pytest
import torch

import saf
from saf.errors import SafWarning, UnsupportedError
from tests.transformers_models import HEADS, freeze, make, tokens, transformers

masking = pytest.importorskip("transformers.masking_utils")
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402

CONFIG = saf.FreezeConfig(heads=[(0, 1)], max_fit_kl=99)
PATTERN = saf.CompactPattern.from_parameters(*torch.zeros(2, 1, 32))
SDPA = ALL_ATTENTION_FUNCTIONS["sdpa"]


@functools.wraps(SDPA)
def doubled(*args, **options):
    """Attend as SDPA does, twice as strongly, under its copied name."""
    output, weights = SDPA(*args, **options)
    return 2 * output, weights


def own_forward(self, hidden_states, **_):
    roles = (self.q_proj, self.k_proj, self.v_proj)
    heads = [role(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for role in roles]
    mixed = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
    return self.o_proj(mixed.transpose(1, 2).flatten(2)), None


def registered(patch, model):
    patch.setitem(transformers.AttentionInterface._global_mapping, "doubled", doubled)
    patch.setitem(transformers.AttentionMaskInterface._global_mapping, "doubled", masking.sdpa_mask)
    model.set_attn_implementation("doubled")


def stock_name_registered(patch, model):
    patch.setitem(transformers.AttentionInterface._global_mapping, "sdpa", doubled)


def eager_of_the_model(patch, model):
    patch.setattr(modeling_llama, "eager_attention_forward", doubled)
    model.set_attn_implementation("eager")


def another_mask(patch, model):
    patch.setitem(transformers.AttentionMaskInterface._global_mapping, "sdpa", lambda **_: None)


def forward_of_the_class(patch, model):
    patch.setattr(modeling_llama.LlamaAttention, "forward", own_forward)


def forward_of_a_layer(patch, model):
    attention = model.model.layers[0].self_attn
    patch.setattr(attention, "forward", types.MethodType(own_forward, attention))


@pytest.mark.parametrize(
    "other",
    [registered, stock_name_registered, eager_of_the_model, another_mask, forward_of_the_class, forward_of_a_layer],
)
def test_attention_by_another_function_is_neither_measured_nor_edited(other, monkeypatch):
    model = make("llama")
    other(monkeypatch, model)
    before = model.config._attn_implementation
    for refused in (
        lambda: saf.freeze_(model, [tokens()], CONFIG),
        lambda: saf.install_(model, [(0, 1)], PATTERN),
        lambda: saf.prune_(model, [(0, 1)]),
    ):
        with pytest.raises(UnsupportedError):
            refused()
    assert model.config._attn_implementation == before
    assert all(map(torch.equal, model.parameters(), make("llama").parameters()))


def test_one_that_is_chosen_afterwards_is_refused_in_the_next_pass_and_goes_with_the_edit(monkeypatch, tmp_path):
    model, ids = make("llama"), tokens(2)
    ordinary = model(ids, use_cache=False).logits
    saf.install_(model, HEADS, [saf.CompactPattern.from_parameters(*torch.zeros(2, 32))] * len(HEADS))
    model.save_pretrained(tmp_path)
    registered(monkeypatch, model)
    for refused in (
        lambda: model(ids, use_cache=False),
        lambda: saf.calibrate(model, [ids]),
        lambda: saf.prune_(model, [(2, 0)]),
        lambda: type(model).from_pretrained(tmp_path, attn_implementation="doubled"),
    ):
        with pytest.raises(UnsupportedError):
            refused()
    saf.uninstall_(model)
    torch.testing.assert_close(model(ids, use_cache=False).logits, ordinary)


@pytest.mark.parametrize("name", ["eager", "flex_attention"])
def test_transformers_own_functions_are_measured_alike(name):
    model = make("llama")
    model.set_attn_implementation(name)
    found, expected = (saf.calibrate(each, [tokens()]).variance for each in (model, make("llama")))
    assert torch.equal(found, expected)
    saf.freeze_(model, [tokens()], CONFIG)
    assert model(tokens(), use_cache=False).logits.isfinite().all()


def test_other_masks_are_refused_and_hooks_set_later_warned_of():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    model, ids = make("llama"), tokens(1, 16)
    freeze(model)
    block = flex.create_block_mask(lambda b, h, q, k: (q >= k) & (q // 8 == k // 8), 1, None, 16, 16, device="cpu")
    with pytest.raises(UnsupportedError, match="must mark padding"):
        model(ids, attention_mask=block, use_cache=False)
    hook = model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: None)
    with pytest.warns(SafWarning, match=r"hooks on q_proj of layer 0"):
        model(ids, use_cache=False)
    hook.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids, use_cache=False)
