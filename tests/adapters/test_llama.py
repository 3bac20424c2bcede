"""Models of transformers, made small here: freezing, generating, training and undoing give what they should."""

import copy

import pytest
import torch

import saf
from saf.adapters import adapter_for
from saf.errors import InputError, UnsupportedError
from saf.heads import HeadSet

transformers = pytest.importorskip("transformers")

from tests.transformers_models import HEADS, LENGTH, VOCAB, freeze, make, tokens  # noqa: E402


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


def test_biases_leave_and_come_back_with_the_rows_of_their_heads():
    test_frozen_heads_attend_by_their_patterns_and_the_others_as_before("llama-biases")
    model = make("llama-biases")
    freeze(model)
    attention = model.model.layers[0].self_attn
    for name, heads in (("q_proj", 2), ("k_proj", 2), ("v_proj", 4)):
        assert getattr(attention, name).bias.shape == (heads * attention.head_dim,)
    assert attention.o_proj.bias.shape == (48,)


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


def test_right_padding_changes_nothing_before_it(family):
    model = make(family).double()
    freeze(model, HeadSet([*HEADS, (2, 0), (2, 1), (2, 2)]))
    ids = torch.cat([tokens(3, 9, seed=4), torch.zeros(3, 5, dtype=torch.long)], 1)
    ids[2] = ids[2].roll(2)
    mask = (ids > 0).long()
    loss = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False).loss
    with torch.no_grad():
        alone = model(ids[:, :9], use_cache=False).logits
        right = model(ids[:2], attention_mask=mask[:2], use_cache=False).logits[:, :9]
        both = model(ids, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(right, alone[:2], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(both[:2, :9], alone[:2], rtol=1e-10, atol=1e-10)
        # Elsewhere in the row: rotations are computed in float32.
        torch.testing.assert_close(both[2, 2:11], model(ids[2:, 2:11]).logits[0], rtol=1e-5, atol=1e-5)
    predicted = both[:, :-1][mask[:, 1:].bool() & mask[:, :-1].bool()]
    wanted = ids[:, 1:][mask[:, 1:].bool() & mask[:, :-1].bool()]
    expected = torch.nn.functional.cross_entropy(torch.cat([predicted, both[2, 1:2]]), torch.cat([wanted, ids[2, 2:3]]))
    torch.testing.assert_close(loss, expected.float(), rtol=1e-6, atol=0)
    loss.backward()
    assert all(layer.self_attn.v_proj.weight.grad.isfinite().all() for layer in model.model.layers)
    mask[0, 4] = 0
    with pytest.raises(InputError, match="at the ends of each row only"):
        model(ids, attention_mask=mask, use_cache=False)
    with pytest.raises(InputError, match="to go on after a prompt, pad on the left"):
        model.generate(ids[:2, :11], attention_mask=(ids[:2, :11] > 0).long(), max_new_tokens=4, eos_token_id=None)


def test_generation_beyond_the_calibrated_length_is_refused_before_its_first_token(family):
    model, ids = make(family), tokens(2, 8, seed=3)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None}
    freeze(model)
    passes = []
    model.model.register_forward_pre_hook(lambda *_: passes.append(1))
    whole = model.generate(ids, max_new_tokens=LENGTH - 7, **options)
    assert whole.shape[1] == LENGTH + 1, "the last token is not read any more"
    passes.clear()
    for ask in ({"max_new_tokens": LENGTH - 6}, {"max_length": LENGTH + 2}):
        with pytest.raises(
            InputError, match=f"may reach {LENGTH + 2} tokens, .* patterns cover {LENGTH}: lower max_new"
        ):
            model.generate(ids, **ask, **options)
    assert not passes
    twin = copy.deepcopy(model)
    saf.uninstall_(model)
    assert model.generate(ids, max_new_tokens=LENGTH - 6, **options).shape[1] == LENGTH + 2
    with pytest.raises(InputError, match="may reach"):
        twin.generate(ids, max_new_tokens=LENGTH - 6, **options)


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


def test_masks_of_pairs_and_other_lengths_are_refused(family):
    model, ids = make(family), tokens(2, 8, seed=3)
    freeze(model)
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits
        again = model(ids, position_ids=torch.arange(8).expand(2, -1), use_cache=False).logits
        torch.testing.assert_close(again, plain)
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
    with pytest.raises(UnsupportedError, match=r"plain nn\.Linear, got \S+\.Adapted"):
        saf.calibrate(model, [tokens()])


def test_layers_of_another_library_are_not_compiled_by_themselves():
    with pytest.raises(UnsupportedError, match="compile='layers' is for the project's own GPT"):
        adapter_for(make("llama")).compiled_by_layer()


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


def test_another_model_of_the_same_config_goes_on_as_before():
    """Also where ours would refuse: output of weights, dropout, packed rows."""
    model = make("qwen3")
    shared = model.config
    other = transformers.Qwen3ForCausalLM(shared).eval()
    ids = tokens(2)

    def outcomes():
        with torch.no_grad():
            packed = torch.cat([torch.arange(20), torch.arange(12)])[None].expand(2, -1)
            yield other(ids, use_cache=False).logits
            yield other(ids, position_ids=packed, use_cache=False).logits
            yield other.generate(ids[:, :8], max_new_tokens=3, do_sample=False, cache_implementation="static")

    expected = list(outcomes())
    freeze(model)
    assert shared._attn_implementation == "sdpa"
    assert all(map(torch.equal, outcomes(), expected))
    assert not hasattr(other.model.layers[0].self_attn, "saf")
    freeze(other)
    saf.uninstall_(model)
    with torch.no_grad():
        assert other(ids, use_cache=False).logits.isfinite().all()
        with pytest.raises(UnsupportedError, match="output_attentions"):
            other(ids, output_attentions=True, use_cache=False)
    saf.uninstall_(other)
    assert all(map(torch.equal, outcomes(), expected))


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
    model.model.layers[1].self_attn.forward = lambda *args, **options: None
    heads = HeadSet((1, head) for head in range(4))
    with pytest.raises(UnsupportedError, match="the forward pass of layer 1 was replaced"):
        saf.install_(model, heads, saf.CompactPattern.from_parameters(*torch.zeros(2, 4, LENGTH)))
    assert model.config._attn_implementation == "sdpa"
    assert all(map(torch.equal, model.parameters(), make("llama").parameters()))
    windowed = make("qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=0)
    with pytest.raises(UnsupportedError, match="sliding window"):
        saf.calibrate(windowed, [tokens()])
    dropping = make("llama", attention_dropout=0.1)
    for refused in (lambda: freeze(dropping), lambda: saf.freeze_(dropping, [tokens()])):
        with pytest.raises(
            UnsupportedError, match=r"this model has 0\.1: set attention_dropout of its attention layers"
        ):
            refused()
    assert all(map(torch.equal, dropping.parameters(), make("llama").parameters()))
    for layer in dropping.model.layers:
        layer.self_attn.attention_dropout = 0.0
    freeze(dropping)
    dropping.model.layers[0].self_attn.attention_dropout = 0.2
    with pytest.raises(UnsupportedError, match=r"this model has 0\.2"):
        dropping.train()(tokens(), use_cache=False)
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=VOCAB))
    with pytest.raises(UnsupportedError, match="GPT2LMHeadModel is not a supported model"):
        adapter_for(gpt2)


@pytest.mark.slow
@pytest.mark.parametrize("first", [(1, 2), (0, 1, 2, 3)], ids=["live", "frozen"])
def test_it_compiles_whole(first):
    model = make("qwen3")
    freeze(model, HeadSet([*((0, head) for head in first), (1, 0), (1, 1), (2, 3)]))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids = tokens(2, seed=7)
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
        mask = torch.ones_like(ids)
        mask[1, :7] = 0
        mask[:, -3:] = 0
        padded, expected = (each(ids, attention_mask=mask, use_cache=False).logits for each in (compiled, model))
        torch.testing.assert_close(padded[mask.bool()], expected[mask.bool()])
        packed = torch.cat([torch.arange(20), torch.arange(12)])[None].expand(2, -1)
        with pytest.raises(RuntimeError, match="one sequence a row"):
            compiled(ids, position_ids=packed, use_cache=False)
