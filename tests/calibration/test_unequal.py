"""Sequences of unequal lengths: a row is measured over the sequences that reach it, without padding."""

import pytest
import torch

from saf.calibration import calibrate, gate_gradients, read_batches, read_sequences
from saf.calibration.measure import spans_of
from saf.errors import InputError
from saf.freeze_config import FreezeConfig
from saf.freezing import freeze_
from saf.statistics import AttentionStatistics
from tests.calibration.test_calibrate import FIELDS, check_close, model, tokens

LENGTHS = [31, 12, 40, 12, 26]


def padded(ids: torch.Tensor, lengths: list[int], *, padding: int) -> dict[str, torch.Tensor]:
    """A batch whose rows end after so many tokens, with a mask of them."""
    mask = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
    return {"input_ids": torch.where(mask, ids, padding), "attention_mask": mask.long()}


@pytest.fixture(scope="module")
def actual() -> AttentionStatistics:
    return calibrate(model(), [padded(tokens(), LENGTHS, padding=7)], collect=("mean", "entry_variance"))


def test_rows_are_collected_of_the_sequences_that_reach_them(actual):
    """The same numbers from the patterns of each sequence by itself, in a loop over rows."""
    rows = [row[:end] for row, end in zip(tokens(), LENGTHS, strict=True)]
    alone = [calibrate(model(), [row[None]], collect=("mean",)).collected["mean"] for row in rows]
    counts = [sum(row < end for end in LENGTHS) for row in range(40)]
    assert actual.lengths == tuple(sorted(LENGTHS, reverse=True))
    for row, count in enumerate(counts):
        here = torch.stack([one[:, row, : row + 1] for one in alone if row < one.shape[1]])
        assert torch.allclose(actual.collected["mean"][:, row, : row + 1], here.mean(0), atol=1e-12)
        if count > 1:
            assert torch.allclose(actual.collected["entry_variance"][:, row, : row + 1], here.var(0), atol=1e-12)


def test_padding_never_enters_and_order_does_not_matter(actual):
    ids = tokens()
    other = calibrate(model(), [padded(ids, LENGTHS, padding=0)])
    separate = calibrate(model(), [row[None, :end] for row, end in zip(ids, LENGTHS, strict=True)])
    assert all(torch.equal(getattr(other, name), getattr(actual, name)) for name in FIELDS)
    check_close(separate, actual, 1e-10)
    assert actual.sequences_hash == other.sequences_hash == separate.sequences_hash
    wide, whole = torch.cat([ids, torch.full((5, 5), 3)], 1), calibrate(model(), [ids])
    again = calibrate(model(), [padded(wide, [40] * 5, padding=1)])  # equal lengths are no unequal ones
    assert all(torch.equal(getattr(again, name), getattr(whole, name)) for name in FIELDS)
    assert (again.lengths, again.sequences_hash) == ((), whole.sequences_hash)


def test_heads_are_frozen_and_gates_measured_without_the_padding():
    batches = [padded(tokens(), LENGTHS, padding=7)]
    with pytest.raises(InputError, match="rows cannot be collected"):
        calibrate(model(), batches, collect=("rows",))
    with pytest.raises(InputError, match="sequences must have one length"):
        read_batches(batches)
    other = [padded(tokens(), LENGTHS, padding=0)]
    assert torch.equal(gate_gradients(model(), batches), gate_gradients(model(), other))
    report = freeze_(model(torch.float32), iter(batches), FreezeConfig(rate=0.25, max_fit_kl=10.0))
    assert report.to_dict()["lengths"] == sorted(LENGTHS, reverse=True)
    assert (report.patterns.length, len(report.heads)) == (40, 3)


def test_batches_are_sorted_longest_first_with_their_targets_and_read_again():
    ids = tokens()
    batches = [padded(ids[:2], LENGTHS[:2], padding=9), padded(ids[2:], LENGTHS[2:], padding=9)]
    read = read_sequences([batch | {"targets": batch["input_ids"] + 1} for batch in batches])
    assert [list(batch.shape) for batch in read.ids] == [[2, 40], [3, 26]]
    assert read.lengths == (40, 31, 26, 12, 12)
    assert torch.equal(read.ids[0][0], ids[2])
    assert all(torch.equal(row + 1, targets) for row, targets in read.rows())
    assert [count for _, _, count in spans_of(read.lengths)] == [5, 3, 2, 1]
    again = read_sequences(list(read))
    assert (again.lengths, again.hash, again.num_different) == (read.lengths, read.hash, 5)
    assert all(map(torch.equal, again.targets, read.targets))
