"""Steps of a token with a cache of fixed size on a CUDA device: one graph, captured once, serves them all."""

import pytest
import torch

import saf
from saf.bench.record import kernels_of
from saf.errors import UnsupportedError
from saf.heads import HeadSet
from saf.hf.cache import SAFE_OFFLOADING
from saf.machine import GraphPool, GraphReplay
from saf.synthetic import synthetic_patterns
from tests.ops.exponential_patterns import exponential_patterns

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.gpu
CUDA, PLACES, PROMPT = torch.device("cuda"), 400, 300
HEADS = HeadSet([(0, 1), (1, 0), (1, 1), (1, 5), *((2, head) for head in range(8))])
"""Of grouped queries in layer 0 one head, in 1 the first group and another head, in 2 all."""


def make(kv_heads: int, dtype: torch.dtype = torch.bfloat16, *, exponential: bool = False) -> torch.nn.Module:
    config = transformers.Qwen3Config(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=kv_heads, head_dim=64, max_position_embeddings=PLACES,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).to(CUDA, dtype).eval()
    if exponential:
        saf.install_(model, HEADS, exponential_patterns(len(HEADS), PLACES, band=100))
    else:
        saf.install_(model, HEADS, synthetic_patterns(len(HEADS), PLACES, torch.Generator().manual_seed(0), CUDA))
    return model


@pytest.mark.parametrize("kv_heads", [8, 4])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("exponential", [False, True])
def test_a_captured_step_is_replayed_at_every_place(kv_heads, padded, exponential):
    """Places 300 to 399 cross two boundaries of chunks, where recurrent states are moved on."""
    model = make(kv_heads, exponential=exponential)
    ids = torch.randint(0, 512, (2, PLACES), generator=torch.Generator().manual_seed(1)).to(CUDA)
    mask = torch.ones_like(ids)
    mask[0, : 70 * padded] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = transformers.StaticCache(config=model.config, max_cache_len=PLACES)
    token, place = ids[:, PROMPT : PROMPT + 1].clone(), positions[:, PROMPT : PROMPT + 1].clone()

    def step() -> torch.Tensor:
        return model(token, attention_mask=mask, position_ids=place, past_key_values=cache).logits

    def go_back() -> torch.Tensor:
        cache.reset()
        own = {"attention_mask": mask[:, :PROMPT], "position_ids": positions[:, :PROMPT]}
        return model(ids[:, :PROMPT], past_key_values=cache, **own).logits.float()

    with torch.no_grad():
        whole = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits.float()
        go_back()
        replay = GraphReplay(step, device=CUDA, pool=GraphPool())
        first = go_back()  # after what warming up and capturing wrote
        actual = []
        for at in range(PROMPT, PLACES):
            token.copy_(ids[:, at : at + 1])
            place.copy_(positions[:, at : at + 1])
            replay()
            actual.append(replay.outcome.float())
    assert (first[1] - whole[1, :PROMPT]).norm() < 2e-2 * whole[1, :PROMPT].norm()
    expected = whole[:, PROMPT:]
    assert (torch.cat(actual, 1) - expected).norm() < 3e-2 * expected.norm()


def test_a_step_of_a_layer_with_frozen_heads_is_one_kernel_and_one_that_adds_up():
    """Layers 0 and 1 have live heads too, which run in the same launch."""
    model = make(8)
    ids = torch.randint(0, 512, (1, PROMPT), device=CUDA)
    cache = transformers.StaticCache(config=model.config, max_cache_len=PLACES)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        kernels = kernels_of(lambda: model(ids[:, :1], past_key_values=cache), CUDA)
    for own, layers in (("flash_decode_kernel", 3), ("merge_kernel", 3)):
        assert sum(kernel["calls"] for kernel in kernels if kernel["name"].startswith(own)) == layers


def padded_prompt() -> tuple[torch.Tensor, dict]:
    """Return two prompts, the first padded, and options of `generate` with their mask."""
    ids = torch.randint(3, 512, (2, 30), device=CUDA)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    return ids, {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "eos_token_id": None}


@pytest.mark.parametrize("kv_heads", [8, 4])
def test_generated_tokens_are_those_of_growing_caches_and_compiled_once(kv_heads):
    """In float32 no two tokens are near enough to one another for a rounding to swap them."""
    model, (ids, options) = make(kv_heads, torch.float32), padded_prompt()
    # On a GPU transformers compiles steps of a cache of fixed size, as CUDA graphs. They come first: what another pass
    # had made ready would hide that a step makes, in the graph's memory, what it then keeps.
    fixed = model.generate(ids, cache_implementation="static", **options)
    grown = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, use_cache=False, **options), grown)
    assert torch.equal(fixed, grown)


@pytest.mark.parametrize("implementation", ["offloaded", "offloaded_static"])
def test_layers_that_wait_in_the_memory_of_the_host_yield_the_same_tokens(implementation):
    model, (ids, options) = make(4, torch.float32), padded_prompt()
    grown = model.generate(ids, **options)
    # transformers compiles steps with caches of fixed size; compiling one that is offloaded ends the process.
    options |= {"disable_compile": True, "cache_implementation": implementation}
    if tuple(map(int, transformers.__version__.split(".")[:2])) < SAFE_OFFLOADING:
        with pytest.raises(UnsupportedError, match="offloaded cache"):
            model.generate(ids, **options)
    else:
        assert torch.equal(model.generate(ids, **options), grown)


@pytest.mark.parametrize("mode", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 5}, {}])
def test_tokens_generated_from_a_recurrent_state_are_those_of_passes_without_a_cache(mode):
    model = make(4, torch.float32, exponential=True)
    ids = torch.randint(3, 512, (1 if "prompt_lookup_num_tokens" in mode else 2, 60), device=CUDA).repeat(1, 2)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
    plain = {name: value for name, value in mode.items() if name == "num_beams"}
    expected = model.generate(ids, use_cache=False, **options, **plain)
    for kind in ("static", None) if "prompt_lookup_num_tokens" not in mode else (None,):
        assert torch.equal(model.generate(ids, cache_implementation=kind, **options, **mode), expected), kind


def test_a_step_of_a_layer_of_linear_heads_is_one_kernel_whose_state_does_not_grow():
    model, ids, sizes = make(8, exponential=True), torch.randint(0, 512, (1, PROMPT), device=CUDA), []
    with torch.no_grad():
        for length in (PROMPT, PROMPT // 2):
            cache = transformers.DynamicCache(config=model.config)
            model(ids[:, :length], past_key_values=cache)
            kernels = kernels_of(lambda past=cache: model(ids[:, :1], past_key_values=past), CUDA)
            assert sum(kernel["calls"] for kernel in kernels if kernel["name"].startswith("step_kernel")) == 3
            sizes.append(sum(layer.ring.nbytes + layer.sums.nbytes for layer in cache.layers))
            assert not cache.layers[2].keys.numel()
            assert not cache.layers[2].values.numel()
    assert sizes[0] == sizes[1]
