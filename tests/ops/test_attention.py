"""A layer's rows after caches, padding, dispatch and refusals; test_sweep.py compares whole sequences with float64."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from saf.errors import InputError, UnsupportedError
from saf.heads import HeadLayout
from saf.ops import FrozenHeads, frozen_attention, live_attention, mixed_attention
from saf.ops.launch import product_precision
from saf.ops.tensors import CachePosition, cached_order
from saf.patterns import DensePattern, TrainablePattern
from saf.synthetic import synthetic_patterns
from tests.ops.hard_patterns import hard_patterns, random_pattern
from tests.ops.layers import relative

LENGTH, DIM, STORED = 40, 8, 50


LAYOUTS = {
    "own values": ((0, 1, 2, 3), 2),
    "even groups": ((0, 1, 0, 1), 2),
    "uneven groups": ((0, 0, 1, 0, 1, 1), 3),
    "a whole group": ((0, 2, 2, 1, 1), 2),
    "none live": ((0, 1, 1), 3),
}
"""The value head of each slot, and how many slots are frozen."""


@pytest.fixture(params=LAYOUTS)
def layer(request, generator):
    """A layer of random inputs, queries, keys, values and frozen heads; of these one is dense."""
    slots, count = LAYOUTS[request.param]
    live, values = slots[: len(slots) - count], max(slots) + 1
    compact = synthetic_patterns(count, STORED, generator)
    patterns = [DensePattern(compact[0].dense()), *(compact[slot] for slot in range(1, count))]
    frozen = FrozenHeads.from_patterns(patterns, dtype=torch.float64, kv_head=slots)
    shapes = (len(live), len(set(live)), values)
    tensors = [torch.randn(2, n, LENGTH, DIM, generator=generator, dtype=torch.float64) for n in shapes]
    return *tensors, frozen


def cached(key, value, frozen, generator):
    """Keys and values in a cache of fixed size, anything finite behind the last of them."""
    filled = []
    for tensor in (key, value[:, list(cached_order(frozen.kv_head, frozen.num_frozen))]):
        filled.append(torch.randn(2, tensor.shape[1], STORED, DIM, generator=generator, dtype=torch.float64))
        filled[-1][:, :, :LENGTH] = tensor
    return filled


@pytest.mark.parametrize("left_pad", [None, (0, 7)], ids=["whole", "padded"])
@pytest.mark.parametrize("rows", [1, 3, 30])
def test_rows_after_a_cache_are_those_of_whole_sequences(layer, rows, left_pad, generator, monkeypatch):
    monkeypatch.setattr("saf.ops.backend.MOST_ROWS", 7)  # several blocks of weights
    query, key, value, frozen = layer
    left_pad = None if left_pad is None else torch.tensor(left_pad)
    whole = mixed_attention(query, key, value, frozen, left_pad=left_pad)[:, :, -rows:]
    few = query[:, :, -rows:]
    where = CachePosition.of(torch.tensor(LENGTH - rows), rows, STORED, left_pad)
    keys, values = cached(key, value, frozen, generator)
    actual = [
        mixed_attention(few, key, value, frozen, left_pad=left_pad),
        mixed_attention(few, keys, values, frozen, cache_position=where),
    ]
    for each in actual:
        torch.testing.assert_close(each, whole, rtol=1e-12, atol=1e-12)
    alone = frozen_attention(values, frozen, cache_position=where, rows=rows)
    torch.testing.assert_close(alone, whole[:, query.shape[1] :], rtol=1e-12, atol=1e-12)


def test_gradients_of_few_rows_are_those_of_whole_sequences(generator):
    frozen = FrozenHeads.from_patterns(synthetic_patterns(2, LENGTH, generator), dtype=torch.float64)
    value = torch.randn(2, 2, LENGTH, DIM, generator=generator, dtype=torch.float64, requires_grad=True)
    outputs = frozen_attention(value, frozen, rows=3), frozen_attention(value, frozen)[:, :, -3:]
    gradients = [torch.autograd.grad(output.square().sum(), value)[0] for output in outputs]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["toeplitz", "reference"])
def test_left_padding_gives_the_unpadded_output(backend, generator):
    frozen = FrozenHeads.from_patterns(random_pattern(2, 60, generator), backend=backend)
    left_pad = torch.tensor([0, 7, 31])
    query, key, value = (torch.randn(3, heads, 50, 8, generator=generator) for heads in (2, 2, 4))
    padded = mixed_attention(query, key, value, frozen, left_pad=left_pad)
    for row, first in enumerate(left_pad.tolist()):
        alone = mixed_attention(*(x[row : row + 1, :, first:] for x in (query, key, value)), frozen)
        torch.testing.assert_close(padded[row : row + 1, :, first:], alone, rtol=1e-5, atol=1e-6)
        assert not padded[row, :, :first].any()


@pytest.mark.parametrize("order", [(2, 0, 1), (1, 1, 2, 0, 1)])
def test_live_slots_may_read_value_heads_in_any_order(order, generator):
    frozen = FrozenHeads.from_patterns(random_pattern(1, 40, generator), kv_head=(*order, 3))
    query, key, value = (torch.randn(2, heads, 40, 8, generator=generator) for heads in (len(order), 3, 4))
    expected = live_attention(query, key[:, order], value[:, order])
    for rows in (40, 3, 1):
        output = mixed_attention(query[:, :, -rows:], key, value, frozen)
        torch.testing.assert_close(output[:, : len(order)], expected[:, :, -rows:])


def test_without_frozen_or_live_heads_it_is_sdpa_or_the_patterns_alone(generator):
    query, key, value = (torch.randn(2, 3, 30, 8, generator=generator) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert torch.equal(mixed_attention(query, key, value, None), expected)
    frozen, none = FrozenHeads.from_patterns(random_pattern(3, 30, generator)), torch.empty(2, 0, 30, 8)
    assert torch.equal(mixed_attention(none, none, value, frozen), frozen_attention(value, frozen))


def test_tables_keep_their_dtype_when_the_model_is_cast(generator):
    frozen = FrozenHeads.from_patterns(random_pattern(2, 30, generator), dtype=(torch.float32, torch.bfloat16))
    before = {name: buffer.clone() for name, buffer in frozen.named_buffers()}
    after = dict(frozen.to(torch.bfloat16).named_buffers())
    assert before
    assert all(after[name].dtype == each.dtype and torch.equal(after[name], each) for name, each in before.items())


@pytest.mark.parametrize("trainable", [False, True])
def test_tables_elsewhere_than_the_values_are_refused(trainable, generator):
    pattern = random_pattern(1, 30, generator)[0]
    frozen = FrozenHeads.from_patterns(TrainablePattern.of(pattern) if trainable else pattern)
    meta = torch.empty(1, 1, 30, 8, device="meta")
    with pytest.raises(InputError, match="values are on meta, the frozen heads' tables on cpu"):
        frozen_attention(meta, frozen)
    if not trainable:
        with pytest.raises(InputError, match="values are on cpu, the frozen heads' tables on meta"):
            frozen_attention(torch.randn(1, 1, 30, 8), frozen.to("meta"))
        assert frozen_attention(meta, frozen).shape == meta.shape


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("batch", "rows"), [(0, 30), (2, 0)])
def test_no_sequences_and_no_queries_make_no_outputs(padded, batch, rows, generator):
    frozen = FrozenHeads.from_patterns(random_pattern(2, 30, generator), kv_head=(0, 0, 1, 1))
    query, key, value = torch.randn(batch, 2, rows, 8), torch.randn(batch, 1, 30, 8), torch.randn(batch, 2, 30, 8)
    value.requires_grad_()
    left_pad = torch.zeros(batch, dtype=torch.int64) if padded else None
    output = mixed_attention(query, key, value, frozen, left_pad=left_pad)
    assert output.shape == (batch, 4, rows, 8)
    output.sum().backward()
    assert torch.equal(value.grad, torch.zeros_like(value))
    assert frozen_attention(value, frozen, left_pad=left_pad, rows=rows).shape == (batch, 2, rows, 8)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # of PyTorch's own code for forward mode
def test_derivatives_in_forward_mode_are_right_or_refused(generator):
    pattern = random_pattern(2, 30, generator)
    query, value, tangent = (torch.randn(1, heads, 30, 8, generator=generator) for heads in (1, 3, 3))
    exact = FrozenHeads.from_patterns(pattern, backend="reference")
    actual = torch.func.jvp(lambda x: frozen_attention(x, exact), (value[:, :2],), (tangent[:, :2],))[1]
    assert relative(actual, pattern.dense() @ tangent[:, :2].double()) <= 1e-6
    fast = FrozenHeads.from_patterns(pattern, backend="toeplitz")
    for call, operand in (
        (lambda x: frozen_attention(x, fast), value[:, :2]),
        (lambda x: mixed_attention(query, query, x, fast), value),
        (lambda x: mixed_attention(x, query, value, fast), query),
    ):
        with pytest.raises(UnsupportedError, match="no derivatives in forward mode"):
            torch.func.jvp(call, (operand,), (torch.ones_like(operand),))


LIVE, ALL = (2, 1, 30, 8), (2, 3, 30, 8)


@pytest.mark.parametrize(
    ("query", "key", "value", "options", "message"),
    [
        ((2, 1, 30), LIVE, ALL, {}, r"must be \[batch, heads, positions, head_dim\], got \(2, 1, 30\)"),
        ((1, 1, 30, 8), LIVE, ALL, {}, "the same batch and head_dim"),
        (LIVE, (2, 1, 29, 8), ALL, {}, "need the same positions"),
        ((2, 1, 31, 8), LIVE, ALL, {}, "queries the last of them"),
        ((2, 1, 31, 8), (2, 1, 31, 8), (2, 3, 31, 8), {}, "input has 31 positions.*cover 30"),
        (LIVE, (2, 2, 30, 8), ALL, {}, "the 1 live heads alone, key their 1 KV heads"),
        (LIVE, LIVE, (2, 2, 30, 8), {}, "pass kv_head"),
        (LIVE, LIVE, ALL, {"left_pad": torch.tensor([0, 30])}, "left padding must be positions 0 to 29"),
        (LIVE, LIVE, ALL, {"left_pad": torch.tensor([0])}, r"left padding must be integers \[2\]"),
        ((2, 1, 0, 8), (2, 1, 0, 8), (2, 3, 0, 8), {}, "positions >= 1"),
        (LIVE, LIVE, ALL, {"kernel": "cudnn"}, "'cudnn' needs a CUDA device, got cpu"),
        (LIVE, LIVE, ALL, {"backend": "reference"}, "prepared for backend 'toeplitz', not 'reference'"),
    ],
)
def test_shapes_and_settings_that_do_not_fit_are_refused(generator, query, key, value, options, message):
    frozen = FrozenHeads.from_patterns(random_pattern(2, 30, generator))
    with pytest.raises((InputError, UnsupportedError), match=message):
        mixed_attention(torch.randn(query), torch.randn(key), torch.randn(value), frozen, **options)


def test_layers_and_patterns_that_cannot_be_computed_are_refused(generator):
    pattern, query, value = random_pattern(2, 30, generator), torch.randn(LIVE), torch.randn(ALL)
    frozen, prepare = FrozenHeads.from_patterns(pattern, kv_head=(0, 1, 2)), FrozenHeads.from_patterns
    cache = {"cache_position": CachePosition.of(torch.tensor(3), 1, 30), "left_pad": torch.tensor([0, 0])}
    for message, call in {
        "there are none": lambda: mixed_attention(query, query, query, None, backend="reference"),
        "same dtype": lambda: mixed_attention(query.double(), query, query, None),
        "a multiple of value's 1": lambda: mixed_attention(query[:, :0], query, query, None),
        "were prepared for": lambda: frozen_attention(value.half(), frozen),
        "rows must be 0 to 30": lambda: frozen_attention(value, frozen, rows=31),
        "leave left_pad out": lambda: frozen_attention(value, frozen, **cache),
        "needs a CUDA device": lambda: prepare(pattern, backend="fused"),
        "one length": lambda: prepare([pattern[0], pattern[1].prefix(20)]),
        "per slot, from 0": lambda: prepare(pattern, kv_head=(0, -1)),
    }.items():
        with pytest.raises((InputError, UnsupportedError), match=message):
            call()
    with torch.autocast("cpu", torch.bfloat16):
        assert mixed_attention(query.bfloat16(), query, query, None).dtype == torch.bfloat16


def test_tf32_is_used_only_where_pytorch_may():
    assert product_precision(torch.float32) == "ieee"
    torch.set_float32_matmul_precision("high")
    try:
        assert (product_precision(torch.float32), product_precision(torch.bfloat16)) == ("tf32", "ieee")
    finally:
        torch.set_float32_matmul_precision("highest")


class Calls(TorchDispatchMode):
    """Note the name of every operator that runs and the shape of its first argument."""

    def __init__(self):
        super().__init__()
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        self.seen.append((func.name(), () if first is None else tuple(first.shape)))
        return func(*args, **(kwargs or {}))

    def of(self, part: str) -> list[tuple[int, ...]]:
        """Return the first arguments' shapes of operators whose name holds `part`."""
        return [shape for name, shape in self.seen if part in name]


@pytest.mark.parametrize(("group", "frozen"), [(1, (1, 3)), (2, (0, 3)), (1, (0, 1, 2, 3))])
def test_live_heads_alone_attend_and_frozen_heads_alone_are_convolved(group, frozen, generator):
    slots = HeadLayout(4, 4 // group, frozen)
    used = sorted(set(slots.kv_head[: slots.num_live]))
    counts = (slots.num_live, len(used), 4 // group)
    inputs = [torch.randn(2, n, LENGTH, DIM, generator=generator, requires_grad=True) for n in counts]
    heads = FrozenHeads.from_patterns(hard_patterns(["decay"] * len(frozen), LENGTH), kv_head=slots.kv_head)
    with Calls() as calls:
        mixed_attention(*inputs, heads).square().sum().backward()
    convolved = (2, slots.num_frozen, LENGTH, DIM)
    assert calls.of("saf::toeplitz") == [convolved, convolved]  # forward, and transposed for the value gradient
    assert calls.of("softmax") == []
    attended = [shape for name, shape in calls.seen if "attention" in name and "backward" not in name]
    assert attended == ([(2, slots.num_live, LENGTH, DIM)] if slots.num_live else [])
