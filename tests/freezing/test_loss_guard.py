"""A freeze that raises held-out perplexity too far is refused where no training follows, and changes nothing."""

import math
import re
import statistics

import pytest
import torch
from scipy.stats import ttest_1samp

import saf
from saf.errors import InputError, LossError, SafWarning
from saf.heldout import heldout_loss
from tests import transformers_models
from tests.freezing.small_model import fluent, loss, tokens
from tests.surgery.trained_model import assert_equal, snapshot

QUARTER = saf.FreezeConfig(rate=0.25, max_fit_kl=9)
HARMLESS = saf.FreezeConfig(heads=((2, 0), (2, 1)), max_fit_kl=9)


def loss_with(heads, text, **settings):
    """The loss once these heads alone are frozen or pruned, measured here."""
    model = fluent()
    saf.freeze_(model, [tokens()], saf.FreezeConfig(heads=heads, **(settings or {"max_fit_kl": 9})))
    return loss(model, text)


def trained(text):
    """A model and its optimiser after an update."""
    model = fluent()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    model(text[:, :-1], text[:, 1:]).backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("settings", [{"max_fit_kl": 9}, {"operation": "prune"}], ids=["freeze", "prune"])
def test_a_rise_without_training_is_refused_names_the_worst_layer_and_changes_nothing(text, settings):
    model, config = fluent(), saf.FreezeConfig(rate=0.5, **settings)
    chosen = saf.freeze_(fluent(), [tokens()], config).heads
    together = {layer: loss_with([h for h in chosen if h[0] == layer], text, **settings) for layer, _ in chosen}
    worst = max(together, key=together.__getitem__)
    rises = [
        math.expm1(each - loss(model, text)) for each in (loss_with(list(chosen), text, **settings), together[worst])
    ]
    before = snapshot(model)
    with pytest.raises(LossError, match="accept_loss") as refused:
        saf.freeze_(model, [tokens()], config, heldout=[text[:3], text[3:]])
    percents = [float(word) / 100 for word in re.findall(r"([\d.]+)%", str(refused.value))]
    assert percents == pytest.approx([0.05, *rises], abs=6e-4)
    assert f"layer {worst} costs most" in str(refused.value)
    assert_equal(snapshot(model), before)
    assert torch.equal(model(text), fluent()(text))
    assert saf.freeze_(model, [tokens()], config).heads == chosen, "nothing is left of the refused event"


def test_an_accepted_rise_and_a_harmless_event_are_reported_with_their_losses(text):
    for config, accept in ((QUARTER, {"accept_loss": True}), (HARMLESS, {})):
        model = fluent()
        before = loss(model, text)
        report = saf.freeze_(model, [tokens()], config, heldout=[text], **accept)
        assert (report.loss.before, report.loss.after) == pytest.approx((before, loss(model, text)), abs=1e-5)
        assert report.to_dict()["loss_after"] == report.loss.after
        rises = [loss(model, row[None]) - loss(fluent(), row[None]) for row in text]
        mean, within = statistics.fmean(rises), ttest_1samp(rises, 0).confidence_interval(0.95)
        low, high = map(math.log1p, report.loss.interval)
        assert (report.loss.rise, low, high) == pytest.approx((math.expm1(mean), *within), rel=1e-2, abs=1e-4)
    assert report.loss.rise == pytest.approx(math.expm1(report.loss.after - report.loss.before))
    assert report.loss.rise < 0.05


def test_with_an_optimizer_a_rise_is_recorded_unless_it_is_not_accepted(text):
    model, optimizer = trained(text)
    report = saf.freeze_(model, [tokens()], QUARTER, optimizer=optimizer, heldout=[text])
    assert report.loss.after > report.loss.before + 0.05
    model(text[:, :-1], text[:, 1:]).backward()
    optimizer.step()


@pytest.mark.parametrize("options", [{}, {"trainable": True}], ids=str)
def test_moments_and_parameter_groups_are_as_before_a_refused_event(text, options):
    model, optimizer = trained(text)
    before, groups = snapshot(model, optimizer), [len(group["params"]) for group in optimizer.param_groups]
    config = saf.FreezeConfig(**{"rate": 0.5, "max_fit_kl": 9, "seed": 1, "score": "random"} | options)
    with pytest.raises(LossError):
        saf.freeze_(model, [tokens()], config, optimizer=optimizer, heldout=[text], accept_loss=False)
    assert_equal(snapshot(model, optimizer), before)
    assert [len(group["params"]) for group in optimizer.param_groups] == groups


def test_a_model_of_transformers_is_measured_on_its_calibration_text():
    model, ids = transformers_models.make("llama"), transformers_models.tokens()
    config = saf.FreezeConfig(rate=0.5, max_fit_kl=99)
    with pytest.warns(SafWarning, match="on the calibration text"):
        report = saf.freeze_(model, [ids], config)
    layer, rise = report.worst_layer
    own = saf.FreezeConfig(heads=tuple(head for head in report.heads if head[0] == layer), max_fit_kl=99)
    alone = saf.freeze_(transformers_models.make("llama"), [ids], own, accept_loss=True)
    assert alone.loss.rise == pytest.approx(rise, abs=1e-4)
    assert f"layer {layer} costs most" in report.cost
    assert report.loss.before == pytest.approx(heldout_loss(transformers_models.make("llama"), [ids[:8]]))
    assert report.loss.after == pytest.approx(heldout_loss(model, [ids[:8]]))
    with pytest.raises(LossError):
        saf.freeze_(transformers_models.make("llama"), [ids], config, accept_loss=False)


@pytest.mark.parametrize(
    ("heldout", "words"), [(torch.ones(2, 1, dtype=torch.long), "two tokens"), (torch.ones(1, 60).long(), "at most")]
)
def test_heldout_text_that_cannot_be_measured_is_refused_before_the_model_changes(heldout, words):
    model = fluent()
    before = snapshot(model)
    with pytest.raises(InputError, match=words):
        saf.freeze_(model, [tokens()], QUARTER, heldout=[heldout])
    assert_equal(snapshot(model), before)
