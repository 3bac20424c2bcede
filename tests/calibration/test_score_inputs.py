"""Inputs of scores against dense computations: Q/K averages, Eqs. (8) and (9), real gates, Eq. (19), and outputs."""

import pytest
import torch

import saf
from saf.calibration import QKGradient, calibrate, gate_gradients, head_outputs, latter_half
from saf.calibration.score_inputs import head_norms
from saf.errors import InputError
from saf.heads import HeadLayout, HeadSet
from saf.models import GPT
from saf.models.adapter import adapter_for
from saf.patterns import CompactPattern
from tests.calibration.oracle import causal_patterns, layer_inputs
from tests.uneven import heldout, ids, model

__all__ = ["heldout", "ids", "model"]
FROZEN = HeadSet([(0, 1), (1, 0), (1, 1), (1, 2), (1, 3)])
NAMES = ("output_magnitude", "redundancy", "residual_cosine", "relative_output_change")


def freeze(model: GPT) -> None:
    """Freeze the heads in FROZEN, a whole layer among them."""
    saf.install_(model, FROZEN, CompactPattern.from_parameters(*torch.randn(2, 5, 24, dtype=torch.float64)))


def norms(model: GPT) -> torch.Tensor:
    """Eq. (8) as the paper writes it."""
    weights = [(block.attention.q_proj.weight.grad, block.attention.k_proj.weight.grad) for block in model.blocks]
    return sum(torch.stack(part).unflatten(1, (4, 8)).norm(dim=(2, 3)) for part in zip(*weights, strict=True))


def backward(model: GPT, ids: torch.Tensor) -> None:
    model.zero_grad()
    model(ids[:, :-1], ids[:, 1:]).backward()


def test_the_average_follows_the_paper_from_the_first_update_and_leaves_bad_ones_out(model, ids):
    gradient, expected = QKGradient(model), None
    assert gradient.scores().isnan().all()
    with pytest.raises(InputError, match="call update"):
        gradient.update()
    for update in range(4):
        backward(model, ids[update : update + 2])
        gradient.update()
        relative = norms(model) / norms(model).mean()
        expected = relative if expected is None else 0.9 * expected + 0.1 * relative
    torch.testing.assert_close(gradient.scores(), expected, rtol=1e-12, atol=0)
    scaled, zero = QKGradient(model), QKGradient(model)
    for factor, other in ((7.5, scaled), (0.0, zero)):
        for parameter in model.parameters():
            parameter.grad *= factor
        other.update()
    torch.testing.assert_close(scaled.scores(), relative, rtol=1e-12, atol=0)  # a common factor cancels
    assert not zero.scores().any()
    model.blocks[1].attention.q_proj.weight.grad[3, 3] = torch.inf
    gradient.update()
    torch.testing.assert_close(gradient.scores(), expected, rtol=1e-12, atol=0)


def test_frozen_heads_are_left_out_of_the_mean_and_score_nan(model, ids):
    gradient = QKGradient(model)
    backward(model, ids)
    gradient.update()
    first = gradient.scores()
    freeze(model)
    backward(model, ids)
    gradient.update()
    scores = gradient.scores()
    assert HeadSet(scores.isnan().nonzero().tolist()) == FROZEN
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


# --- gates


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


def test_gates_are_real_ones_and_measuring_them_leaves_no_trace(model, ids):
    expected = torch.zeros(3, 4, dtype=torch.float64)
    for sequence in ids.split(1):  # absolute values before the mean over sequences
        gates = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
        gated_loss(model, sequence, gates).backward()
        expected += gates.grad.abs() / len(ids)
    model.zero_grad()
    actual = gate_gradients(model, [ids[:2], {"input_ids": ids[2:]}])
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-10)
    model.requires_grad_(False)
    model.train()
    torch.testing.assert_close(gate_gradients(model, [ids.flip(0)]), actual, rtol=1e-10, atol=0)
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in model.parameters())
    assert all(module.training for module in model.modules())


def test_gates_of_frozen_heads_are_nan_and_others_keep_their_place(model, ids):
    freeze(model)
    model.blocks[0].attention.o_proj.weight.data[:, 16:24] = 0  # slot 2 is head 3: slots are 0, 2, 3, 1
    actual = gate_gradients(model, [ids])
    assert HeadSet(actual.isnan().nonzero().tolist()) == FROZEN
    assert actual[0, 3] == 0


def test_targets_decide_where_the_loss_is_taken(model, ids):
    targets = torch.full_like(ids, -100)
    targets[:, 5], targets[0, 9] = ids[:, 2], 1
    batches = [{"input_ids": ids[:2], "targets": targets[:2]}, {"input_ids": ids[2:], "targets": targets[2:]}]
    actual = gate_gradients(model, batches)
    # Next tokens as targets give the loss that is taken without any, but for the last token, which has none.
    after = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], dim=1)
    plain = gate_gradients(model, [{"input_ids": ids, "targets": after}])
    torch.testing.assert_close(plain, gate_gradients(model, [ids]), rtol=1e-4, atol=1e-10)
    assert (plain - actual).abs().min() > 0
    report = saf.freeze_(model, iter(batches), saf.FreezeConfig(count=1, score="gate_taylor", operation="prune"))
    torch.testing.assert_close(report.scores, actual / actual.norm(dim=1, keepdim=True), rtol=1e-10, atol=0)


def test_targets_and_sequences_without_a_loss_are_refused(model, ids):
    targets = torch.full_like(ids, -100)
    targets[1:, 3] = 1
    whole = {"input_ids": ids, "targets": targets.clamp(min=0)}
    for batches, message in [
        ([ids[:, :1]], "two tokens or more"),
        ([{"input_ids": ids, "targets": targets}], "needs a target"),
        ([whole | {"targets": targets[:, 1:]}], "targets must be"),
        ([whole, ids], "in every batch or in none"),
        ([whole | {"targets": targets.float()}], "targets must be"),
    ]:
        with pytest.raises(InputError, match=message):
            gate_gradients(model, batches)


# --- outputs


def layer_scores(block, before, seen, rows):
    """Return the magnitude and Eqs. (10) to (12) as the paper defines them, `[H]` each, head by head."""
    mean, pattern = causal_patterns(before["q"], before["k"]).mean(0), causal_patterns(seen["q"], seen["k"])
    weight = block.attention.o_proj.weight.detach().T.unflatten(0, (mean.shape[0], -1))
    c, swapped = ((each @ seen["v"] @ weight)[:, :, rows].transpose(0, 1) for each in (pattern, mean))  # [H, N, R, d]
    output = c.sum(0)
    torch.testing.assert_close(output, seen["output"][:, rows])
    after, flat = seen["residual"][:, rows] + output, c.flatten(1)
    cosine = torch.cosine_similarity(flat[:, None], flat, dim=-1).fill_diagonal_(-1)
    changed = torch.cosine_similarity(after, after + swapped - c, dim=-1)
    relative = (swapped - c).norm(dim=-1) / output.norm(dim=-1).clamp(min=1e-8)
    magnitude = flat.norm(dim=1) / flat.shape[1] ** 0.5
    return magnitude, -cosine.amax(-1), (1 - changed).mean((1, 2)), relative.mean((1, 2))


def measure(model, ids, heldout, positions):
    statistics = calibrate(model, [ids], collect=("mean_rows",), positions=positions)
    outputs = head_outputs(model, [heldout], statistics)
    return outputs, {name: saf.score(statistics, name, outputs=outputs) for name in NAMES}


def test_scores_of_outputs_equal_the_dense_computation_and_leave_no_trace(model, ids, heldout):
    model.train()
    before, positions = {k: v.clone() for k, v in model.state_dict().items()}, latter_half(24, 5)
    outputs, actual = measure(model, ids, heldout, positions)
    assert not any(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(module.training for module in model.modules())
    for layer in zip(range(3), model.blocks, layer_inputs(model, ids), layer_inputs(model, heldout), strict=True):
        for name, expected in zip(NAMES, layer_scores(*layer[1:], list(positions)), strict=True):
            torch.testing.assert_close(actual[name][layer[0]], expected, rtol=1e-9, atol=1e-12)
    assert outputs.residual.shape[-1] == 3 * 5
    freeze(model)
    for scores in measure(model, ids, heldout, (12, 20))[1].values():
        assert HeadSet(scores.isnan().nonzero().tolist()) == FROZEN


def test_outputs_need_the_rows_of_mean_patterns(model, ids, heldout):
    with pytest.raises(InputError, match="mean_rows"):
        head_outputs(model, [heldout], calibrate(model, [ids]))
    some = calibrate(model, [ids], collect=("mean_rows",), heads=[(0, 0), (2, 3)])
    with pytest.raises(InputError, match="24 tokens, as calibrated"):
        head_outputs(model, [heldout[:, :10]], some)
    outputs = head_outputs(model, [heldout], some)
    assert saf.score(some, "residual_cosine", outputs=outputs).isfinite().sum() == 2
    with pytest.raises(InputError, match="'residual_cosine' has no value for live heads"):
        saf.score(calibrate(model, [ids]), "residual_cosine", outputs=outputs)
