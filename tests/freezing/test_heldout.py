"""KL to a held-out half, against whole patterns of both halves written out densely."""

import copy
from dataclasses import replace

import pytest
import torch

from saf.calibration import calibrate
from saf.errors import InputError
from saf.fit import fit_compact, fit_variants
from saf.freezing.config import FreezeConfig
from saf.freezing.heldout import fit_heldout
from saf.freezing.recipe import freeze_
from saf.heads import HeadSet
from saf.models import GPT, GPTConfig
from saf.patterns import CompactPattern
from saf.records.events import read_events
from saf.surgery import install_

LENGTH = 24


@pytest.fixture
def model() -> GPT:
    made = GPT(GPTConfig(vocab_size=30, num_layers=2, num_heads=3, hidden_size=24, max_length=LENGTH)).double()
    made.reset_parameters(torch.Generator().manual_seed(0))
    for block in made.blocks:
        block.attention.q_proj.weight.data *= 40
    return made


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 30, (7, LENGTH), generator=torch.Generator().manual_seed(1))


def mean_pattern(model: GPT, ids: torch.Tensor, layer: int, head: int, *, sharp: bool = False) -> torch.Tensor:
    """The floored mean pattern, or that of the mean logits, from queries and keys seen by a hook."""
    kept = []
    attention = model.blocks[layer].attention
    handle = attention.live.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[:2]))
    with torch.no_grad():
        model.hidden(ids)
    handle.remove()
    query, key = (part[:, head] for part in kept[0])
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    logits = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(future, -torch.inf)
    mean = logits.mean(0).softmax(-1) if sharp else logits.softmax(-1).mean(0)
    floored = mean.clamp(min=1e-9).tril()
    return floored / floored.sum(-1, keepdim=True)


def kl(first: torch.Tensor, second: torch.Tensor) -> float:
    terms = torch.xlogy(first, first) - torch.xlogy(first, second)
    return terms.tril().nan_to_num(0.0).sum().item() / LENGTH


@pytest.mark.parametrize("pattern", ["mean", "sharp_mean"])
def test_kl_to_both_halves_entry_by_entry(model, ids, pattern):
    fits = fit_variants(LENGTH, constant_after=4)
    found = fit_heldout(model, ids.split(2), fits=fits, pattern=pattern)
    assert found.keys() == {"free", "structured"}
    for layer in range(2):
        for head in range(3):
            own, other = (
                mean_pattern(model, half, layer, head, sharp=pattern == "sharp_mean") for half in (ids[:3], ids[3:])
            )
            by_distance = torch.stack([own.diagonal(-d).sum() for d in range(LENGTH)])
            for name, options in fits.items():
                fitted = fit_compact(own.sum(0), by_distance, fitter="dense", **options).dense()
                assert found[name].own[layer, head].item() == pytest.approx(kl(own, fitted), abs=1e-6)
                assert found[name].other[layer, head].item() == pytest.approx(kl(other, fitted), abs=1e-5)
    # The free fit minimises the KL to its own half, whatever the structured one does for the other.
    assert (found["free"].own < found["structured"].own).all()


def test_halves_are_calibrated_apart(model, ids):
    """A model has seen nothing of the second half when the first is fitted: another second half changes no own KL."""
    found = fit_heldout(model, [ids])["free"]
    again = fit_heldout(model, [torch.cat([ids[:3], ids[3:].flip(1)])])["free"]
    assert torch.equal(found.own, again.own)
    assert (found.other != again.other).all()


def test_some_heads_and_heads_frozen_before(model, ids):
    flat = torch.zeros(1, LENGTH, dtype=torch.float64)
    install_(model, HeadSet([(0, 1)]), CompactPattern.from_parameters(flat, flat), backend="reference")
    found = fit_heldout(model, [ids])["free"]
    assert found.other.isnan().nonzero().tolist() == [[0, 1]]
    some = fit_heldout(model, [ids], [(1, 2)])["free"]
    assert some.own[1, 2] == found.own[1, 2]
    assert int((~some.own.isnan()).sum()) == 1
    before = calibrate(model, [ids]).variance
    assert torch.equal(before.isnan(), found.own.isnan())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"pattern": "gaussian"}, "mean and sharp_mean; got pattern 'gaussian'"),
        ({"fits": {"x": {"steps": 3}}}, "takes tolerance"),
        ({"heads": [(9, 9)]}, "only live heads"),
    ],
)
def test_what_cannot_be_judged_is_refused(model, ids, words, message):
    with pytest.raises(InputError, match=message):
        fit_heldout(model, [ids], **words)


def test_one_sequence_has_no_halves(model, ids):
    with pytest.raises(InputError, match="two halves"):
        fit_heldout(model, [ids[:1]])


def test_freezing_reports_it_when_asked(model, ids, tmp_path):
    config = FreezeConfig(rate=0.5, max_fit_kl=9, heldout_kl=True, fitter_options={"alpha_constant_after": 3})
    expected = fit_heldout(model, ids.split(2), fits={"own": config.fitter_options})["own"]
    plain = freeze_(copy.deepcopy(model), ids.split(2), replace(config, heldout_kl=False))
    report = freeze_(model, ids.split(2), config)
    assert len(report.heads) == 3
    assert report.heldout_kl == {
        head: (expected.own[head].item(), expected.other[head].item()) for head in report.heads
    }
    report.save(tmp_path)
    record = read_events(tmp_path)[0].values
    assert {(layer, head) for layer, head, _, _ in record["heldout_kl"]} == set(report.heads)
    assert "the other half by" in " ".join(str(report).split())
    assert "heldout" in report.seconds
    # Asking changes nothing else.
    assert plain.heads == report.heads
    assert plain.fit_kl == report.fit_kl
    assert "heldout_kl" not in plain.to_dict()


@pytest.mark.parametrize("wrong", [{"pattern": "dirichlet"}, {"storage": "dense"}])
def test_settings_that_no_half_can_judge_are_refused(wrong):
    with pytest.raises(InputError, match="a held-out half judges compact fits"):
        FreezeConfig(heldout_kl=True, **wrong)
