"""Arguments of every registered operator `saf::*`, for `opcheck` on any device."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

import saf.ops.loss_and_gelu  # noqa: F401 (registers operators)
from saf.ops import FrozenHeads
from saf.ops.backend import has_triton
from saf.ops.flash_decode import decode_maps
from saf.ops.fused import operator_tables
from saf.ops.linear import RecurrentState, exact_tables, linear_tables
from saf.patterns import CompactPattern
from tests.ops.exponential_patterns import exponential_patterns

Draw = Callable[..., torch.Tensor]
ONE_SHAPE = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
"""What is checked of the operator that only code compiled for one shape has."""


def registered() -> set[str]:
    """Return the names of all operators of the library; where Triton is, the one that compilers look into too."""
    if has_triton():
        import_module("saf.ops.fused_kernels")
    names = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("saf::")}
    return {name.removeprefix("saf::") for name in names}


def runnable(device: str) -> set[str]:
    """Return the operators that run on a device: those that are kernels and nothing else on CUDA only."""
    kernels = {"fused", "fused_backward", "fused_visible", "flash_decode"}
    return registered() - (kernels if device == "cpu" else set())


def check(name: str, device: str, dtype: torch.dtype) -> None:
    """Run `opcheck` on every sample of an operator; float32 losses and gradients of 16-bit logits may differ a bit."""
    arguments = samples(device, dtype)[name]
    assert arguments, f"saf::{name} has no sample; add one to tests/ops/operator_samples.py"
    checks: dict[str, Any] = {"test_utils": ONE_SHAPE} if name == "fused_visible" else {}
    for each in arguments:
        torch.library.opcheck(getattr(torch.ops.saf, name).default, each, **checks)


def samples(device: str, dtype: torch.dtype) -> dict[str, list[tuple]]:
    """Return argument tuples by operator: contiguous and strided operands, with and without gradients."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    labels = torch.tensor([1, 2, -100, 0, 10], device=device)
    logits = patterns(device)
    values = [draw(3, 2, length, 16) for length in (48, 40)]
    trained = [(value.requires_grad_(), logits.alpha.float(), logits.rho.float()) for value in values]
    tables = torch.ops.saf.trainable(*trained[0])[1:]
    return {
        **toeplitz_samples(draw, device, dtype),
        **linear_samples(draw, device, dtype),
        **(fused_samples(draw, device, dtype) if "fused" in runnable(device) else {"fused": [], "fused_backward": []}),
        **({"fused_visible": []} if "fused_visible" in registered() - runnable(device) else {}),
        "trainable": trained,
        "pattern_gradient": [(draw(3, 2, 48, 16), draw(3, 2, 48, 16), *(x.detach() for x in tables), 60)],
        "softmax_gradient_": [(draw(5, 11), labels, torch.tensor(4, device=device))],
        "gelu": [(draw(3, 40),), (draw(2, 3, 40).transpose(0, 1),)],
        "gelu_backward_": [(draw(3, 40), draw(3, 40))],
    }


def patterns(device: str) -> CompactPattern:
    """Two patterns of 48 positions."""
    logits = torch.randn(2, 2, 48, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device)
    return CompactPattern.from_parameters(*logits)


def toeplitz_samples(draw: Draw, device: str, dtype: torch.dtype) -> dict[str, list[tuple]]:
    """The product in both directions; decoding at a position that device or host knows, with and without live heads."""
    tables = FrozenHeads.from_patterns(patterns(device), dtype=dtype, device=device).tables(dtype)
    scales = tables["key_scale"], tables["row_scale"]
    inputs = (draw(2, 2, 40, 16), draw(2, 40, 2, 16).transpose(1, 2), draw(2, 2, 16, 40).mT)
    patterns_ = [tables["distance"], *scales]
    # A live slot, if there is one, that reads value head 1; frozen slots that read heads 2 and 0.
    mixed, frozen = (decode_maps(kv_head, 2, torch.device(device)) for kv_head in ((1, 2, 0), (2, 0)))
    maps, frozen_maps = ([each["kv_read"], each["kv_readers"]] for each in (mixed, frozen))
    value, pad = draw(2, 40, 3, 16).transpose(1, 2), torch.tensor([0, 4], device=device)
    query, key, at = draw(2, 1, 3, 16), draw(2, 1, 40, 16), (torch.tensor(30, device=device), 0, pad)
    return {
        "toeplitz": [
            (x.requires_grad_(), tables["table"], *scales, transpose)
            for x, transpose in zip(inputs, (False, True, False), strict=True)
        ],
        "flash_decode": [
            (query, key, value, maps, patterns_, *at, 0.25),
            (query[:, :0], key[:, :0], value, frozen_maps, patterns_, *at, 0.25),
            (query, key, value, [], [], None, 37, None, 0.25),
        ],
    }


def linear_samples(draw: Draw, device: str, dtype: torch.dtype) -> dict[str, list[tuple]]:
    """The product in both directions; a prompt of 40 positions and the next ones; with padding and without."""
    exact = exact_tables(exponential_patterns(2, 48, band=8).singles(), torch.device(device))
    tables, before, after = linear_tables(exact, dtype)
    pad, first = torch.tensor([0, 4], device=device), torch.tensor(40, device=device)
    value = draw(2, 40, 2, 16).transpose(1, 2)
    state = RecurrentState.empty(value, (2, tables[0].shape[1], 64, tables[1].shape[1]))[:2]
    return {
        "linear": [
            (x.requires_grad_(), tables, before, after, left_pad, transpose)
            for x, left_pad, transpose in (
                (draw(2, 2, 40, 16), None, False),
                (draw(2, 2, 40, 16), pad, False),
                (draw(2, 40, 2, 16).transpose(1, 2), pad, True),
            )
        ],
        "linear_fill": [(value, tables, before, left_pad, *state) for left_pad in (None, pad)],
        "linear_step": [
            (draw(2, 2, 3, 16), tables, before, after, first, 0, pad, *state),
            (draw(2, 2, 1, 16), tables, before, after, None, 40, None, *state),
        ],
    }


def fused_samples(draw: Draw, device: str, dtype: torch.dtype) -> dict[str, list[tuple]]:
    """A mixed layer and one with frozen heads alone, and what their backward passes take."""
    frozen = FrozenHeads.from_patterns(patterns(device), backend="fused", dtype=dtype, device=device, kv_head=range(4))
    tables, results = frozen.tables(dtype), {"fused": [], "fused_backward": [], "fused_visible": []}
    for layout, live in (("mixed", 2), ("frozen", 0)):
        inputs = [draw(2, 40, heads, 64).transpose(1, 2) for heads in (live, live, live + 2)]
        rest = (*operator_tables(tables, layout), 0.125)
        output, log_sums = torch.ops.saf.fused(*inputs, *rest)
        results["fused"].append((*(x.clone().requires_grad_() for x in inputs), *rest))
        results["fused_backward"].append((draw(*output.shape), *inputs, output, log_sums, *rest))
        results["fused_visible"].append((*inputs, *rest))
    return results
