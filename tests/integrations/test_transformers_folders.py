"""Folders of `save_pretrained`: models with frozen heads open by `from_pretrained` and give the same outputs."""

import copy
import json
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file

import saf
from saf.adapters import adapter_for
from saf.errors import CheckpointError, SafWarning, UnsupportedError
from saf.heads import HeadSet
from tests.transformers_models import FAMILIES, HEADS, freeze, make, tokens, weight_of

transformers = pytest.importorskip("transformers")


import saf.integrations.transformers  # noqa: E402

EVERY = HeadSet((layer, head) for layer in range(3) for head in range(4))
FIRST = HeadSet((0, head) for head in range(4))


@pytest.fixture(params=["llama", "gemma3"])
def family(request):
    """Name of a family whose layers have an up_proj."""
    return request.param


def logits(model, seed=6):
    with torch.no_grad():
        return model(tokens(2, seed=seed), use_cache=False).logits


def opened(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("heads", [HEADS, FIRST, EVERY], ids=["some", "a-layer", "all"])
def test_a_saved_model_opens_and_is_saved_again_with_the_same_outputs(family, heads, tmp_path):
    model = make(family)
    freeze(model, heads)
    with torch.no_grad():
        weight_of(model, 1).mul_(1.5)  # trained on
    model.save_pretrained(tmp_path / "one")
    first, found = opened(tmp_path / "one", output_loading_info=True)
    assert type(first) is type(model)
    assert not any(found.values())
    first.save_pretrained(tmp_path / "two", max_shard_size="20KB")
    assert (tmp_path / "two" / "model.safetensors.index.json").is_file()
    second = type(model).from_pretrained(tmp_path / "two")
    expected = logits(model)
    for one in (first, second):
        assert torch.equal(logits(one), expected)
        # What was removed is there to come back, and the folder of an ordinary model has no word of it.
        twin = copy.deepcopy(one)
        saf.uninstall_(one)
        assert [tuple(each.shape) for each in one.parameters()] == [tuple(e.shape) for e in make(family).parameters()]
        assert not hasattr(one.config, "saf")
        assert torch.equal(logits(twin), expected)
    second.save_pretrained(tmp_path / "three")
    assert not (tmp_path / "three" / "saf.json").exists()
    attention = make(family).config._attn_implementation
    assert torch.equal(logits(opened(tmp_path / "three", attn_implementation=attention)), logits(second))


def test_pruned_and_final_heads_and_trained_patterns_come_back(tmp_path):
    model = make("llama")
    freeze(model, HeadSet([(0, 1)]))
    saf.prune_(model, HeadSet([(0, 2), (2, 0), (2, 1), (2, 2), (2, 3)]))
    saf.finalize_(model)
    model.save_pretrained(tmp_path / "pruned")
    assert torch.equal(logits(opened(tmp_path / "pruned")), logits(model))
    with pytest.raises(saf.SafError, match="were not kept"):
        saf.uninstall_(opened(tmp_path / "pruned"))
    trained = make("llama")
    saf.freeze_(trained, [tokens()], saf.FreezeConfig(count=3, trainable=True, max_fit_kl=99))
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if name.endswith(("alpha", "rho")):
                parameter.add_(0.1 * torch.arange(len(parameter)))
    trained.save_pretrained(tmp_path / "trained")
    assert torch.equal(logits(opened(tmp_path / "trained")), logits(trained))


def test_dtypes_other_models_of_the_family_and_generation(tmp_path):
    model = make("qwen3")
    freeze(model)
    model.save_pretrained(tmp_path)
    make("qwen3").save_pretrained(tmp_path / "ordinary")
    low, ordinary = (opened(each, dtype=torch.bfloat16) for each in (tmp_path, tmp_path / "ordinary"))
    assert low.model.layers[0].self_attn.saf.frozen_layout.dtype == torch.int64
    assert torch.equal(logits(low), logits(saf.load(ordinary, tmp_path)))
    judge = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    with torch.no_grad():
        hidden = judge.model(tokens(2), use_cache=False).last_hidden_state
        assert torch.equal(hidden, model.model(tokens(2), use_cache=False).last_hidden_state)
    ids = tokens(1, 6)
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(opened(tmp_path).generate(ids, **options), model.generate(ids, **options))


def test_a_device_map_places_layers_and_is_refused_where_it_offloads_them(tmp_path):
    pytest.importorskip("accelerate.utils.dataclasses")  # it is its work
    model = make("llama")
    freeze(model)
    model.save_pretrained(tmp_path / "whole")
    assert torch.equal(logits(opened(tmp_path / "whole", device_map="auto")), logits(model))
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "cpu"}
    places |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    with pytest.raises(UnsupportedError, match=r"device_map offloads layer 1, .*opened whole"):
        opened(tmp_path / "whole", device_map=places, offload_folder=str(tmp_path / "disk"))


def hooked_places(model, away):
    """Places of a model's parts for which accelerate wraps every layer: one part is on disk."""
    base = model.base_model_prefix
    parts = [name for name, part in model.base_model.named_children() if not isinstance(part, torch.nn.ModuleList)]
    layers = "h" if base == "transformer" else "layers"
    names = ["lm_head", *(f"{base}.{name}" for name in (*parts, *(f"{layers}.{number}" for number in range(3))))]
    return dict.fromkeys(names, "cpu") | {f"{base}.{away.replace('layers', layers)}": "disk"}


HOOKED = pytest.mark.parametrize("family", ["llama", "gpt2", "phi3"])


def attention_of(model):
    return adapter_for(model).sites()[0].attention


@HOOKED
@pytest.mark.parametrize("heads", [HeadSet([(0, 0)]), FIRST], ids=["a-head", "a-layer"])
def test_a_device_map_that_needs_hooks_opens_undoes_and_saves(family, heads, tmp_path):
    hooks = pytest.importorskip("accelerate.hooks")
    model, ordinary = make(family), logits(make(family))
    freeze(model, heads)
    model.save_pretrained(tmp_path / "whole")
    places = hooked_places(model, "ln_f" if family == "gpt2" else "norm")
    options = {"device_map": places, "offload_folder": str(tmp_path / "disk")}
    again = opened(tmp_path / "whole", **options)
    assert hasattr(attention_of(again), "_hf_hook")
    assert torch.equal(logits(again), logits(model))
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(opened(tmp_path / "again")), logits(model))
    bare = opened(tmp_path / "whole", **options)
    hooks.remove_hook_from_module(attention_of(bare))
    assert torch.equal(logits(bare), logits(model))
    saf.uninstall_(again)
    assert hasattr(attention_of(again), "_hf_hook"), "the hooks stay around the layer's own pass"
    torch.testing.assert_close(logits(again), ordinary)
    freeze(again, heads)
    assert torch.equal(logits(again), logits(model))


@HOOKED
@pytest.mark.parametrize("heads", [HeadSet([(0, 0)]), FIRST], ids=["a-head", "a-layer"])
def test_a_model_with_hooks_is_frozen_as_without_and_refused_where_its_attention_is_offloaded(family, heads, tmp_path):
    modeling = pytest.importorskip("accelerate.big_modeling")
    config = saf.FreezeConfig(heads=tuple(heads), max_fit_kl=99)
    model, hooked, away = make(family), make(family), make(family)
    norm = "ln_f" if family == "gpt2" else "norm"
    modeling.dispatch_model(hooked, hooked_places(hooked, norm), offload_dir=str(tmp_path / "one"))
    for each in (model, hooked):
        saf.freeze_(each, [tokens()], config)
    assert torch.equal(logits(hooked), logits(model))
    modeling.dispatch_model(away, hooked_places(away, "layers.0"), offload_dir=str(tmp_path / "two"))
    with pytest.raises(UnsupportedError, match=r"weights of layer 0 are offloaded, .*devices in the device_map"):
        saf.freeze_(away, [tokens()], config)


ADAPTED = {"llama": ["q_proj", "k_proj", "o_proj"], "gpt2": ["c_attn", "c_fc"], "phi3": ["qkv_proj", "o_proj"]}


@pytest.mark.parametrize("family", ADAPTED)
@pytest.mark.parametrize("heads", [HEADS, FIRST], ids=["some", "a-layer"])
def test_the_folder_of_an_adapter_opens_on_its_base_with_frozen_heads(family, heads, tmp_path):
    peft = pytest.importorskip("peft")
    model = make(family)
    freeze(model, heads)
    model.save_pretrained(tmp_path / "base")
    options = {"target_modules": ADAPTED[family], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    adapted = peft.get_peft_model(opened(tmp_path / "base"), peft.LoraConfig(**options))
    adapted.save_pretrained(tmp_path / "adapter")
    expected = logits(adapted)
    assert not torch.equal(expected, logits(model))
    shutil.copytree(tmp_path / "base", tmp_path / "both")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(tmp_path / "adapter" / name, tmp_path / "both")
    again, found = opened(tmp_path / "adapter", output_loading_info=True)
    assert not any(found.values())
    for one in (again, type(model).from_pretrained(tmp_path / "adapter"), opened(tmp_path / "both")):
        assert type(one) is type(model)
        torch.testing.assert_close(logits(one), expected)
    make(family).save_pretrained(tmp_path / "base")  # an ordinary one in its place
    with pytest.raises(RuntimeError, match="mismatch"):
        opened(tmp_path / "adapter")


def test_without_the_import_transformers_refuses_by_shape(tmp_path):
    model = make("llama")
    freeze(model)
    model.save_pretrained(tmp_path)
    without = vars(transformers.PreTrainedModel)["from_pretrained"].__func__.__wrapped__
    with pytest.raises(RuntimeError, match="mismatch"):
        without(type(model), tmp_path)
    assert "import saf.integrations.transformers" in json.loads((tmp_path / "config.json").read_text())["saf"].values()


def test_no_heads_frozen_is_the_ordinary_model(tmp_path):
    model, ordinary = make("qwen3"), make("qwen3")
    assert not len(saf.freeze_(model, [tokens()], saf.FreezeConfig(count=0), allow_empty=True).heads)
    assert torch.equal(logits(model), logits(ordinary))
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "saf.json").exists()
    assert torch.equal(logits(opened(tmp_path)), logits(ordinary))


def test_a_part_of_the_model_is_saved_with_its_heads_too(family, tmp_path):
    """The decoder without its output layer, and the model under an adapter of peft that heads were frozen through."""
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(make(family), peft.LoraConfig(target_modules=["up_proj"], task_type="CAUSAL_LM"))
    saf.freeze_(adapted, [tokens()], saf.FreezeConfig(count=3, max_fit_kl=99))
    whole = adapted.merge_and_unload()
    whole.save_pretrained(tmp_path / "whole")
    assert torch.equal(logits(opened(tmp_path / "whole")), logits(whole))
    part = whole.base_model
    part.save_pretrained(tmp_path / "part")
    again = transformers.AutoModel.from_pretrained(tmp_path / "part")
    with torch.no_grad():
        found, expected = (each(tokens(), use_cache=False).last_hidden_state for each in (again, part))
    assert torch.equal(found, expected)
    saf.uninstall_(whole)
    part.save_pretrained(tmp_path / "undone")
    assert not (tmp_path / "undone" / "saf.json").exists()
    assert not hasattr(part.config, "saf")


def test_a_model_around_the_one_that_heads_were_frozen_through_warns_when_it_is_saved(tmp_path):
    model = make("llama")
    freeze(model.base_model)
    with pytest.warns(SafWarning, match=r"through the LlamaModel alone, .* writes no saf\.json .*whole model"):
        model.save_pretrained(tmp_path / "around")
    saf.save(model, tmp_path / "heads")
    with warnings.catch_warnings():
        warnings.simplefilter("error", SafWarning)
        model.base_model.save_pretrained(tmp_path / "part")
        fresh = saf.load(make("llama"), tmp_path / "heads")
        fresh.save_pretrained(tmp_path / "whole")
        saf.prune_(model, HeadSet([(2, 0)]))  # through the whole: from now on it saves its heads
        model.save_pretrained(tmp_path / "pruned")
        saf.uninstall_(model)
        model.save_pretrained(tmp_path / "undone")
    assert torch.equal(logits(opened(tmp_path / "whole")), logits(fresh))
    assert len(adapter_for(opened(tmp_path / "pruned")).heads("pruned")) == 1


def test_from_config_and_weights_without_a_folder_refuse_the_configuration_of_frozen_heads(tmp_path):
    model = make("llama")
    freeze(model)
    config = copy.deepcopy(model.config)
    with pytest.raises(UnsupportedError, match=r"open its folder by from_pretrained; .*del config\.saf"):
        transformers.AutoModelForCausalLM.from_config(config)
    weights = copy.deepcopy(model.state_dict())
    with pytest.raises(UnsupportedError, match=r"in its folder, not in a state_dict: .*del config\.saf.*saf\.load"):
        type(model).from_pretrained(None, config=config, state_dict=weights)
    model.save_pretrained(tmp_path)
    del config.saf
    built = type(model)(config).eval()
    with pytest.warns(SafWarning, match="load the state dict of the frozen model now"):
        saf.load(built, tmp_path)
    built.load_state_dict(weights)
    assert torch.equal(logits(built), logits(model))
    plain = make("llama").state_dict()
    assert torch.equal(
        logits(type(model).from_pretrained(None, config=config, state_dict=plain).eval()), logits(make("llama"))
    )
    built = transformers.AutoModelForCausalLM.from_config(config)
    assert built.num_parameters() == make("llama").num_parameters()


def test_a_class_that_calls_its_layers_otherwise_is_refused_by_the_class_that_was_saved(tmp_path):
    model, config = make("llama"), make("llama").config
    freeze(model)
    model.save_pretrained(tmp_path / "causal")
    told = r"saved of LlamaForCausalLM .* LlamaForQuestionAnswering finds none .* 'transformer\.layers\.0\.self_attn'"
    with pytest.raises(UnsupportedError, match=rf"{told}.* Open .* by LlamaForCausalLM, .*TokenClassification.*=2 has"):
        transformers.AutoModelForQuestionAnswering.from_pretrained(tmp_path / "causal")
    scores = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "causal", num_labels=2)
    part = transformers.AutoModel.from_pretrained(tmp_path / "causal")
    with torch.no_grad():
        hidden = [each(tokens(2), use_cache=False).last_hidden_state for each in (scores.model, part, model.model)]
        assert scores(tokens(2), use_cache=False).logits.shape[-1] == 2
    assert torch.equal(hidden[0], hidden[2])
    assert torch.equal(hidden[1], hidden[2])
    answers = transformers.LlamaForQuestionAnswering(config)
    freeze(answers)
    answers.save_pretrained(tmp_path / "answers")
    again = transformers.AutoModelForQuestionAnswering.from_pretrained(tmp_path / "answers")
    with torch.no_grad():
        found, expected = (each.eval()(tokens(2), use_cache=False).start_logits for each in (again, answers))
    assert torch.equal(found, expected)
    for other in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        with pytest.raises(UnsupportedError, match=r"Open the folder by LlamaForQuestionAnswering$"):
            other.from_pretrained(tmp_path / "answers")


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    model, other = make("llama"), make("llama")
    freeze(model)
    freeze(other, HeadSet([(0, 0), (0, 2), (1, 0), (1, 1), (2, 3)]))
    model.save_pretrained(tmp_path / "one")
    other.save_pretrained(tmp_path / "two")
    shutil.copy(tmp_path / "two" / "model.safetensors", tmp_path / "one")
    with pytest.raises(CheckpointError, match=r"layer 0: .* heads \[0, 2\], this one has frozen heads \[1, 2\]"):
        opened(tmp_path / "one")
    (tmp_path / "two" / "saf.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"saf\.safetensors"):
        opened(tmp_path / "two")
    (tmp_path / "two" / "saf.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json tells of frozen heads, and saf.json or .* is missing"):
        opened(tmp_path / "two")
    make("llama").save_pretrained(tmp_path / "ordinary")
    told = transformers.AutoConfig.from_pretrained(tmp_path / "one")
    with pytest.raises(CheckpointError, match=r"the config that was given tells of frozen heads, .* leave config out"):
        opened(tmp_path / "ordinary", config=told)
    with pytest.raises(UnsupportedError, match="quantise the model once it is open"):
        opened(tmp_path / "one", quantization_config={})
    with pytest.raises(CheckpointError, match=r"import saf\.integrations\.transformers, then from_pretrained"):
        saf.load(tmp_path / "one")


def test_the_sidecar_and_the_folder_hold_the_same_heads(tmp_path):
    model = make("qwen3")
    freeze(model)
    model.save_pretrained(tmp_path / "one")
    saf.save(model, tmp_path / "two")
    for name in ("saf.json", "saf.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert torch.equal(logits(saf.load(make("qwen3"), tmp_path / "one")), logits(model))
    assert any(name.endswith("frozen_layout") for name in load_file(tmp_path / "one" / "model.safetensors"))
