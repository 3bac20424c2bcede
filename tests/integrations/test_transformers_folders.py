"""Folders of `save_pretrained`: models with frozen heads open by `from_pretrained` and give the same outputs."""

import copy
import json
import shutil
import warnings
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import saf
from saf.adapters import adapter_for
from saf.adapters.transformers_folder import folder_hash, section, tell_cost_, with_section
from saf.errors import CheckpointError, SafWarning, UnsupportedError
from saf.heads import HeadSet
from tests.transformers_models import FAMILIES, HEADS, freeze, make, tokens, weight_of

transformers = pytest.importorskip("transformers")

from huggingface_hub import ModelCard  # noqa: E402
from huggingface_hub.errors import EntryNotFoundError  # noqa: E402

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


@pytest.mark.parametrize("family", ["gpt2", "llama-grouped"])
def test_refitted_outputs_come_back_and_are_undone_while_a_sidecar_alone_warns(family, tmp_path):
    model, ordinary = make(family), logits(make(family))
    config = saf.FreezeConfig(heads=tuple(HEADS), max_fit_kl=9.0, refit=True)
    saf.freeze_(model, [tokens()], config)
    model.save_pretrained(tmp_path / "whole")
    again = opened(tmp_path / "whole")
    assert torch.equal(logits(again), logits(model))
    saf.uninstall_(again)
    assert torch.equal(logits(again), ordinary)
    saf.save(model, tmp_path / "sidecar")
    with pytest.warns(UserWarning, match="differ from those saved with the frozen heads .*layer 0: output"):
        saf.load(make(family), tmp_path / "sidecar")


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
    assert not len(saf.freeze_(model, [tokens()], saf.FreezeConfig(count=0)).heads)
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


def test_from_config_refuses_the_configuration_of_frozen_heads(tmp_path):
    model = make("llama")
    freeze(model)
    config = copy.deepcopy(model.config)
    with pytest.raises(UnsupportedError, match=r"open its folder by from_pretrained; .*del config\.saf"):
        transformers.AutoModelForCausalLM.from_config(config)
    del config.saf
    built = transformers.AutoModelForCausalLM.from_config(config)
    assert built.num_parameters() == make("llama").num_parameters()


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


def test_the_model_card_maps_the_heads_and_keeps_what_people_wrote(tmp_path):
    model = make("llama")
    report = saf.freeze_(model, [tokens()], saf.FreezeConfig(count=3, max_fit_kl=99))
    (tmp_path / "README.md").write_text("# Mine\n")
    model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert card.startswith("# Mine\n")
    rows = [line.split()[-1] for line in card.splitlines() if line.startswith("layer")]
    assert [[head for head, mark in enumerate(row) if mark == "F"] for row in rows] == [
        report.heads.in_layer(layer) for layer in range(3)
    ]
    assert "3 heads frozen by variance, patterns by mean" in card
    tell_cost_(tmp_path, "one thing")
    tell_cost_(tmp_path, "another")
    card = (tmp_path / "README.md").read_text()
    named = make("llama")
    saf.freeze_(named, [tokens()], saf.FreezeConfig(heads=[(0, 1)], max_fit_kl=99))
    assert "1 head frozen as named, patterns by mean" in section(adapter_for(named))
    assert card.count("what freezing cost") == 1
    assert card.index("calibrated on") < card.index("- what freezing cost: another\n") < card.index("<!-- end of")
    assert report.statistics.sequences_hash[:16] in card
    again = opened(tmp_path)
    saf.uninstall_(again, [next(iter(report.heads))])
    again.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert card.count("## Frozen attention heads") == 1
    assert "what freezing cost" not in card, "of weights that may be others by now"
    assert card.count("F", card.index("```text"), card.rindex("```")) == 2
    assert with_section(None, "text").startswith("---\nlibrary_name: transformers")


def told_what_it_cost(folder, family="llama"):
    """Save a frozen model and tell what freezing cost; evaluations of the folder stay evaluations of it."""
    model = make(family)
    saf.freeze_(model, [tokens()], saf.FreezeConfig(count=3, max_fit_kl=99))
    model.save_pretrained(folder)
    before = folder_hash(folder)
    tell_cost_(folder, "much")
    assert folder_hash(folder) == before


def card_of(folder):
    return (folder / "README.md").read_text()


@pytest.mark.parametrize("family", FAMILIES)
def test_cards_tell_what_freezing_cost_while_the_weights_are_those(family, tmp_path):
    told_what_it_cost(tmp_path / "one", family)
    card = card_of(tmp_path / "one")
    again = opened(tmp_path / "one")
    again.save_pretrained(tmp_path / "one")
    assert card_of(tmp_path / "one") == card
    assert card.count("- what freezing cost: much\n") == 1
    again.base_model.save_pretrained(tmp_path / "part")
    assert "what freezing cost" not in card_of(tmp_path / "part"), "which predicts nothing"
    again.save_pretrained(tmp_path / "two", max_shard_size="20KB")
    tell_cost_(tmp_path / "two", "more")
    opened(tmp_path / "two").save_pretrained(tmp_path / "two")
    assert card_of(tmp_path / "two") == card.replace("much", "more")


def trained(model):
    with torch.no_grad():
        next(module for name, module in model.named_modules() if name.endswith("mlp.up_proj")).weight.mul_(2)


CHANGES = {
    "trained": trained,
    "another event": lambda model: saf.freeze_(model, [tokens()], saf.FreezeConfig(count=1, max_fit_kl=99)),
    "pruned": lambda model: saf.prune_(model, list(adapter_for(model).live_heads())[:1]),
    "undone": lambda model: saf.uninstall_(model, list(adapter_for(model).frozen_heads())[:1]),
    "in 16 bits": lambda model: model.to(torch.bfloat16),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_freezing_cost_is_not_told_of_other_weights(change, tmp_path):
    told_what_it_cost(tmp_path / "one")
    model = opened(tmp_path / "one")
    assert "what freezing cost" in section(adapter_for(model))
    change(model)
    assert "what freezing cost" not in section(adapter_for(model))
    model.save_pretrained(tmp_path / "one")
    assert "what freezing cost" not in card_of(tmp_path / "one")
    assert "cost" not in json.loads((tmp_path / "one" / "config.json").read_text())["saf"]


def test_the_card_tells_of_heads_that_are_still_frozen(tmp_path):
    model = make("llama")
    first = saf.freeze_(model, [tokens()], saf.FreezeConfig(count=4, max_fit_kl=99))
    second = saf.freeze_(model, [tokens()], saf.FreezeConfig(count=2, max_fit_kl=99))
    assert "4 heads frozen by variance, patterns by mean; calibrated" in section(adapter_for(model))
    kept, *others = first.heads
    saf.uninstall_(model, others[:1])
    model.save_pretrained(tmp_path)
    model = opened(tmp_path)
    assert "3 heads frozen by variance, patterns by mean; 1 more of the same event was undone" in card_of(tmp_path)
    saf.uninstall_(model, [*others[1:], *second.heads])
    model.save_pretrained(tmp_path)
    card = card_of(tmp_path)
    assert "Of the 12 attention heads 1 frozen" in card
    assert "1 head frozen by variance, patterns by mean; 3 more of the same event were undone since; calib" in card
    assert card.count("patterns by mean") == 1
    worst = first.fit_kl[kept]
    assert f"KL of the fits {worst:.4f} nats in the middle, {worst:.4f} at most" in card
    saf.freeze_(model, [tokens()], saf.FreezeConfig(heads=others[:1], max_fit_kl=99))
    assert section(adapter_for(model)).count("1 head frozen") == 2


class Hub:
    """A hub in a folder, which keeps the files that a model sends."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self):
        return self

    def create_repo(self, name, **_):
        return SimpleNamespace(repo_id=name)

    def create_commit(self, *, operations, **_):
        self.folder.mkdir(exist_ok=True)
        for each in operations:
            shutil.copy(each.path_or_fileobj, self.folder / each.path_in_repo)

    def load(self, name, **_):
        """Return the repository's card, in the place of `ModelCard.load`."""
        if not (self.folder / "README.md").is_file():
            raise EntryNotFoundError("no card")
        return ModelCard(self.card())

    def card(self):
        return (self.folder / "README.md").read_text()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The hub that models send to."""
    made = Hub(tmp_path / "hub")
    for place in ("transformers.utils.hub.hf_api", "transformers.modeling_utils.hf_api"):
        monkeypatch.setattr(place, made)
    monkeypatch.setattr(ModelCard, "load", made.load)
    return made


def push_a_folder(model, folder):
    model.save_pretrained(folder, push_to_hub=True, repo_id="me/frozen")


def push_alone(model, folder):
    model.push_to_hub("me/frozen")


PUSHES = pytest.mark.parametrize("push", [push_a_folder, push_alone])


@PUSHES
def test_a_pushed_model_opens_and_its_card_has_the_section(push, hub, tmp_path):
    model = make("llama")
    saf.freeze_(model, [tokens()], saf.FreezeConfig(count=3, max_fit_kl=99))
    model.add_model_tags("mine")
    push(model, tmp_path / "folder")
    assert torch.equal(logits(opened(hub.folder)), logits(model))
    assert hub.card().startswith("---\nlibrary_name: transformers\ntags:\n- saf\n- mine\n---\n")
    assert "3 heads frozen by variance, patterns by mean" in hub.card()
    assert "Model ID" not in hub.card()
    if push is push_a_folder:
        assert (tmp_path / "folder" / "README.md").read_text() == hub.card()
    # From now on the repository has a card, which people may write in.
    (hub.folder / "README.md").write_text(f"{hub.card()}\nThanks.\n")
    saf.prune_(model, HeadSet([(2, 3)]))
    push(model, tmp_path / "folder")
    assert torch.equal(logits(opened(hub.folder)), logits(model))
    assert hub.card().endswith("\nThanks.\n")
    assert "3 frozen and 1 pruned" in hub.card()
    assert hub.card().count("## Frozen attention heads") == 1


@PUSHES
def test_what_freezing_cost_is_pushed(push, hub, tmp_path):
    told_what_it_cost(tmp_path / "one")
    for _ in range(2):  # the second time the repository has a card
        push(opened(tmp_path / "one"), tmp_path / "folder")
        assert hub.card().count("- what freezing cost: much\n") == 1
    assert "what freezing cost" in section(adapter_for(opened(hub.folder)))


def test_a_pushed_folder_keeps_what_its_card_says_where_the_repository_has_none(hub, tmp_path):
    model = make("llama")
    freeze(model)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "README.md").write_text("# Mine\n")
    push_a_folder(model, tmp_path / "folder")
    assert hub.card().startswith("# Mine\n")
    assert hub.card().count("## Frozen attention heads") == 1


@PUSHES
def test_a_model_that_is_ordinary_again_is_pushed_as_any_other(push, hub, tmp_path):
    model = make("llama")
    freeze(model)
    model.save_pretrained(tmp_path / "frozen")
    saf.uninstall_(model)
    push(model, tmp_path / "folder")
    assert not (hub.folder / "saf.json").exists()
    assert "Model Card for Model ID" in hub.card()
    assert "Frozen attention heads" not in hub.card()
