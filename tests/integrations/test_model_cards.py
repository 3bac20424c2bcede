"""Model cards list frozen heads and what freezing cost, in folders and on the hub."""

import re

import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.errors import EntryNotFoundError

import saf
from saf.errors import InputError
from saf.heads import HeadSet
from saf.hf.model_card import record_cost_
from tests.integrations.training import Hub, frozen, opened
from tests.transformers_models import logits, make, tokens


def frozen_llama(**options):
    model = make("llama")
    return model, saf.freeze_(model, [tokens()], saf.FreezeConfig(max_fit_kl=99, **options))


def frozen_in(card):
    """The heads that the map of a card marks as frozen."""
    rows = re.findall(r"^layer +\d+  (\S+)$", card, re.MULTILINE)
    return HeadSet((layer, head) for layer, row in enumerate(rows) for head, mark in enumerate(row) if mark == "F")


def test_the_card_maps_the_heads_that_are_frozen_now_and_keeps_what_people_wrote(tmp_path):
    model, report = frozen_llama(count=4)
    path = tmp_path / "README.md"
    path.write_text("# Mine\n")
    model.save_pretrained(tmp_path)
    card = path.read_text()
    assert card.startswith("# Mine\n")
    assert frozen_in(card) == report.heads
    assert report.statistics.sequences_hash[:16] in card
    for line in ("one thing", "another"):
        record_cost_(tmp_path, line)
    assert path.read_text().count("what freezing cost") == 1
    again, first = opened(tmp_path), next(iter(report.heads))
    saf.freeze_(again, [tokens()], saf.FreezeConfig(count=2, max_fit_kl=99))
    saf.uninstall_(again, frozen(again) - HeadSet([first]))
    again.save_pretrained(tmp_path)
    card = path.read_text()
    assert frozen_in(card) == HeadSet([first])
    assert card.count("## Frozen attention heads") == 1
    assert card.count("patterns by mean") == 1, "an event all of whose heads were undone is gone"
    assert "what freezing cost" not in card, "of weights that may be others by now"
    with pytest.raises(InputError):
        record_cost_(tmp_path / "elsewhere", "a cost")


def test_a_pushed_model_opens_and_its_card_has_the_section(tmp_path, monkeypatch):
    hub = Hub(tmp_path / "hub")

    def load(name, **_):
        if not (hub.folder / "README.md").is_file():
            raise EntryNotFoundError("no card")
        return ModelCard(hub.card)

    for place in ("transformers.utils.hub.hf_api", "transformers.modeling_utils.hf_api"):
        monkeypatch.setattr(place, hub)
    monkeypatch.setattr(ModelCard, "load", load)
    model, _ = frozen_llama(count=3)
    model.push_to_hub("me/frozen")
    assert torch.equal(logits(opened(hub.folder)), logits(model))
    assert len(frozen_in(hub.card)) == 3
    # From now on the repository has a card, which people may write in.
    (hub.folder / "README.md").write_text(f"{hub.card}\nThanks.\n")
    saf.prune_(model, HeadSet([(2, 3)]))
    model.save_pretrained(tmp_path / "folder", push_to_hub=True, repo_id="me/frozen")
    assert torch.equal(logits(opened(hub.folder)), logits(model))
    assert hub.card.endswith("\nThanks.\n")
    assert "3 frozen and 1 pruned" in hub.card
    assert hub.card.count("## Frozen attention heads") == 1
