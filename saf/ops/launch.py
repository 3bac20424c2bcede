"""`launch` runs a Triton kernel at little cost to the host; here too are names and functions that kernels share.

Sizes: B sequences, H heads, L live ones, T positions, D channels, DP: rounded up to a power of two, N = B x D. Letters:
b sequence, h head or slot, g value head of a group, m query positions (rows of P), k key positions (columns of P), n
columns of N, t any positions, d channels. `o_m` are offsets along m, `m0` is the first of them,
`BM` a block's size, `i_m` its number, `m_m` a mask. `x_stride_h` is the stride of x from head to head, `p_x` a pointer
moved to what a program reads, `b_x` a block in registers. `before` and `after` scale the input and the output of a
product, `pad` is the first real position of a sequence, `first` the position of the first query.
"""

from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# Bytes: what Triton compiles aligned addresses for, and the widest load of a thread.
ALIGNMENT = 16
# Compiled kernels in the cache; more than this means lengths that change again and again.
MOST = 4096
# Bytes of shared memory that a program may have on compute capability 9.0, which is compiled for without a GPU.
SHARED_MEMORY = 227 << 10
# The compiled kernel and the constants that it takes last, by kernel, device, constants and `_specialization`.
_compiled: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, device: torch.device, **constants: Any) -> None:
    """Run a kernel on the tensors' device, which Triton takes to be the current one.

    Triton inspects every argument of every call to find the compiled kernel. This caches compiled kernels by the
    properties that Triton may inspect, and launches them directly; the interpreter compiles none.
    """
    # With few tokens the host sets the pace: a called layer with frozen heads took it 140 us more than an ordinary one
    # (docs/log.md, "Few sequences"). So nothing here may cost more than a few look-ups.
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else nullcontext():
        kinds = map(_specialization, args, _varying(kernel, len(args)))
        # A name missing here would be a wrong kernel without any error: test_launch.py has all that Triton looks at.
        key = (kernel, device, *kinds, *constants, *constants.values())
        entry = _compiled.get(key)
        if entry is not None:
            compiled, rest = entry
            # Addresses in place of tensors: for each tensor Triton would ask the driver what kind of memory it has.
            direct = [each.data_ptr() if isinstance(each, Tensor) else each for each in args]
            compiled[(*grid, 1, 1)[:3]](*direct, *rest)
            return
        compiled = kernel[grid](*args, **constants)
        if compiled is not None:  # None from the interpreter
            if len(_compiled) >= MOST:
                _compiled.clear()
            _compiled[key] = compiled, [constants[name] for name in kernel.arg_names[len(args) :]]


@cache
def _varying(kernel: Any, count: int) -> tuple[bool, ...]:
    """Return which of the first `count` parameters Triton does not specialize on, such as a decoding position."""
    parameters = getattr(kernel, "params", ())[:count]
    return tuple(parameter.do_not_specialize for parameter in parameters) or (False,) * count


def _specialization(argument: Any, varies: bool) -> Any:
    """Return what a kernel may be compiled for: dtype and alignment of memory, blocks of a descriptor, any number."""
    if type(argument) is int:  # most of them; not isinstance, since Triton takes bools for another type
        # Of a number that varies Triton compiles the width alone, 32 or 64 bits. Of others it may compile the value: 1
        # is a constant, and multiples of 16 allow wide loads.
        return -(1 << 31) <= argument < 1 << 31 if varies else argument
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % ALIGNMENT == 0
    if isinstance(argument, TensorDescriptor):
        return argument.base.dtype, argument.padding, *argument.block_shape
    return argument


@cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have on a CUDA device; `SHARED_MEMORY` elsewhere."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return SHARED_MEMORY
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def strides(*tensors: Tensor) -> list[int]:
    """Return the strides of batch, head and position of tensors `[B, H, T, D]`, one after another."""
    return [each for tensor in tensors for each in tensor.stride()[:3]]


def cdiv(count: int, size: int) -> int:
    """Return how many blocks of `size` cover `count`, as a plain int."""
    return -(-count // size)


def padded_channels(dim: int) -> int:
    """Return the power of two that holds a head's channels, at least the 16 that matrix units take."""
    return max(16, 1 << (dim - 1).bit_length())


def product_precision(dtype: torch.dtype) -> str:
    """Return how kernels multiply operands of `dtype` on CUDA: "tf32" for float32 where PyTorch's switches allow it.

    All else is exact, "ieee". `torch.set_float32_matmul_precision` sets the switch of matrix products; without it the
    general one counts.
    """
    if dtype != torch.float32:
        return "ieee"
    # Kernels follow PyTorch's switches, so that a frozen head is no less exact than the projections around it. "none"
    # means that nobody has set the switch of products.
    own = torch.backends.cuda.matmul.fp32_precision
    general = torch.backends.fp32_precision  # type: ignore[attr-defined]
    return "tf32" if "tf32" in (own, general if own == "none" else own) else "ieee"


@triton.jit
def add_product(acc, b_a, b_b, PRECISION: tl.constexpr):
    """Return acc + a b; float32 sums keep their accuracy over many steps."""
    if b_b.dtype == tl.float32:
        # The product is summed by itself, then added: T additions to one long sum would round T times. The limit keeps
        # the compiler from joining the two.
        return acc + tl.dot(b_a.to(b_b.dtype), b_b, input_precision=PRECISION, max_num_imprecise_acc=1)
    return tl.dot(b_a.to(b_b.dtype), b_b, acc, input_precision=PRECISION)


@triton.jit
def load_rows(
    pointer, start, stride, T, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """Load the first DP channels of rows, from a start, of a [T, D] matrix as [ROWS, DP], zero outside."""
    o_r = tl.arange(0, ROWS)
    o_d = tl.arange(0, DP)
    # The start's offset is 64 bits wide, those within a block 32: fewer registers.
    p = pointer + tl.cast(start, tl.int64) * stride + (o_r[:, None] * stride + o_d[None, :])
    # The fewest masks: whole blocks need none, powers of two none over channels.
    if EVEN and D >= DP:
        return tl.load(p)
    if D >= DP:
        return tl.load(p, mask=(start + o_r < T)[:, None], other=0.0)
    return tl.load(p, mask=(start + o_r < T)[:, None] & (o_d < D)[None, :], other=0.0)
