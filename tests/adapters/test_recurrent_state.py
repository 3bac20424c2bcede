"""Heads with exponential patterns decode from a state: the same numbers as passes that compute everything anew."""

import copy

import pytest
import torch
from transformers import CompileConfig, DynamicCache, StaticCache

import saf
from saf.errors import UnsupportedError
from saf.heads import HeadSet
from saf.integrations.transformers import cache_bytes
from saf.synthetic import synthetic_patterns
from tests.ops.exponential_patterns import exponential_patterns
from tests.transformers_models import FROZEN, generate, logits, make, tokens

PLACES, CHUNK = 260, 64


def frozen_model(family: str, *, compact: int = 0, dtype=torch.float64, heads=FROZEN, seed: int = 0):
    """A model whose heads have exponential patterns, the last `compact` ones compact patterns."""
    full = {"layer_types": ["full_attention"] * 4} if family == "gemma2" else {}
    model = make(family, max_position_embeddings=PLACES, **full).to(dtype)
    patterns = exponential_patterns(len(heads) - compact, PLACES, band=40, seed=seed).singles()
    if compact:
        patterns += synthetic_patterns(compact, PLACES, torch.Generator().manual_seed(4)).singles()
    saf.install_(model, heads, patterns)
    return model


@pytest.fixture(params=["llama", "qwen3", "qwen3-mixed", "gemma2"])
def model(request):
    """Of one KV head each, grouped, with another kind of pattern too, and with a soft cap."""
    family, _, mixed = request.param.partition("-")
    heads = HeadSet([(0, 1), (1, 0), (1, 1)]) if family == "gemma2" else FROZEN
    return frozen_model(family, compact=3 if mixed else 0, heads=heads)


@pytest.mark.parametrize("padded", [False, True])
def test_a_prompt_and_steps_of_any_size_equal_one_pass(model, padded):
    ids = tokens(2, PLACES, seed=7)
    mask = torch.ones_like(ids)
    mask[0, : 70 * padded] = 0
    position = (mask.cumsum(1) - 1).clamp(min=0)
    expected = logits(model, ids, attention_mask=mask, position_ids=position)
    fixed = StaticCache(config=model.config, max_cache_len=PLACES)
    for name, cache in {"growing": DynamicCache(config=model.config), "empty": DynamicCache(), "fixed": fixed}.items():
        at, parts = 0, []
        with torch.no_grad():
            for size in (150, 1, 3, 1, 41, 1, 30, 1):
                own = slice(at, at + size)
                inputs = {"attention_mask": mask[:, : own.stop], "position_ids": position[:, own]}
                parts.append(model(ids[:, own], past_key_values=cache, **inputs).logits)
                at = own.stop
        difference = (torch.cat(parts, 1) - expected[:, :at])[mask[:, :at].bool()]
        assert difference.abs().max() < 1e-8, name


MODES = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 1.5, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
    "looked up": {"do_sample": False, "prompt_lookup_num_tokens": 5},
    "assisted": {"do_sample": False, "assistant_model": "another"},
}
HELP = ("prompt_lookup_num_tokens", "assistant_model")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_generated_tokens_are_those_of_passes_without_a_cache(family, mode):
    model = frozen_model(family, compact=1)
    options = dict(MODES[mode])
    if helped := not options.keys().isdisjoint(HELP):
        options |= {"assistant_model": frozen_model(family, seed=1)} if mode == "assisted" else {}
    rows = 1 if helped else 3
    ids = tokens(rows, 189, seed=5)
    ids[:, 100:] = ids[:, :89]
    mask = torch.ones_like(ids)
    mask[0, : 0 if helped else 75] = 0
    plain = {name: value for name, value in options.items() if name not in HELP}
    expected = generate(model, ids * mask, mask, use_cache=False, **plain)
    for kind in (None,) if helped else (None, "static"):
        found = generate(model, ids * mask, mask, cache_implementation=kind, disable_compile=True, **options)
        assert torch.equal(found, expected), kind


def test_tokens_are_taken_back_up_to_a_chunk():
    model, ids = frozen_model("qwen3"), tokens(1, 230, seed=3)
    expected, cache = logits(model, ids), DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :150], past_key_values=cache)
        for back, count in ((CHUNK, CHUNK + 10), (20, 9), (5, 60)):
            at = cache.get_seq_length() - back
            cache.crop(-back)
            found = model(ids[:, at : at + count], past_key_values=cache).logits
            torch.testing.assert_close(found, expected[:, at : at + count], rtol=1e-8, atol=1e-8)
        cache.crop(-CHUNK)
        with pytest.raises(UnsupportedError, match="at most 64 tokens"):
            cache.crop(-1)
        cache.crop(-cache.get_seq_length())
        found = model(ids[:, :150], past_key_values=cache).logits
        torch.testing.assert_close(found, expected[:, :150], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_linear_heads_hold_a_state_of_one_size_and_no_values(family):
    model = frozen_model(family, dtype=torch.float32)
    sizes = {}
    with torch.no_grad():
        for length in (100, 200):
            cache = DynamicCache(config=model.config)
            model(tokens(2, length), past_key_values=cache)
            sizes[length] = cache_bytes(cache)
    dim = {"llama": 12, "qwen3": 16}[family]
    pairs = {"llama": 3 + 2, "qwen3": 2 + 1}[family]  # keys and values of live heads alone
    state = len(FROZEN) * (3 * CHUNK + 2 * 32) * dim * 4
    assert sizes == {length: 2 * (length * 2 * pairs * dim * 4 + state) for length in sizes}


def test_steps_compile_once_and_whole():
    model, ids = frozen_model("qwen3", compact=1, dtype=torch.float32), tokens(2, 60, seed=5)
    mask = torch.ones_like(ids)
    expected = generate(model, ids, mask, use_cache=False, do_sample=False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = CompileConfig(backend="aot_eager", mode=None, fullgraph=True)  # type: ignore[arg-type]
    compiled._compile_all_devices = True  # type: ignore[assignment] # transformers compiles on GPUs alone otherwise
    options = {"cache_implementation": "static", "compile_config": compiled, "do_sample": False}
    assert torch.equal(generate(model, ids, mask, **options), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def test_states_go_on_without_gradients():
    model, ids = frozen_model("qwen3"), tokens(1, 9, seed=9)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        copy.deepcopy(model)(ids[:, :1], past_key_values=copy.deepcopy(cache))
        with pytest.raises(UnsupportedError, match="other frozen heads"):  # the same heads by other patterns
            frozen_model("qwen3", seed=1)(ids[:, :1], past_key_values=cache)
    with pytest.raises(UnsupportedError, match="no gradients"):
        model(ids[:, :1], past_key_values=cache)
    expected = logits(model, torch.cat([ids, ids[:, :1]], 1))[:, -1:]
    growing = DynamicCache(config=model.config)  # filled with gradients it holds values
    model(ids, past_key_values=growing)
    torch.testing.assert_close(model(ids[:, :1], past_key_values=growing).logits, expected)
