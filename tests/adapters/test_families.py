"""Every family of transformers: freezing, pruning, training and undoing give what they should."""

import copy

import pytest
import torch

import saf
from saf.errors import InputError, UnsupportedError
from saf.heads import BIAS, HeadSet
from saf.models.adapter import adapter_for, language_model, rows_of

transformers = pytest.importorskip("transformers")

from tests.transformers_models import (  # noqa: E402
    FAMILIES,
    HEADS,
    LENGTH,
    freezable,
    freeze,
    logits,
    make,
    tokens,
    weight_of,
)

WHOLE = HeadSet([(0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (2, 0), (2, 1), (2, 2), (2, 3)])
"""The first layer, by which a cache counts its tokens, and the last; one head between them."""
EVERY = HeadSet((layer, head) for layer in range(3) for head in range(4))
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


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
    return logits(model, ids)


def in_steps(model, ids, *sizes):
    """Logits of a prompt that goes on in steps of these sizes, then of one token, with the cache."""
    cache, parts = None, []
    with torch.no_grad():
        for part in ids.split([*sizes, *[1] * (ids.shape[1] - sum(sizes))], 1):
            out = model(part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            parts.append(out.logits)
    return torch.cat(parts, 1), cache


def outcome(model):
    """Logits of whole and of padded rows, and the gradients of a loss."""
    ids = tokens(2, seed=8)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    whole, padded = model(ids, use_cache=False).logits, model(ids, attention_mask=mask).logits
    loss = torch.nn.functional.cross_entropy(whole[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    # In float64 the eager attention of transformers makes padding NaN.
    return [whole, padded.nan_to_num(), *torch.autograd.grad(loss, [*model.parameters()])]


def unchanged(model, family):
    same = all(map(torch.equal, model.parameters(), make(family).to(model.dtype).parameters()))
    return same and all(map(torch.equal, outcome(model), outcome(make(family).to(model.dtype))))


@pytest.mark.parametrize(
    ("family", "heads"),
    [
        *((family, HEADS) for family in FAMILIES),
        *((family, WHOLE) for family in ("qwen3", "llama", "gpt2", "phi3", "gemma3")),
        *((family, EVERY) for family in ("qwen3", "gpt2", "gemma2")),
    ],
)
def test_frozen_heads_attend_by_their_patterns_and_the_others_as_before(family, heads):
    model, untouched = make(family).double(), make(family).double()
    patterns = freeze(model, heads)
    ids = tokens(2, LENGTH - 5, seed=2)
    found = logits(model, ids)
    torch.testing.assert_close(found, by_hand(untouched, patterns, ids), **CLOSE)
    assert not torch.allclose(found, by_hand(make(family).double(), {}, ids), atol=1e-2)
    steps, cache = in_steps(model, ids, 20, 3)
    torch.testing.assert_close(steps, found, **CLOSE)
    site = adapter_for(model).sites()[0]
    live, values = 4 - len(heads.in_layer(0)), site.layout.num_kv_heads
    keys = values if live and site.layout.grouped else live
    rows = [len(weight_of(model, 0, role)) for role in ("query", "key", "value")]
    assert rows == [count * site.head_dim for count in (live, keys, values)]
    assert [cache.layers[0].keys.shape[1], cache.layers[0].values.shape[1]] == [keys, values]
    saf.uninstall_(model)
    assert str(model) == str(make(family)), "projections print their sizes"
    assert unchanged(model, family)


def test_pruned_heads_of_any_layer_compute_what_they_would_with_outputs_of_zero(shape):
    model, untouched = make(shape).double(), make(shape).double()
    layers = model.config.num_hidden_layers
    gone = HeadSet([*((0, head) for head in range(4)), (1, 0), (1, 1), *((layers - 1, head) for head in (1, 2))])
    saf.prune_(model, gone)
    patterns, sites = freeze(model, HeadSet([(1, 3)])), adapter_for(model).sites()
    rows = [len(weight_of(model, layer, "value")) // sites[layer].head_dim for layer in range(2)]
    assert rows == [0, 1 if sites[1].layout.grouped else 2], "keys and values go with a whole group"
    ids = tokens(2, LENGTH - 5, seed=2)
    expected = by_hand(untouched, patterns | dict.fromkeys(gone, torch.zeros(LENGTH, LENGTH)), ids)
    torch.testing.assert_close(logits(model, ids), expected, **CLOSE)
    torch.testing.assert_close(in_steps(model, ids, 20, 3)[0], expected, **CLOSE)
    saf.uninstall_(model)
    assert unchanged(model, shape)


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


@pytest.mark.parametrize("shape", ["qwen3", "gpt2", "gemma2"])
def test_layers_without_live_heads_train_and_come_back_as_they_were(shape):
    model, ids = make(shape).double().train(), tokens(4, seed=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.5)

    def update():
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    update()
    weights = {role: weight for role, (weight, _) in adapter_for(model).sites()[0].projections().items()}
    before = {role: [weight.clone(), optimizer.state[weight]["exp_avg"].clone()] for role, weight in weights.items()}
    freeze(model, WHOLE, optimizer=optimizer)
    for _ in range(2):
        update()
    saf.uninstall_(model, optimizer=optimizer)
    for role, weight in weights.items():
        now = [weight, optimizer.state[weight]["exp_avg"]]
        assert all(map(torch.equal, now, before[role])) is (role.removesuffix(BIAS) in ("query", "key")), role
    update()


def test_dropout_after_the_output_projection_stays():
    model, outputs = make("gpt2", resid_pdrop=1.0).double(), []
    freeze(model, WHOLE)
    model.transformer.h[0].attn.register_forward_hook(lambda module, inputs, output: outputs.append(output[0]))
    for training in (True, False):
        model.train(training)(tokens(), use_cache=False)
    assert [bool(output.any()) for output in outputs] == [False, True]


def test_calibration_measures_equation_1_and_leaves_the_model_as_it_was(family):
    model = make(family)
    statistics = saf.calibrate(model, [tokens()])
    assert model.config.to_dict() == make(family).config.to_dict()
    assert all(map(torch.equal, model.state_dict().values(), make(family).state_dict().values()))
    eager, measured = make(family), freezable(model)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        weights = torch.stack(eager(tokens(), output_attentions=True, use_cache=False).attentions).double()
    variance = ((weights - weights.mean(1, keepdim=True)) ** 2).sum((1, 3, 4)) / ((4 - 1) * LENGTH**2)
    torch.testing.assert_close(statistics.variance[measured], variance[measured], rtol=1e-4, atol=1e-9)
    assert statistics.variance.isnan().sum() == 4 * (len(variance) - len(measured))
    if family == "llama":
        for name in ("eager", "flex_attention"):
            model.set_attn_implementation(name)
            assert torch.equal(saf.calibrate(model, [tokens()]).variance, statistics.variance), name


def test_another_model_of_the_same_config_goes_on_as_before():
    """Also where ours would refuse: output of weights, packed rows."""
    model = make("qwen3")
    shared, ids = model.config, tokens(2)
    other = transformers.Qwen3ForCausalLM(shared).eval()

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
    freeze(other)
    saf.uninstall_(model)
    saf.uninstall_(other)
    assert all(map(torch.equal, outcomes(), expected))


# --- what is refused


def test_masks_and_functions_that_frozen_heads_cannot_follow_are_refused(shape):
    model, ids = make(shape), tokens(2, 8, seed=3)
    # One live head: its weights would be taken for every head's.
    freeze(model, HeadSet((layer, head) for layer in range(3) for head in range(3)))
    refused = [{"attention_mask": torch.zeros(2, 1, 8, 8)}, {"attention_mask": torch.ones(2, 10, dtype=torch.long)}]
    if shape != "gpt2":  # whose layers do not get it
        refused.append({"output_attentions": True})
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits
        for options in refused:
            with pytest.raises(UnsupportedError):
                model(ids, use_cache=False, **options)
        model.set_attn_implementation("eager")
        with pytest.raises(UnsupportedError, match="set_attn_implementation"):
            model(ids, use_cache=False)
        model.set_attn_implementation("saf")
        assert torch.equal(model(ids, use_cache=False).logits, plain)


@pytest.mark.parametrize("change", ["function", "projection", "dropout"])
def test_layers_that_cannot_be_frozen_are_refused_and_unchanged(change):
    model = make("llama", attention_dropout=0.1 * (change == "dropout"))
    if change == "function":
        transformers.AttentionInterface.register("doubled", lambda *args, **options: None)
        model.set_attn_implementation("doubled")
    if change == "projection":
        model.model.layers[1].self_attn.q_proj = type("Adapted", (torch.nn.Linear,), {})(48, 48, bias=False)
    before, function = copy.deepcopy(model.state_dict()), model.config._attn_implementation
    heads = HeadSet((1, head) for head in range(4))
    with pytest.raises(UnsupportedError):
        saf.install_(model, heads, saf.CompactPattern.from_parameters(*torch.zeros(2, 4, LENGTH)))
    assert model.config._attn_implementation == function
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_models_that_cannot_be_frozen_are_refused(tmp_path):
    config = transformers.LlavaConfig(text_config=make("llama").config.to_dict())
    with torch.device("meta"):
        images = transformers.LlavaForConditionalGeneration(config)
    windowed = make("qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=0)
    capped, crossed = make("gemma2"), make("gpt2", add_cross_attention=True)
    capped.config._attn_implementation_internal = "sdpa"  # as transformers 5.17 lets Gemma 2 attend, without its cap
    for refused in (
        lambda: adapter_for(images),
        lambda: saf.calibrate(windowed, [tokens()]),
        lambda: saf.calibrate(capped, [tokens()]),
        lambda: saf.calibrate(crossed, [tokens()]),
        lambda: freeze(make("gpt2", attn_pdrop=0.1)),
    ):
        with pytest.raises(UnsupportedError):
            refused()
    assert language_model(crossed).token_log_probs(tokens(), tokens()).isfinite().all()
    crossed.save_pretrained(tmp_path)
    freeze(type(crossed).from_pretrained(tmp_path, add_cross_attention=False))


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_layers_with_a_sliding_window_stay_ordinary(family):
    model, last = make(family), HeadSet([(3, 1)])
    for refused in (
        lambda: saf.calibrate(model, [tokens()], heads=last),
        lambda: saf.install_(model, last, saf.CompactPattern.from_parameters(*torch.zeros(2, 1, LENGTH))),
        lambda: saf.freeze_(model, [tokens()], saf.FreezeConfig(heads=((0, 0), (3, 1)), max_fit_kl=99)),
    ):
        with pytest.raises(UnsupportedError, match="layer 3 attends within a sliding window"):
            refused()
    report = saf.freeze_(model, [tokens()], saf.FreezeConfig(count=12, max_fit_kl=99))
    assert {layer for layer, _ in report.heads} == {0, 1, 2}
    assert report.in_all == {"frozen": 12, "pruned": 0}
    with pytest.raises(UnsupportedError, match="a norm behind"):
        saf.head_outputs(make(family), [tokens()], saf.calibrate(make(family), [tokens()], collect=("mean_rows",)))


@pytest.mark.slow
def test_it_compiles_whole():
    model = make("qwen3", max_position_embeddings=2 * LENGTH)
    freeze(model, HeadSet([*((0, head) for head in range(4)), (1, 0), (1, 1), (2, 3)]))
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
        with pytest.raises((InputError, torch._dynamo.exc.Unsupported), match=r"patterns cover|InputError"):
            compiled(tokens(2, LENGTH + 1), use_cache=False)
