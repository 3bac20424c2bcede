"""Generation, caches, padding and length limits: tokens are those of passes that compute everything anew."""

import copy

import pytest
import torch
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import QuantizedLayer

import saf
from saf.errors import InputError, UnsupportedError
from saf.heads import HeadSet
from saf.integrations.transformers import cache_bytes
from saf.models.adapter import adapter_for, rows_of
from saf.synthetic import synthetic_patterns
from tests.transformers_models import FROZEN, HEADS, LENGTH, NEW, SIZES, freezable, freeze, generate, make, tokens

HEAD_DIMS = {"llama": SIZES["hidden_size"] // 4, "qwen3": 16}


@pytest.fixture
def padded():
    """Prompts of three lengths, padded on the left, and their mask."""
    ids = tokens(3, 10, seed=5)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    mask[1, :1] = 0
    return ids * mask, mask


MODES = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 1.5, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampled sequences": {"do_sample": True, "num_return_sequences": 2},
}


@pytest.mark.parametrize("mode", MODES)
def test_tokens_in_every_cache_are_those_of_passes_without_one(frozen, padded, mode):
    _, model = frozen
    expected = generate(model, *padded, use_cache=False, **MODES[mode])
    for kind in (None, "static"):
        assert torch.equal(generate(model, *padded, cache_implementation=kind, **MODES[mode]), expected), kind


def test_tokens_of_every_family_are_those_of_passes_without_a_cache(family, padded):
    freeze(model := make(family))
    for mode, options in (("beams", {}), ("greedy", {"prefill_chunk_size": 4})):
        expected = generate(model, *padded, use_cache=False, **MODES[mode])
        assert torch.equal(generate(model, *padded, **MODES[mode], **options), expected), mode


@pytest.mark.parametrize("helper", ["model", "frozen model", "prompt"])
def test_assisted_tokens_are_the_greedy_ones(frozen, helper):
    family, model = frozen
    ids = tokens(1, 9, seed=6)
    ids[0, 5:8] = ids[0, :3]
    expected = generate(model, ids, torch.ones_like(ids), use_cache=False, do_sample=False)
    options = {"prompt_lookup_num_tokens": 3}
    if helper != "prompt":  # the model before it was frozen: some of its guesses are right
        options = {"assistant_model": make(family)}
    if helper == "frozen model":
        freeze(options["assistant_model"], HeadSet([(0, 0), (0, 1), (2, 2)]))
    assert torch.equal(generate(model, ids, torch.ones_like(ids), do_sample=False, **options), expected)


def test_right_padding_changes_nothing_before_it(shape):
    model = make(shape).double()
    freeze(model, HeadSet([*HEADS, (2, 0), (2, 1), (2, 2)]))
    ids = torch.cat([tokens(2, 9, seed=4), torch.zeros(2, 5, dtype=torch.long)], 1)
    mask = (ids > 0).long()
    logits = model(ids, attention_mask=mask, use_cache=False).logits
    with torch.no_grad():
        alone = model(ids[:, :9], use_cache=False).logits
        longer = model(ids, attention_mask=torch.nn.functional.pad(mask, (0, 3), value=1)).logits
    torch.testing.assert_close(logits[:, :9], alone, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(longer[:, :9], alone, rtol=1e-10, atol=1e-10)  # it covers tokens to come
    logits[:, :9].sum().backward()
    assert all(rows_of(site, "value").parameter.grad.isfinite().all() for site in adapter_for(model).sites())
    mask[0, 4], cache = 0, DynamicCache(config=model.config)
    with pytest.raises(InputError, match="at the ends"):
        model(ids, attention_mask=mask, use_cache=False)
    with pytest.raises(InputError, match="on the left"):
        generate(model, ids[:, :11], (ids[:, :11] > 0).long(), do_sample=False)
    model(ids[:, :5], past_key_values=cache)
    with pytest.raises(InputError, match="cached tokens too, 6, got 1"):
        model(ids[:, 5:6], past_key_values=cache, attention_mask=torch.ones(2, 1))


@pytest.mark.parametrize("shape", ["llama", "gpt2", "gemma3"])
def test_inputs_longer_than_the_patterns_are_refused_before_the_first_layer(shape):
    """A cache stays as it was, also of layers before the first frozen head."""
    model = make(shape, max_position_embeddings=2 * LENGTH)
    freeze(model, HeadSet([(freezable(model)[-1], 1)]))
    ids, cache = tokens(2, LENGTH + 1), DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)
        size, fixed = cache_bytes(cache), StaticCache(config=model.config, max_cache_len=LENGTH + 1)
        document, prompt = torch.cat([torch.arange(7), torch.arange(LENGTH + 1)])[None], ids[:1, :-5]
        for refused in (
            lambda: model(ids, use_cache=False),
            lambda: model(inputs_embeds=model.get_input_embeddings()(ids)),
            lambda: model.base_model(ids),
            lambda: model(ids[:, 20:], past_key_values=cache),
            lambda: model(tokens(1, LENGTH + 8), position_ids=document, use_cache=False),
        ):
            with pytest.raises(InputError, match=f"cover {LENGTH}"):
                refused()
        begun = model.register_forward_pre_hook(lambda *_: pytest.fail("a pass has begun"))
        whole, embeds = {"input_ids": prompt}, {"inputs_embeds": model.get_input_embeddings()(prompt)}
        for options in (
            whole | {"max_new_tokens": 6},
            whole | {"max_length": LENGTH + 2, "use_cache": False},
            whole | {"max_new_tokens": 6, "cache_implementation": "static"},
            whole | {"max_new_tokens": 6, "prompt_lookup_num_tokens": 3},
            embeds | {"max_new_tokens": 6},
        ):
            with pytest.raises(InputError, match=f"at most {LENGTH + 1} together"):
                model.generate(**options)
        begun.remove()
        assert generate(model, prompt, torch.ones_like(prompt), max_new_tokens=5).shape[1] == LENGTH + 1, "not read"
        with pytest.raises((InputError, UnsupportedError)):
            model(ids[:, :4], past_key_values=fixed)
        assert cache_bytes(cache) == size
        rest = model(ids[:, 20:-1], past_key_values=cache).logits
        whole = model(ids[:, :-1], use_cache=False).logits
        torch.testing.assert_close(rest, whole[:, 20:], rtol=1e-4, atol=1e-4)
        twin = copy.deepcopy(model)
        saf.uninstall_(model)
        assert model(ids).logits.isfinite().all()
        with pytest.raises(InputError, match=f"cover {LENGTH}"):
            twin(ids)


def test_a_fixed_cache_serves_frozen_and_pruned_heads_and_the_model_once_they_are_live_again(shape):
    model, ids = make(shape), tokens(2, 8, seed=3)
    function = model.config._attn_implementation

    def fixed(**options):
        options = options or {"cache_implementation": "static", "disable_compile": True}
        return generate(model, ids, torch.ones_like(ids), do_sample=False, **options)

    before = fixed()
    for edit in (freeze, lambda model: saf.prune_(model, HeadSet([(0, 0), (1, 2), *((2, head) for head in range(4))]))):
        edit(model)
        if shape.startswith("gemma"):
            with pytest.raises(UnsupportedError, match="sliding window"):
                fixed()
        else:
            assert torch.equal(fixed(), fixed(use_cache=False))
        saf.uninstall_(model)
        assert model.config._attn_implementation == function
    assert torch.equal(fixed(), before)


class Exact(QuantizedLayer):
    """A layer of a quantised cache that loses nothing, whose residual joins the rest every four tokens."""

    def __init__(self):
        super().__init__(residual_length=4)

    def _quantize(self, tensor, axis):
        assert tensor.numel()
        return tensor.clone()

    def _dequantize(self, q_tensor):
        return q_tensor


def test_a_quantised_cache_serves_layers_with_a_live_head(padded):
    model = make("qwen3")
    freeze(model, HeadSet([(0, 1), (1, 0), (1, 1), *((2, head) for head in range(3))]))
    cache = Cache(layers=[Exact() for _ in range(3)])
    expected = generate(model, *padded, use_cache=False, do_sample=False)
    assert torch.equal(generate(model, *padded, past_key_values=cache, do_sample=False), expected)
    with pytest.raises(UnsupportedError, match="quantised"):
        cache_bytes(cache)
    freeze(model, HeadSet([(2, 3)]))
    with pytest.raises(UnsupportedError, match="quantised cache"):
        model(padded[0], past_key_values=Cache(layers=[Exact() for _ in range(3)]))


def test_a_cache_goes_on_in_steps_of_any_size_and_is_used_again(frozen, padded):
    _, model = frozen
    ids, (short, mask) = tokens(2, 22, seed=7), padded
    with torch.no_grad():
        whole, alone = model(ids, use_cache=False).logits, model(short[:1, 4:], use_cache=False).logits
        for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=LENGTH)):
            steps = ids.split([10, 4, 1, 6, 1], 1)
            logits = torch.cat([model(step, past_key_values=cache).logits for step in steps], 1)
            torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)
        cache = StaticCache(config=model.config, max_cache_len=LENGTH)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        for _ in range(2):  # padding, in a cache that was emptied
            found = model(short, attention_mask=mask, position_ids=positions, past_key_values=cache).logits
            torch.testing.assert_close(found[:1, 4:], alone, rtol=1e-4, atol=1e-4)
            cache.reset()


@pytest.mark.parametrize("kind", ["all places", "a window", "a window counted by tensors"])
def test_layers_with_a_window_go_on_in_any_growing_cache(kind):
    """One made without the configuration holds all places; transformers 5.17 counts by tensors once it was cut back."""
    model, ids = make("gemma3", sliding_window=8), tokens(2, 14, seed=7)
    saf.prune_(model, HeadSet([(0, 1), (1, 0)]))
    freeze(model, HeadSet([(0, 2)]))
    cache, parts = DynamicCache() if kind == "all places" else DynamicCache(config=model.config), []
    with torch.no_grad():
        for step in ids.split([3, 7, 2, 1, 1], 1):
            parts.append(model(step, past_key_values=cache).logits)
            for layer in cache.layers if kind == "a window counted by tensors" else ():
                if hasattr(layer, "cumulative_length"):
                    layer.cumulative_length = torch.as_tensor(layer.cumulative_length)
        whole = model(ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)


def test_frozen_heads_keep_no_keys_unless_a_live_head_reads_them(frozen):
    family, model = frozen
    ids, sizes = tokens(2, 6, seed=8), {}
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=LENGTH)):
        model(ids, past_key_values=cache)
        sizes[type(cache)] = cache_bytes(cache)
    heads = {"llama": (3 + 2 + 0) + 3 * 4, "qwen3": (2 + 1 + 0) + 3 * 2}[family]
    assert sum(len(site.layout.rows[role]) for site in adapter_for(model).sites() for role in ("key", "value")) == heads
    token = 2 * heads * HEAD_DIMS[family] * 4
    assert sizes == {DynamicCache: 6 * token, StaticCache: LENGTH * token}


@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
def test_a_cache_that_other_frozen_heads_filled_is_refused(fixed):
    """With grouped queries a layer caches as many keys whichever of its heads are frozen."""
    model, ids = make("qwen3"), tokens(1, 9, seed=9)
    freeze(model, HeadSet([(0, 0), (2, 1)]))
    cache = StaticCache(config=model.config, max_cache_len=LENGTH) if fixed else DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :4], past_key_values=cache)
        copy.deepcopy(model)(ids[:, 4:5], past_key_values=cache)  # its heads are the same
        saf.uninstall_(model)
        freeze(model, HeadSet([(0, 1), (2, 1)]))
        with pytest.raises(UnsupportedError, match="other frozen heads"):
            model(ids[:, 5:], past_key_values=cache)


def test_trainable_patterns_take_a_growing_cache(frozen):
    family, _ = frozen
    ids, trained = tokens(1, 6, seed=9), make(family)
    patterns = synthetic_patterns(len(FROZEN), LENGTH, torch.Generator().manual_seed(4))
    saf.install_(trained, FROZEN, patterns, trainable=True)
    with pytest.raises(UnsupportedError):
        generate(trained, ids, torch.ones_like(ids), cache_implementation="static", do_sample=False)
    assert generate(trained, ids, torch.ones_like(ids), do_sample=False).shape == (1, 6 + NEW)
