"""The one launch of live and frozen heads' few rows against float64."""

import pytest
import torch
from torch.autograd import forward_ad

from saf.bench.models import synthetic_patterns
from saf.errors import InputError, UnsupportedError
from saf.ops import FrozenHeads, live_attention, mixed_attention, ways
from saf.ops.backend import Call
from saf.ops.rows import split
from tests.ops.projected import projected_attention
from tests.ops.rows.split_cases import CASES, LIMITS


@pytest.mark.parametrize("name", CASES)
def test_heads_agree_with_float64_in_one_launch(split_results, name):
    result, case = split_results[name], CASES[name]
    assert len(result["parts"]) == 1
    assert result["error"].keys() == {"live", *(["frozen"] if case.heads else [])}
    assert max(result["error"].values()) <= LIMITS[case.dtype]
    assert result["strides"]
    assert result["finite"]


def test_keys_are_cut_where_parts_are_many(split_results):
    assert split_results["a row"]["parts"][0] > 1
    assert split_results["one part"]["parts"] == [1]


def test_other_passes_take_the_usual_choice():
    query, key, value = (torch.randn(1, 2, 40, 16) for _ in range(3))
    for rows in (40, 17):
        last = query[:, :, -rows:]
        usual = mixed_attention(last, key, value, None)
        assert torch.equal(mixed_attention(last, key, value, None, kernel="split"), usual)
    with pytest.raises(InputError, match=r"unknown attention kernel 'splitt'.*did you mean 'split'"):
        live_attention(query, key, value, kernel="splitt")


def test_layers_without_heads_and_projections_of_another_width_are_refused():
    query, key, value = (torch.randn(1, heads, 40, 16) for heads in (2, 2, 3))
    frozen = FrozenHeads.from_patterns(synthetic_patterns(1, 40, torch.Generator()), kv_head=(0, 1, 2))
    with pytest.raises(InputError, match=r"projection must be \[C, 48\], columns slot by slot; got \[8, 32\]"):
        projected_attention(query, key, value, frozen, torch.randn(8, 32))
    with pytest.raises(InputError, match="query has no heads, and none is frozen"):
        mixed_attention(query[:, :0], key[:, :0], value[:, :0], None)


def test_few_rows_that_it_cannot_take_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(split, "uses_triton", lambda device, dtype: True)
    query, key, value = (torch.randn(1, heads, rows, 16).half() for heads, rows in ((32, 1), (1, 40), (1, 40)))
    with pytest.raises(UnsupportedError, match="at most 16 query heads of a KV head, got 32"):
        mixed_attention(query, key, value, None, kernel="split")
    with torch.no_grad(), forward_ad.dual_level():
        moved = forward_ad.make_dual(value, torch.ones_like(value))
        with pytest.raises(UnsupportedError, match="no derivatives in forward mode"):
            mixed_attention(query[:, :2], key, moved, None, kernel="split")


def test_layers_with_frozen_heads_take_it_by_themselves_where_it_can_run(monkeypatch):
    """Ordinary layers, kernels asked for by name, float32 and passes that need a gradient stay as they are."""
    query, key, value = (torch.randn(1, heads, rows, 16) for heads, rows in ((2, 2), (2, 40), (3, 40)))
    frozen = FrozenHeads.from_patterns(synthetic_patterns(1, 40, torch.Generator()), kv_head=(0, 1, 2))
    taken: list[bool] = []
    monkeypatch.setattr(ways, "WAYS", tuple(_told(way, taken) for way in ways.WAYS))

    def takes(frozen: FrozenHeads | None = frozen, value: torch.Tensor = value, **changes) -> bool:
        taken.clear()
        mixed_attention(**{"query": query, "key": key, "value": value, "frozen": frozen} | changes)
        return taken == [True]

    assert not takes()
    monkeypatch.setattr(split, "uses_triton", lambda device, dtype: True)
    assert not takes()
    monkeypatch.setattr(split, "DTYPES", (torch.float32,))
    assert not takes()
    monkeypatch.setattr(split, "READERS", "distance")  # a table that heads have without a GPU
    assert takes()
    assert not takes(None, value[:, :2])
    assert not takes(kernel="math")
    assert not takes(value=value.clone().requires_grad_())
    assert not takes(query=torch.randn(1, 2, 17, 16))


def _told(way: ways.Way, taken: list[bool]) -> ways.Way:
    """Return the way, which notes that it was taken in the place of the launch."""
    if way.name != "split":
        return way

    def run(call: Call) -> tuple[torch.Tensor, ...]:
        taken.append(True)
        return (torch.zeros_like(call.query),)

    return way._replace(run=run)


def test_few_rows_that_it_cannot_take_are_refused(monkeypatch):
    query, key, value = (torch.randn(1, 2, rows, 16) for rows in (1, 40, 40))

    def refused(why: str, frozen: FrozenHeads | None = None, **changes) -> None:
        given = {"query": query, "key": key, "value": value} | changes
        with pytest.raises(UnsupportedError, match=rf"kernel 'split' {why}.*or take 'auto'"):
            mixed_attention(**given, frozen=frozen, kernel="split")

    refused("needs a CUDA device and values of 16 bits, got cpu and torch.float32")
    monkeypatch.setattr(split, "uses_triton", lambda device, dtype: True)
    refused("needs a CUDA device and values of 16 bits")
    monkeypatch.setattr(split, "DTYPES", (torch.float32,))
    refused("gives no gradients", query=query.clone().requires_grad_())
    patterns = synthetic_patterns(1, 40, torch.Generator())
    frozen = FrozenHeads.from_patterns(patterns, backend="reference", kv_head=(0, 1))
    refused("takes fixed patterns", frozen, query=query[:, :1], key=key[:, :1])
