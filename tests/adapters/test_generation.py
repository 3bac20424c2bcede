"""Every way to generate with frozen heads yields the tokens of passes that compute everything anew."""

import copy
from contextlib import nullcontext

import pytest
import torch
from transformers import Cache, CompileConfig, DynamicCache, GenerationConfig, StaticCache
from transformers.cache_utils import QuantizedLayer

import saf
from saf.adapters import adapter_for
from saf.bench.models import synthetic_patterns
from saf.errors import InputError, UnsupportedError
from saf.heads import HeadSet
from saf.integrations.transformers import cache_bytes
from tests.adapters.generated import FROZEN, NEW, generate
from tests.transformers_models import LENGTH, SIZES, freeze, make, tokens

HEAD_DIMS = {"llama": SIZES["hidden_size"] // 4, "qwen3": 16}
ROWS = 3


@pytest.fixture(params=[None, "static"], ids=["growing", "fixed"])
def implementation(request):
    return request.param


@pytest.fixture
def padded():
    """Prompts of three lengths, padded on the left, and their mask."""
    ids = tokens(ROWS, 10, seed=5)
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
def test_tokens_are_those_of_passes_without_a_cache(frozen, implementation, padded, mode):
    _, model = frozen
    again = generate(model, *padded, use_cache=False, **MODES[mode])
    assert torch.equal(generate(model, *padded, cache_implementation=implementation, **MODES[mode]), again)


@pytest.mark.parametrize("mode", MODES)
def test_tokens_of_every_family_are_those_of_passes_without_a_cache(family, padded, mode):
    model = make(family)
    freeze(model)
    again = generate(model, *padded, use_cache=False, **MODES[mode])
    assert torch.equal(generate(model, *padded, **MODES[mode]), again)


@pytest.fixture
def streams(monkeypatch):
    """Stand-ins for the CUDA streams on which transformers moves offloaded layers; on a CPU they move nowhere."""

    class Stream(nullcontext):
        def wait_stream(self, other):
            assert isinstance(other, Stream)

    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream())


@pytest.mark.parametrize("mode", ["greedy", "beams"])
@pytest.mark.parametrize("implementation", ["offloaded", "offloaded_static"])
@pytest.mark.usefixtures("streams")
def test_tokens_of_offloaded_caches_are_those_of_passes_without_one(frozen, implementation, padded, mode):
    _, model = frozen
    again = generate(model, *padded, use_cache=False, **MODES[mode])
    assert torch.equal(generate(model, *padded, cache_implementation=implementation, **MODES[mode]), again)


def test_an_offloaded_cache_of_fixed_size_is_refused_where_its_steps_would_be_compiled(frozen, padded, monkeypatch):
    _, model = frozen
    with monkeypatch.context() as on_gpu:
        on_gpu.setattr("saf.adapters.transformers.cache.STREAMS_WAIT", (5, 0))  # whichever version is installed
        on_gpu.setattr(type(model), "device", torch.device("cuda"))
        on_gpu.setattr(type(model), "forward", lambda *_, **__: pytest.fail("a pass was run"))
        with pytest.raises(UnsupportedError, match=r"segmentation fault .*: pass disable_compile=True"):
            generate(model, *padded, cache_implementation="offloaded_static", do_sample=False)
        for allowed in ({"disable_compile": True}, {"cache_implementation": "offloaded"}):
            config = GenerationConfig(**{"cache_implementation": "offloaded_static", "max_length": 12} | allowed)
            model._validate_generated_length(config, 10, False)


@pytest.mark.parametrize("implementation", ["offloaded", "offloaded_static"])
@pytest.mark.parametrize(("version", "races"), [("5.17.0", True), ("5.19.2", True), ("5.20.0.dev0", False)])
def test_offloaded_caches_are_refused_where_their_copies_race(
    frozen, padded, monkeypatch, implementation, version, races
):
    _, model = frozen
    config = GenerationConfig(cache_implementation=implementation, max_length=12, disable_compile=True)
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    model._validate_generated_length(config, 10, False)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    with (
        pytest.raises(UnsupportedError, match=r"wrong tokens .* take transformers 5\.20 or later")
        if races
        else (nullcontext())
    ):
        model._validate_generated_length(config, 10, False)


@pytest.mark.usefixtures("streams")
def test_an_offloaded_cache_made_by_hand_is_refused_before_it_is_filled(frozen, padded, monkeypatch):
    _, model = frozen
    cache = DynamicCache(offloading=True)
    monkeypatch.setattr("saf.adapters.transformers.attention.check_offloading", _refuse)
    with pytest.raises(UnsupportedError, match="on cpu"):
        model(padded[0], past_key_values=cache)
    assert not cache.get_seq_length()


def _refuse(device: torch.device) -> None:
    raise UnsupportedError(f"on {device}")


class Exact(QuantizedLayer):
    """A layer of a quantised cache that loses nothing, whose residual is put in with the rest every four tokens."""

    def __init__(self):
        super().__init__(residual_length=4)

    def _quantize(self, tensor, axis):
        assert tensor.numel()
        return tensor.clone()

    def _dequantize(self, q_tensor):
        return q_tensor


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_quantised_cache_serves_layers_with_a_live_head(family, padded):
    model = make(family)
    freeze(model, HeadSet([(0, 1), (1, 0), (1, 1), *((2, head) for head in range(3))]))
    cache = Cache(layers=[Exact() for _ in range(3)])
    again = generate(model, *padded, use_cache=False, do_sample=False)
    assert torch.equal(generate(model, *padded, past_key_values=cache, do_sample=False), again)
    with pytest.raises(UnsupportedError, match="a quantised cache does not tell"):
        cache_bytes(cache)


def test_a_quantised_cache_of_a_layer_without_live_heads_is_refused(frozen, padded, monkeypatch):
    _, model = frozen
    with pytest.raises(UnsupportedError, match="take the default cache, an offloaded one or one of fixed size"):
        model(padded[0], past_key_values=Cache(layers=[Exact() for _ in range(3)]))
    passes = []
    monkeypatch.setattr(type(model), "forward", lambda *_, **options: passes.append(options))
    with pytest.raises(UnsupportedError, match=r"or leave a head of each layer live \(max_per_layer\)"):
        generate(model, *padded, cache_implementation="quantized", do_sample=False)
    assert not passes


def test_a_cache_given_by_hand_goes_on_in_steps_of_any_size(frozen):
    _, model = frozen
    ids = tokens(2, 22, seed=7)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=LENGTH)):
            for _ in range(1 + isinstance(cache, StaticCache)):  # one of fixed size is emptied and used again
                steps = ids.split([10, 4, 1, 6, 1], 1)
                logits = torch.cat([model(step, past_key_values=cache).logits for step in steps], 1)
                torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)
                cache.reset()


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
@pytest.mark.parametrize("kept", ["all places", "a window", "a window counted by tensors"])
def test_layers_with_a_window_go_on_in_any_cache_that_grows(family, kept):
    """One made without the configuration holds all places; transformers 5.17 counts by tensors once it was cut back."""
    model, ids = make(family, sliding_window=8), tokens(2, 14, seed=7)
    saf.prune_(model, HeadSet([(0, 1), (1, 0)]))
    if family == "gemma3":
        freeze(model, HeadSet([(0, 2)]))
    cache = DynamicCache() if kept == "all places" else DynamicCache(config=model.config)
    parts = []
    with torch.no_grad():
        for step in ids.split([3, 7, 2, 1, 1], 1):
            parts.append(model(step, past_key_values=cache).logits)
            for layer in cache.layers if kept == "a window counted by tensors" else ():
                if hasattr(layer, "cumulative_length"):
                    layer.cumulative_length = torch.as_tensor(layer.cumulative_length)
        whole = model(ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)


def test_padding_that_is_emptied_and_filled_again_counts_for_nothing(frozen, padded):
    _, model = frozen
    ids, mask = padded
    cache = StaticCache(config=model.config, max_cache_len=LENGTH)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        for _ in range(2):
            found = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits
            cache.reset()
        alone = model(ids[:1, 4:], use_cache=False).logits
    torch.testing.assert_close(found[:1, 4:], alone, rtol=1e-4, atol=1e-4)


def test_what_a_mask_tells_of_tokens_to_come_counts_for_nothing(frozen, padded):
    _, model = frozen
    ids, mask = padded
    longer = torch.nn.functional.pad(mask, (0, 7), value=1)
    with torch.no_grad():
        expected, found = (model(ids, attention_mask=each).logits for each in (mask, longer))
    assert torch.equal(found, expected)


def test_frozen_heads_keep_no_keys_unless_a_live_head_reads_them(frozen):
    family, model = frozen
    ids = tokens(2, 6, seed=8)
    sizes = {}
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=LENGTH)):
        model(ids, past_key_values=cache)
        sizes[type(cache)] = cache_bytes(cache)
    kept = {"llama": (3 + 2 + 0) + 3 * 4, "qwen3": (2 + 1 + 0) + 3 * 2}[family]
    told = sum(len(site.layout.rows[role]) for site in adapter_for(model).sites() for role in ("key", "value"))
    assert told == kept
    a_place = 2 * kept * HEAD_DIMS[family] * 4
    assert sizes == {DynamicCache: 6 * a_place, StaticCache: LENGTH * a_place}
    plain = make(family)
    cache = DynamicCache(config=plain.config)
    plain(ids, past_key_values=cache)
    assert cache_bytes(cache) > sizes[DynamicCache]


def test_steps_of_one_token_compile_once_and_whole(padded):
    model = make("qwen3")
    freeze(model, FROZEN)
    again = generate(model, *padded, use_cache=False, do_sample=False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = CompileConfig(backend="aot_eager", mode=None, fullgraph=True)
    compiled._compile_all_devices = True  # transformers compiles on GPUs alone otherwise
    found = generate(model, *padded, cache_implementation="static", compile_config=compiled, do_sample=False)
    assert torch.equal(found, again)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def test_keys_and_values_of_a_step_are_read_where_they_lie(frozen):
    """No tensor as large as a layer's cache is made while one token is computed."""
    _, model = frozen
    length, made = LENGTH, []
    cache = StaticCache(config=model.config, max_cache_len=length)

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dim() == 4 and not function.is_view:
                made.append((result.shape, str(function)))
            return result

    ids = tokens(1, 12, seed=9)
    with torch.no_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        model(ids, past_key_values=cache)
        with Sizes():
            model(ids[:, :1], past_key_values=cache)
    own = {(length, layer.keys.shape[-1]) for layer in cache.layers}
    copies = [(shape, name) for shape, name in made if tuple(shape[-2:]) in own and "index_copy" not in name]
    assert not copies


@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
@pytest.mark.parametrize("others", [[(0, 1), (2, 1)], [(0, 0)], [(1, 0), (2, 1)]], ids=["moved", "fewer", "elsewhere"])
def test_a_cache_goes_on_beside_the_heads_that_it_was_filled_beside_alone(others, fixed):
    """With grouped queries a layer keeps as many keys whichever of its heads are frozen."""
    model, ids = make("qwen3"), tokens(1, 9, seed=9)
    freeze(model, HeadSet([(0, 0), (2, 1)]))
    cache = StaticCache(config=model.config, max_cache_len=LENGTH) if fixed else DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :4], past_key_values=cache)
        twin = copy.deepcopy(model)
        model(ids[:, 4:5], past_key_values=cache)
        twin(ids[:, 5:6], past_key_values=cache)  # its heads are the same
        saf.uninstall_(model)
        freeze(model, HeadSet(others))
        with pytest.raises(UnsupportedError, match="made for other frozen heads"):
            model(ids[:, 6:], past_key_values=cache)
        if not fixed:
            cache.crop(-cache.get_seq_length())
            model(ids[:, :4], past_key_values=cache)
            stepped = model(ids[:, 4:], past_key_values=cache).logits
            torch.testing.assert_close(stepped, model(ids, use_cache=False).logits[:, 4:])


def test_a_cache_that_cannot_be_right_is_refused(frozen):
    family, model = frozen
    ids = tokens(1, 6, seed=9)
    with pytest.raises(InputError, match=f"has {LENGTH + 1} places, .* cover {LENGTH}: make it with max_cache_len"):
        model(ids, past_key_values=StaticCache(config=model.config, max_cache_len=LENGTH + 1))
    early = StaticCache(config=model.config, max_cache_len=LENGTH)
    early.early_initialization(1, model.config.num_key_value_heads, HEAD_DIMS[family], torch.float32, ids.device)
    with pytest.raises(UnsupportedError, match="leave early_initialization"):
        model(ids, past_key_values=early)
    other, cache = make(family), StaticCache(config=model.config, max_cache_len=LENGTH)
    freeze(other, HeadSet([(0, 0), (0, 1), (0, 2), (0, 3)]))
    other(ids, past_key_values=cache)
    with pytest.raises(UnsupportedError, match="made for other frozen heads"):
        model(ids, past_key_values=cache)
    grown = DynamicCache(config=other.config)
    other(ids, past_key_values=grown)
    with pytest.raises(UnsupportedError, match=r"the cache holds .* for layer 0, which keeps .*: .* make a new one"):
        model(ids, past_key_values=grown)
    assert grown.get_seq_length() == ids.shape[1]
    trained = make(family)
    patterns = synthetic_patterns(len(FROZEN), LENGTH, torch.Generator().manual_seed(4))
    saf.install_(trained, FROZEN, patterns, trainable=True)
    with pytest.raises(UnsupportedError, match="patterns that are trained cannot go on"):
        generate(trained, ids, torch.ones_like(ids), cache_implementation="static", do_sample=False)
    assert generate(trained, ids, torch.ones_like(ids), do_sample=False).shape == (1, 6 + NEW)


def test_pruned_heads_leave_a_cache_of_fixed_size_without_their_keys_and_values(frozen):
    family, _ = frozen
    model = make(family)
    saf.prune_(model, HeadSet([(0, 0), (0, 1), (1, 2), *((2, head) for head in range(4))]))
    ids, options = tokens(2, 8, seed=3), {"do_sample": False}
    again = generate(model, ids, torch.ones_like(ids), use_cache=False, **options)
    assert torch.equal(generate(model, ids, torch.ones_like(ids), cache_implementation="static", **options), again)
