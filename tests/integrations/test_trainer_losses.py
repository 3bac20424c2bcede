"""What an event in a Trainer costs is logged; after the last update one that costs too much is refused and undone."""

import logging

import pytest
import torch
from torch.nn.functional import cross_entropy

import saf
from saf.errors import LossError
from saf.models.adapter import adapter_for
from tests.integrations.test_trainer import LENGTH, callback, frozen, same, trainer
from tests.transformers_models import make, tokens

transformers = pytest.importorskip("transformers")

ALL = saf.FreezeConfig(rate=1.0, max_fit_kl=99)


def sharp():
    """A model whose attention decides what it predicts."""
    model = make("llama")
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 30
        layer.self_attn.k_proj.weight.data *= 10
        layer.self_attn.o_proj.weight.data *= 100
    model.lm_head.weight.data *= 30
    return model


def spoken(model):
    """Sequences that the model itself says, so that any other predicts them worse."""
    generator, ids = torch.Generator().manual_seed(3), tokens(4, 1)
    while ids.shape[1] < LENGTH:
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1, generator=generator)], 1)
    return ids


def loss(model, text):
    with torch.no_grad():
        logits = model(text, use_cache=False).logits[:, :-1].double()
    return float(cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()))


def test_an_event_within_training_chooses_heads_by_joint_cost_on_the_held_out_text(hf, tmp_path):
    text = [tokens(4, LENGTH, seed=5)]
    event = callback(saf.OneTime(2), saf.FreezeConfig(rate=0.25, budget=9.0, max_fit_kl=99), heldout=text)
    run = trainer(hf, tmp_path, event, max_steps=3, save_strategy="no")
    run.train()
    assert len(frozen(run.model)) > 0


def test_an_event_is_a_line_of_the_log_and_a_metric(hf, tmp_path, caplog):
    text, event = tokens(3, LENGTH, seed=5), callback(heldout=[tokens(3, LENGTH, seed=5)])
    run = trainer(hf, tmp_path, event, save_strategy="no")
    with caplog.at_level(logging.INFO, logger="saf"):
        run.train()
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("saf")]
    assert "update 4" in line
    assert f"{len(frozen(run.model))} of" in line
    (metrics,) = [entry for entry in run.state.log_history if "frozen_heads" in entry]
    assert (metrics["step"], metrics["frozen_heads"]) == (4, 4)
    recorded = event.events[0].values
    assert metrics["heldout_loss_before"] == recorded["loss_before"]
    assert metrics["heldout_loss_after"] == recorded["loss_after"]
    # Without further training the loss after the event is that of the model.
    last = callback(saf.OneTime(1.0), heldout=[text], accept_loss=True)
    run = trainer(hf, tmp_path / "last", last, save_strategy="no")
    run.train()
    assert run.state.log_history[-2]["heldout_loss_after"] == pytest.approx(loss(run.model.eval(), text), abs=1e-5)


def test_after_the_last_update_a_rise_is_refused_and_what_was_trained_is_saved(hf, tmp_path):
    text, options = spoken(sharp()), {"learning_rate": 1e-9, "save_steps": UPDATES, "max_steps": UPDATES}
    ordinary = trainer(hf, tmp_path / "ordinary", model=sharp(), **options)
    ordinary.train()
    event = callback(saf.OneTime(1.0), ALL, heldout=[text])
    refused = trainer(hf, tmp_path / "refused", event, model=sharp(), **options)
    with pytest.raises(LossError, match=r"must rise by at most 5%, got .*; layer \d costs most .*accept_loss"):
        refused.train()
    assert event.events == []
    assert same(refused.model, ordinary.model)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "refused" / f"checkpoint-{UPDATES}")
    assert same(saved, ordinary.model)
    for schedule, accept in ((saf.OneTime(1.0), True), (saf.OneTime(1), False)):
        event = callback(schedule, ALL, heldout=[text], accept_loss=accept)
        run = trainer(hf, tmp_path / f"kept-{accept}", event, model=sharp(), **options)
        run.train()
        assert len(frozen(run.model)) == sum(site.layout.num_heads for site in adapter_for(run.model).sites())
        assert event.events[0].values["loss_after"] > event.events[0].values["loss_before"] + 0.05


UPDATES = 2
