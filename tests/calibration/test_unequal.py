"""Calibration on sequences of unequal lengths: a row is measured over the sequences that reach it, without padding."""

import pytest
import torch

from saf.calibration import calibrate, dense_statistics, gate_gradients, plan_calibration
from saf.calibration.capture import read_sequences
from saf.calibration.layer import measure_layer, spans_of
from saf.errors import InputError
from saf.freezing.config import FreezeConfig
from saf.freezing.recipe import freeze_
from saf.statistics import AttentionStatistics
from tests.calibration.test_calibrate import FIELDS, model, tokens

LENGTHS = [31, 12, 40, 12, 26]


def padded(ids: torch.Tensor, lengths: list[int], *, padding: int) -> dict[str, torch.Tensor]:
    """A batch whose rows end after so many tokens, with a mask that says so."""
    mask = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
    return {"input_ids": torch.where(mask, ids, padding), "attention_mask": mask.long()}


@pytest.fixture(scope="module")
def found() -> AttentionStatistics:
    collect = ("mean", "entry_variance", "row_variance", "sharp_row_entropy")
    return calibrate(model(), [padded(tokens(), LENGTHS, padding=7)], collect=collect)


@pytest.mark.parametrize("lengths", [[70, 70, 33, 5, 1], [70, 1], [70], [70, 69, 68]])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_strips_equal_the_dense_oracle(lengths, dtype, tolerance, generator):
    query = 2 * torch.randn(len(lengths), 4, 70, 16, generator=generator, dtype=dtype)
    key = 2 * torch.randn(len(lengths), 2, 70, 16, generator=generator, dtype=dtype)
    for place, end in enumerate(lengths):
        query[place, :, end:] = key[place, :, end:] = torch.nan
    given = {"kv_head": [0, 0, 1, 1], "lengths": lengths}
    measured, expected = measure_layer(query, key, rows=32, **given), dense_statistics(query, key, **given)
    for name in FIELDS:
        one, other = getattr(measured, name), getattr(expected, name)
        assert ((one - other).abs() <= tolerance * other.abs().max()).all(), name


def test_rows_are_measured_over_the_sequences_that_reach_them(found):
    """The same numbers from the patterns of each sequence by itself, in a loop over rows."""
    rows = [row[:end] for row, end in zip(tokens(), LENGTHS, strict=True)]
    alone = [calibrate(model(), [row[None]], collect=("mean",)).collected["mean"] for row in rows]
    counts = [sum(row < end for end in LENGTHS) for row in range(40)]
    assert found.row_counts.tolist() == counts
    assert found.lengths == tuple(sorted(LENGTHS, reverse=True))
    variance, divergence = (torch.zeros(12, dtype=torch.float64) for _ in range(2))
    for row, count in enumerate(counts):
        here = torch.stack([one[:, row, : row + 1] for one in alone if row < one.shape[1]])
        mean = here.mean(0)
        assert torch.allclose(found.collected["mean"][:, row, : row + 1], mean, atol=1e-12)
        if count > 1:
            spread = here.var(0)
            assert torch.allclose(found.collected["entry_variance"][:, row, : row + 1], spread, atol=1e-12)
            variance += spread.sum(-1)
            divergence += (torch.xlogy(here, here) - torch.xlogy(here, mean)).sum((0, 2)) / count
    # 31 rows are reached by two sequences or more: they make the scores.
    assert torch.allclose(found.variance.flatten(), variance / 31**2, rtol=1e-10)
    assert torch.allclose(found.forward_kl.flatten(), divergence / 31, rtol=1e-10)


def test_padding_never_enters_and_order_does_not_matter(found):
    ids = tokens()
    other = calibrate(model(), [padded(ids, LENGTHS, padding=0)])
    separate = calibrate(model(), [row[None, :end] for row, end in zip(ids, LENGTHS, strict=True)])
    for name in FIELDS:
        assert torch.equal(getattr(other, name), getattr(found, name))
        assert torch.allclose(getattr(separate, name), getattr(found, name), rtol=1e-9, atol=1e-12)
    assert found.sequences_hash == other.sequences_hash == separate.sequences_hash


def test_equal_lengths_are_the_same_numbers_with_or_without_padding(generator):
    ids = tokens(4, 24)
    whole = calibrate(model(), [ids[:3], ids[3:]])
    wide = torch.cat([ids, torch.full((4, 5), 3)], 1)
    for batches in (
        [{"input_ids": ids[:3], "attention_mask": torch.ones(3, 24)}, ids[3:]],
        [padded(wide[:3], [24] * 3, padding=1), padded(wide[3:], [24], padding=2)],
    ):
        again = calibrate(model(), batches)
        assert all(torch.equal(getattr(again, name), getattr(whole, name)) for name in FIELDS)
        assert (again.lengths, again.sequences_hash) == ((), whole.sequences_hash)
    assert whole.row_counts.tolist() == [4] * 24


def test_they_are_kept_with_their_counts_and_told(found, tmp_path):
    found.save(tmp_path / "statistics.safetensors")
    again = AttentionStatistics.load(tmp_path / "statistics.safetensors")
    assert again.lengths == found.lengths
    assert torch.equal(again.row_counts, found.row_counts)
    assert "5 sequences of 12 to 40 tokens (31 rows are reached by two or more)" in repr(again)
    plan = plan_calibration(model(), [padded(tokens(), LENGTHS, padding=7)])
    assert "12 heads on 5 sequences of 12 to 40 tokens" in str(plan)
    first, second = (
        calibrate(model(), [padded(tokens(), LENGTHS, padding=7)], heads=[head]) for head in ((0, 1), (2, 3))
    )
    assert AttentionStatistics.join([first, second]).lengths == found.lengths
    with pytest.raises(InputError, match="lengths must be of 5 sequences"):
        AttentionStatistics(**{**vars(found), "lengths": (40, 3)})


def test_what_is_kept_of_every_sequence_needs_one_length():
    with pytest.raises(InputError, match="rows cannot be collected of sequences of unequal lengths, 12 to 40 tokens"):
        calibrate(model(), [padded(tokens(), LENGTHS, padding=7)], collect=("rows",))


def test_heads_are_frozen_and_gates_measured_without_the_padding():
    batches = [padded(tokens(), LENGTHS, padding=7)]
    gates = [gate_gradients(model(), each) for each in (batches, [padded(tokens(), LENGTHS, padding=0)])]
    assert torch.equal(*gates)
    made = model().float()
    report = freeze_(made, batches, FreezeConfig(rate=0.25, max_fit_kl=10.0))
    assert report.to_dict()["lengths"] == sorted(LENGTHS, reverse=True)
    assert report.patterns.length == 40
    assert len(report.heads) == 3
    with pytest.raises(InputError, match="one full length"):
        freeze_(model().float(), batches, FreezeConfig(rate=0.25, heldout_kl=True))


def test_batches_are_made_anew_longest_first():
    ids = tokens()
    read = read_sequences([padded(ids[:2], LENGTHS[:2], padding=9), padded(ids[2:], LENGTHS[2:], padding=9)])
    assert [list(batch.shape) for batch in read.ids] == [[2, 40], [3, 26]]
    assert read.lengths == (40, 31, 26, 12, 12)
    assert torch.equal(read.ids[0][0], ids[2])
    assert [span.count for span in spans_of(read.lengths)] == [5, 3, 2, 1]
