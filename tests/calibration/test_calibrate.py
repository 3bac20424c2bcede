"""Calibration: exact against whole patterns, independent of how it is split, and without a trace on the model."""

import hashlib
import random
from functools import partial

import numpy as np
import pytest
import torch

import saf
from saf.calibration import (
    COLLECTIONS,
    calibrate,
    capture,
    gate_gradients,
    heads_at_a_time,
    plan_calibration,
    read_batches,
    read_sequences,
)
from saf.calibration.capture import capture_layers
from saf.calibration.measure import Collector, measure_layer, spans_of
from saf.errors import DivergenceError, InputError
from saf.models import GPT
from saf.models.adapter import adapter_for
from saf.targets import target_of
from tests.calibration.oracle import dense_statistics, queries_and_keys
from tests.freezing.small_model import make

FIELDS = ("variance", "forward_kl", "eta_abs", "eta_rel", "row_entropy")


def model(dtype: torch.dtype = torch.float64) -> GPT:
    """Return three layers of four heads, with queries large enough for uneven attention."""
    return make(gain=40, length=40, vocab_size=30).to(dtype)


def tokens(count: int = 5, length: int = 40) -> torch.Tensor:
    return torch.randint(0, 30, (count, length), generator=torch.Generator().manual_seed(1))


def check_close(actual, expected, tolerance: float) -> None:
    """Compare statistics, with errors relative to the largest entry of each."""
    for name in FIELDS:
        one, other = getattr(actual, name), getattr(expected, name)
        assert one.dtype == torch.float64
        assert ((one - other).abs() <= tolerance * other.abs().max()).all(), name


@pytest.mark.parametrize("lengths", [[70] * 5, [1] * 3, [200] * 7, [70, 70, 33, 5, 1], [70]])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_strips_of_any_size_equal_the_dense_oracle(lengths, dtype, tolerance, generator):
    count, length = len(lengths), lengths[0]
    query = 2 * torch.randn(count, 4, length, 16, generator=generator, dtype=dtype)
    key = 2 * torch.randn(count, 2, length, 16, generator=generator, dtype=dtype)
    for row, end in enumerate(lengths):  # positions behind the end of a sequence never enter
        query[row, :, end:] = key[row, :, end:] = torch.nan
    operands = {"kv_head": [0, 0, 1, 1], "lengths": lengths}
    expected = dense_statistics(query, key, **operands)
    for strip in (None, count * 32 * length, 7 * count * length, 1):
        check_close(measure_layer(query, key, strip_elements=strip, **operands), expected, tolerance)


def test_no_variance_is_exactly_zero_and_a_very_low_one_stays_positive(generator):
    query, key = torch.randn(2, 1, 3, 90, 8, generator=generator) * 5
    actual = measure_layer(query, key, kv_head=range(3))
    assert not actual.variance.any()
    assert not actual.forward_kl.any()
    query = 1 + 1e-5 * torch.randn(6, 1, 64, 8, generator=generator)
    key = torch.randn(1, 1, 64, 8, generator=generator).expand(6, -1, -1, -1)
    exact = dense_statistics(query, key, kv_head=[0]).variance.item()
    assert 0 < measure_layer(query, key, kv_head=[0]).variance.item() == pytest.approx(exact, rel=0.05)


def test_the_model_is_measured_as_its_own_attention_computes_it():
    network, ids = model(), tokens()
    expected = [dense_statistics(*layer, kv_head=range(4)) for layer in queries_and_keys(network, ids)]
    actual = calibrate(network, [ids[:2], {"input_ids": ids[2:]}])
    assert (actual.length, actual.num_sequences) == (40, 5)
    for layer, statistics in enumerate(expected):
        for name, values in statistics._asdict().items():
            torch.testing.assert_close(getattr(actual, name)[layer], values, rtol=1e-9, atol=1e-12)


def test_layers_at_a_time_batches_and_named_heads_change_nothing():
    network, ids, seen = model(), tokens(), []
    whole, one_layer = calibrate(network, [ids]), 2 * 5 * 40 * 32 * 8
    split = calibrate(network, [ids], capture_bytes=one_layer, progress=lambda *done: seen.append(done))
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert all(torch.equal(getattr(whole, name), getattr(split, name)) for name in FIELDS)
    check_close(calibrate(network, list(ids.flip(0).split(2))), whole, 1e-10)
    heads = saf.HeadSet([(0, 2), (1, 0), (2, 1)])
    some = calibrate(network, (batch for batch in [ids]), heads=heads)
    assert saf.HeadSet(some.measured.nonzero().tolist()) == heads
    for name in FIELDS:
        others = torch.where(getattr(some, name).isnan(), torch.nan, getattr(whole, name))
        torch.testing.assert_close(getattr(some, name), others, rtol=1e-10, atol=0, equal_nan=True)


def test_calibration_leaves_no_trace_even_where_it_fails():
    network, ids = model(), tokens()
    network.train()
    network.blocks[1].eval()
    network(ids[:, :-1], ids[:, 1:]).backward()

    def state() -> str:
        numbers = [x for parameter in network.parameters() for x in (parameter.data, parameter.grad)]
        modules = [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in network.modules()]
        generators = random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()
        return hashlib.sha256(repr((*(x.tolist() for x in numbers), modules, generators)).encode()).hexdigest()

    def fail(*_: object) -> None:
        modes.update(module.training for module in network.modules())
        raise KeyError("in the middle of a forward pass")

    before, modes = state(), set()
    calibrate(network, [ids])
    assert state() == before
    handle = network.blocks[2].register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        calibrate(network, [ids])
    handle.remove()
    assert modes == {False}
    assert state() == before


def test_attention_that_is_not_finite_is_refused():
    network = model()
    network.blocks[1].attention.q_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(DivergenceError, match="layer 1 must be finite"):
        calibrate(network, [tokens()])


MASK = torch.arange(40) < torch.tensor([40, 12, 3, 40, 40])[:, None]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids: [], "at least one sequence"),
        (lambda ids: [ids.float()], "integer tensors"),
        (lambda ids: [ids[0]], "text_sequences"),
        (lambda ids: ids, "list of one"),
        (lambda ids: [ids[:, :0]], "at least one token"),
        (lambda ids: [{"input_ids": ids, "attention_mask": MASK.flip(1)}], "pad on the right"),
        (lambda ids: [{"input_ids": ids, "attention_mask": MASK[:, 1:]}], "shape of input_ids"),
        (lambda ids: [{"input_ids": ids, "position_ids": torch.arange(40)[None] % 20}], "one document each"),
        (lambda ids: [{"input_ids": ids, "position_ids": torch.arange(3, 43)[None]}], "one document each"),
        (lambda ids: [{"input_ids": ids[:1], "cu_seq_lens_q": torch.tensor([0, 20, 40])}], "one document each"),
        (lambda ids: [{"input_ids": ids[:2], "seq_lengths": [[20, 20], [40]]}], "one document each"),
        (lambda ids: [ids - 1_000], "must lie in"),
        (lambda ids: [ids + 1_000_000], "must lie in"),
    ],
)
def test_bad_batches_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        calibrate(model(), change(tokens()))


def test_an_iterator_is_read_once_and_other_forms_of_the_same_tokens_are_equal():
    network, ids, once = model(), tokens(), iter([tokens()])
    whole = calibrate(network, once)
    with pytest.raises(InputError, match="an iterator is read once"):
        calibrate(network, once)
    for batches in ([{"input_ids": ids, "position_ids": torch.arange(40)[None]}], [ids.to(torch.int16)], [[ids]]):
        other = calibrate(network, batches)
        assert torch.equal(whole.variance, other.variance)
        assert whole.sequences_hash == other.sequences_hash


# --- tensors that are collected, and the memory that a calibration plans


HEADS = saf.HeadSet([(0, 2), (1, 0), (1, 3), (2, 1)])
POSITIONS = (0, 7, 31, 39)
LAYER = 2 * 5 * 40 * 32 * 4
"""Bytes of queries and keys of a layer in float32."""


def logits_of(network: GPT, ids: torch.Tensor, heads: saf.HeadSet) -> torch.Tensor:
    """Return causal logits `[F, N, T, T]`, -inf above the diagonal."""
    layers = queries_and_keys(network, ids)
    scores = [(layers[layer][0] @ layers[layer][1].mT / 8**0.5)[:, head] for layer, head in heads]
    return torch.stack(scores).masked_fill(torch.ones(40, 40, dtype=torch.bool).triu(1), -torch.inf)


def dense_collections(logits: torch.Tensor) -> dict[str, torch.Tensor]:
    pattern = logits.softmax(-1)
    finite = logits.masked_fill(logits == -torch.inf, 0)
    count = logits.shape[1]
    variance = pattern.var(1) if count > 1 else torch.zeros_like(pattern[:, 0])
    sharp = target_of(logits.mean(1).softmax(-1))
    rows = list(POSITIONS)
    return {
        "mean": pattern.mean(1),
        "entry_variance": variance,
        "row_variance": variance.sum(-1),
        "logit_mean": finite.mean(1),
        "logit_variance": finite.var(1) if count > 1 else torch.zeros_like(variance),
        **{f"sharp_{name}": values for name, values in sharp._asdict().items()},
        "mean_rows": pattern.mean(1)[:, rows],
        "rows": pattern[:, :, rows],
        "logit_rows": logits[:, :, rows],
    }


@pytest.mark.parametrize(("count", "dtype"), [(1, torch.float64), (5, torch.float64), (5, torch.float32)])
def test_everything_equals_the_dense_computation(count, dtype):
    network, ids = model(dtype), tokens(count)
    actual = calibrate(network, [ids], collect=list(COLLECTIONS), heads=HEADS, positions=POSITIONS)
    dense = dense_collections(logits_of(network, ids, HEADS).double())
    tolerance = 1e-10 if dtype == torch.float64 else 2e-5
    assert set(actual.collected) == set(dense) == set(COLLECTIONS)
    for name, tensor in actual.collected.items():
        assert tensor.dtype == (torch.float64 if name.startswith("sharp") else dtype)
        torch.testing.assert_close(tensor.double(), dense[name], rtol=tolerance, atol=tolerance, msg=name)
    assert (actual.collected_heads, actual.positions) == (HEADS, POSITIONS)
    plan = plan_calibration(network, [ids], collect=list(COLLECTIONS), heads=HEADS, positions=POSITIONS)
    assert plan.collector.nbytes == sum(tensor.nbytes for tensor in actual.collected.values())


def test_collections_do_not_depend_on_strips_or_order(generator):
    names = [name for name, kind in COLLECTIONS.items() if "N" not in kind.shape]
    query, key = 2 * torch.randn(2, 5, 4, 40, 8, generator=generator, dtype=torch.float64)
    heads = saf.HeadSet((0, head) for head in range(4))
    one, other = (
        Collector(names, heads, sequences=5, length=40, positions=POSITIONS, dtype=torch.float64) for _ in range(2)
    )
    measure_layer(query, key, kv_head=range(4), on_strip=partial(one.read, 0))
    options = {"strip_elements": 5 * 7 * 40, "on_strip": partial(other.read, 0)}
    measure_layer(query.flip(0), key.flip(0), kv_head=range(4), **options)
    for name, tensor in one.tensors.items():
        assert ((tensor - other.tensors[name]).abs() <= 1e-10 * tensor.abs().max()).all(), name


def test_missing_values_and_wrong_requests_are_refused():
    network, ids = model(), tokens()
    actual = calibrate(network, [ids], collect=("mean",), heads=HEADS)
    assert torch.equal(actual.take("mean", [(2, 1), (0, 2)]), actual.collected["mean"][[3, 0]])
    for name, heads in (("mean", [(0, 0), (0, 2)]), ("logit_mean", [(0, 2)])):
        with pytest.raises(InputError, match=rf"collect=\('{name}',\)"):
            actual.take(name, heads)
    for options, message in [
        ({"collect": ("median",)}, "collect must be one of"),
        ({"heads": [(0, 9)]}, "frozen or do not exist"),
        ({"collect": ("rows",), "positions": (3, 3)}, "must ascend"),
        ({"collect": ("rows",), "positions": (40,)}, "must ascend"),
    ]:
        with pytest.raises(InputError, match=message):
            calibrate(network, [ids], **options)


@pytest.mark.parametrize(("heads", "autocast"), [(None, False), ([(0, 2), (2, 0), (2, 3)], True)])
def test_queries_and_keys_take_the_planned_bytes(heads, autocast):
    small, ids = model(torch.float32), tokens()
    saf.install_(small, saf.HeadSet([(1, 1)]), saf.CompactPattern.from_parameters(*torch.randn(2, 1, 40)))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.no_grad():
        plan = plan_calibration(small, [ids], heads=heads)
        captured = capture_layers(adapter_for(small), plan.heads, plan.groups[0], [ids[:2], ids[2:]])
    held = sum(part.untyped_storage().nbytes() for layer in captured.values() for part in layer[:2])
    assert plan.capture_bytes == held
    assert len(plan.groups) == 1


def test_memory_decides_how_many_layers_and_heads_go_together(monkeypatch):
    small, mean, free = model(torch.float32), 40 * 40 * 4, [0]
    assert plan_calibration(small, [tokens()], capture_bytes=2 * LAYER).groups == [[0, 1], [2]]
    monkeypatch.setattr(capture, "free_bytes", lambda device: free[0])
    for free[0], layers in ((6 * LAYER, 3), (4 * LAYER + 10, 2), (LAYER, 1), (None, 3)):
        assert len(plan_calibration(small, [tokens()]).groups[0]) == layers
    for free[0], heads in ((6 * mean + 1, 3), (mean, 1), (None, capture.COLLECT_BYTES // mean)):
        assert heads_at_a_time(small, ("mean",), sequences=5, length=40) == heads
    small.blocks[0].register_forward_pre_hook(lambda *_: pytest.fail("the model was run"))
    free[0] = LAYER - 1
    for limit, collect, message in (
        (None, (), "free memory"),
        (LAYER - 1, (), r"\(capture_bytes\), got 50 KiB"),
        (1 << 20, ("mean",), "heads="),
    ):
        with pytest.raises(InputError, match=message):
            calibrate(small, [tokens()], collect=collect, capture_bytes=limit)


# --- sequences of unequal lengths: a row is measured over the sequences that reach it, without padding


LENGTHS = [31, 12, 40, 12, 26]


def padded(ids: torch.Tensor, lengths: list[int], *, padding: int) -> dict[str, torch.Tensor]:
    """Return a batch whose rows end after so many tokens, with its mask."""
    mask = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
    return {"input_ids": torch.where(mask, ids, padding), "attention_mask": mask.long()}


@pytest.fixture(scope="module")
def unequal() -> saf.AttentionStatistics:
    return calibrate(model(), [padded(tokens(), LENGTHS, padding=7)], collect=("mean", "entry_variance"))


def test_rows_are_collected_of_the_sequences_that_reach_them(unequal):
    """The same numbers from the patterns of each sequence by itself, in a loop over rows."""
    rows = [row[:end] for row, end in zip(tokens(), LENGTHS, strict=True)]
    alone = [calibrate(model(), [row[None]], collect=("mean",)).collected["mean"] for row in rows]
    counts = [sum(row < end for end in LENGTHS) for row in range(40)]
    assert unequal.lengths == tuple(sorted(LENGTHS, reverse=True))
    for row, count in enumerate(counts):
        here = torch.stack([one[:, row, : row + 1] for one in alone if row < one.shape[1]])
        assert torch.allclose(unequal.collected["mean"][:, row, : row + 1], here.mean(0), atol=1e-12)
        if count > 1:
            assert torch.allclose(unequal.collected["entry_variance"][:, row, : row + 1], here.var(0), atol=1e-12)


def test_padding_never_enters_and_order_does_not_matter(unequal):
    ids = tokens()
    other = calibrate(model(), [padded(ids, LENGTHS, padding=0)])
    separate = calibrate(model(), [row[None, :end] for row, end in zip(ids, LENGTHS, strict=True)])
    assert all(torch.equal(getattr(other, name), getattr(unequal, name)) for name in FIELDS)
    check_close(separate, unequal, 1e-10)
    assert unequal.sequences_hash == other.sequences_hash == separate.sequences_hash
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
    report = saf.freeze_(model(torch.float32), iter(batches), saf.FreezeConfig(rate=0.25, max_fit_kl=10.0))
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
    assert (again.lengths, again.hash, again.num_distinct) == (read.lengths, read.hash, 5)
    assert all(map(torch.equal, again.targets, read.targets))
