"""Models of transformers, made small here: freezing, generating, training and undoing give what they should."""

import copy
import json
import warnings

import pytest
import torch
from safetensors.torch import load_model

import saf
from saf.adapters import adapter_for
from saf.errors import CheckpointError, InputError, SelectionError, UnsupportedError
from saf.heads import HeadSet
from saf.patterns import dense_pattern

transformers = pytest.importorskip("transformers")

LENGTH, VOCAB = 32, 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 16}),
    "llama": ("Llama", {"num_key_value_heads": 4}),
    "llama-grouped": ("Llama", {"num_key_value_heads": 2}),
    "mistral": ("Mistral", {"num_key_value_heads": 1, "sliding_window": None}),
}
HEADS = HeadSet([(0, 1), (0, 2), (1, 0), (1, 1), (2, 3)])
"""In layer 1 the whole first group of two."""


def make(family: str, **changes):
    name, more = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**(SIZES | more | changes))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
        for parameter in model.parameters():
            parameter.data.normal_(std=0.3 if parameter.dim() > 1 else 1.0)
    return model


def tokens(rows: int = 4, length: int = LENGTH, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def freeze(model, heads: HeadSet = HEADS):
    patterns = dense_pattern(saf.calibrate(model, [tokens()], collect=("mean",)), heads, "mean", dtype=torch.float32)
    saf.install_(model, heads, [patterns[number] for number in range(len(heads))])
    return dict(zip(heads, patterns.weights, strict=True))


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def by_hand(model, patterns, ids):
    """Logits of the untouched model with some heads' rows of attention replaced, through transformers' own hooks."""

    def attend(module, query, key, value, mask, scaling=None, **_):
        group = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(group, 1).double() for each in (key, value))
        scores = query.double() @ key.mT * scaling
        weights = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf")).softmax(-1)
        for (layer, head), pattern in patterns.items():
            if layer == module.layer_idx:
                weights[:, head] = pattern[: weights.shape[-1], : weights.shape[-1]].double()
        return (weights @ value).transpose(1, 2).to(query.dtype), None

    transformers.AttentionInterface.register("by_hand", attend)
    model.set_attn_implementation("by_hand")
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def test_frozen_heads_attend_by_their_patterns_and_the_others_as_before(family):
    model, untouched = make(family), make(family)
    before = [parameter.shape for parameter in model.parameters()]
    patterns = freeze(model)
    ids = tokens(2, LENGTH - 5, seed=2)
    with torch.no_grad():
        found = model(ids, use_cache=False).logits
    torch.testing.assert_close(found, by_hand(untouched, patterns, ids), rtol=2e-4, atol=2e-4)
    assert not torch.allclose(found, by_hand(make(family), {}, ids), atol=1e-2)
    layer = model.model.layers[0].self_attn
    assert layer.q_proj.weight.shape[0] == 2 * layer.head_dim
    grouped = model.config.num_key_value_heads < 4
    assert layer.k_proj.weight.shape[0] == (model.config.num_key_value_heads if grouped else 2) * layer.head_dim
    assert layer.q_proj.out_features == layer.q_proj.weight.shape[0]
    saf.uninstall_(model)
    assert [parameter.shape for parameter in model.parameters()] == before
    with torch.no_grad():
        found = model(ids, use_cache=False).logits
    torch.testing.assert_close(found, by_hand(make(family), {}, ids), rtol=2e-4, atol=2e-4)
    assert all(map(torch.equal, model.parameters(), make(family).parameters()))


def test_calibration_leaves_the_model_as_it_was(family):
    model = make(family)
    before = copy.deepcopy(model.state_dict())
    statistics = saf.calibrate(model, [tokens()])
    assert statistics.variance.shape == (3, 4)
    assert model.config._attn_implementation == "sdpa"
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
    seen = by_hand_variance(make(family))
    torch.testing.assert_close(statistics.variance, seen.to(statistics.variance.dtype), rtol=1e-4, atol=1e-9)


def by_hand_variance(model):
    """Eq. (1) from attention weights as transformers' eager attention gives them."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = torch.stack(model(tokens(), output_attentions=True, use_cache=False).attentions).double()
    return ((weights - weights.mean(1, keepdim=True)) ** 2).sum((1, 3, 4)) / ((4 - 1) * LENGTH**2)


def test_generation_with_a_cache_equals_passes_without_one(family):
    model = make(family)
    freeze(model)
    ids = tokens(2, 8, seed=3)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    cached = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    for _ in range(6):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(cached, ids)


def test_left_padding_changes_nothing(family):
    model = make(family)
    freeze(model)
    ids = tokens(1, 9, seed=4)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], 1)
    mask = (padded > 0).long()
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    alone = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    beside = model.generate(padded, attention_mask=mask, **options)
    assert torch.equal(alone, beside[:, 5:])
    with torch.no_grad(), pytest.raises(InputError, match="left"):
        model(padded.flip(1), attention_mask=mask.flip(1), use_cache=False)


def test_a_cache_of_fixed_size_is_refused_and_works_again_once_heads_are_unfrozen(family):
    model, ids = make(family), tokens(2, 8, seed=3)
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "disable_compile": True}
    options |= {"attention_mask": torch.ones_like(ids), "cache_implementation": "static"}
    before = model.generate(ids, **options)
    freeze(model)
    with pytest.raises(UnsupportedError, match="leave cache_implementation out"):
        model.generate(ids, **options)
    saf.uninstall_(model)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model.generate(ids, **options), before)


def test_several_sequences_in_a_row_and_masks_of_pairs_are_refused(family):
    model, ids = make(family), tokens(2, 8, seed=3)
    freeze(model)
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits
        again = model(ids, position_ids=torch.arange(8).expand(2, -1), use_cache=False).logits
        torch.testing.assert_close(again, plain)
        with pytest.raises(UnsupportedError, match="a row of its own"):
            model(ids, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]), use_cache=False)
        with pytest.raises(UnsupportedError, match="no mask but of padding"):
            model(ids, attention_mask=torch.zeros(2, 1, 8, 8), use_cache=False)
        with pytest.raises(UnsupportedError, match="as long as the input"):
            model(ids, attention_mask=torch.ones(2, 10, dtype=torch.long), use_cache=False)
        with pytest.raises(UnsupportedError, match="leave output_attentions out"):
            model(ids, output_attentions=True, use_cache=False)


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_another_attention_function_is_refused_while_heads_are_frozen(family, name):
    model, ids = make(family), tokens(2, 8, seed=3)
    # One live head: its weights would be taken for every head's.
    freeze(model, HeadSet((layer, head) for layer in range(3) for head in range(3)))
    with torch.no_grad():
        frozen = model(ids, use_cache=False).logits
        model.set_attn_implementation(name)
        with pytest.raises(UnsupportedError, match=f"'saf', not '{name}'"):
            model(ids, use_cache=False)
        model.set_attn_implementation("saf")
        assert torch.equal(model(ids, use_cache=False).logits, frozen)


def test_projections_that_are_no_plain_matrices_are_refused():
    class Adapted(torch.nn.Linear):
        pass

    model = make("llama")
    model.model.layers[1].self_attn.q_proj = Adapted(48, 48, bias=False)
    with pytest.raises(UnsupportedError, match=r"plain nn\.Linear, got Adapted"):
        saf.calibrate(model, [tokens()])


def test_models_for_images_too_are_not_taken_for_their_text_part():
    config = transformers.LlavaConfig(text_config=make("llama").config.to_dict())
    with torch.device("meta"):
        model = transformers.LlavaForConditionalGeneration(config)
    with pytest.raises(UnsupportedError, match="LlavaForConditionalGeneration is not a supported model"):
        adapter_for(model)


def test_a_frozen_model_trains_and_its_optimiser_follows(family):
    model, ids = make(family).train(), tokens(4, seed=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for update in range(4):
        if update == 2:
            config = saf.FreezeConfig(rate=0.25, max_fit_kl=9, max_per_layer=3)
            report = saf.freeze_(model, [ids], config, optimizer=optimizer)
            assert len(report.heads) == 3
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        gradients = [layer.self_attn.v_proj.weight.grad for layer in model.model.layers]
        assert all(gradient.abs().sum() > 0 for gradient in gradients)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for parameter in model.parameters():
        assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape


def test_a_sidecar_freezes_the_same_weights_alike(family, tmp_path):
    model = make(family)
    freeze(model)
    saf.save(model, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh = saf.load(make(family), tmp_path)
    ids = tokens(2, seed=6)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        assert torch.equal(fresh(ids, use_cache=False).logits, expected)
        # Other weights are noticed, and those of the frozen model fit.
        other = make(family)
        for parameter in other.parameters():
            parameter.mul_(1.5)
        with pytest.warns(UserWarning, match="weights differ .*layer 0: key, output, query, value; .*load the state"):
            saf.load(other, tmp_path)
        assert not torch.allclose(other(ids, use_cache=False).logits, expected, atol=1e-2)
        other.load_state_dict(model.state_dict())
        assert torch.equal(other(ids, use_cache=False).logits, expected)
    saf.uninstall_(fresh)
    assert all(map(torch.equal, fresh.parameters(), make(family).parameters()))


@pytest.mark.parametrize("role", ["q", "k", "v", "o"])
def test_weights_trained_after_freezing_are_missed_by_name_until_they_are_loaded(role, family, tmp_path):
    model, ids = make(family, tie_word_embeddings=True), tokens(2, seed=6)
    freeze(model)
    weight = getattr(model.model.layers[1].self_attn, f"{role}_proj").weight
    with torch.no_grad():
        weight.view(-1)[-1] += 1
        expected = model(ids, use_cache=False).logits
    saf.save(model, tmp_path)
    model.save_pretrained(tmp_path / "trained")
    fresh = make(family, tie_word_embeddings=True)
    named = {"q": "query", "k": "key", "v": "value", "o": "output"}[role]
    with pytest.warns(UserWarning, match=rf"weights differ from those saved .*\(layer 1: {named}\)"):
        saf.load(fresh, tmp_path)
    load_model(fresh, tmp_path / "trained" / "model.safetensors")
    with torch.no_grad():
        assert torch.equal(fresh(ids, use_cache=False).logits, expected)


def test_saved_weights_are_compared_in_their_own_dtype_and_files_without_sums_still_load(tmp_path):
    low = make("llama").bfloat16()
    freeze(low)
    saf.save(low, tmp_path / "low")
    high = make("llama")
    freeze(high)
    with torch.no_grad():
        high.model.layers[1].self_attn.v_proj.weight.mul_(2)
    saf.save(high, tmp_path / "high")
    earlier = tmp_path / "high" / "saf.json"
    state = json.loads(earlier.read_text())
    for layer in state["layers"]:
        del layer["weights"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saf.load(make("llama").bfloat16().float(), tmp_path / "low")
        saf.load(make("llama").bfloat16(), tmp_path / "high")
        earlier.write_text(json.dumps(state))
        saf.load(make("llama"), tmp_path / "high")


def test_a_sidecar_of_other_heads_is_refused(tmp_path):
    model = make("qwen3")
    freeze(model)
    saf.save(model, tmp_path)
    for other in (make("llama-grouped"), make("llama"), make("qwen3", num_hidden_layers=2)):
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(CheckpointError, match="frozen heads"):
            saf.load(other, tmp_path)
        assert all(torch.equal(other.state_dict()[name], before[name]) for name in before)


@pytest.mark.parametrize("score", ["variance", "random"])
def test_every_layer_keeps_a_live_head_over_several_events(score):
    model, ids = make("qwen3"), tokens()
    saf.freeze_(model, [ids], saf.FreezeConfig(count=5, score=score, max_fit_kl=99))
    with pytest.warns(UserWarning, match="1 of every layer must stay live"):
        saf.freeze_(model, [ids], saf.FreezeConfig(count=7, score=score, max_fit_kl=99))
    assert [site.layout.num_live for site in adapter_for(model).sites()] == [1, 1, 1]
    with pytest.raises(SelectionError, match=r"asks for 1 heads; 0 can be frozen \(1 of every layer must stay live"):
        saf.freeze_(model, [ids], saf.FreezeConfig(count=1, strict=True))


def test_another_model_of_the_same_config_goes_on_as_before():
    model = make("qwen3")
    other = transformers.Qwen3ForCausalLM(model.config).eval()
    ids = tokens(2)
    with torch.no_grad():
        expected = other(ids, use_cache=False).logits
        freeze(model)
        torch.testing.assert_close(other(ids, use_cache=False).logits, expected)
        assert not hasattr(other.model.layers[0].self_attn, "saf")


def test_whole_groups():
    model = make("qwen3")
    report = saf.freeze_(
        model, [tokens()], saf.FreezeConfig(rate=0.5, max_fit_kl=9, whole_groups=True, max_per_layer=2)
    )
    assert len(report.heads) == 6
    groups = {(layer, head // 2) for layer, head in report.heads}
    assert len(groups) == 3
    assert model(tokens(2), use_cache=False).logits.isfinite().all()


def test_what_cannot_be_frozen_says_so_and_changes_nothing():
    model = make("llama")
    patterns = dense_pattern(saf.calibrate(model, [tokens()], collect=("mean",)), [(1, h) for h in range(4)], "mean")
    with pytest.raises(UnsupportedError, match="need a live head in every layer; freeze 3 of 4 at most"):
        saf.install_(model, HeadSet([(1, head) for head in range(4)]), [patterns[number] for number in range(4)])
    assert model.config._attn_implementation == "sdpa"
    assert all(map(torch.equal, model.parameters(), make("llama").parameters()))
    with pytest.raises(UnsupportedError, match="attention_bias"):
        saf.calibrate(make("llama", attention_bias=True), [tokens()])
    windowed = make("qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=0)
    with pytest.raises(UnsupportedError, match="sliding window"):
        saf.calibrate(windowed, [tokens()])
    dropping = make("llama", attention_dropout=0.1)
    freeze(dropping)
    with pytest.raises(UnsupportedError, match="attention_dropout"):
        dropping.train()(tokens(), use_cache=False)
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=VOCAB))
    with pytest.raises(UnsupportedError, match="GPT2LMHeadModel is not a supported model"):
        adapter_for(gpt2)


@pytest.mark.slow
def test_it_compiles_whole():
    model = make("qwen3")
    freeze(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids = tokens(2, seed=7)
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
        mask = torch.ones_like(ids)
        mask[1, :7] = 0
        padded, expected = (each(ids, attention_mask=mask, use_cache=False).logits for each in (compiled, model))
        torch.testing.assert_close(padded[mask.bool()], expected[mask.bool()])
        packed = torch.cat([torch.arange(20), torch.arange(12)])[None].expand(2, -1)
        with pytest.raises(RuntimeError, match="one sequence a row"):
            compiled(ids, position_ids=packed, use_cache=False)
