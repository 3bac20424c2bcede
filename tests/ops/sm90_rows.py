"""What is compiled for compute capability 9.0: every launch for shapes of models, recorded on the meta device."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from saf.ops.flash_decode_kernels import decode
from saf.ops.fused import COMPACT, DENSE, LIVE, head_maps, shifted_band
from saf.ops.fused_kernels import fused_backward, fused_forward
from saf.ops.launch import launch as run
from saf.ops.linear import CHUNK, TURNS
from saf.ops.linear_kernels import fill, linear_matmul, step
from saf.ops.loss_and_gelu_kernels import gelu, gelu_backward, softmax_gradient
from saf.ops.toeplitz import PAD, TILE
from saf.ops.toeplitz_kernels import ToeplitzConfig, choose_config, convolve, toeplitz_matmul

NAMES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64", torch.int32: "i32",
    torch.int64: "i64",
}  # fmt: skip
OPERANDS = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = [
    (512, 1, 3, 64),
    (512, 64, 3, 64),
    (4096, 8, 4, 64),
    (8192, 2, 4, 96),
    (16384, 2, 6, 64),
    (16384, 1, 3, 64),
    (65536, 1, 3, 64),
    (8192, 64, 6, 64),
]
"""Positions, sequences, heads, channels."""
HALF_SHAPES = [(512, 4, 3, 64), (512, 64, 3, 64), (4096, 2, 4, 192)]
"""Those of float16: its kernels are bfloat16's with another type, but for short inputs' scaling."""
FUSED = {torch.bfloat16: (64, 96, 128, 192), torch.float32: (64, 192)}
"""Channels of the fused kernels."""
DECODE = {torch.bfloat16: (8, 64, 96, 128, 256), torch.float16: (128,)}
"""Channels of decoding: 8 are padded to 16, 96 to 128; float16 is bfloat16 by another name, so bfloat16 has all."""


class Launch(NamedTuple):
    """A launch of a kernel: its arguments and its compile-time constants, with the options of the compiler."""

    kernel: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


def recorded(call: Callable, *operands: Any, **options: Any) -> list[Launch]:
    """Return what a call launches, in order; of tensors on the meta device nothing is computed."""
    launches: list[Launch] = []

    def record(kernel, grid, *arguments, device, **constants) -> None:
        launches.append(Launch(kernel, arguments, constants))

    with ExitStack() as patched:
        for name, module in list(sys.modules.items()):
            if name.startswith("saf.") and getattr(module, "launch", None) is run:
                patched.enter_context(patch.object(module, "launch", record))
        call(*operands, **options)
    return launches


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def all_rows() -> dict[str, Launch]:
    """Return every launch by the name of its kernel and what sets it apart."""
    rows = {}
    for cases in (toeplitz_rows, linear_rows, fused_rows, decode_rows, small_rows):
        for name, launches in cases():
            rows |= {f"{each.kernel.fn.__name__} {name}": each for each in launches}
    return rows


def toeplitz_rows() -> Iterator[tuple[str, list[Launch]]]:
    """Every distinct choice of the rule, with descriptors and without."""
    for dtype in OPERANDS:
        for length, batch, heads, dim in HALF_SHAPES if dtype == torch.float16 else SHAPES:
            x, scale = empty(batch, length, heads, dim, dtype=dtype).transpose(1, 2), empty(heads, length)
            tiles = empty(heads, -(-length // PAD) * (PAD // TILE), TILE, TILE, dtype=dtype)
            for hopper in (False, True):
                config = choose_config(length=length, columns=batch * dim, heads=heads, dtype=dtype, hopper=hopper)
                for transpose in (False, True):
                    options = {"transpose": transpose, "config": config}
                    scaling, product = recorded(toeplitz_matmul, x, tiles, scale, scale, **options)
                    yield f"{NAMES[dtype]} D{dim}", [scaling]
                    yield f"{NAMES[dtype]} D{dim} {compiled_name(config)} {direction(transpose)}", [product]


def compiled_name(config: ToeplitzConfig) -> str:
    """A configuration's name without what the compiler never sees."""
    descriptors = " descriptors" if config.descriptors else ""
    return f"{config.block_m}x{config.block_n}x{config.block_k} w{config.num_warps} s{config.num_stages}{descriptors}"


def direction(transpose: bool) -> str:
    """Which way the product goes."""
    return "transposed" if transpose else "forward"


def linear_rows() -> Iterator[tuple[str, list[Launch]]]:
    """The linear product with bands of one chunk and of two, and its state."""
    heads, poles = 3, 16
    for dtype in (torch.bfloat16, torch.float32):
        for tiles in (2, 3):
            near, write = (heads, tiles, CHUNK, CHUNK), (heads, 2 * poles, CHUNK)
            near, write, read = (empty(*x, dtype=dtype) for x in (near, write, (heads, CHUNK, 2 * poles)))
            tables, scale = (near, write, read, empty(heads, TURNS, 2, poles)), empty(heads, 32768)
            for dim in (96, 256):
                x = empty(2, 32768, heads, dim, dtype=dtype).transpose(1, 2)
                pad = empty(2, dtype=torch.int64) if dim == 96 else None
                for reverse in (False, True):
                    options = {"transpose": reverse, "left_pad": pad}
                    name = f"{NAMES[dtype]} D{dim} {tiles} tiles {direction(reverse)}"
                    yield name, recorded(linear_matmul, x, tables, scale, scale, **options)
        x, pad = empty(2, 32768, heads, 64, dtype=dtype).transpose(1, 2), empty(2, dtype=torch.int64)
        state = empty(2, heads, 4, CHUNK, 64, dtype=dtype), empty(2, heads, 2, 2 * poles, 64)
        yield f"{NAMES[dtype]} prompt", recorded(fill, x, tables, scale, pad, *state)
        row, first = x[:, :, :1], empty(dtype=torch.int64)
        yield NAMES[dtype], recorded(step, row, tables, scale, scale, first, pad, *state)


def fused_rows() -> Iterator[tuple[str, list[Launch]]]:
    """Layers with all kinds of heads, each with its own value head or in a group; and few tokens."""
    for dtype, dims in FUSED.items():
        for dim in dims:
            query, value = (empty(4, 4096, heads, dim, dtype=dtype).transpose(1, 2) for heads in (2, 4))
            pattern, lse = empty(1, 4096), empty(4, 2, 4096)
            patterns = (pattern, shifted_band(pattern), pattern, empty(1, 4096, 4096, dtype=dtype))
            kinds, name = (LIVE, LIVE, COMPACT, DENSE), f"{NAMES[dtype]} D{dim}"

            def layer(kinds, value_heads, patterns=patterns) -> tuple[list[Tensor], tuple[int, ...], float]:
                tables = [*head_maps(kinds, value_heads, "meta").values(), *patterns]
                return tables, tuple(kinds.count(kind) for kind in (LIVE, COMPACT, DENSE)), 0.125

            yield name, recorded(fused_forward, query, query, value, *layer(kinds, range(4)))
            operands = value, query, query, value, value, lse
            yield name, recorded(fused_backward, *operands, *layer(kinds, range(4)))
            if dtype == torch.bfloat16 and dim <= 128:  # others take the same blocks
                few = [x[:, :, :512] for x in (query, query, value[:, :3])]
                yield f"few {name}", recorded(fused_forward, *few, *layer(kinds[:3], range(3)))
                operands = value, query, query[:, :1], value[:, :1], value, lse
                yield f"grouped {name}", recorded(fused_backward, *operands, *layer(kinds, (0, 0, 0, 0)))[1:2]
            if dtype == torch.bfloat16 and dim == 64:  # numbers of heads are compile-time constants where they are 1
                one = [x[:, :0] for x in (query, query)] + [value[:, :1]]
                yield f"one head {name}", recorded(fused_forward, *one, *layer(kinds[2:3], range(1)))
                operands = value[:, :1], *one, value[:, :1], lse[:, :0]
                yield f"one head {name}", recorded(fused_backward, *operands, *layer(kinds[2:3], range(1)))


def decode_rows() -> Iterator[tuple[str, list[Launch]]]:
    """One query: live heads in an uneven group of four and three frozen ones, these alone, or an ordinary layer."""
    whole, place = torch.int32, empty(dtype=torch.int64)
    for dtype, dims in DECODE.items():
        for dim in dims:
            for live, kv, frozen in ((9, 2, 3), (0, 0, 3), (8, 2, 0)):
                counts, keys = (live, kv, 12), (1, 512, 512)
                operands = [empty(2, t, n, dim, dtype=dtype).transpose(1, 2) for n, t in zip(counts, keys, strict=True)]
                maps = [empty(kv + 2, dtype=whole), empty(kv + 2, 4, dtype=whole)] if frozen else []
                patterns = [empty(3, 512, dtype=dtype), empty(3, 512), empty(3, 512)] if frozen else []
                pad, out = empty(2, dtype=torch.int64), empty(2, 1, live + frozen, dim, dtype=dtype).transpose(1, 2)
                name, tables = f"{NAMES[dtype]} D{dim} {live}+{frozen}", (maps, patterns)
                yield name, recorded(decode, *operands, *tables, place, pad, 0.125, out)
                if dtype == torch.bfloat16 and dim == 64:
                    yield f"host {name}", recorded(decode, *operands, *tables, 511, None, 0.125, out)
                    if frozen and live:  # frozen heads decode from a state
                        yield f"state {name}", recorded(decode, *operands, maps, [], place, pad, 0.125, out[:, :live])


def small_rows() -> Iterator[tuple[str, list[Launch]]]:
    """The loss, GELU, and the sums of normalisers."""
    table = empty(2, 4096, dtype=torch.float64)
    yield "fp64", recorded(convolve, table, table)
    for dtype in OPERANDS:
        logits, labels = empty(64, 50304, dtype=dtype), empty(64, dtype=torch.int64)
        count = empty(dtype=torch.int64)
        yield NAMES[dtype], recorded(softmax_gradient, logits, labels, count, ignored=-100)
        yield NAMES[dtype], recorded(gelu, logits)
        yield NAMES[dtype], recorded(gelu_backward, logits, logits)
