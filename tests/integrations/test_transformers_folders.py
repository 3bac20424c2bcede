"""Folders of `save_pretrained`: models with frozen heads open by `from_pretrained` and give the same outputs."""

import json
import shutil

import pytest
import torch

import saf
from saf.errors import CheckpointError, InputError, UnsupportedError
from saf.heads import HeadSet
from saf.models.adapter import adapter_for
from tests.integrations.training import opened
from tests.transformers_models import FAMILIES, HEADS, freeze, logits, make, tokens, weight_of

transformers = pytest.importorskip("transformers")

import saf.integrations.transformers  # noqa: E402

FIRST = HeadSet((0, head) for head in range(4))
EVERY = HeadSet((layer, head) for layer in range(3) for head in range(4))


def saved(folder, family="llama", heads=HEADS):
    """A frozen model, and the folder that it was saved into."""
    model = make(family)
    freeze(model, heads)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("family", "heads"), [*((family, HEADS) for family in FAMILIES), ("llama", EVERY), ("phi3", FIRST)]
)
def test_a_saved_model_opens_and_is_saved_again_with_the_same_outputs(family, heads, tmp_path):
    model = make(family)
    freeze(model, heads)
    with torch.no_grad():
        weight_of(model, 1).mul_(1.5)  # trained on
    model.save_pretrained(tmp_path / "one")
    first, info = opened(tmp_path / "one", output_loading_info=True)
    assert type(first) is type(model)
    assert not any(info.values())
    first.save_pretrained(tmp_path / "two", max_shard_size="20KB")
    assert (tmp_path / "two" / "model.safetensors.index.json").is_file()
    attention = make(family).config._attn_implementation  # 5.17 opens Gemma 2 by another, which drops its soft caps
    second = type(model).from_pretrained(tmp_path / "two", attn_implementation=attention)
    assert torch.equal(logits(second), logits(model))
    # What was removed comes back, and the folder of an ordinary model says nothing of heads.
    saf.uninstall_(second)
    assert [each.shape for each in second.parameters()] == [each.shape for each in make(family).parameters()]
    second.save_pretrained(tmp_path / "three")
    assert not (tmp_path / "three" / "saf.json").exists()
    assert "saf" not in json.loads((tmp_path / "three" / "config.json").read_text())
    assert torch.equal(logits(opened(tmp_path / "three", attn_implementation=attention)), logits(second))


def test_pruned_final_and_trained_heads_come_back(tmp_path):
    pruned, trained = make("llama"), make("llama")
    freeze(pruned, HeadSet([(0, 1)]))
    saf.prune_(pruned, HeadSet([(0, 2), (2, 0), (2, 1), (2, 2), (2, 3)]))
    saf.finalize_(pruned)
    saf.freeze_(trained, [tokens()], saf.FreezeConfig(count=3, trainable=True, max_fit_kl=99))
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if name.endswith(("alpha", "rho")):
                parameter.add_(0.1 * torch.arange(len(parameter)))
    for name, model in {"pruned": pruned, "trained": trained}.items():
        model.save_pretrained(tmp_path / name)
        assert torch.equal(logits(opened(tmp_path / name)), logits(model)), name
    with pytest.raises(saf.SafError, match="are gone"):
        saf.uninstall_(opened(tmp_path / "pruned"))


def test_dtypes_and_other_models_of_the_family(tmp_path):
    model = saved(tmp_path, "qwen3")
    make("qwen3").save_pretrained(tmp_path / "ordinary")
    low, ordinary = (opened(each, dtype=torch.bfloat16) for each in (tmp_path, tmp_path / "ordinary"))
    assert low.model.layers[0].self_attn.saf.frozen_layout.dtype == torch.int64
    assert torch.equal(logits(low), logits(saf.load(ordinary, tmp_path)))
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    part = transformers.AutoModel.from_pretrained(tmp_path)
    with torch.no_grad():
        expected = model.model(tokens(2), use_cache=False).last_hidden_state
        for each in (classifier.model, part):
            assert torch.equal(each(tokens(2), use_cache=False).last_hidden_state, expected)


def places(model, away):
    """Places of a model's parts for which accelerate wraps every layer: one part is on disk."""
    base = model.base_model_prefix
    parts = [name for name, part in model.base_model.named_children() if not isinstance(part, torch.nn.ModuleList)]
    layers = "h" if base == "transformer" else "layers"
    names = ["lm_head", *(f"{base}.{name}" for name in (*parts, *(f"{layers}.{number}" for number in range(3))))]
    return dict.fromkeys(names, "cpu") | {f"{base}.{away.replace('layers', layers)}": "disk"}


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_a_device_map_with_hooks_opens_freezes_undoes_and_saves(family, tmp_path):
    modeling = pytest.importorskip("accelerate.big_modeling")
    model, ordinary = saved(tmp_path / "whole", family, FIRST), make(family)
    options = {"device_map": places(model, "norm"), "offload_folder": str(tmp_path / "disk")}
    again = opened(tmp_path / "whole", **options)
    attention = adapter_for(again).sites()[0].attention
    assert hasattr(attention, "_hf_hook")
    assert torch.equal(logits(again), logits(model))
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(opened(tmp_path / "again")), logits(model))
    saf.uninstall_(again)
    assert hasattr(attention, "_hf_hook"), "the hooks stay around the layer's own pass"
    torch.testing.assert_close(logits(again), logits(ordinary))
    freeze(again, FIRST)
    assert torch.equal(logits(again), logits(model))
    with pytest.raises(UnsupportedError, match="offload"):
        opened(tmp_path / "whole", **options | {"device_map": places(model, "layers.1")})
    modeling.dispatch_model(ordinary, places(ordinary, "layers.0"), offload_dir=str(tmp_path / "two"))
    with pytest.raises(UnsupportedError, match="device_map"):
        saf.prune_(ordinary, FIRST)


def test_without_the_import_and_for_a_class_with_other_names_a_folder_is_refused(tmp_path):
    model = saved(tmp_path)
    without = vars(transformers.PreTrainedModel)["from_pretrained"].__func__.__wrapped__
    with pytest.raises(RuntimeError, match="mismatch"):
        without(type(model), tmp_path)
    assert "import saf.integrations.transformers" in json.loads((tmp_path / "config.json").read_text())["saf"].values()
    with pytest.raises(UnsupportedError, match=r"by LlamaForCausalLM"):  # whose layers have other names
        transformers.AutoModelForQuestionAnswering.from_pretrained(tmp_path)


def test_parts_of_the_model_are_saved_with_their_heads(tmp_path):
    """The decoder without its output layer, and the model under an adapter of peft that heads were frozen through."""
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(make("gemma3"), peft.LoraConfig(target_modules=["up_proj"], task_type="CAUSAL_LM"))
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
    around = make("gemma3")
    freeze(around.base_model)
    around.save_pretrained(tmp_path / "around")
    assert torch.equal(logits(opened(tmp_path / "around")), logits(around))


def test_saving_an_ordinary_model_of_the_same_configuration_leaves_the_heads_theirs(tmp_path):
    model = saved(tmp_path / "frozen")
    type(model)(model.config).save_pretrained(tmp_path / "ordinary")
    model.save_pretrained(tmp_path / "frozen")
    assert torch.equal(logits(opened(tmp_path / "frozen")), logits(model))
    assert opened(tmp_path / "ordinary").num_parameters() > model.num_parameters()


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    saved(tmp_path / "one")
    saved(tmp_path / "two", heads=HeadSet([(0, 0), (0, 2), (1, 0), (1, 1), (2, 3)]))
    shutil.copy(tmp_path / "two" / "model.safetensors", tmp_path / "one")
    with pytest.raises(CheckpointError, match="layer 0"):
        opened(tmp_path / "one")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "one")
    make("llama").save_pretrained(tmp_path / "ordinary")
    with pytest.raises(CheckpointError, match="frozen heads"):
        opened(tmp_path / "ordinary", config=config)
    with pytest.raises(CheckpointError, match="ordinary must hold frozen heads"):
        saf.load(make("llama"), tmp_path / "ordinary")
    with pytest.raises(InputError, match="open the model first"):
        saf.load(tmp_path / "ordinary", tmp_path / "one")
    with pytest.raises(UnsupportedError, match="quantise"):
        opened(tmp_path / "one", quantization_config={})
    with pytest.raises(CheckpointError, match=r"import saf\.integrations\.transformers"):
        saf.load(tmp_path / "one")
    for name in ("saf.safetensors", "saf.json"):
        (tmp_path / "two" / name).unlink()
        with pytest.raises(CheckpointError, match=r"saf\.safetensors"):
            opened(tmp_path / "two")
