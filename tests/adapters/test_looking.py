"""Looking at a model and measuring it change nothing in it: weights, configuration, methods, hooks, attributes."""

import copy

import pytest
import torch

import saf
from saf.errors import UnsupportedError
from saf.heads import BIAS, roles_of
from saf.models.adapter import adapter_for, language_model

SHAPE = {"vocab_size": 61, "num_layers": 3, "num_heads": 4, "hidden_size": 48, "max_length": 32}


def traces(model):
    """Everything about a model that looking could leave behind, apart from tensors' values."""
    found = {"config": (copy.deepcopy(model.config.to_dict()), repr(vars(model.config)))}
    for name, module in model.named_modules():
        hooks = {key: dict(value) for key, value in vars(module).items() if "_hooks" in key and hasattr(value, "items")}
        tensors = {**module._parameters, **module._buffers}
        own = (sorted(vars(module)), module.forward, list(module._modules), module.training)
        found[name] = (*own, hooks, {key: (id(one), one is None or one.grad) for key, one in tensors.items()})
    return found


@pytest.fixture(params=["gpt", "qwen3", "gpt2", "gemma2"])
def looked_at(request):
    """A model and tokens; afterwards the model is as it was."""
    ids = torch.randint(3, 61, (4, 32), generator=torch.Generator().manual_seed(1))
    if request.param == "gpt":
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = saf.GPT(saf.GPTConfig(**SHAPE)).eval()
    else:
        pytest.importorskip("transformers")
        from tests.transformers_models import make

        model = make(request.param)
    before, weights = traces(model), copy.deepcopy(model.state_dict())
    yield model, ids
    assert traces(model) == before
    after = model.state_dict()
    assert after.keys() == weights.keys()
    assert all(torch.equal(after[name], weights[name]) for name in weights)


def test_an_adapter_and_its_answers(looked_at):
    model, ids = looked_at
    adapter = adapter_for(model)
    assert (adapter.max_length, adapter.vocab_size) == (32, 61)
    assert (adapter.device, adapter.dtype) == (torch.device("cpu"), torch.float32)
    assert len(adapter.heads("live")) == 4 * len(adapter.sites())
    for site in adapter.sites():
        assert (site.layout.frozen, site.frozen, dict(site.removed)) == ((), None, {})
        held = [role for name in site.projections() for role in roles_of(name) if not name.endswith(BIAS)]
        assert held == ["query", "key", "value", "output"]
        site.check(site.layout)
        site.pin("math")
        site.pin("auto")
    with torch.no_grad():
        log_probs = adapter.token_log_probs(ids[:, :-1], ids[:, 1:])
        torch.testing.assert_close(adapter.next_token_loss(ids[:, :-1], ids[:, 1:]), -log_probs.mean())
        following = adapter.last_logits(model, ids[:, :-1]).log_softmax(-1)[:, 0]
        torch.testing.assert_close(following.gather(1, ids[:, -1:])[:, 0], log_probs[:, -1], rtol=1e-4, atol=1e-5)


def test_measuring_and_freezing_that_is_undone(looked_at):
    model, ids = looked_at
    statistics = saf.calibrate(model, [ids], collect=("mean_rows",))
    sites = adapter_for(model).sites()
    ordinary = [site.unsupported_reason is not None for site in sites]
    assert [bool(row.isnan().any()) for row in statistics.variance] == ordinary
    if not sites[0].post_norm:
        assert not saf.head_outputs(model, [ids], statistics).gram.isnan().any()
    assert not saf.gate_gradients(model, [ids]).isnan().any()
    if not isinstance(model, saf.GPT):  # whose state dict says that it was edited
        report = saf.freeze_(model, [ids], saf.FreezeConfig(count=3, max_fit_kl=9))
        assert adapter_for(model).heads("frozen") == report.heads
        saf.uninstall_(model)


def test_other_causal_models_are_evaluated_but_not_edited():
    transformers = pytest.importorskip("transformers")
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_size": 8, "vocab_size": 61, "max_position_embeddings": 32}
    model = transformers.GPTNeoForCausalLM(transformers.GPTNeoConfig(**sizes, attention_types=[[["global"], 1]])).eval()
    language, ids = language_model(model), torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(ids).logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
        torch.testing.assert_close(language.token_log_probs(ids[:, :-1], ids[:, 1:]), expected)
    assert (language.max_length, language.vocab_size) == (32, 61)
    with pytest.raises(UnsupportedError, match="GPTNeoForCausalLM is not of a supported family"):
        adapter_for(model)
