"""`freeze_` end to end on a small model: whom it chooses, what it installs, what it reports, and what it refuses."""

import copy
import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import saf
from saf.calibration import QKGradient
from saf.errors import InputError, SafWarning, SelectionError, UnsupportedError
from saf.records.run import read_events
from saf.scores import SCORES
from saf.targets import TARGETS, dense_pattern
from tests.freezing.small_model import LENGTH, accepting, make, tokens
from tests.surgery.trained_model import assert_equal, snapshot


def gradients(model, ids) -> dict:
    gradient = QKGradient(model)
    model(ids[:, :-1], ids[:, 1:]).backward()
    gradient.update()
    return {"gradient": gradient}


def test_the_lowest_heads_are_frozen_with_fits_of_their_mean():
    model, ids = make(), tokens()
    statistics = saf.calibrate(model, [ids])
    report = saf.freeze_(model, [ids[:3], ids[3:]], saf.FreezeConfig(rate=0.25))
    assert report.heads == saf.select(saf.score(statistics), 0.25)
    assert set(report.seconds) == {"capture", "statistics", "score", "select", "fit", "install"}
    chosen = [
        torch.stack([getattr(statistics, name)[head] for head in report.heads])
        for name in ("eta_abs", "eta_rel", "row_entropy")
    ]
    fitted = saf.fit_compact(*chosen[:2])
    torch.testing.assert_close(report.patterns.dense(), fitted.dense())
    assert list(report.fit_kl.values()) == pytest.approx(saf.fit_kl(fitted, *chosen).tolist(), abs=1e-9)
    assert max(report.fit_kl.values()) <= 0.2
    again = saf.freeze_(model, [ids], saf.FreezeConfig(rate=0.25))
    assert len(report.heads & again.heads) == 0
    assert all(again.scores[head].isnan() for head in report.heads)


@pytest.mark.parametrize("score", SCORES)
def test_every_score_ranks_the_heads_that_are_frozen(score):
    model, ids = make(), tokens()
    config = saf.FreezeConfig(rate=0.25, score=score, pattern="structured_random", seed=3)
    report = saf.freeze_(model, [ids[:4]], config, heldout=[ids[4:]], score_inputs=gradients(model, ids))
    assert report.heads == saf.select(report.scores, 0.25)
    assert report.scores.isfinite().all()
    json.dumps(report.to_dict(), allow_nan=False)


def test_a_function_can_be_the_score():
    def first_layers(statistics):
        return torch.arange(12.0).view(3, 4)

    report = saf.freeze_(make(), [tokens()], saf.FreezeConfig(score=first_layers))
    assert list(report.heads) == [(0, 0), (0, 1), (0, 2)]
    with pytest.raises(InputError, match="must differ between heads, got 1 for all"):
        saf.freeze_(make(), [tokens()], saf.FreezeConfig(score=lambda statistics: torch.ones(3, 4)))
    assert report.to_dict()["score_name"] == report.to_dict()["config"]["score"] == "first_layers"


@pytest.mark.parametrize(
    ("pattern", "storage"),
    [*((pattern, "compact") for pattern in TARGETS), ("dirichlet", "dense"), ("gaussian", "dense")],
)
def test_every_pattern_is_installed_and_executed(pattern, storage, tmp_path):
    model, ids = make(gain=2.0), tokens()
    config = saf.FreezeConfig(pattern=pattern, storage=storage, seed=7, **accepting(pattern, storage))
    statistics = saf.calibrate(model, [ids], collect=("mean", "row_variance", "logit_mean", "logit_variance"))
    report = saf.freeze_(model, [ids], config)
    expected = dense_pattern(statistics, report.heads, pattern, **({} if "mean" in pattern else {"seed": 7})).weights
    held = report.patterns.dense().double()
    if storage != "compact":
        torch.testing.assert_close(held, expected.double(), rtol=2**-24, atol=0)
        assert (held.sum(-1) - 1).abs().max() <= LENGTH * 2**-24 / 4
        assert (report.fit_kl, report.to_dict()["certificates"], "worst fit" in report.cost) == ({}, [], False)
    else:
        floored = expected.double().clamp(min=1e-9).tril()
        kl = (torch.xlogy(floored, floored) - torch.xlogy(floored, held)).sum((1, 2)) / LENGTH
        assert list(report.fit_kl.values()) == pytest.approx(kl.tolist() if report.fit_kl else [], abs=1e-4)
        torch.testing.assert_close(report.patterns.canonical().alpha, report.patterns.alpha)
    layer, head = next(iter(report.heads))
    attention = model.blocks[layer].attention
    value = torch.randn(1, 4, LENGTH, 8, generator=torch.Generator().manual_seed(0))
    output = saf.frozen_attention(value, attention.frozen)[0, 0]
    slot = attention.layout.slots.index(head)
    torch.testing.assert_close(output, held[0].float() @ value[0, slot], rtol=1e-4, atol=1e-4)
    saf.save(model, tmp_path / "saved")
    assert torch.equal(saf.load(tmp_path / "saved")(ids), model(ids))


def test_recorded_settings_repeat_an_event_and_another_seed_draws_other_patterns():
    ids, first = tokens(), saf.FreezeConfig(pattern="gaussian", max_fit_kl=100, seed=1)
    recorded = saf.FreezeConfig(**json.loads(json.dumps(first.to_dict())))
    assert recorded == first
    configs = (first, recorded, replace(first, seed=2))
    one, again, other = (saf.freeze_(make(2.0), [ids], config) for config in configs)
    assert torch.equal(one.patterns.alpha, again.patterns.alpha)
    assert not torch.equal(one.patterns.alpha, other.patterns.alpha)
    lists = saf.FreezeConfig(heads=((1, 2), (0, 3)), pattern="dirichlet", pattern_options={"scale": 4.0})
    assert saf.FreezeConfig(**json.loads(json.dumps(lists.to_dict()))) == lists
    prune = saf.FreezeConfig(count=2, operation="prune")
    for config, report in ((prune, saf.freeze_(make(2.0), [ids], prune)), (replace(first, storage="compact"), one)):
        assert saf.FreezeConfig(**json.loads(json.dumps(report.config))) == config


def test_heads_within_lists_limits_and_below_a_score():
    ids = tokens()
    free = saf.freeze_(make(), [ids], saf.FreezeConfig(count=12, max_fit_kl=9))
    order = sorted(free.heads, key=lambda head: float(free.scores[head]))

    def frozen(warn=None, **settings):
        with pytest.warns(SafWarning, match=warn) if warn else warnings.catch_warnings():
            return saf.freeze_(make(), [ids], saf.FreezeConfig(max_fit_kl=100, **settings)).heads

    third = float(free.scores[order[2]])
    assert list(frozen("1 of 2 heads", count=2, below=third, exclude=(order[0],))) == [order[1]]
    assert set(frozen(count=2, only=(order[5], order[3], order[8]))) == {order[3], order[5]}
    by_layer = frozen("3 of 4 heads could be frozen", rate=4 / 12, max_per_layer=1)
    assert [len(by_layer.in_layer(layer)) for layer in range(3)] == [1, 1, 1]
    assert frozen(count=5, rate=1.0) == saf.select(free.scores, count=5)
    assert set(frozen(heads=((2, 3), (0, 1)))) == {(2, 3), (0, 1)}


def test_random_controls_match_a_score_or_a_list_by_layer():
    ids = tokens()
    chosen = saf.freeze_(make(), [ids], saf.FreezeConfig(rate=0.5, max_fit_kl=100)).heads
    for options in ({"match": "variance"}, {"match_heads": chosen.to_list()}):
        drawn = set()
        for seed in range(2):
            config = saf.FreezeConfig(rate=0.5, score="random", seed=seed, max_fit_kl=100, **options)
            heads = saf.freeze_(make(), [ids], config).heads
            assert all(len(heads.in_layer(layer)) == len(chosen.in_layer(layer)) for layer in range(3))
            drawn.add(heads)
        assert len(drawn) == 2


def test_max_heads_freezes_the_first_and_names_the_others():
    ids, config = tokens(), saf.FreezeConfig(count=5, max_fit_kl=9)
    whole, model = saf.freeze_(make(), [ids], config), make()
    report = saf.freeze_(model, [ids], config, max_heads=2)
    order = sorted(whole.heads, key=lambda head: float(whole.scores[head]))
    assert (set(report.heads), report.deferred) == (set(order[:2]), tuple(order[2:]))
    assert sum(len(block.attention.layout.frozen) for block in model.blocks) == len(report.heads) == 2
    later = saf.freeze_(model, [ids], saf.FreezeConfig(only=report.deferred, count=3, max_fit_kl=9))
    assert later.heads | report.heads == whole.heads


def planted(inputs, head):
    """Make a head attend, on every input alike, in a way that no alpha and rho express: to key i - (i mod 7)^2."""
    query, key = inputs[0].clone(), inputs[1].clone()
    position = torch.arange(query.shape[2])
    attended = (position - (position % 7) ** 2).clamp(min=0)
    angle = torch.outer(position.float(), torch.arange(1.0, 5.0))
    key[:, head] = torch.cat([angle.cos(), angle.sin()], -1) * 6
    query[:, head] = key[:, head][:, attended]
    return query, key


def test_a_head_that_cannot_be_fitted_is_skipped_or_refused():
    model, ids = make(), tokens()
    model.blocks[0].attention.live.register_forward_pre_hook(
        lambda module, inputs: (*planted(inputs, 2), *inputs[2:]), prepend=True
    )
    before = snapshot(model)
    for settings in ({"rate": 0.25, "strict": True}, {"heads": ((0, 2), (1, 1))}):
        with pytest.raises(SelectionError, match=r"1 do not fit within max_fit_kl=0.2 nats \(\(0, 2\)"):
            saf.freeze_(model, [ids], saf.FreezeConfig(**settings))
    assert_equal(snapshot(model), before)
    report = saf.freeze_(model, [ids], saf.FreezeConfig(rate=0.25))
    assert list(report.rejected) == [(0, 2)]
    assert report.rejected[0, 2] > 0.2
    assert len(report.heads) == 3
    limit = max(report.fit_kl.values())
    with pytest.warns(SafWarning, match="heads could be frozen: . do not fit within"):
        rest = saf.freeze_(make(), [ids], saf.FreezeConfig(rate=1.0, max_fit_kl=limit))
    assert len(rest.heads) + len(rest.rejected) == 12 == rest.requested


@pytest.mark.parametrize("operation", ["freeze", "prune"])
def test_nothing_frozen_is_an_error_unless_allowed(operation):
    model, ids, kind = make(), tokens(), {"freeze": "frozen", "prune": "pruned"}[operation]
    before = snapshot(model)
    lowest = float(saf.score(saf.calibrate(model, [ids])).min())
    cases = [
        (saf.FreezeConfig(rate=0.02, operation=operation), InputError, f"at least 1 of 12 heads must be {kind}"),
        (saf.FreezeConfig(count=0, operation=operation), InputError, f"at least 1 of 12 heads must be {kind}"),
        (saf.FreezeConfig(below=lowest, operation=operation), SelectionError, "no other may be chosen and scores"),
    ]
    if operation == "freeze":
        cases.append((saf.FreezeConfig(max_fit_kl=1e-12), SelectionError, "at least 1 of 3 heads must be frozen"))
    for config, error, words in cases:
        with pytest.raises(error, match=words):
            saf.freeze_(model, [ids], config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SafWarning)
            nothing = saf.freeze_(model, [ids], config, allow_empty=True)
        assert (len(nothing.heads), nothing.patterns) == (0, None)
    assert_equal(snapshot(model), before)


def test_with_all_heads_frozen_queries_and_keys_are_gone():
    model, ids = make(gain=1.0), tokens()
    assert len(saf.freeze_(model, [ids], saf.FreezeConfig(rate=1.0)).heads) == 12
    for block in model.blocks:
        assert block.attention.q_proj.weight.numel() == block.attention.k_proj.weight.numel() == 0
    model(ids[:, :-1], ids[:, 1:]).backward()
    assert model.blocks[0].attention.v_proj.weight.grad.abs().sum() > 0
    with pytest.raises(InputError, match="got 0 of 0 live"):
        saf.freeze_(model, [ids])


def test_lengths_that_differ_from_the_models_warn_at_the_caller():
    model, ids = make(), tokens()
    with pytest.warns(UserWarning, match="calibration has 20 tokens, the model takes up to 48") as caught:
        saf.freeze_(model, [ids[:, :20]])
    assert [Path(warning.filename).name for warning in caught] == [Path(__file__).name]
    pruned = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saf.freeze_(pruned, [ids[:, :20]], saf.FreezeConfig(rate=0.25, operation="prune"))
    assert pruned(ids).shape[1] == 48


@pytest.mark.parametrize("score", ["variance", "residual_cosine"])
def test_copies_of_one_sequence_choose_no_heads(score):
    model, one = make(), tokens(1)
    before = snapshot(model)
    copies = list(one.repeat(7, 1).split(3))  # in batches of unequal sizes, whose products may be rounded differently
    with pytest.raises(InputError, match=f"{score!r} compares sequences"):
        saf.freeze_(model, copies, saf.FreezeConfig(score=score), heldout=[one])
    assert_equal(snapshot(model), before)
    assert len(saf.freeze_(model, copies, saf.FreezeConfig(heads=[(0, 1)], max_fit_kl=5)).heads) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 1.2}, "from 0 to 1"),
        ({"max_fit_kl": 0}, "positive"),
        ({"pattern": "structured_random", "fitter": "adam"}, "compact by nature, and nothing is fitted"),
        ({"pattern_options": {"scale": 2}}, "'mean' takes no options"),
        ({"match": "variance"}, "match has no effect where heads are chosen by 'variance' anyway"),
        ({"heads": ((0, 1),), "count": 1, "max_per_layer": 1}, "leave count and max_per_layer out"),
        ({"heads": ((0, 1), (0, 1))}, "names each head once"),
        ({"match_heads": ((0, 1),), "match": "forward_kl"}, "match_heads sets .* leave match out"),
        ({"storage": "exponential", "trainable": True}, "storage='compact'"),
        ({"fitter_options": {"band": 64}}, "got band"),
        ({"storage": "exponential", "operation": "prune"}, "pruned heads have no patterns: leave storage out"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        saf.FreezeConfig(**options)


def test_what_a_model_cannot_give_is_refused_before_anything_is_measured():
    """The calibration ids are beyond the vocabulary, an error as soon as the model runs."""
    ids, ready = tokens(), make()
    already, *_ = saf.freeze_(ready, [ids], saf.FreezeConfig(rate=0.75, max_fit_kl=100)).heads
    stranger = {"optimizer": torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])}
    for model, config, options, error, message in (
        (ready, {"count": 4}, {}, InputError, "count must be at most the 3 live heads of 12, got 4"),
        (ready, {"heads": [already]}, {}, InputError, "are frozen or pruned already"),
        (make(), {"exclude": ((0, 4),)}, {}, InputError, r"3 layers of 4 heads; got \[\(0, 4\)\]"),
        (make(), {"rate": 1.0, "operation": "prune"}, {}, InputError, "pruning must leave the model a head"),
        (make(), {"count": 4, "max_per_layer": 1, "strict": True}, {}, InputError, "at least 4 of 12 .*, got 3"),
        (make(), {"backend": "fused"}, {}, UnsupportedError, "backend 'fused' cannot run: it needs a CUDA device"),
        (make(), {}, stranger, InputError, "does not hold the model's attention weights"),
        (make().to("meta"), {}, {}, InputError, "on the meta device, which holds no numbers"),
    ):
        before = copy.deepcopy(model.state_dict()) if not next(model.parameters()).is_meta else {}
        with pytest.raises(error, match=message):
            saf.freeze_(model, [ids + 1000], saf.FreezeConfig(**config), **options)
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    for score, message in [("qk_gradient", r"QKGradient\(model\)"), ("redundancy", "pass heldout=")]:
        with pytest.raises(InputError, match=message):
            saf.freeze_(make(), [ids], saf.FreezeConfig(score=score))
    with pytest.raises(InputError, match="a list of one; got a bare"):
        saf.freeze_(make(), ids)
    for config in (0.5, 0, {}):
        with pytest.raises(InputError, match=f"config must be a FreezeConfig, got {config}"):
            saf.freeze_(make(), [ids], config)


def test_the_report_is_recorded_and_counts_the_heads_of_events_before(tmp_path):
    model, ids = make(), tokens()
    report = saf.freeze_(model, [ids])
    report.save(tmp_path, update=7)
    (event,) = read_events(tmp_path)
    assert (event.kind, event.number, event.update, event.heads) == ("freeze", 1, 7, report.heads.to_list())
    assert event.tensors()["alpha"].shape == (3, LENGTH)
    assert event.tensors()["eta_abs"].shape == (3, 4, LENGTH)
    more = tuple((layer, head) for layer in range(3) for head in range(4) if (layer, head) not in report.heads)[:2]
    named = saf.freeze_(model, [ids], saf.FreezeConfig(heads=more, max_fit_kl=100))
    pruned = saf.freeze_(model, [ids], saf.FreezeConfig(count=1, operation="prune"))
    assert named.summary == "2 of 12 heads frozen as named, 5 frozen in all"
    assert pruned.summary == "1 of 12 heads pruned by variance, 5 frozen and 1 pruned in all"
    assert [each.to_dict()["frozen_in_all"] for each in (report, named, pruned)] == [3, 5, 5]


@pytest.mark.filterwarnings("ignore:.*not yet fitted")
def test_the_certificate_of_every_fit_is_recorded(tmp_path):
    ids, config = tokens(), saf.FreezeConfig(max_fit_kl=9, fitter_options={"max_sweeps": 2, "tolerance": 0.068})
    kls = sorted(saf.freeze_(make(), [ids], replace(config, rate=0.5)).fit_kl.values())
    report = saf.freeze_(make(), [ids], replace(config, max_fit_kl=(kls[2] + kls[3]) / 2))
    assert report.rejected
    report.save(tmp_path)
    records = {tuple(record["head"]): record for record in read_events(tmp_path)[0].values["certificates"]}
    assert set(records) == set(report.heads) | set(report.rejected)
    assert {record["sweeps"] for record in records.values()} == {2}
    assert {record["converged"] for record in records.values()} == {False, True}
