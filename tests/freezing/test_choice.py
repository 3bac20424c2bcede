"""Whom an event takes: by every score, within budgets and limits, past the gate of the fits, and controls."""

import copy
import json
from dataclasses import replace

import pytest
import torch

import saf
from saf.calibration import QKGradient
from saf.errors import InputError, SafWarning, SelectionError
from saf.scores import SCORES
from tests.freezing.small_model import make, tokens


def planted(inputs, head):
    """Make a head attend, on every input alike, in a way that no alpha and rho express: to key i - (i mod 7)^2."""
    query, key = inputs[0].clone(), inputs[1].clone()
    position = torch.arange(query.shape[2])
    wanted = (position - (position % 7) ** 2).clamp(min=0)
    angle = torch.outer(position.float(), torch.arange(1.0, 5.0))
    key[:, head] = torch.cat([angle.cos(), angle.sin()], -1) * 6
    query[:, head] = key[:, head][:, wanted]
    return query, key


def gathered(model, ids) -> dict:
    """Return what the scores read that training measures."""
    gradient = QKGradient(model)
    model(ids[:, :-1], ids[:, 1:]).backward()
    gradient.update()
    return {"gradient": gradient}


@pytest.mark.parametrize("score", ["variance", "forward_kl"])
def test_scores_choose_their_own_heads_and_frozen_ones_are_never_chosen_again(score):
    model, ids = make(), tokens()
    first = saf.freeze_(model, [ids], saf.FreezeConfig(rate=0.25, score=score))
    second = saf.freeze_(model, [ids], saf.FreezeConfig(rate=0.25, score=score))
    assert len(first.heads & second.heads) == 0
    assert all(second.scores[layer, head].isnan() for layer, head in first.heads)
    assert first.heads == saf.select(getattr(first.statistics, score), 0.25)


@pytest.mark.parametrize("score", SCORES)
def test_every_score_ranks_the_heads_that_are_frozen(score):
    model, ids = make(), tokens()
    config = saf.FreezeConfig(rate=0.25, score=score, pattern="structured_random", seed=3)
    report = saf.freeze_(model, [ids[:4]], config, heldout=[ids[4:]], needed=gathered(model, ids))
    assert report.heads == saf.select(report.scores, 0.25)
    assert report.scores.isfinite().all()
    json.dumps(report.to_dict(), allow_nan=False)


def test_a_score_that_lacks_something_is_refused_before_the_model_changes():
    model, ids = make(), tokens()
    for score, message in [("qk_gradient", r"QKGradient\(model\)"), ("redundancy", "or give freeze_ heldout=")]:
        with pytest.raises(InputError, match=message):
            saf.freeze_(model, [ids], saf.FreezeConfig(score=score))
    assert not model.blocks[0].attention.layout.frozen


def test_a_function_can_be_the_score():
    def first_layers(statistics):
        return torch.arange(12.0).view(3, 4)

    report = saf.freeze_(make(), [tokens()], saf.FreezeConfig(score=first_layers))
    assert list(report.heads) == [(0, 0), (0, 1), (0, 2)]
    assert report.to_dict()["score_name"] == report.to_dict()["config"]["score"] == "first_layers"


def test_given_heads_are_frozen_whatever_they_score_or_refused():
    model, ids = make(), tokens()
    chosen = ((2, 3), (0, 1))
    report = saf.freeze_(model, [ids], saf.FreezeConfig(heads=chosen, max_fit_kl=9))
    assert (set(report.heads), report.requested) == (set(chosen), 2)
    with pytest.raises(InputError, match=r"\[\(2, 3\)\] are frozen or pruned already"):
        saf.freeze_(model, [ids], saf.FreezeConfig(heads=((2, 3), (1, 1))))
    with pytest.raises(SelectionError, match="do not fit"):
        saf.freeze_(model, [ids], saf.FreezeConfig(heads=((1, 1), (1, 2)), max_fit_kl=1e-6))
    assert not model.blocks[1].attention.layout.frozen


def test_the_random_control_matches_the_variance_by_layer():
    ids = tokens()
    chosen = saf.freeze_(make(), [ids], saf.FreezeConfig(rate=0.5, max_fit_kl=100)).heads
    drawn = {}
    for seed in range(3):
        config = saf.FreezeConfig(rate=0.5, score="random", match="variance", seed=seed, max_fit_kl=100)
        drawn[seed] = saf.freeze_(make(), [ids], config).heads
        for layer in range(3):
            assert len(drawn[seed].in_layer(layer)) == len(chosen.in_layer(layer))
    assert len(set(drawn.values())) == 3


def test_only_heads_of_a_list_and_below_a_score_are_chosen():
    ids = tokens()
    free = saf.freeze_(make(), [ids], saf.FreezeConfig(count=12, max_fit_kl=9))
    order = sorted(free.heads, key=lambda head: float(free.scores[head]))
    third = float(free.scores[order[2]])
    below = saf.freeze_(make(), [ids], saf.FreezeConfig(count=2, below=third, exclude=(order[0],), max_fit_kl=9))
    assert list(below.heads) == [order[1]]
    only = saf.freeze_(make(), [ids], saf.FreezeConfig(count=2, only=(order[5], order[3], order[8]), max_fit_kl=9))
    assert set(only.heads) == {order[3], order[5]}


@pytest.mark.parametrize("operation", ["freeze", "prune"])
def test_a_limit_of_scores_that_no_head_is_below_is_refused_with_the_lowest(operation):
    model, ids = make(), tokens()
    scores = saf.score(saf.calibrate(model, [ids]), "variance")
    lowest = float(scores[1:].min())
    config = saf.FreezeConfig(count=2, operation=operation, below=lowest, exclude=[(0, head) for head in range(4)])
    done = {"freeze": "frozen", "prune": "pruned"}[operation]
    words = rf"no head that may be {done} scores below {lowest:g} by variance .*: the lowest score is {lowest:.6g}\."
    with pytest.raises(SelectionError, match=words.replace("+", r"\+")):
        saf.freeze_(model, [ids], config)
    with pytest.warns(SafWarning, match=f"0 of 2 heads could be {done}: no other may be {done}"):
        nothing = saf.freeze_(model, [ids], config, may_be_none=True)
    assert (len(nothing.heads), nothing.patterns) == (0, None)


def test_pruned_heads_too_are_as_many_as_asked_in_strict_mode():
    config = saf.FreezeConfig(operation="prune", count=4, max_per_layer=1, strict=True)
    with pytest.raises(SelectionError, match="the event asks for 4 heads; 3 can be pruned"):
        saf.freeze_(make(), [tokens()], config)
    with pytest.warns(SafWarning, match="only 3 of 4 heads could be pruned"):
        saf.freeze_(make(), [tokens()], replace(config, strict=False))


def test_the_first_of_the_heads_chosen_are_frozen_and_the_others_named():
    ids, config = tokens(), saf.FreezeConfig(count=5, max_fit_kl=9)
    whole = saf.freeze_(make(), [ids], config)
    model = make()
    report = saf.freeze_(model, [ids], config, first=2)
    order = sorted(whole.heads, key=lambda head: float(whole.scores[head]))
    assert (set(report.heads), report.deferred) == (set(order[:2]), tuple(order[2:]))
    assert sum(len(block.attention.layout.frozen) for block in model.blocks) == len(report.fit_kl) == 2
    assert report.to_dict()["deferred"] == [list(head) for head in order[2:]]
    assert report.summary == "2 of 12 heads frozen by variance; 3 chosen for later"
    assert len(report.certificates) == 5
    later = saf.freeze_(model, [ids], saf.FreezeConfig(only=report.deferred, count=3, max_fit_kl=9))
    assert later.heads | report.heads == whole.heads


def test_random_heads_match_a_list_by_layer():
    ids, listed = tokens(), ((0, 1), (2, 0), (2, 3))
    found = [
        saf.freeze_(make(), [ids], saf.FreezeConfig(score="random", seed=seed, match_heads=listed, max_fit_kl=9)).heads
        for seed in range(4)
    ]
    assert all(sorted(layer for layer, _ in heads) == [0, 2, 2] for heads in found)
    assert len(set(found)) > 1
    assert saf.FreezeConfig(match_heads=listed).requested(12) == 3
    with pytest.raises(InputError, match=r"got \[\(3, 0\)\]"):
        saf.freeze_(make(), [ids], saf.FreezeConfig(match_heads=((3, 0),)))


def test_limits_by_layer_hold():
    model, ids = make(), tokens()
    with pytest.warns(UserWarning, match="3 of 4 heads could be frozen"):
        report = saf.freeze_(model, [ids], saf.FreezeConfig(rate=4 / 12, max_per_layer=1, max_fit_kl=100))
    assert [len(report.heads.in_layer(layer)) for layer in range(3)] == [1, 1, 1]
    assert len(saf.select(report.scores, 4 / 12).in_layer(2)) == 2


@pytest.mark.parametrize("options", [{}, {"score": "random", "match": "variance"}, {"exclude": ((0, 0),)}])
def test_a_number_of_heads_stands_above_the_rate(options):
    report = saf.freeze_(make(), [tokens()], saf.FreezeConfig(count=5, rate=1.0, max_fit_kl=100, **options))
    assert len(report.heads) == report.requested == 5
    if not options:
        assert report.heads == saf.select(report.scores, count=5)


def test_when_no_head_is_left_the_fits_are_not_blamed():
    model, ids = make(), tokens()
    saf.freeze_(model, [ids], saf.FreezeConfig(rate=0.75, max_fit_kl=100))
    words = "only 3 of 6 more heads could be frozen: no other may be frozen; 12 are frozen in all"
    with pytest.warns(SafWarning, match=words):
        assert len(saf.freeze_(model, [ids], saf.FreezeConfig(rate=0.5, max_fit_kl=100)).heads) == 3


def test_what_no_live_head_can_meet_is_refused_before_anything_is_measured(monkeypatch):
    model, ids = make(), tokens()
    saf.freeze_(model, [ids], saf.FreezeConfig(rate=0.75, max_fit_kl=100))
    ready, live = copy.deepcopy(model), 12 - 9
    saf.freeze_(model, [ids], saf.FreezeConfig(count=live, max_fit_kl=100))
    monkeypatch.setattr("saf.freezing.recipe.calibrate", lambda *args, **options: pytest.fail("measured"))
    for to_freeze, config, message in (
        (ready, {"count": live + 1}, "4 heads asked for; 3 of 12 are live"),
        (ready, {"rate": 0.02}, "a rate of 0.02 of 12 heads is less than one: raise it, or give count"),
        (ready, {"heads": ((3, 0),)}, r"3 layers of 4 heads; got \[\(3, 0\)\]"),
        (ready, {"exclude": ((0, 4),)}, r"3 layers of 4 heads; got \[\(0, 4\)\]"),
        (model, {"rate": 0.25}, "all 12 heads are frozen or pruned already"),
    ):
        with pytest.raises(InputError, match=message):
            saf.freeze_(to_freeze, [ids], saf.FreezeConfig(**config))


def test_a_fit_whose_divergence_is_not_a_number_is_rejected(monkeypatch):
    wanted = list(saf.freeze_(make(), [tokens()], saf.FreezeConfig(rate=0.25)).heads)

    def undefined_for_the_first(*arguments):
        kls = saf.fit_kl(*arguments)
        return torch.where(torch.arange(len(kls)) == 0, torch.nan, kls) if len(kls) == 3 else kls

    monkeypatch.setattr("saf.freezing.recipe.fit_kl", undefined_for_the_first)
    report = saf.freeze_(make(), [tokens()], saf.FreezeConfig(rate=0.25))
    assert wanted[0] in report.rejected
    assert wanted[0] not in report.heads
    assert len(report.heads) == 3


def test_a_planted_head_that_cannot_be_fitted_is_skipped_and_refused_in_strict_mode():
    model, ids = make(), tokens()
    model.blocks[0].attention.live.register_forward_pre_hook(
        lambda module, inputs: (*planted(inputs, 2), *inputs[2:]), prepend=True
    )
    scores = saf.score(saf.calibrate(model, [ids]))
    assert scores[0, 2] < 1e-12, "its pattern does not depend on the input, so it ranks first"
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(SelectionError, match=r"1 of the 3 lowest-variance heads .*\(0, 2\).*leave strict out"):
        saf.freeze_(model, [ids], saf.FreezeConfig(rate=0.25, strict=True))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    report = saf.freeze_(model, [ids], saf.FreezeConfig(rate=0.25))
    assert list(report.rejected) == [(0, 2)]
    assert report.rejected[0, 2] > 0.2
    assert len(report.heads) == 3
    assert (0, 2) not in report.heads


def test_a_rate_that_cannot_be_attained_warns_or_is_refused():
    model, ids = make(), tokens()
    with pytest.warns(UserWarning, match="of 12 heads could be frozen"):
        report = saf.freeze_(model, [ids], saf.FreezeConfig(rate=1.0, max_fit_kl=1e-4))
    assert len(report.heads) + len(report.rejected) == 12 == report.requested
    saf.uninstall_(model)
    excluded = saf.FreezeConfig(rate=1.0, strict=True, exclude=((0, 0),))
    with pytest.raises(SelectionError, match="asks for 12 heads; 11 can be frozen"):
        saf.freeze_(model, [ids], excluded)
