"""Gradients that scores read: the running Q/K average against Eqs. (8) and (9), gates against real ones, Eq. (19)."""

import json

import pytest
import torch

import saf
from saf.calibration import QKGradient, gate_gradients
from saf.calibration.collectors import head_norms
from saf.errors import CheckpointError, InputError
from saf.heads import HeadLayout, HeadSet
from saf.models import GPT
from saf.models.adapter import adapter_for
from saf.patterns import CompactPattern
from tests.uneven import ids, model

__all__ = ["ids", "model"]
FROZEN = HeadSet([(0, 1), (1, 0), (1, 1), (1, 2), (1, 3)])


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
    with pytest.raises(InputError, match="call update"):
        gradient.update()
    expected = None
    for update in range(4):
        backward(model, ids[update : update + 2])
        gradient.update()
        relative = norms(model) / norms(model).mean()
        expected = relative if expected is None else 0.9 * expected + 0.1 * relative
    torch.testing.assert_close(gradient.scores(), expected, rtol=1e-12, atol=0)
    assert gradient.updates == 4


def test_a_common_factor_cancels_a_bad_update_is_left_out_and_zero_stays_zero(model, ids):
    one, other, none = (QKGradient(model) for _ in range(3))
    backward(model, ids)
    one.update()
    for factor, gradient in ((7.5, other), (0.0, none)):
        for parameter in model.parameters():
            parameter.grad *= factor
        gradient.update()
    torch.testing.assert_close(one.scores(), other.scores(), rtol=1e-12, atol=0)
    assert not none.scores().any()
    before = one.scores()
    model.blocks[1].attention.q_proj.weight.grad[3, 3] = torch.inf
    one.update()
    assert torch.equal(one.scores(), before)


def test_frozen_heads_are_left_out_of_the_mean_and_score_nan(model, ids):
    gradient = QKGradient(model)
    backward(model, ids)
    gradient.update()
    first = gradient.scores()
    saf.install_(model, FROZEN, CompactPattern.from_parameters(*torch.randn(2, 5, 24, dtype=torch.float64)))
    backward(model, ids)
    gradient.update()
    scores = gradient.scores()
    assert HeadSet(map(tuple, scores.isnan().nonzero().tolist())) == FROZEN
    q = torch.stack([head_norms(site) for site in adapter_for(model).sites()])
    torch.testing.assert_close(scores, 0.9 * first + 0.1 * q / q.nanmean(), equal_nan=True)
    saf.uninstall_(model)
    assert torch.equal(gradient.scores()[1], first[1]), "an undone head goes on from where it was"


def test_a_query_head_takes_its_groups_key_gradient(generator):
    query, key = torch.zeros(3 * 4, 6, requires_grad=True), torch.zeros(2 * 4, 6, requires_grad=True)
    query.grad, key.grad = torch.randn(12, 6, generator=generator), torch.randn(8, 6, generator=generator)

    class Grouped:
        layout = HeadLayout(4, 2, frozen=(1,))
        head_dim = 4

        def projections(self):
            return {"query": (query, 0), "key": (key, 0)}

    q, k = query.grad.view(3, -1).norm(dim=1), key.grad.view(2, -1).norm(dim=1)
    expected = torch.stack([q[0] + k[0], torch.tensor(torch.nan), q[1] + k[1], q[2] + k[1]]).double()
    torch.testing.assert_close(head_norms(Grouped()), expected, equal_nan=True)


def test_the_state_survives_json(model, ids):
    gradient, fresh = QKGradient(model), QKGradient(model)
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
    for state in (gradient.state_dict(),):
        with pytest.raises(CheckpointError, match="state must"):
            QKGradient(model, beta=0.5).load_state_dict(state)


def gated_loss(model, ids, gates):
    """Multiply every head's output by its gate `[L, H]` before the output projection; return the loss."""
    handles = []
    for block, row in zip(model.blocks, gates, strict=True):
        wide = row.repeat_interleave(block.attention.head_dim)
        handles.append(block.attention.o_proj.register_forward_pre_hook(lambda _, args, wide=wide: args[0] * wide))
    loss = model(ids[:, :-1], ids[:, 1:])
    for handle in handles:
        handle.remove()
    return loss


def dense_gates(model, ids):
    """Absolute values before the mean over sequences."""
    total = torch.zeros(3, 4, dtype=torch.float64)
    for sequence in ids.split(1):
        gates = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
        gated_loss(model, sequence, gates).backward()
        total += gates.grad.abs()
    return total / len(ids)


def test_gates_equal_real_ones_and_finite_differences(model, ids):
    actual = gate_gradients(model, [ids[:2], {"input_ids": ids[2:]}])
    torch.testing.assert_close(actual, dense_gates(model, ids), rtol=1e-5, atol=1e-10)
    torch.testing.assert_close(gate_gradients(model, [ids.flip(0)]), actual, rtol=1e-10, atol=0)
    step, up, down = 1e-3, *torch.ones(2, 3, 4, dtype=torch.float64)
    up[1, 2] += step
    down[1, 2] -= step
    with torch.no_grad():
        slope = (gated_loss(model, ids[:1], up) - gated_loss(model, ids[:1], down)) / (2 * step)
    assert gate_gradients(model, [ids[:1]])[1, 2].item() == pytest.approx(abs(slope.item()), rel=1e-2)


def test_measuring_gates_leaves_no_trace_and_works_on_fixed_weights(model, ids):
    free = gate_gradients(model, [ids])
    model.requires_grad_(False)
    model.train()
    assert torch.equal(gate_gradients(model, [ids]), free)
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in model.parameters())
    assert all(module.training for module in model.modules())


def test_gates_of_frozen_heads_are_nan_and_others_keep_their_place(model, ids):
    fixed = CompactPattern.from_parameters(*torch.randn(2, 1, 24, dtype=torch.float64))
    saf.install_(model, HeadSet([(1, 1)]), fixed, backend="reference")
    assert gate_gradients(model, [ids]).isnan().nonzero().tolist() == [[1, 1]]
    with torch.no_grad():
        model.blocks[1].attention.o_proj.weight[:, 16:24] = 0  # slot 2 is head 3: slots are 0, 2, 3, 1
    assert gate_gradients(model, [ids])[1, 3] == 0


def test_a_loss_of_ones_own_and_targets_decide_where_it_is_taken(model, ids):
    targets = torch.full_like(ids, -100)
    targets[:, 5], targets[0, 9] = ids[:, 2], 1

    def at_targets(model, sequence):
        row = int((ids == sequence).all(1).nonzero()[0, 0])
        return model(sequence, targets[row : row + 1])

    batches = [{"input_ids": ids[:2], "targets": targets[:2]}, {"input_ids": ids[2:], "targets": targets[2:]}]
    actual = gate_gradients(model, batches)
    torch.testing.assert_close(actual, gate_gradients(model, [ids], loss=at_targets), rtol=1e-10, atol=0)
    # Next tokens as targets give the loss that is taken without any, but for the last token, which has none.
    after = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], dim=1)
    plain = gate_gradients(model, [{"input_ids": ids, "targets": after}])
    torch.testing.assert_close(plain, gate_gradients(model, [ids]), rtol=1e-4, atol=1e-10)
    config = saf.FreezeConfig(count=1, score="gate_taylor", operation="prune")
    report = saf.freeze_(model, iter(batches), config)
    torch.testing.assert_close(report.scores, actual / actual.norm(dim=1, keepdim=True), rtol=1e-10, atol=0)


def test_targets_and_sequences_without_a_loss_are_refused(model, ids):
    targets = torch.full_like(ids, -100)
    targets[1:, 3] = 1
    whole = {"input_ids": ids, "targets": targets.clamp(min=0)}
    for batches, options, message in [
        ([ids[:, :1]], {}, "two tokens or more"),
        ([{"input_ids": ids, "targets": targets}], {}, "needs a target"),
        ([whole | {"targets": targets[:, 1:]}], {}, "targets must be"),
        ([whole, ids], {}, "in every batch or in none"),
        ([whole | {"targets": targets.float()}], {}, "targets must be"),
        ([whole], {"loss": lambda model, ids: model(ids).sum()}, "no effect with loss="),
    ]:
        with pytest.raises(InputError, match=message):
            gate_gradients(model, batches, **options)
