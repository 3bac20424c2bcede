"""Head outputs and the scores of them against a dense computation, every contribution formed head by head."""

import pytest
import torch

import saf
from saf.calibration import calibrate, head_outputs, latter_half
from saf.errors import InputError
from saf.heads import HeadSet
from saf.patterns import CompactPattern
from tests.uneven import heldout, ids, model

__all__ = ["heldout", "ids", "model"]
NAMES = ("output_magnitude", "redundancy", "residual_cosine", "relative_output_change")


def layer_inputs(model, ids):
    """Run the model; return queries, keys, values, residual stream and attention output of each layer."""
    seen = [{} for _ in model.blocks]
    handles = []
    for block, retained in zip(model.blocks, seen, strict=True):
        handles += [
            block.register_forward_pre_hook(lambda _, args, retained=retained: retained.update(residual=args[0])),
            block.attention.register_forward_hook(lambda _, args, out, retained=retained: retained.update(output=out)),
            block.attention.live.register_forward_pre_hook(
                lambda _, args, retained=retained: retained.update(q=args[0], k=args[1], v=args[2])
            ),
        ]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return seen


def causal_patterns(query, key):
    length, dim = query.shape[-2:]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    return (query @ key.mT / dim**0.5).masked_fill(future, -torch.inf).softmax(-1)


def dense_scores(model, ids, heldout, positions):
    """Return the four scores, `[L, H]` each, as the paper defines them."""
    actual = {name: [] for name in NAMES}
    calibration = layer_inputs(model, ids)
    for block, before, seen in zip(model.blocks, calibration, layer_inputs(model, heldout), strict=True):
        heads, dim = seen["q"].shape[1], seen["q"].shape[-1]
        mean = causal_patterns(before["q"], before["k"]).mean(0)
        pattern = causal_patterns(seen["q"], seen["k"])
        weight = block.attention.o_proj.weight.detach()
        rows = list(positions)
        c = [pattern[:, h] @ seen["v"][:, h] @ weight[:, h * dim : (h + 1) * dim].T for h in range(heads)]
        swapped = [mean[h] @ seen["v"][:, h] @ weight[:, h * dim : (h + 1) * dim].T for h in range(heads)]
        output = sum(c)
        torch.testing.assert_close(output, seen["output"])
        after = (seen["residual"] + output)[:, rows]
        flat = [part[:, rows].flatten() for part in c]
        actual["output_magnitude"].append([part.norm() / len(part) ** 0.5 for part in flat])
        actual["redundancy"].append(
            [
                -max(torch.cosine_similarity(flat[h], flat[o], dim=0) for o in range(heads) if o != h)
                for h in range(heads)
            ]
        )
        actual["residual_cosine"].append(
            [
                (1 - torch.cosine_similarity(after, after + (swapped[h] - c[h])[:, rows], dim=-1)).mean()
                for h in range(heads)
            ]
        )
        norm = output[:, rows].norm(dim=-1).clamp(min=1e-8)
        actual["relative_output_change"].append(
            [((swapped[h] - c[h])[:, rows].norm(dim=-1) / norm).mean() for h in range(heads)]
        )
    return {name: torch.tensor(rows, dtype=torch.float64) for name, rows in actual.items()}


def measure(model, ids, heldout, positions):
    statistics = calibrate(model, [ids], collect=("mean_rows",), positions=positions)
    outputs = head_outputs(model, [heldout], statistics)
    return statistics, outputs, {name: saf.score(statistics, name, outputs=outputs) for name in NAMES}


def test_scores_equal_the_dense_computation(model, ids, heldout):
    positions = latter_half(24, 5)
    _, outputs, actual = measure(model, ids, heldout, positions)
    expected = dense_scores(model, ids, heldout, positions)
    for name in NAMES:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-9, atol=1e-12)
        assert len(actual[name].unique()) == 12 or name == "redundancy"
    assert outputs.num_samples == 3 * 5


def test_measuring_outputs_leaves_no_trace(model, ids, heldout):
    statistics = calibrate(model, [ids], collect=("mean_rows",))
    model.train()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    head_outputs(model, [heldout], statistics)
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())


def test_with_frozen_heads_the_others_are_measured_in_the_model_as_it_is(model, ids, heldout):
    fixed = CompactPattern.from_parameters(*torch.randn(2, 5, 24, dtype=torch.float64))
    saf.install_(model, HeadSet([(0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]), fixed)
    _, outputs, actual = measure(model, ids, heldout, (12, 20))
    for name in NAMES:
        assert actual[name].isnan().tolist() == [[False, True, False, False], [True] * 4, [False] * 4]
    inputs = layer_inputs(model, heldout)[0]
    torch.testing.assert_close(outputs.output[0], inputs["output"][:, [12, 20]].norm(dim=-1).flatten())
    # Live slots come first: head 2 is slot 1.
    head = causal_patterns(inputs["q"], inputs["k"])[:, 1] @ inputs["v"][:, 1]
    c = (head @ model.blocks[0].attention.o_proj.weight[:, 8:16].T)[:, [12, 20]]
    torch.testing.assert_close(actual["output_magnitude"][0, 2], c.square().mean().sqrt())


def test_what_is_missing_is_told(model, ids, heldout):
    with pytest.raises(InputError, match="mean_rows"):
        head_outputs(model, [heldout], calibrate(model, [ids]))
    some = calibrate(model, [ids], collect=("mean_rows",), heads=[(0, 0), (2, 3)])
    with pytest.raises(InputError, match="24 tokens, as calibrated"):
        head_outputs(model, [heldout[:, :10]], some)
    outputs = head_outputs(model, [heldout], some)
    assert saf.score(some, "residual_cosine", outputs=outputs).isfinite().sum() == 2
    with pytest.raises(InputError, match="'residual_cosine' has no value for live heads"):
        saf.score(calibrate(model, [ids]), "residual_cosine", outputs=outputs)
