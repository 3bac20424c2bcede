"""Model cards list frozen heads and what freezing cost, in folders and on the hub."""

import re
import shutil
from types import SimpleNamespace

import pytest
import torch

import saf
from saf.errors import InputError
from saf.heads import HeadSet
from saf.hf.pretrained import record_cost_
from saf.models.adapter import adapter_for
from tests.transformers_models import make, tokens

transformers = pytest.importorskip("transformers")

from huggingface_hub import ModelCard  # noqa: E402
from huggingface_hub.errors import EntryNotFoundError  # noqa: E402

import saf.integrations.transformers  # noqa: E402


def frozen_llama(**options):
    model = make("llama")
    return model, saf.freeze_(model, [tokens()], saf.FreezeConfig(max_fit_kl=99, **options))


def logits(model):
    with torch.no_grad():
        return model(tokens(2, seed=6), use_cache=False).logits


def opened(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def card_of(folder):
    return (folder / "README.md").read_text()


def frozen_in(card):
    """The heads that the map of a card marks as frozen."""
    rows = re.findall(r"^layer +\d+  (\S+)$", card, re.MULTILINE)
    return HeadSet((layer, head) for layer, row in enumerate(rows) for head, mark in enumerate(row) if mark == "F")


def test_the_card_maps_the_heads_that_are_frozen_now_and_keeps_what_people_wrote(tmp_path):
    model, report = frozen_llama(count=4)
    (tmp_path / "README.md").write_text("# Mine\n")
    model.save_pretrained(tmp_path)
    card = card_of(tmp_path)
    assert card.startswith("# Mine\n")
    assert frozen_in(card) == report.heads
    assert report.statistics.sequences_hash[:16] in card
    assert f"calibration loss {report.loss.before:.4f} nats before" in card
    for line in ("one thing", "another"):
        record_cost_(tmp_path, line)
    assert card_of(tmp_path).count("what freezing cost") == 1
    again, first = opened(tmp_path), next(iter(report.heads))
    saf.freeze_(again, [tokens()], saf.FreezeConfig(count=2, max_fit_kl=99))
    saf.uninstall_(again, adapter_for(again).heads("frozen") - HeadSet([first]))
    again.save_pretrained(tmp_path)
    card = card_of(tmp_path)
    assert frozen_in(card) == HeadSet([first])
    assert card.count("## Frozen attention heads") == 1
    assert "4 heads frozen (1 of them still) by variance" in card
    assert card.count("patterns by mean") == 1, "an event all of whose heads were undone is gone"
    assert "what freezing cost" not in card, "of weights that may be others by now"
    with pytest.raises(InputError):
        record_cost_(tmp_path / "elsewhere", "a cost")


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
        return ModelCard(card_of(self.folder))


def test_a_pushed_model_opens_and_its_card_has_the_section(tmp_path, monkeypatch):
    hub = Hub(tmp_path / "hub")
    for place in ("transformers.utils.hub.hf_api", "transformers.modeling_utils.hf_api"):
        monkeypatch.setattr(place, hub)
    monkeypatch.setattr(ModelCard, "load", hub.load)
    model, _ = frozen_llama(count=3)
    model.push_to_hub("me/frozen")
    assert torch.equal(logits(opened(hub.folder)), logits(model))
    assert len(frozen_in(card_of(hub.folder))) == 3
    # From now on the repository has a card, which people may write in.
    (hub.folder / "README.md").write_text(f"{card_of(hub.folder)}\nThanks.\n")
    saf.prune_(model, HeadSet([(2, 3)]))
    model.save_pretrained(tmp_path / "folder", push_to_hub=True, repo_id="me/frozen")
    assert torch.equal(logits(opened(hub.folder)), logits(model))
    assert card_of(hub.folder).endswith("\nThanks.\n")
    assert "3 frozen and 1 pruned" in card_of(hub.folder)
    assert card_of(hub.folder).count("## Frozen attention heads") == 1
