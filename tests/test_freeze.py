"""The whole recipe: budgets, the fit gate, controls, and what it leaves behind."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import saf
from saf.calibration import QKGradient
from saf.errors import InputError, SelectionError
from saf.models import GPT, GPTConfig
from saf.patterns import PATTERNS, dense_pattern
from saf.scores import SCORES

LENGTH = 48
SHAPE = GPTConfig(vocab_size=60, num_layers=3, num_heads=4, hidden_size=32, max_length=LENGTH)


def make(gain: float = 30.0) -> GPT:
    torch.manual_seed(0)
    model = GPT(SHAPE)
    for block in model.blocks:
        block.attention.q_proj.weight.data *= gain
    return model


def tokens(count: int = 6) -> torch.Tensor:
    return torch.randint(0, SHAPE.vocab_size, (count, LENGTH), generator=torch.Generator().manual_seed(2))


def planted(inputs, head):
    """Make a head attend, on every input alike, in a way that no alpha and rho express: to key i - (i mod 7)^2."""
    query, key = inputs[0].clone(), inputs[1].clone()
    position = torch.arange(query.shape[2])
    wanted = (position - (position % 7) ** 2).clamp(min=0)
    angle = torch.outer(position.float(), torch.arange(1.0, 5.0))
    key[:, head] = torch.cat([angle.cos(), angle.sin()], -1) * 6
    query[:, head] = key[:, head][:, wanted]
    return query, key


def test_the_lowest_heads_are_frozen_with_fits_of_their_mean():
    model, ids = make(), tokens()
    statistics = saf.calibrate(model, [ids])
    report = saf.freeze_(model, [ids[:3], ids[3:]], saf.FreezeConfig(rate=0.25))
    assert report.heads == saf.select(saf.score(statistics), 0.25)
    assert len(report.heads) == 3
    chosen = (
        [statistics.eta_abs[layer, head] for layer, head in report.heads],
        [statistics.eta_rel[layer, head] for layer, head in report.heads],
    )
    entropy = torch.stack([statistics.row_entropy[layer, head] for layer, head in report.heads])
    fitted = saf.fit_compact(*map(torch.stack, chosen))
    torch.testing.assert_close(report.patterns.dense(), fitted.dense())
    kls = saf.fit_kl(fitted, *map(torch.stack, chosen), entropy)
    assert list(report.fit_kl.values()) == pytest.approx(kls.tolist(), abs=1e-9)
    assert max(report.fit_kl.values()) <= 0.2
    assert model(ids).shape == (6, LENGTH, 60)


@pytest.mark.parametrize("score", ["variance", "forward_kl"])
def test_scores_choose_their_own_heads_and_frozen_ones_are_never_chosen_again(score):
    model, ids = make(), tokens()
    first = saf.freeze_(model, [ids], saf.FreezeConfig(rate=0.25, score=score))
    second = saf.freeze_(model, [ids], saf.FreezeConfig(rate=0.25, score=score))
    assert len(first.heads & second.heads) == 0
    assert all(second.scores[layer, head].isnan() for layer, head in first.heads)
    assert first.heads == saf.select(getattr(first.statistics, score), 0.25)


def gathered(model, ids) -> dict:
    """Return what the scores read that training measures."""
    gradient = QKGradient(model)
    model(ids[:, :-1], ids[:, 1:]).backward()
    gradient.update()
    return {"gradient": gradient}


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


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("storage", ["compact", "dense"])
def test_every_pattern_is_installed_and_executed(pattern, storage, tmp_path):
    model, ids = make(gain=2.0), tokens()
    config = saf.FreezeConfig(pattern=pattern, storage=storage, seed=7, max_fit_kl=100)
    statistics = saf.calibrate(model, [ids], collect=("mean", "row_variance", "logit_mean", "logit_variance"))
    report = saf.freeze_(model, [ids], config)
    expected = dense_pattern(statistics, report.heads, pattern, **({} if "mean" in pattern else {"seed": 7})).weights
    held = report.patterns.dense().double()
    if storage == "dense":
        assert held.dtype == torch.float64
        torch.testing.assert_close(held, expected.double(), rtol=2**-8, atol=0)
        assert set(report.fit_kl.values()) == {0.0}
    else:
        floored = expected.double().clamp(min=1e-9).tril()
        kl = (torch.xlogy(floored, floored) - torch.xlogy(floored, held)).sum((1, 2)) / LENGTH
        assert list(report.fit_kl.values()) == pytest.approx(kl.tolist(), abs=1e-4)
    report.save(tmp_path)
    layer, head = next(iter(report.heads))
    attention = model.blocks[layer].attention
    value = torch.randn(1, 4, LENGTH, 8, generator=torch.Generator().manual_seed(0))
    found = saf.frozen_attention(value, attention.frozen)[0, 0]
    slot = attention.layout.slots.index(head)
    torch.testing.assert_close(found, held[0].float() @ value[0, slot], rtol=1e-4, atol=1e-4)
    logits = model(ids)
    saf.save(model, tmp_path / "saved")
    assert torch.equal(saf.load(tmp_path / "saved")(ids), logits)


@pytest.mark.parametrize("pattern", ["mean", "structured_random"])
def test_patterns_are_kept_in_canonical_form(pattern, tmp_path):
    model = make()
    saf.freeze_(model, [tokens()], saf.FreezeConfig(pattern=pattern, seed=7, max_fit_kl=100)).save(tmp_path)
    saf.save(model, tmp_path / "saved")
    frozen = [one for block in saf.load(tmp_path / "saved").blocks if block.attention.frozen is not None
              for one in block.attention.frozen.patterns]  # fmt: skip
    assert len(frozen) == 3
    tensors = load_file(tmp_path / "freeze.safetensors")
    for number, one in enumerate(frozen):
        for name in ("alpha", "rho"):
            expected = getattr(one.canonical(), name)
            torch.testing.assert_close(getattr(one, name).double(), expected.double(), rtol=0, atol=1e-6)
            torch.testing.assert_close(tensors[name][number].double(), expected.double(), rtol=0, atol=1e-6)
        assert one.alpha.max() == one.rho.max() == 0


def test_a_fit_whose_divergence_is_not_a_number_is_rejected(monkeypatch):
    wanted = list(saf.freeze_(make(), [tokens()], saf.FreezeConfig(rate=0.25)).heads)

    def undefined_for_the_first(*arguments):
        kls = saf.fit_kl(*arguments)
        return torch.where(torch.arange(len(kls)) == 0, torch.nan, kls) if len(kls) == 3 else kls

    monkeypatch.setattr("saf.freeze_patterns.fit_kl", undefined_for_the_first)
    report = saf.freeze_(make(), [tokens()], saf.FreezeConfig(rate=0.25))
    assert wanted[0] in report.rejected
    assert wanted[0] not in report.heads
    assert len(report.heads) == 3


def test_given_heads_are_frozen_whatever_they_score_or_refused():
    model, ids = make(), tokens()
    chosen = ((2, 3), (0, 1))
    report = saf.freeze_(model, [ids], saf.FreezeConfig(heads=chosen, max_fit_kl=9))
    assert (set(report.heads), report.requested) == (set(chosen), 2)
    with pytest.raises(SelectionError, match="asks for 2 heads; 1 can be frozen"):
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


def test_limits_by_layer_hold():
    model, ids = make(), tokens()
    with pytest.warns(UserWarning, match="3 of 4 heads could be frozen"):
        report = saf.freeze_(model, [ids], saf.FreezeConfig(rate=4 / 12, max_per_layer=1, max_fit_kl=100))
    assert [len(report.heads.in_layer(layer)) for layer in range(3)] == [1, 1, 1]
    assert len(saf.select(report.scores, 4 / 12).in_layer(2)) == 2


def test_settings_survive_json():
    config = saf.FreezeConfig(heads=((1, 2), (0, 3)), pattern="dirichlet", pattern_options={"scale": 4.0}, seed=5)
    for each in (config, saf.FreezeConfig(count=3, exclude=((0, 0),), max_per_layer=2)):
        assert saf.FreezeConfig(**json.loads(json.dumps(each.to_dict()))) == each


def test_a_generator_gives_the_event_one_seed_that_is_kept(tmp_path):
    generator, ids = torch.Generator().manual_seed(1), tokens()
    first, second = (saf.FreezeConfig(pattern="gaussian", max_fit_kl=100, seed=generator) for _ in range(2))
    assert first.seed != second.seed
    assert saf.FreezeConfig(**json.loads(json.dumps(first.to_dict()))) == first
    one, again, other = (saf.freeze_(make(2.0), [ids], config) for config in (first, first, second))
    assert torch.equal(one.patterns.alpha, again.patterns.alpha)
    assert not torch.equal(one.patterns.alpha, other.patterns.alpha)
    one.save(tmp_path)
    recorded = json.loads((tmp_path / "freeze.json").read_text())["config"]
    assert torch.equal(saf.freeze_(make(2.0), [ids], saf.FreezeConfig(**recorded)).patterns.alpha, one.patterns.alpha)
    own = saf.FreezeConfig(pattern="gaussian", pattern_options={"seed": torch.Generator().manual_seed(1)})
    assert own.pattern_options == {"seed": first.seed}


@pytest.mark.parametrize("options", [{}, {"score": "random", "match": "variance"}, {"exclude": ((0, 0),)}])
def test_a_number_of_heads_stands_above_the_rate(options):
    report = saf.freeze_(make(), [tokens()], saf.FreezeConfig(count=5, rate=1.0, max_fit_kl=100, **options))
    assert len(report.heads) == report.requested == 5
    if not options:
        assert report.heads == saf.select(report.scores, count=5)


def test_when_no_head_is_left_the_fits_are_not_blamed():
    model, ids = make(), tokens()
    saf.freeze_(model, [ids], saf.FreezeConfig(rate=0.75, max_fit_kl=100))
    with pytest.warns(UserWarning, match="3 of 6 heads could be frozen: no other may be frozen"):
        assert len(saf.freeze_(model, [ids], saf.FreezeConfig(rate=0.5, max_fit_kl=100)).heads) == 3


def test_a_planted_head_that_cannot_be_fitted_is_skipped_and_refused_in_strict_mode():
    model, ids = make(), tokens()
    model.blocks[0].attention.live.register_forward_pre_hook(
        lambda module, inputs: (*planted(inputs, 2), *inputs[2:]), prepend=True
    )
    scores = saf.score(saf.calibrate(model, [ids]))
    assert scores[0, 2] < 1e-12, "its pattern does not depend on the input, so it ranks first"
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(SelectionError, match=r"strict.*\(0, 2\)"):
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


def test_freezing_no_head_changes_nothing():
    model, ids = make(), tokens()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = saf.freeze_(model, [ids], saf.FreezeConfig(rate=0.0))
    assert (len(report.heads), report.patterns) == (0, None)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model(ids), make()(ids))


def test_with_all_heads_frozen_queries_and_keys_are_gone():
    model, ids = make(gain=1.0), tokens()
    report = saf.freeze_(model, [ids], saf.FreezeConfig(rate=1.0))
    assert len(report.heads) == 12
    for block in model.blocks:
        assert block.attention.q_proj.weight.numel() == block.attention.k_proj.weight.numel() == 0
    model(ids[:, :-1], ids[:, 1:]).backward()
    assert model.blocks[0].attention.v_proj.weight.grad.abs().sum() > 0


def test_inputs_longer_than_the_patterns_are_refused():
    model, ids = make(), tokens()
    with pytest.warns(UserWarning, match="calibration has 20 tokens, the model takes up to 48"):
        saf.freeze_(model, [ids[:, :20]])
    assert model(ids[:, :20]).shape[1] == 20
    with pytest.raises(InputError, match="input has 48 positions, the frozen heads' patterns cover 20"):
        model(ids)


def test_bad_settings_are_refused():
    for options, message in [
        ({"rate": 1.2}, "from 0 to 1"),
        ({"score": "magic"}, "unknown score"),
        ({"pattern": "median"}, "unknown pattern"),
        ({"fitter": "newton"}, "unknown fitter"),
        ({"max_fit_kl": 0}, "positive"),
        ({"storage": "sparse"}, "unknown storage"),
        ({"match": "magic"}, "unknown match"),
        ({"pattern_options": {"scale": 2}}, "'mean' takes no options"),
        ({"match": "variance", "max_per_layer": 2}, "leave heads and max_per_layer out"),
        ({"max_per_layer": 0}, "at least 1; got 0"),
        ({"count": -1}, "0 or more; got -1"),
        ({"seed": -1}, "integer from 0 on"),
        ({"heads": ((0, 1),), "count": 1, "max_per_layer": 1}, "leave count and max_per_layer out"),
        ({"heads": ((0, 1),), "exclude": ((0, 0),)}, "leave exclude out"),
        ({"heads": ((0, 1), (0, 1))}, "names each head once"),
    ]:
        with pytest.raises(InputError, match=message):
            saf.FreezeConfig(**options)


def test_warnings_point_at_the_caller():
    with pytest.warns(UserWarning, match="calibration has|could be frozen") as caught:
        saf.freeze_(make(), [tokens()[:, :20]], saf.FreezeConfig(rate=1.0, max_fit_kl=1e-9))
    assert [Path(warning.filename).name for warning in caught] == ["test_freeze.py"] * 2
