"""What calibration keeps on request, against whole patterns, and the memory it says it needs."""

import pytest
import torch

from saf.calibration import calibrate, collection_bytes, latter_half
from saf.calibration.layer import measure_layer
from saf.errors import DivergenceError, InputError
from saf.heads import HeadSet
from saf.models import GPT, GPTConfig
from saf.statistics import COLLECTIONS, AttentionStatistics
from saf.targets import target_of

HEADS = HeadSet([(0, 2), (1, 0), (1, 3), (2, 1)])
POSITIONS = (0, 7, 31, 39)


def model(dtype: torch.dtype = torch.float64) -> GPT:
    made = GPT(GPTConfig(vocab_size=30, num_layers=3, num_heads=4, hidden_size=32, max_length=40)).to(dtype)
    made.reset_parameters(torch.Generator().manual_seed(0))
    for block in made.blocks:
        block.attention.q_proj.weight.data *= 40
    return made


def tokens(count: int = 5) -> torch.Tensor:
    return torch.randint(0, 30, (count, 40), generator=torch.Generator().manual_seed(1))


def logits_of(made: GPT, ids: torch.Tensor, heads: HeadSet) -> torch.Tensor:
    """Return causal logits `[F, N, T, T]`, -inf above the diagonal."""
    seen = {}
    handles = [
        block.attention.live.register_forward_pre_hook(lambda _, args, at=layer: seen.update({at: args[:2]}))
        for layer, block in enumerate(made.blocks)
    ]
    with torch.no_grad():
        made(ids)
    for handle in handles:
        handle.remove()
    future = torch.ones(40, 40, dtype=torch.bool).triu(1)
    scores = [(seen[layer][0] @ seen[layer][1].mT / 8**0.5)[:, head] for layer, head in heads]
    return torch.stack(scores).masked_fill(future, -torch.inf)


def expected(logits: torch.Tensor) -> dict[str, torch.Tensor]:
    pattern = logits.softmax(-1)
    finite = logits.masked_fill(logits == -torch.inf, 0)
    count = logits.shape[1]
    square = pattern.var(1) if count > 1 else torch.zeros_like(pattern[:, 0])
    sharp = target_of(logits.mean(1).softmax(-1))
    rows = list(POSITIONS)
    return {
        "mean": pattern.mean(1),
        "entry_variance": square,
        "row_variance": square.sum(-1),
        "logit_mean": finite.mean(1),
        "logit_variance": finite.var(1) if count > 1 else torch.zeros_like(square),
        "sharp_eta_abs": sharp.eta_abs,
        "sharp_eta_rel": sharp.eta_rel,
        "sharp_row_entropy": sharp.row_entropy,
        "mean_rows": pattern.mean(1)[:, rows],
        "rows": pattern[:, :, rows],
        "logit_rows": logits[:, :, rows],
    }


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_everything_equals_the_dense_computation(count, dtype):
    made, ids = model(dtype), tokens(count)
    found = calibrate(made, [ids], collect=list(COLLECTIONS), heads=HEADS, positions=POSITIONS)
    dense = expected(logits_of(made, ids, HEADS).double())
    tolerance = 1e-10 if dtype == torch.float64 else 2e-5
    assert set(found.collected) == set(dense) == set(COLLECTIONS)
    for name, tensor in found.collected.items():
        assert tensor.dtype == (torch.float64 if name.startswith("sharp") else dtype)
        torch.testing.assert_close(tensor.double(), dense[name], rtol=tolerance, atol=tolerance, msg=name)
    assert (found.collected_heads, found.positions) == (HEADS, POSITIONS)


def test_named_heads_alone_are_measured_as_in_a_pass_over_all():
    made, ids = model(), tokens()
    whole, some = calibrate(made, [ids]), calibrate(made, [ids], heads=HEADS)
    measured = HeadSet(map(tuple, some.measured.nonzero().tolist()))
    assert measured == HEADS
    for layer, head in HEADS:
        for name in ("variance", "forward_kl", "eta_abs", "eta_rel", "row_entropy"):
            one, other = getattr(some, name)[layer, head], getattr(whole, name)[layer, head]
            torch.testing.assert_close(one, other, rtol=1e-10, atol=0)
    seen = []
    calibrate(made, [ids], heads=[(2, 1)], progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 1), (1, 1)]


def test_collections_do_not_depend_on_strips_batches_or_order(monkeypatch):
    made, ids = model(), tokens()
    names = [name for name, shape in COLLECTIONS.items() if "N" not in shape]
    whole = calibrate(made, [ids], collect=names, positions=POSITIONS)
    small = {"rows": 7, "strip_elements": 2 * 5 * 7 * 40}
    monkeypatch.setattr("saf.calibration.driver.measure_layer", lambda *a, **k: measure_layer(*a, **k, **small))
    other = calibrate(made, [ids[4:], ids[:4].flip(0)], collect=names, positions=POSITIONS)
    for name in names:
        one, two = whole.collected[name], other.collected[name]
        assert ((one - two).abs() <= 1e-10 * one.abs().max()).all(), name


def test_what_was_not_collected_is_told():
    found = calibrate(model(), [tokens()], collect=("mean",), heads=HEADS)
    assert torch.equal(found.take("mean", [(2, 1), (0, 2)]), found.collected["mean"][[3, 0]])
    with pytest.raises(InputError, match=r"no 'mean' of heads \[\(0, 0\)\]; .*collect=\('mean',\), heads="):
        found.take("mean", [(0, 0), (0, 2)])
    with pytest.raises(InputError, match=r"no 'logit_mean' of heads \[\(0, 2\)\]"):
        found.take("logit_mean", [(0, 2)])


def test_memory_is_computed_and_refused_before_the_model_runs():
    sizes = {"heads": 36, "sequences": 32, "length": 4096}
    assert collection_bytes(["mean"], **sizes) == 36 * 4096**2 * 4
    assert collection_bytes(["rows", "sharp_eta_abs"], **sizes, positions=6) == 36 * (32 * 6 * 4096 * 4 + 4096 * 8)
    found = calibrate(model(), [tokens()], collect=list(COLLECTIONS), heads=HEADS, positions=POSITIONS)
    held = sum(tensor.numel() * tensor.element_size() for tensor in found.collected.values())
    assert held == collection_bytes(list(COLLECTIONS), heads=4, sequences=5, length=40, positions=4, itemsize=8)
    made = model()
    made.blocks[0].register_forward_pre_hook(lambda *_: pytest.fail("the model was run"))
    with pytest.raises(InputError, match=r"mean of 12 heads at T = 40 takes 0.00 GB, collect_limit is .*raise coll"):
        calibrate(made, [tokens()], collect=("mean",), collect_limit=12 * 40**2 * 8 - 1)


def test_wrong_requests_are_refused():
    made, ids = model(), tokens()
    for options, message in [
        ({"collect": ("median",)}, r"unknown name to collect \['median'\]"),
        ({"heads": [(0, 9)]}, r"frozen or do not exist: \[\[0, 9\]\]"),
        ({"collect": ("rows",), "positions": (3, 3)}, r"ascend within \[0, 40\)"),
        ({"collect": ("rows",), "positions": (40,)}, r"ascend within \[0, 40\)"),
    ]:
        with pytest.raises(InputError, match=message):
            calibrate(made, [ids], **options)
    assert calibrate(made, [ids], collect=("rows",)).positions == latter_half(40)
    made.blocks[1].attention.q_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(DivergenceError, match="layer 1 is not finite"):
        calibrate(made, [ids])


def test_collections_join_over_heads_save_and_load(tmp_path):
    made, ids = model(), tokens()
    names = ("mean", "mean_rows", "sharp_row_entropy")
    whole = calibrate(made, [ids], collect=names, heads=HEADS, positions=POSITIONS)
    parts = [
        calibrate(made, [ids], collect=names, heads=some, positions=POSITIONS)
        for some in ([(1, 3), (0, 2)], [(2, 1)], [(1, 0)])
    ]
    joined = AttentionStatistics.join(parts)
    joined.save(tmp_path / "statistics.safetensors")
    loaded = AttentionStatistics.load(tmp_path / "statistics.safetensors")
    assert (loaded.collected_heads, loaded.positions) == (HEADS, POSITIONS)
    for name in names:
        torch.testing.assert_close(loaded.collected[name], whole.collected[name], rtol=1e-10, atol=1e-15)
    with pytest.raises(InputError, match=r"differ in \['collected'\]"):
        AttentionStatistics.join(
            [parts[0], calibrate(made, [ids], heads=[(2, 1)], collect=names[1:], positions=POSITIONS)]
        )
