"""Collections of calibration against whole patterns, and the memory that a calibration plans."""

from functools import partial

import pytest
import torch

import saf.calibration.capture as memory
from saf.calibration import COLLECTIONS, calibrate, heads_at_a_time, plan_calibration
from saf.calibration.capture import capture_layers
from saf.calibration.measure import Collection, measure_layer
from saf.errors import InputError
from saf.heads import HeadSet
from saf.models import GPT
from saf.models.adapter import adapter_for
from saf.patterns import CompactPattern
from saf.surgery import install_
from saf.targets import target_of
from tests.calibration.oracle import queries_and_keys
from tests.calibration.test_calibrate import model, tokens

HEADS = HeadSet([(0, 2), (1, 0), (1, 3), (2, 1)])
POSITIONS = (0, 7, 31, 39)
LAYER = 2 * 5 * 40 * 32 * 4
"""Bytes of queries and keys of a layer in float32."""


def logits_of(network: GPT, ids: torch.Tensor, heads: HeadSet) -> torch.Tensor:
    """Return causal logits `[F, N, T, T]`, -inf above the diagonal."""
    layers = queries_and_keys(network, ids)
    scores = [(layers[layer][0] @ layers[layer][1].mT / 8**0.5)[:, head] for layer, head in heads]
    return torch.stack(scores).masked_fill(torch.ones(40, 40, dtype=torch.bool).triu(1), -torch.inf)


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
        **{f"sharp_{name}": values for name, values in sharp._asdict().items()},
        "mean_rows": pattern.mean(1)[:, rows],
        "rows": pattern[:, :, rows],
        "logit_rows": logits[:, :, rows],
    }


@pytest.mark.parametrize(("count", "dtype"), [(1, torch.float64), (5, torch.float64), (5, torch.float32)])
def test_everything_equals_the_dense_computation(count, dtype):
    network, ids = model(dtype), tokens(count)
    actual = calibrate(network, [ids], collect=list(COLLECTIONS), heads=HEADS, positions=POSITIONS)
    dense = expected(logits_of(network, ids, HEADS).double())
    tolerance = 1e-10 if dtype == torch.float64 else 2e-5
    assert set(actual.collected) == set(dense) == set(COLLECTIONS)
    for name, tensor in actual.collected.items():
        assert tensor.dtype == (torch.float64 if name.startswith("sharp") else dtype)
        torch.testing.assert_close(tensor.double(), dense[name], rtol=tolerance, atol=tolerance, msg=name)
    assert (actual.collected_heads, actual.positions) == (HEADS, POSITIONS)
    plan = plan_calibration(network, [ids], collect=list(COLLECTIONS), heads=HEADS, positions=POSITIONS)
    assert plan.collection.nbytes == sum(tensor.nbytes for tensor in actual.collected.values())


def test_collections_do_not_depend_on_strips_or_order(generator):
    names = [name for name, kind in COLLECTIONS.items() if "N" not in kind.shape]
    query, key = 2 * torch.randn(2, 5, 4, 40, 8, generator=generator, dtype=torch.float64)
    heads = HeadSet((0, head) for head in range(4))
    one, other = (
        Collection(names, heads, sequences=5, length=40, positions=POSITIONS, dtype=torch.float64) for _ in range(2)
    )
    measure_layer(query, key, kv_head=range(4), take=partial(one.take, 0))
    options = {"strip_elements": 5 * 7 * 40, "take": partial(other.take, 0)}
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


@pytest.mark.parametrize(("heads", "lower"), [(None, False), ([(0, 2), (2, 0), (2, 3)], True)])
def test_queries_and_keys_take_the_planned_bytes(heads, lower):
    small, ids = model(torch.float32), tokens()
    install_(small, HeadSet([(1, 1)]), CompactPattern.from_parameters(*torch.randn(2, 1, 40)))
    with torch.autocast("cpu", torch.bfloat16, enabled=lower), torch.no_grad():
        plan = plan_calibration(small, [ids], heads=heads)
        captured = capture_layers(adapter_for(small), plan.heads, plan.groups[0], [ids[:2], ids[2:]])
    held = sum(part.untyped_storage().nbytes() for layer in captured.values() for part in layer[:2])
    assert plan.capture_bytes == held
    assert len(plan.groups) == 1


def test_memory_decides_how_many_layers_and_heads_go_together(monkeypatch):
    small, mean, free = model(torch.float32), 40 * 40 * 4, [0]
    assert plan_calibration(small, [tokens()], capture_bytes=2 * LAYER).groups == [[0, 1], [2]]
    monkeypatch.setattr(memory, "free_bytes", lambda device: free[0])
    for free[0], layers in ((6 * LAYER, 3), (4 * LAYER + 10, 2), (LAYER, 1), (None, 3)):
        assert len(plan_calibration(small, [tokens()]).groups[0]) == layers
    for free[0], heads in ((6 * mean + 1, 3), (mean, 1), (None, memory.COLLECT_BYTES // mean)):
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
