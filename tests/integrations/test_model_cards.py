"""Model cards tell of frozen heads and of what freezing cost, in folders and on the hub."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch

import saf
from saf.adapters import adapter_for
from saf.adapters.transformers.folder import folder_hash, section, tell_cost_, with_section
from saf.heads import HeadSet
from tests.transformers_models import FAMILIES, freeze, make, tokens

transformers = pytest.importorskip("transformers")

from huggingface_hub import ModelCard  # noqa: E402
from huggingface_hub.errors import EntryNotFoundError  # noqa: E402

import saf.integrations.transformers  # noqa: E402


def logits(model, seed=6):
    with torch.no_grad():
        return model(tokens(2, seed=seed), use_cache=False).logits


def opened(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


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
    assert "Of its 12 attention heads this model has 1 frozen, a share of 8.3%." in card
    assert "1 head frozen by variance, patterns by mean; 3 more of the same event were undone since; calib" in card
    assert card.count("patterns by mean") == 1
    worst = first.fit_kl[kept]
    assert f"KL of the fits {worst:.4f} nats (median), {worst:.4f} at most" in card
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
