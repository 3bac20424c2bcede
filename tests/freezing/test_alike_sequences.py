"""Calibration that tells no heads apart is refused, however many sequences it has: rounding would choose the heads."""

import pytest
import torch

import saf
from saf.calibration import QKGradient
from saf.errors import InputError
from tests.freezing.small_model import LENGTH, make, tokens

COMPARE = ["variance", "forward_kl", "rank_sum", "gradient_veto", "residual_cosine", "relative_output_change"]


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def refused(model, batches, words, **given):
    """Check that a freeze is refused and the model is as it was."""
    before = state(model)
    with pytest.raises(InputError, match=words):
        saf.freeze_(model, batches, **given)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("score", COMPARE)
def test_copies_of_one_sequence_choose_no_heads(score):
    model, one = make(), tokens(1)
    gradient = QKGradient(model)
    model(tokens()[:, :-1], tokens()[:, 1:]).backward()
    gradient.update()
    copies = list(one.repeat(7, 1).split(3))  # in batches of unequal sizes, whose products may be rounded differently
    given = {"config": saf.FreezeConfig(score=score, max_fit_kl=9), "needed": {"gradient": gradient}}
    refused(model, copies, f"{score!r} compares sequences", heldout=[one], **given)


@pytest.mark.parametrize("count", [2, 8, 32])
def test_their_number_does_not_help(count):
    refused(make(), [tokens(1).expand(count, -1)], "must have two different ones, got 1")
    assert len(saf.freeze_(make(), [tokens(1).expand(count, -1)], saf.FreezeConfig(heads=[(0, 1)], max_fit_kl=5)).heads)


def test_beginnings_of_one_sequence_are_copies_too():
    ends = torch.tensor([LENGTH, 40, 31, 17])
    mask = torch.arange(LENGTH) < ends[:, None]
    ids = torch.where(mask, tokens(1), tokens(4))  # another padding behind each
    refused(make(), [{"input_ids": ids, "attention_mask": mask}], "must have two different ones, got 1")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("score", ["variance", "forward_kl"])
def test_attention_that_no_input_changes_chooses_no_heads(score, dtype):
    """Patterns without queries are uniform: what calibration measures is the rounding of their mean over 7."""
    model, config = make(gain=0.0).to(dtype), saf.FreezeConfig(rate=0.25, score=score)
    refused(model, list(tokens(7).split(3)), "must differ between heads, got .* but for rounding", config=config)
    # Logits of one head that are some 0.02: a score far above rounding, beside eleven that are not.
    model.blocks[1].attention.q_proj.weight.data[:8] = make(gain=1.0).blocks[1].attention.q_proj.weight.data[:8]
    report = saf.freeze_(model, list(tokens(7).split(3)), saf.FreezeConfig(count=1, score=score))
    assert report.scores[1, 0] == report.scores.max()
    assert report.heads.to_list() != [[1, 0]]
