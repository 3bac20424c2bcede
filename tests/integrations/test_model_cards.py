"""Model cards tell of frozen heads and of what freezing cost, in folders and on the hub."""

import shutil
from types import SimpleNamespace

import pytest
import torch

import saf
from saf.heads import HeadSet
from saf.hf.pretrained import record_cost_, section
from saf.models.adapter import adapter_for
from tests.transformers_models import make, tokens

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
    record_cost_(tmp_path, "one thing")
    record_cost_(tmp_path, "another")
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


def card_of(folder):
    return (folder / "README.md").read_text()


def test_the_card_tells_of_heads_that_are_still_frozen(tmp_path):
    model = make("llama")
    first = saf.freeze_(model, [tokens()], saf.FreezeConfig(count=4, max_fit_kl=99))
    second = saf.freeze_(model, [tokens()], saf.FreezeConfig(count=2, max_fit_kl=99))
    assert "4 heads frozen by variance, patterns by mean; calibrated" in section(adapter_for(model))
    saf.uninstall_(model, [*list(first.heads)[1:], *second.heads])
    model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "Of its 12 attention heads this model has 1 frozen, a share of 8.3%." in card
    assert "4 heads frozen (1 of them still) by variance, patterns by mean; calib" in card
    assert card.count("patterns by mean") == 1
    saf.freeze_(model, [tokens()], saf.FreezeConfig(heads=list(first.heads)[1:2], max_fit_kl=99))
    assert section(adapter_for(model)).count("1 head frozen") == 1


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


def test_a_pushed_model_opens_and_its_card_has_the_section(hub, tmp_path):
    model = make("llama")
    saf.freeze_(model, [tokens()], saf.FreezeConfig(count=3, max_fit_kl=99))
    model.add_model_tags("mine")
    model.push_to_hub("me/frozen")
    assert torch.equal(logits(opened(hub.folder)), logits(model))
    assert "- mine" in hub.card()
    assert "3 heads frozen by variance, patterns by mean" in hub.card()
    # From now on the repository has a card, which people may write in.
    (hub.folder / "README.md").write_text(f"{hub.card()}\nThanks.\n")
    saf.prune_(model, HeadSet([(2, 3)]))
    model.save_pretrained(tmp_path / "folder", push_to_hub=True, repo_id="me/frozen")
    assert torch.equal(logits(opened(hub.folder)), logits(model))
    assert hub.card().endswith("\nThanks.\n")
    assert "3 frozen and 1 pruned" in hub.card()
    assert hub.card().count("## Frozen attention heads") == 1
