"""Calibration: exact against whole patterns, independent of how it is split, and without a trace on the model."""

import hashlib
import random

import numpy as np
import pytest
import torch

from saf.calibration import calibrate
from saf.calibration.measure import measure_layer
from saf.errors import DivergenceError, InputError
from saf.heads import HeadSet
from saf.models import GPT, GPTConfig
from saf.patterns import CompactPattern
from saf.surgery import install_
from tests.calibration.oracle import dense_statistics, queries_and_keys

FIELDS = ("variance", "forward_kl", "eta_abs", "eta_rel", "row_entropy")


def model(dtype: torch.dtype = torch.float64) -> GPT:
    """Three layers of four heads, with queries large enough for uneven attention."""
    network = GPT(GPTConfig(vocab_size=30, num_layers=3, num_heads=4, hidden_size=32, max_length=40)).to(dtype)
    network.reset_parameters(torch.Generator().manual_seed(0))
    for block in network.blocks:
        block.attention.q_proj.weight.data *= 40
    return network


def tokens(count: int = 5, length: int = 40) -> torch.Tensor:
    return torch.randint(0, 30, (count, length), generator=torch.Generator().manual_seed(1))


def check_close(actual, expected, tolerance: float) -> None:
    """Errors relative to the largest entry of each statistic."""
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
    for place, end in enumerate(lengths):  # what stands behind a sequence never enters
        query[place, :, end:] = key[place, :, end:] = torch.nan
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
    heads = HeadSet([(0, 2), (1, 0), (2, 1)])
    some = calibrate(network, (batch for batch in [ids]), heads=heads)
    assert HeadSet(some.measured.nonzero().tolist()) == heads
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
        raise KeyError("in the middle of a forward pass")

    before = state()
    calibrate(network, [ids])
    assert state() == before
    handle = network.blocks[2].register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        calibrate(network, [ids])
    handle.remove()
    assert state() == before


def test_attention_that_is_not_finite_is_refused():
    network = model()
    network.blocks[1].attention.q_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(DivergenceError, match="layer 1 must be finite"):
        calibrate(network, [tokens()])


def test_frozen_heads_are_not_measured_and_the_others_see_them():
    network, ids = model(), tokens()
    fixed = CompactPattern.from_parameters(*torch.randn(2, 5, 40, dtype=torch.float64))
    install_(network, HeadSet([(0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]), fixed)
    actual = calibrate(network, [ids])
    assert actual.measured.tolist() == [[True, False, True, True], [False] * 4, [True] * 4]
    assert torch.equal(actual.eta_abs.isfinite().all(-1), actual.measured)


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
        (lambda ids: [{"input_ids": ids[:1], "cu_seq_lens_q": torch.tensor([0, 20, 40])}], "one document each"),
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
