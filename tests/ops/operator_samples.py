"""Arguments of every registered operator `saf::*`, for `opcheck` on any device."""

from collections.abc import Callable
from importlib import import_module

import torch

import saf.ops.decoder  # noqa: F401 (registers operators)
from saf.ops import FrozenHeads
from saf.ops.decode.op import decode_tables
from saf.ops.fused.op import MAPS, PATTERNS
from saf.ops.linear.op import RecurrentState, exact_tables, linear_tables
from saf.ops.operator import has_triton
from saf.patterns import CompactPattern
from tests.ops.exponential_patterns import exponential_patterns


def registered() -> set[str]:
    """Return the names of all operators of the library; where Triton is, the one that compilers look into too."""
    if has_triton():
        import_module("saf.ops.fused.kernels")
    names = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("saf::")}
    return {name.removeprefix("saf::") for name in names}


def runnable(device: str) -> set[str]:
    """Return the operators that run on a device: those that are kernels and nothing else on CUDA only."""
    kernels = {"fused", "fused_backward", "fused_visible", "flash_decode"}
    return registered() - (kernels if device == "cpu" else set())


def operator(name: str):
    """Return an operator by name."""
    return getattr(torch.ops.saf, name).default


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
    convolved = toeplitz_samples(draw, device, dtype)
    fused = fused_samples(draw, device, dtype) if "fused" in runnable(device) else []
    return {
        "toeplitz": convolved,
        "linear": linear_samples(draw, device, dtype),
        **state_samples(draw, device, dtype),
        **decode_samples(draw, device, dtype),
        "fused": [arguments for arguments, _ in fused],
        "fused_backward": [backward for _, backward in fused],
        **({"fused_visible": visible_samples(fused)} if "fused_visible" in registered() else {}),
        "trainable": trained,
        "pattern_gradient": [(draw(3, 2, 48, 16), draw(3, 2, 48, 16), *(x.detach() for x in tables), 60)],
        "softmax_gradient_": [(draw(5, 11), labels, torch.tensor(4, device=device))],
        "gelu": [(draw(3, 40),), (draw(2, 3, 40).transpose(0, 1),)],
        "gelu_backward_": [(draw(3, 40), draw(3, 40))],
    }


def decode_samples(draw: Callable[..., torch.Tensor], device: str, dtype: torch.dtype) -> dict[str, list[tuple]]:
    """Rows of two frozen heads, of their own value heads or of one, at a position that device or host knows."""
    made = FrozenHeads.from_patterns(patterns(device), dtype=dtype, device=device).tables(dtype)
    tables = made["distance"], made["key_scale"], made["row_scale"]
    maps = decode_tables((0, 1, 2, 0), 2, torch.device(device))
    value, pad = draw(2, 40, 3, 16).transpose(1, 2), torch.tensor([0, 4], device=device)
    query, key, frozen = draw(2, 1, 3, 16), draw(2, 1, 40, 16), (maps["frozen_read"], maps["frozen_readers"])
    first = torch.tensor(30, device=device)
    return {
        "flash_decode": [
            (query, key, value, None, None, 1, *frozen, 0, *tables, first, 0, pad, 2, 0.25),
            (query[:, :0], key[:, :0], value, None, None, 1, *frozen, 0, *tables, first, 0, pad, 2, 0.25),
            (query, key, value, None, None, 1, None, None, 0, None, None, None, None, 37, None, 1, 0.25),
        ],
    }


def visible_samples(fused: list) -> list[tuple]:
    """Return the arguments of `fused_samples` without gradients."""
    return [(*(x.detach() for x in arguments[:3]), *arguments[3:]) for arguments, _ in fused]


ONE_SHAPE = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
"""What is checked of the operator that only code compiled for one shape has."""


def check(name: str, device: str, dtype: torch.dtype) -> None:
    """Run `opcheck` on every sample of an operator; float32 losses and gradients of 16-bit logits may differ a bit."""
    known = samples(device, dtype)[name]
    assert known, f"saf::{name} has no sample; add one to tests/ops/operator_samples.py"
    checks = {"test_utils": ONE_SHAPE} if name == "fused_visible" else {}
    for arguments in known:
        torch.library.opcheck(operator(name), arguments, **checks)


def patterns(device: str) -> CompactPattern:
    """Two patterns of 48 positions."""
    generator = torch.Generator().manual_seed(0)
    return CompactPattern.from_parameters(
        *(x.to(device) for x in torch.randn(2, 2, 48, generator=generator, dtype=torch.float64))
    )


def toeplitz_samples(draw, device: str, dtype: torch.dtype) -> list[tuple]:
    """Both directions, a strided and a contiguous input."""
    tables = FrozenHeads.from_patterns(patterns(device), dtype=dtype, device=device).tables(dtype)
    rest = (tables["table"], tables["key_scale"], tables["row_scale"])
    inputs = (draw(2, 2, 40, 16), draw(2, 40, 2, 16).transpose(1, 2), draw(2, 2, 16, 40).mT)
    inputs = [x.requires_grad_() for x in inputs]
    return [(x, *rest, transpose) for x, transpose in zip(inputs, (False, True, False), strict=True)]


def linear_samples(draw, device: str, dtype: torch.dtype) -> list[tuple]:
    """Both directions, of a contiguous and of a strided input, with padding and without."""
    made = linear_tables(exact_tables(exponential_patterns(2, 48, band=8).singles(), torch.device(device)), dtype)
    samples, left_pad = [], torch.tensor([0, 4], device=device)
    for pad, transpose in ((None, False), (left_pad, False), (left_pad, True)):
        x = draw(2, 40, 2, 16).transpose(1, 2) if transpose else draw(2, 2, 40, 16)
        samples.append((x.requires_grad_(), list(made[0]), *made[1:], pad, transpose))
    return samples


def state_samples(draw, device: str, dtype: torch.dtype) -> dict[str, list[tuple]]:
    """A prompt of 40 positions and the next three, at a position that device or host knows, with padding or without."""
    made = linear_tables(exact_tables(exponential_patterns(2, 48, band=8).singles(), torch.device(device)), dtype)
    tables, before, after = list(made[0]), *made[1:]
    value, pad = draw(2, 40, 2, 16).transpose(1, 2), torch.tensor([0, 4], device=device)
    state = RecurrentState.empty(value, (2, made[0].near.shape[1], 64, made[0].write.shape[1]))[:2]
    first = torch.tensor(40, device=device)
    return {
        "linear_fill": [(value, tables, before, left_pad, *state) for left_pad in (None, pad)],
        "linear_step": [
            (draw(2, 2, 3, 16), tables, before, after, first, 0, pad, *state),
            (draw(2, 2, 1, 16), tables, before, after, None, 40, None, *state),
        ],
    }


def fused_samples(draw, device: str, dtype: torch.dtype) -> list[tuple[tuple, tuple]]:
    """A mixed layer and one with frozen heads alone, with what their backward passes take."""
    frozen = FrozenHeads.from_patterns(patterns(device), backend="fused", dtype=dtype, device=device, kv_head=range(4))
    tables = frozen.tables(dtype)
    made = []
    for layout, live in (("mixed", 2), ("alone", 0)):
        shapes = (live, live, live + 2)
        inputs = [draw(2, 40, heads, 64).transpose(1, 2).requires_grad_() for heads in shapes]
        maps, stored = [tables[f"{layout}_{name}"] for name in MAPS], [tables[name] for name in PATTERNS]
        rest = (maps, stored, list(tables[f"{layout}_counts"]), tables[f"{layout}_grouped"][0], 0.125)
        output, log_sums = torch.ops.saf.fused(*(x.detach() for x in inputs), *rest)
        operands = (draw(*output.shape), *(x.detach() for x in inputs), output, log_sums)
        made.append(((*inputs, *rest), (*operands, *rest)))
    return made
