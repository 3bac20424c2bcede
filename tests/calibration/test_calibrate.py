"""Calibration: exact against whole patterns, independent of how it is split, and without a trace on the model."""

import hashlib
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from saf.calibration import calibrate, dense_collection, dense_statistics
from saf.calibration.layer import diagonal_sums, measure_layer
from saf.errors import CheckpointError, InputError
from saf.heads import HeadSet
from saf.models import GPT, GPTConfig
from saf.patterns import CompactPattern
from saf.statistics import AttentionStatistics
from saf.surgery import install_

FIELDS = ("variance", "forward_kl", "eta_abs", "eta_rel", "row_entropy")


def model(**overrides) -> GPT:
    torch.manual_seed(0)
    shape = {"vocab_size": 30, "num_layers": 3, "num_heads": 4, "hidden_size": 32, "max_length": 40}
    made = GPT(GPTConfig(**(shape | overrides))).double()
    for block in made.blocks:
        block.attention.q_proj.weight.data *= 40
    return made


def tokens(count: int = 5, length: int = 40) -> torch.Tensor:
    return torch.randint(0, 30, (count, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("count", "length"), [(5, 70), (2, 128), (3, 1), (7, 200)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_strips_equal_the_dense_oracle(count, length, dtype, tolerance, generator):
    query = 2 * torch.randn(count, 4, length, 16, generator=generator, dtype=dtype)
    key = 2 * torch.randn(count, 2, length, 16, generator=generator, dtype=dtype)
    found = measure_layer(query, key, kv_head=[0, 0, 1, 1], rows=32, strip_elements=count * 32 * length * 3)
    expected = dense_statistics(query, key, kv_head=[0, 0, 1, 1])
    for name in FIELDS:
        one, other = getattr(found, name), getattr(expected, name)
        assert ((one - other).abs() <= tolerance * other.abs().max()).all(), name


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_collecting_whole_patterns_one_after_the_other_equals_the_oracle(dtype, tolerance, generator):
    query = 2 * torch.randn(5, 4, 70, 16, generator=generator, dtype=torch.float64)
    key = 2 * torch.randn(5, 2, 70, 16, generator=generator, dtype=torch.float64)
    found = dense_collection(query, key, kv_head=[0, 0, 1, 1], dtype=dtype)
    expected = dense_statistics(query, key, kv_head=[0, 0, 1, 1])
    for name in FIELDS:
        one, other = getattr(found, name), getattr(expected, name)
        assert one.dtype == torch.float64
        assert ((one - other).abs() <= tolerance * other.abs().max()).all(), name


@given(rows=st.integers(5, 80), strip=st.integers(10**3, 10**5), seed=st.integers(0, 50))
def test_results_do_not_depend_on_tile_size_or_order(rows, strip, seed):
    generator = torch.Generator().manual_seed(seed)
    query, key = torch.randn(2, 4, 3, 67, 8, generator=generator, dtype=torch.float64) * 2
    whole = measure_layer(query, key, kv_head=range(3))
    order = torch.randperm(4, generator=generator)
    other = measure_layer(query[order], key[order], kv_head=range(3), rows=rows, strip_elements=strip)
    for one, two in zip(whole, other, strict=True):
        assert ((one - two).abs() <= 1e-10 * one.abs().max()).all()


def test_one_sequence_has_no_variance_and_no_divergence(generator):
    query, key = torch.randn(2, 1, 3, 90, 8, generator=generator) * 5
    found = measure_layer(query, key, kv_head=range(3))
    assert not found.variance.any()
    assert not found.forward_kl.any()


def test_scores_follow_the_papers_formulae(generator):
    query, key = torch.randn(2, 4, 1, 12, 8, generator=generator, dtype=torch.float64) * 3
    scores = (query @ key.mT)[:, 0] / 8**0.5
    patterns = torch.stack([s.masked_fill(torch.ones(12, 12).triu(1).bool(), -torch.inf).softmax(-1) for s in scores])
    mean = patterns.mean(0)
    variance = sum(float(torch.linalg.matrix_norm(p - mean) ** 2) for p in patterns) / (3 * 12**2)
    kl = sum(float(p[i, j] * (p[i, j] / mean[i, j]).log()) for p in patterns for i in range(12) for j in range(i + 1))
    found = measure_layer(query, key, kv_head=[0])
    assert found.variance.item() == pytest.approx(variance, rel=1e-12)
    assert found.forward_kl.item() == pytest.approx(kl / (4 * 12), rel=1e-12)


def test_a_very_low_variance_stays_positive():
    query = torch.ones(6, 1, 64, 8)
    query += 1e-5 * torch.randn(6, 1, 64, 8, generator=torch.Generator().manual_seed(0))
    key = torch.randn(1, 1, 64, 8, generator=torch.Generator().manual_seed(1)).expand(6, -1, -1, -1)
    exact = dense_statistics(query, key, kv_head=[0]).variance
    found = measure_layer(query, key, kv_head=[0]).variance
    assert 0 < found.item() == pytest.approx(exact.item(), rel=0.05)


@given(heads=st.integers(1, 3), rows=st.integers(1, 9), before=st.integers(0, 9))
def test_diagonal_sums_add_equal_distances(heads, rows, before):
    width = rows + before
    strip = torch.rand(heads, rows, width, dtype=torch.float64).tril(before)
    expected = torch.zeros(heads, width, dtype=torch.float64)
    for row in range(rows):
        for column in range(before + row + 1):
            expected[:, before + row - column] += strip[:, row, column]
    torch.testing.assert_close(diagonal_sums(strip), expected)


def test_the_model_is_measured_as_its_own_attention_computes_it():
    made, ids = model(), tokens()
    kept = {}
    for layer, block in enumerate(made.blocks):
        block.attention.live.register_forward_pre_hook(lambda _, inputs, at=layer: kept.update({at: inputs[:2]}))
    made(ids)
    seen = dict(kept)
    found = calibrate(made, [ids[:2], {"input_ids": ids[2:]}])
    assert (found.length, found.num_sequences) == (40, 5)
    for layer, (query, key) in seen.items():
        expected = dense_statistics(query.detach(), key.detach(), kv_head=range(4))
        for name in FIELDS:
            torch.testing.assert_close(getattr(found, name)[layer], getattr(expected, name), rtol=1e-9, atol=1e-12)


def test_few_layers_at_a_time_give_the_same_statistics():
    made, ids = model(), tokens()
    one_layer = 2 * 5 * 40 * 32 * 8
    whole, split = calibrate(made, [ids]), calibrate(made, [ids], capture_bytes=one_layer)
    for name in FIELDS:
        assert torch.equal(getattr(whole, name), getattr(split, name))


@given(cuts=st.sets(st.integers(1, 4)), seed=st.integers(0, 5))
def test_statistics_do_not_depend_on_batches_or_order(cuts, seed):
    made, ids = model(), tokens()
    whole = calibrate(made, [ids])
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
    other = calibrate(made, list(ids[order].tensor_split(sorted(cuts))))
    for name in FIELDS:
        one, two = getattr(whole, name), getattr(other, name)
        assert ((one - two).abs() <= 1e-10 * one.abs().max()).all(), name


def test_calibration_leaves_no_trace(monkeypatch):
    made, ids = model(), tokens()
    made.train()
    made.blocks[1].eval()
    made(ids[:, :-1], ids[:, 1:]).backward()

    def state() -> str:
        digest = hashlib.sha256()
        for name, parameter in made.named_parameters():
            digest.update(name.encode() + parameter.detach().numpy().tobytes() + parameter.grad.numpy().tobytes())
        for module in made.modules():
            digest.update(bytes([module.training, len(module._forward_hooks), len(module._forward_pre_hooks)]))
        digest.update(torch.get_rng_state().numpy().tobytes())
        digest.update(repr((random.getstate(), np.random.get_state(), ids)).encode())
        return digest.hexdigest()

    before = state()
    calibrate(made, [ids])
    assert state() == before
    monkeypatch.setattr("saf.calibration.driver.check_vocabulary", lambda *_: None)
    with pytest.raises(IndexError):  # in the middle of the forward pass
        calibrate(made, [ids + 1000])
    assert state() == before


def test_frozen_heads_are_not_measured_and_the_others_see_them():
    made, ids = model(), tokens()
    fixed = CompactPattern.from_parameters(*torch.randn(2, 5, 40, dtype=torch.float64))
    install_(made, HeadSet([(0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]), fixed)
    found = calibrate(made, [ids])
    assert found.measured.tolist() == [[True, False, True, True], [False] * 4, [True] * 4]
    assert found.variance[0, 1].isnan()
    assert torch.isfinite(found.eta_abs[found.measured]).all()


def test_statistics_join_over_heads_save_and_load(tmp_path):
    whole = calibrate(model(), [tokens()])
    parts = []
    for keep in (0, 1):
        chosen = torch.zeros(3, 4, dtype=torch.bool)
        chosen[:, keep::2] = True
        tensors = {name: getattr(whole, name).clone() for name in FIELDS}
        for tensor in tensors.values():
            tensor[~chosen] = torch.nan
        parts.append(AttentionStatistics(**tensors, length=40, num_sequences=5, sequences_hash=whole.sequences_hash))
    joined = AttentionStatistics.join(parts)
    joined.save(tmp_path / "statistics.safetensors")
    loaded = AttentionStatistics.load(tmp_path / "statistics.safetensors")
    for name in FIELDS:
        assert torch.equal(getattr(loaded, name), getattr(whole, name))
    assert loaded.sequences_hash == whole.sequences_hash
    with pytest.raises(InputError, match="measure some heads twice"):
        AttentionStatistics.join([whole, parts[0]])
    other = calibrate(model(), [tokens(3)])
    with pytest.raises(InputError, match="different calibration inputs"):
        AttentionStatistics.join([parts[0], other])
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="does not hold attention statistics"):
        AttentionStatistics.load(tmp_path / "other.safetensors")
    content = bytearray((tmp_path / "statistics.safetensors").read_bytes())
    content[-3] ^= 1
    (tmp_path / "changed.safetensors").write_bytes(bytes(content))
    with pytest.raises(
        CheckpointError, match=r"changed.safetensors cannot be trusted: expected SHA-256.*measure again"
    ):
        AttentionStatistics.load(tmp_path / "changed.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "statistics.safetensors").read_bytes()[:-100])
    for name, reason in (("cut", "is not a readable safetensors file"), ("missing", "does not exist")):
        with pytest.raises(CheckpointError, match=f"{name}.safetensors {reason}.*AttentionStatistics.save"):
            AttentionStatistics.load(tmp_path / f"{name}.safetensors")


def test_statistics_cut_off_while_written_leave_the_file_that_was_there(tmp_path, monkeypatch):
    path, found = tmp_path / "statistics.safetensors", calibrate(model(), [tokens()])
    found.save(path)
    before = path.read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("saf.records.files.os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        calibrate(model(), [tokens(2)]).save(path)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [before]


def test_bad_batches_are_refused():
    made, ids = model(), tokens()
    for batches, message in [
        ([], "at least one sequence"),
        ([ids.float()], "integer tensors"),
        ([ids[0]], "integer tensors"),
        ([ids > 3], r"integer tensors \[B, T\] .* got torch.bool \[5, 40\]"),
        ([{"labels": ids}], "integer tensors .*; got NoneType"),
        ([ids[:, :0]], "at least one token"),
        ([{"input_ids": ids, "attention_mask": (ids > 3).long()}], "must stand behind"),
        ([{"input_ids": ids, "attention_mask": torch.ones(5, 39)}], r"shape of input_ids, \[5, 40\]"),
        ([{"input_ids": ids, "attention_mask": torch.zeros(5, 40)}], "at least one token"),
        ([{"input_ids": ids, "position_ids": torch.arange(40)[None] % 20}], "several documents in a row"),
        ([{"input_ids": ids, "position_ids": torch.arange(3, 43).expand(5, -1)}], "several documents in a row"),
        ([{"input_ids": ids[:1], "cu_seq_lens_q": torch.tensor([0, 20, 40])}], "several documents in a row"),
        ([{"input_ids": ids[:2], "seq_lengths": [[20, 20], [40]]}], "several documents in a row"),
        (["a text"], r"token ids, .*text_sequences makes them"),
        ([ids[0]], r"got torch.int64 \[40\]; of text, saf.integrations.transformers.text_sequences"),
        (ids, r"such as a list of one; got a bare torch.int64 \[5, 40\]"),
        ([ids - 1_000], r"must lie in \[0, \d+\); got -\d+"),
        ([ids + 1_000_000], r"must lie in \[0, \d+\); got 10\d+"),
    ]:
        with pytest.raises(InputError, match=message):
            calibrate(made, batches)
    begins = torch.tensor([0, 40, 80, 120, 160, 200, 200])  # as long as the most documents, the rest without tokens
    positions = {"position_ids": torch.arange(40)[None], "cu_seq_lens_q": begins, "max_length_q": 40}
    whole, short = calibrate(made, [{"input_ids": ids, **positions}]), calibrate(made, [ids.to(torch.int16)])
    assert torch.equal(whole.variance, short.variance)
    assert whole.sequences_hash == short.sequences_hash
