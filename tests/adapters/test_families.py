"""Models of transformers, made small here: freezing, generating, training and undoing give what they should."""

import copy

import pytest
import torch

import saf
from saf.adapters import adapter_for, language_model, rows_of
from saf.errors import InputError, SelectionError, UnsupportedError
from saf.heads import HeadSet

transformers = pytest.importorskip("transformers")

from tests.transformers_models import FAMILIES, HEADS, LENGTH, freezable, freeze, make, tokens, weight_of  # noqa: E402


def by_hand(model, patterns, ids):
    """Logits of the untouched model with some heads' rows of attention replaced, through transformers' own hooks."""

    def attend(module, query, key, value, mask, scaling=None, softcap=None, sliding_window=None, **_):
        group = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(group, 1).double() for each in (key, value))
        scores = query.double() @ key.mT * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        unseen = torch.ones(scores.shape[-2:]).triu(1)
        if sliding_window is not None:
            unseen += torch.ones(scores.shape[-2:]).tril(-sliding_window)
        weights = scores.masked_fill(unseen.bool(), float("-inf")).softmax(-1)
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
    site = adapter_for(model).sites()[0]
    assert weight_of(model, 0, "query").shape[0] == 2 * site.head_dim
    keys = site.layout.num_kv_heads if site.layout.grouped else 2
    assert weight_of(model, 0, "key").shape[0] == keys * site.head_dim
    saf.uninstall_(model)
    assert [parameter.shape for parameter in model.parameters()] == before
    assert str(model) == str(make(family)), "projections tell their sizes"
    with torch.no_grad():
        found = model(ids, use_cache=False).logits
    torch.testing.assert_close(found, by_hand(make(family), {}, ids), rtol=2e-4, atol=2e-4)
    assert all(map(torch.equal, model.parameters(), make(family).parameters()))


NO_HEADS = {
    "freeze_": lambda model: saf.freeze_(model, [tokens()], saf.FreezeConfig(count=0)),
    "install_": lambda model: saf.install_(model, [], []),
    "prune_": lambda model: saf.prune_(model, []),
    "undone": lambda model: (freeze(model), saf.uninstall_(model)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_without_edited_heads_it_is_the_ordinary_model_bit_for_bit(family):
    ids, stock = tokens(2, seed=8), outcome(make(family))
    for name, edit in NO_HEADS.items():
        model = make(family)
        edit(model)
        assert all(map(torch.equal, outcome(model), stock)), name
        assert model.config.to_dict() == make(family).config.to_dict(), name
        options = {"attention_mask": torch.ones_like(ids[:, :9]), "max_new_tokens": 5, "do_sample": False}
        assert torch.equal(model.generate(ids[:, :9], **options), make(family).generate(ids[:, :9], **options)), name


def outcome(model):
    """Logits of whole and of padded rows, and the gradients of a loss."""
    ids = tokens(2, seed=8)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    whole, padded = model(ids, use_cache=False).logits, model(ids, attention_mask=mask).logits
    loss = torch.nn.functional.cross_entropy(whole[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    return [whole, padded, *torch.autograd.grad(loss, [*model.parameters()])]


def test_a_soft_cap_that_the_attention_function_leaves_out_is_refused():
    """As transformers up to some 5.1x lets Gemma 2 attend by SDPA."""
    model, expected = make("gemma2"), outcome(make("gemma2"))
    model.config._attn_implementation_internal = "sdpa"
    with pytest.raises(UnsupportedError, match=r"leaves out; call model\.set_attn_implementation\('eager'\)"):
        saf.freeze_(model, [tokens()], saf.FreezeConfig(count=3))
    freeze(frozen := make("gemma2"))
    adapter_for(model).apply_caps()
    assert all(map(torch.equal, outcome(model), expected))
    freeze(model)
    assert all(map(torch.equal, outcome(model), outcome(frozen)))


def test_heads_of_windows_are_not_told_as_frozen():
    report = saf.freeze_(make("gemma3"), [tokens()], saf.FreezeConfig(count=3, max_fit_kl=100))
    assert not report.statistics.measured.all()
    assert report.in_all == {"frozen": 3}
    assert "in all" not in report.summary


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
    assert statistics.variance.shape == (model.config.num_hidden_layers, 4)
    assert model.config._attn_implementation == make(family).config._attn_implementation
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
    seen = by_hand_variance(make(family))
    measured = freezable(model)
    torch.testing.assert_close(statistics.variance[measured], seen[measured], rtol=1e-4, atol=1e-9)
    assert statistics.variance.isnan().sum() == 4 * (len(seen) - len(measured))


def by_hand_variance(model):
    """Eq. (1) from attention weights as transformers' eager attention gives them."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = torch.stack(model(tokens(), output_attentions=True, use_cache=False).attentions).double()
    return ((weights - weights.mean(1, keepdim=True)) ** 2).sum((1, 3, 4)) / ((4 - 1) * LENGTH**2)


def test_tokens_that_a_mask_leaves_out_are_padding_as_transformers_takes_them(family):
    model, ids = make(family), tokens(2, 12, seed=3)
    freeze(model)
    mask = torch.ones_like(ids)
    mask[0, :3], mask[:, 9:] = 0, 0
    with torch.no_grad():
        whole, short = (model(ids, attention_mask=each).logits for each in (mask, mask[:, :9]))
    assert torch.equal(short[mask.bool()], whole[mask.bool()])


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
        if family == "gpt2":  # its layers are not told
            assert not any(w is not None for w in model(ids, output_attentions=True, use_cache=False).attentions or ())
            return
        with pytest.raises(UnsupportedError, match="leave output_attentions out"):
            model(ids, output_attentions=True, use_cache=False)


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_another_attention_function_is_refused_while_heads_are_frozen(family, name):
    if (family, name) == ("gemma2", "sdpa"):
        pytest.skip("transformers does not offer SDPA for Gemma 2")
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
            assert len(report.heads) == model.config.num_hidden_layers
            assert {layer for layer, _ in report.heads} <= {*freezable(model)}
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        gradients = [rows_of(site, "value").parameter.grad for site in adapter_for(model).sites()]
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


@pytest.mark.parametrize(
    ("settings", "error", "expected"),
    [
        ({"count": 1}, InputError, "freezes at least 2 heads, got 1"),
        ({"heads": ((0, 0), (0, 1), (1, 2))}, SelectionError, "asks for 3 heads; 2 can be frozen"),
    ],
)
def test_less_than_whole_groups_is_refused(settings, error, expected):
    with pytest.raises(error, match=expected):
        saf.freeze_(make("qwen3"), [tokens()], saf.FreezeConfig(max_fit_kl=9, whole_groups=True, **settings))


def test_cross_attention_is_refused_before_anything_is_measured(tmp_path):
    model = make("gpt2", add_cross_attention=True)
    batches = iter([tokens()])
    for refused in (
        lambda: saf.freeze_(model, batches),
        lambda: saf.calibrate(model, batches),
        lambda: saf.prune_(model, HEADS),
        lambda: freeze(model),
    ):
        with pytest.raises(UnsupportedError, match=r"GPT2LMHeadModel has cross-attention .*add_cross_attention=False"):
            refused()
    assert len(list(batches)) == 1
    assert language_model(model).token_log_probs(tokens(), tokens()).isfinite().all(), "to evaluate it is no matter"
    model.save_pretrained(tmp_path)
    alone = type(model).from_pretrained(tmp_path, add_cross_attention=False)
    freeze(alone)
    assert len(adapter_for(alone).frozen_heads()) == len(HEADS)


def test_what_cannot_be_frozen_says_so_and_changes_nothing():
    model = make("llama")
    model.model.layers[1].self_attn.forward = lambda *args, **options: None
    heads = HeadSet((1, head) for head in range(4))
    with pytest.raises(UnsupportedError, match="the forward pass of layer 1 was replaced"):
        saf.install_(model, heads, saf.CompactPattern.from_parameters(*torch.zeros(2, 4, LENGTH)))
    assert model.config._attn_implementation == "sdpa"
    assert all(map(torch.equal, model.parameters(), make("llama").parameters()))
    windowed = make("qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=0)
    with pytest.raises(UnsupportedError, match="no head of this model can be frozen: layer 0 attends within a sliding"):
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
    with pytest.raises(UnsupportedError, match=r"0\.1: set attn_dropout\.p of its attention layers"):
        freeze(make("gpt2", attn_pdrop=0.1))
    other = transformers.GPTNeoForCausalLM(
        transformers.GPTNeoConfig(num_layers=1, num_heads=2, hidden_size=8, attention_types=[[["global"], 1]])
    )
    with pytest.raises(
        UnsupportedError, match=r"GPTNeoForCausalLM is not .*, Gemma 3 of .*huggingface\.md, \"How to add"
    ):
        adapter_for(other)


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_layers_with_a_sliding_window_stay_ordinary(family):
    model, last = make(family), HeadSet([(3, 1)])
    with pytest.raises(
        UnsupportedError, match=r"heads \[\[3, 1\]\] cannot be measured: layer 3 attends within a sliding"
    ):
        saf.calibrate(model, [tokens()], heads=last)
    with pytest.raises(UnsupportedError, match="sliding window of 8 positions, which frozen heads do not know; leave"):
        saf.install_(model, last, saf.CompactPattern.from_parameters(*torch.zeros(2, 1, LENGTH)))
    with pytest.raises(
        UnsupportedError, match=r"heads \[\[3, 1\]\] cannot be measured: layer 3 attends within a sliding"
    ):
        saf.freeze_(model, [tokens()], saf.FreezeConfig(heads=((0, 0), (3, 1)), max_fit_kl=99))
    report = saf.freeze_(model, [tokens()], saf.FreezeConfig(count=12, max_fit_kl=99))
    assert {layer for layer, _ in report.heads} == {0, 1, 2}
    with pytest.raises(UnsupportedError, match="where a norm follows the attention layer"):
        saf.head_outputs(make(family), [tokens()], saf.calibrate(make(family), [tokens()], collect=("mean_rows",)))


def test_pruned_heads_of_any_layer_compute_what_they_would_with_outputs_of_zero(family):
    model = make(family).double()
    untouched, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    layers = model.config.num_hidden_layers
    gone = HeadSet([*((0, head) for head in range(4)), (1, 0), *((layers - 1, head) for head in (1, 2))])
    saf.prune_(model, gone)
    patterns = freeze(model, HeadSet([(1, 1), (1, 3)]))
    ids = tokens(2, LENGTH - 5, seed=2)
    expected = by_hand(untouched, patterns | dict.fromkeys(gone, torch.zeros(LENGTH, LENGTH)), ids)
    with torch.no_grad():
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected, rtol=1e-10, atol=1e-10)
        cache, steps = None, []
        for part in (ids[:, :20], ids[:, 20:23], *ids[:, 23:].split(1, 1)):
            out = model(part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits)
        torch.testing.assert_close(torch.cat(steps, 1), expected, rtol=1e-10, atol=1e-10)
    saf.uninstall_(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


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
