"""Gate-Taylor against gates that are really there, and finite differences."""

import pytest
import torch

import saf
from saf.calibration import calibrate, gate_gradients
from saf.errors import InputError
from saf.heads import HeadSet
from saf.patterns import CompactPattern


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
    total = torch.zeros(3, 4, dtype=torch.float64)
    for sequence in ids.split(1):
        gates = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
        gated_loss(model, sequence, gates).backward()
        total += gates.grad.abs()
    return total / len(ids)


def test_gradients_equal_those_of_real_gates(model, ids):
    found = gate_gradients(model, [ids[:2], {"input_ids": ids[2:]}])
    torch.testing.assert_close(found, dense_gates(model, ids), rtol=1e-5, atol=1e-10)
    torch.testing.assert_close(gate_gradients(model, [ids.flip(0)]), found, rtol=1e-10, atol=0)


def test_the_absolute_value_is_taken_before_the_mean(model, ids):
    gates = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
    gated_loss(model, ids, gates).backward()
    assert (gate_gradients(model, [ids]) > gates.grad.abs() * (1 + 1e-6)).any()


def test_finite_differences_agree(model, ids):
    step, gates = 1e-3, torch.ones(3, 4, dtype=torch.float64)
    up, down = gates.clone(), gates.clone()
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


def test_frozen_heads_are_nan_and_others_keep_their_place(model, ids):
    fixed = CompactPattern.from_parameters(*torch.randn(2, 1, 24, dtype=torch.float64))
    saf.install_(model, HeadSet([(1, 1)]), fixed, backend="reference")
    found = gate_gradients(model, [ids])
    assert found.isnan().nonzero().tolist() == [[1, 1]]
    weight = model.blocks[1].attention.o_proj.weight
    with torch.no_grad():
        weight[:, 16:24] = 0  # slot 2 is head 3: slots are 0, 2, 3, 1
    assert gate_gradients(model, [ids])[1, 3] == 0


def test_a_loss_of_ones_own(model, ids):
    def last_token(model, sequence):
        return -model(sequence[:, :-1])[:, -1].log_softmax(-1)[0, sequence[0, -1]]

    found = gate_gradients(model, [ids], loss=last_token)
    assert not torch.allclose(found, gate_gradients(model, [ids]), rtol=1e-2)
    with pytest.raises(InputError, match="two tokens or more"):
        gate_gradients(model, [ids[:, :1]])


def test_targets_say_at_which_tokens_the_loss_is_taken(model, ids):
    targets = torch.full_like(ids, -100)
    targets[:, 5], targets[0, 9] = ids[:, 2], 1

    def at_targets(model, sequence):
        row = int((ids == sequence).all(1).nonzero()[0, 0])
        return model(sequence, targets[row : row + 1])

    batches = [{"input_ids": ids[:2], "targets": targets[:2]}, {"input_ids": ids[2:], "targets": targets[2:]}]
    found = gate_gradients(model, batches)
    torch.testing.assert_close(found, gate_gradients(model, [ids], loss=at_targets), rtol=1e-10, atol=0)
    # Next tokens as targets give the loss that is taken without any, but for the last token, which has none.
    after = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], dim=1)
    plain = gate_gradients(model, [{"input_ids": ids, "targets": after}])
    torch.testing.assert_close(plain, gate_gradients(model, [ids]), rtol=1e-4, atol=1e-10)
    config = {"count": 1, "score": "gate_taylor", "operation": "prune"}
    report = saf.freeze_(model, iter(batches), saf.FreezeConfig(**config))
    torch.testing.assert_close(report.scores, found / found.norm(dim=1, keepdim=True), rtol=1e-10, atol=0)


def test_targets_that_cannot_be_used_are_refused(model, ids):
    targets = torch.full_like(ids, -100)
    with pytest.raises(InputError, match="every sequence needs a target that counts"):
        gate_gradients(model, [{"input_ids": ids, "targets": targets}])
    targets[:, 3] = 1
    for batches in (
        [{"input_ids": ids, "targets": targets[:, 1:]}],
        [{"input_ids": ids, "targets": targets}, ids],
        [{"input_ids": ids, "targets": targets.float()}],
    ):
        with pytest.raises(InputError, match="targets must be integers of the shape of input_ids, in every batch"):
            gate_gradients(model, batches)
    with pytest.raises(InputError, match="targets have no effect beside loss="):
        gate_gradients(model, [{"input_ids": ids, "targets": targets}], loss=lambda model, ids: model(ids).sum())


def test_the_score_is_normalised_by_layer(model, ids, statistics):
    gates = torch.tensor([[3.0, 4.0, torch.nan], [0.0, 0.0, 0.0]])
    variance = torch.tensor([[1.0, 1.0, torch.nan], [1.0, 1.0, 1.0]], dtype=torch.float64)
    found = saf.score(statistics(variance), "gate_taylor", gates=gates)
    expected = torch.tensor([[0.6, 0.8, torch.nan], [0.0, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert saf.selection.ranking(found)[:3] == [(1, 0), (1, 1), (1, 2)]
    with pytest.raises(InputError, match=r"\[2, 3\]; got \[3\]"):
        saf.score(statistics(variance), "gate_taylor", gates=gates[0])
    measured = gate_gradients(model, [ids])
    found = saf.score(calibrate(model, [ids]), "gate_taylor", gates=measured)
    torch.testing.assert_close(found.square().sum(1), torch.ones(3, dtype=torch.float64))
