"""The running gradient average against Eqs. (8) and (9) written out, and the scores that combine it with variance."""

import json

import pytest
import torch

import saf
from saf.adapters import adapter_for
from saf.calibration import QKGradient
from saf.calibration.gradients import head_norms
from saf.errors import CheckpointError, InputError
from saf.heads import HeadLayout, HeadSet
from saf.models import GPT
from saf.patterns import CompactPattern


def norms(model: GPT) -> torch.Tensor:
    rows = []
    for block in model.blocks:
        parts = (block.attention.q_proj.weight.grad.split(8), block.attention.k_proj.weight.grad.split(8))
        rows.append([sum(map(torch.linalg.matrix_norm, pair)) for pair in zip(*parts, strict=True)])
    return torch.tensor(rows, dtype=torch.float64)


def backward(model: GPT, ids: torch.Tensor) -> None:
    model.zero_grad()
    model(ids[:, :-1], ids[:, 1:]).backward()


def test_the_average_starts_at_the_first_update_and_follows_the_paper(model, ids):
    gradient = QKGradient(model)
    assert gradient.scores().isnan().all()
    expected = None
    for update in range(4):
        backward(model, ids[update : update + 2])
        gradient.update()
        relative = norms(model) / norms(model).mean()
        expected = relative if expected is None else 0.9 * expected + 0.1 * relative
    torch.testing.assert_close(gradient.scores(), expected, rtol=1e-12, atol=0)
    assert gradient.updates == 4


def test_a_common_factor_cancels_and_a_bad_update_is_left_out(model, ids):
    one, other = QKGradient(model), QKGradient(model)
    backward(model, ids)
    one.update()
    for parameter in model.parameters():
        parameter.grad *= 7.5
    other.update()
    torch.testing.assert_close(one.scores(), other.scores(), rtol=1e-12, atol=0)
    before = one.scores()
    model.blocks[1].attention.q_proj.weight.grad[3, 3] = torch.inf
    one.update()
    assert torch.equal(one.scores(), before)


def test_gradients_that_are_all_zero_score_zero(model, ids):
    gradient = QKGradient(model)
    backward(model, ids)
    for parameter in model.parameters():
        parameter.grad *= 0
    gradient.update()
    assert not gradient.scores().any()


def test_frozen_heads_are_left_out_of_the_mean_and_score_nan(model, ids):
    gradient = QKGradient(model)
    backward(model, ids)
    gradient.update()
    first = gradient.scores()
    fixed = CompactPattern.from_parameters(*torch.randn(2, 5, 24, dtype=torch.float64))
    frozen = HeadSet([(0, 1), (1, 0), (1, 1), (1, 2), (1, 3)])
    saf.install_(model, frozen, fixed)
    backward(model, ids)
    gradient.update()
    scores = gradient.scores()
    assert HeadSet(map(tuple, scores.isnan().nonzero().tolist())) == frozen
    q = torch.stack([head_norms(site) for site in adapter_for(model).sites()])
    torch.testing.assert_close(scores, 0.9 * first + 0.1 * q / q.nanmean(), equal_nan=True)
    saf.uninstall_(model)
    assert torch.equal(gradient.scores()[1], first[1]), "an undone head goes on from where it was"


def test_a_query_head_takes_its_groups_key_gradient():
    generator = torch.Generator().manual_seed(0)
    query, key = torch.zeros(3 * 4, 6, requires_grad=True), torch.zeros(2 * 4, 6, requires_grad=True)
    query.grad, key.grad = torch.randn(12, 6, generator=generator), torch.randn(8, 6, generator=generator)

    class Grouped:
        layout = HeadLayout(4, 2, frozen=(1,))
        head_dim = 4

        def projections(self):
            return {"query": (query, 0), "key": (key, 0)}

    found = head_norms(Grouped())
    q, k = query.grad.view(3, -1).norm(dim=1), key.grad.view(2, -1).norm(dim=1)
    expected = torch.stack([q[0] + k[0], torch.tensor(torch.nan), q[1] + k[1], q[2] + k[1]]).double()
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_the_state_survives_json(model, ids):
    gradient = QKGradient(model)
    fresh = QKGradient(model)
    fresh.load_state_dict(json.loads(json.dumps(fresh.state_dict(), allow_nan=False)))
    assert fresh.scores().isnan().all()
    for part in (gradient, fresh):
        backward(model, ids)
        part.update()
    fresh.load_state_dict(json.loads(json.dumps(gradient.state_dict(), allow_nan=False)))
    backward(model, ids[:2])
    gradient.update()
    fresh.update()
    assert torch.equal(gradient.scores(), fresh.scores())
    with pytest.raises(CheckpointError, match=r"beta=0.5; got \[3, 4\] with beta=0.9"):
        QKGradient(model, beta=0.5).load_state_dict(gradient.state_dict())


def test_update_without_gradients_is_refused(model):
    with pytest.raises(InputError, match=r"after loss.backward\(\) and before zero_grad"):
        QKGradient(model).update()


NAN = torch.nan
VARIANCE = torch.tensor([[0.3, 0.1, NAN], [0.1, 0.5, 0.4]], dtype=torch.float64)
GRADIENT = torch.tensor([[1.0, 2.0, NAN], [0.5, 0.7, 3.0]], dtype=torch.float64)


def test_rank_sum_adds_places_ties_by_layer_and_head(statistics):
    found = saf.score(statistics(VARIANCE), "rank_sum", gradient=GRADIENT)
    expected = torch.tensor([[2.0 + 2, 0 + 3, NAN], [1 + 0, 4 + 1, 3 + 4]], dtype=torch.float64)
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_the_veto_sends_heads_above_the_median_to_the_end(statistics):
    found = saf.score(statistics(VARIANCE), "gradient_veto", gradient=GRADIENT)
    # The median is 1.0: (0, 1) and (1, 2) lie above it and follow all others, by variance.
    assert [(layer, head) for layer, head in saf.selection.ranking(found)] == [(1, 0), (0, 0), (1, 1), (0, 1), (1, 2)]


def test_a_live_head_without_a_gradient_is_told(statistics):
    unknown = GRADIENT.clone()
    unknown[1, 1] = NAN
    for name in ("qk_gradient", "rank_sum", "gradient_veto"):
        with pytest.raises(InputError, match=r"no value for live heads \[\[1, 1\]\]: call saf.QKGradient"):
            saf.score(statistics(VARIANCE), name, gradient=unknown)
        with pytest.raises(InputError, match=r"\[2, 3\]; got \[3\]"):
            saf.score(statistics(VARIANCE), name, gradient=GRADIENT[0])
    assert torch.equal(saf.score(statistics(VARIANCE), "qk_gradient", gradient=GRADIENT)[1], GRADIENT[1])
