"""What is compiled for compute capability 9.0: every kernel, cut as the written rules do for shapes of models."""

from dataclasses import dataclass
from typing import Any

import torch

from saf.ops import decoder_kernels as decoder
from saf.ops.decode.kernels import (
    decode_constants,
    flash_decode_kernel,
    keys_at_once,
    merge_constants,
    merge_kernel,
)
from saf.ops.fused.kernels import (
    block_constants,
    delta_kernel,
    fused_forward_kernel,
    key_block_kernel,
    query_block_kernel,
)
from saf.ops.fused.kernels import choose_config as fused_config
from saf.ops.launch import SHARED_MEMORY
from saf.ops.linear.kernels import (
    SCAN_COLUMNS,
    STEP_COLUMNS,
    fill_kernel,
    linear_constants,
    mix_kernel,
    scan_kernel,
    states_kernel,
    step_kernel,
)
from saf.ops.linear.kernels import choose_config as linear_config
from saf.ops.linear.op import CHUNK, TURNS
from saf.ops.toeplitz import kernels as toeplitz

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
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
FUSED = {
    ("keys", torch.bfloat16): (64, 96, 128, 192),
    ("grouped", torch.bfloat16): (64, 96, 128),
    ("forward", torch.bfloat16): (64, 128, 192),
    ("few", torch.bfloat16): (64, 128),
    ("queries", torch.bfloat16): (64, 128, 192),
    ("keys", torch.float32): (64, 192),
    ("forward", torch.float32): (64, 192),
    ("queries", torch.float32): (128,),
}
"""Channels by kernel; grouped queries are a case of the key-block kernel alone, few tokens one of the forward."""
DECODE = {torch.bfloat16: (8, 64, 96, 128, 256), torch.float16: (128,)}
"""Channels of decoding: 8 are padded to 16, 96 to 128; float16 is bfloat16 by another name, so bfloat16 has all."""


@dataclass(frozen=True)
class Row:
    """One kernel to compile; `blocks` are those of its tensor descriptors."""

    kernel: Any
    constants: dict[str, Any]
    dtype: torch.dtype
    blocks: dict[str, list[int]] | None = None

    @property
    def tile_rows(self) -> int:
        """Rows of the tiles that are multiplied: query positions, key positions in the key-block kernel."""
        return self.constants.get({key_block_kernel: "BK", mix_kernel: "C"}.get(self.kernel, "BM"), 0)


def all_rows() -> dict[str, Row]:
    """Return every row by name; equal ones, once."""
    return toeplitz_rows() | linear_rows() | fused_rows() | decode_rows() | small_rows()


def shapes(dtype: torch.dtype) -> list[tuple[int, int, int, int]]:
    """The shapes of a dtype."""
    return HALF_SHAPES if dtype == torch.float16 else SHAPES


def toeplitz_rows() -> dict[str, Row]:
    """The Toeplitz product, every distinct choice of the rule, with descriptors and without."""
    rows = {}
    for dtype in OPERANDS:
        for length, batch, heads, dim in shapes(dtype):
            for hopper in (False, True):
                shape = {"length": length, "columns": batch * dim, "heads": heads, "dtype": dtype}
                config = toeplitz.choose_config(**shape, hopper=hopper)
                for transpose in (False, True):
                    constants = toeplitz.product_constants(config, length, batch * dim, dim, transpose, "ieee")
                    name = f"{NAMES[dtype]} D{dim} {compiled_name(config)} {direction(transpose)}"
                    if config.descriptors:
                        tile = [config.block_k, config.block_m] if transpose else [config.block_m, config.block_k]
                        blocks = {"x_desc": [1, config.block_k, config.block_n], "tiles_desc": tile}
                        row = Row(toeplitz.toeplitz_descriptor_kernel, constants, dtype, blocks)
                        rows[f"descriptor {name}"] = row
                    else:
                        rows[f"toeplitz {name}"] = Row(toeplitz.toeplitz_kernel, constants, dtype)
    return rows


def compiled_name(config: toeplitz.ToeplitzConfig) -> str:
    """A configuration's name without what the compiler never sees."""
    fold = f" f{config.fold}" if config.fold > 1 else ""
    return f"{config.block_m}x{config.block_n}x{config.block_k} w{config.num_warps} s{config.num_stages}{fold}"


def linear_rows() -> dict[str, Row]:
    """The linear product: bands of one chunk and of two."""
    rows = {}
    for dtype in (torch.bfloat16, torch.float32):
        for band in (CHUNK, 2 * CHUNK):
            for dim in (96, 256):
                config = linear_config(length=32768, columns=2 * dim, heads=3, dtype=dtype)
                for reverse in (False, True):
                    states, mix = linear_constants(
                        config, rows=CHUNK, reach=1 + band // CHUNK, poles=16, powers=TURNS, dim=dim, columns=2 * dim,
                        reverse=reverse, padded=dim == 96, precision="ieee",
                    )  # fmt: skip
                    name = f"{NAMES[dtype]} D{dim} band {band} {direction(reverse)}"
                    rows[f"linear mix {name}"] = Row(mix_kernel, mix, dtype)
                    rows[f"linear states {name}"] = Row(states_kernel, states, dtype)
        inner = {"D": 64, "C": CHUNK, "P": 16, "BN": STEP_COLUMNS, "REACH": 3, "POWERS": TURNS}
        inner |= {"PADDED": True, "PRECISION": "ieee", "num_warps": 4}
        rows[f"linear fill {NAMES[dtype]}"] = Row(fill_kernel, inner | {"EVEN_N": True}, dtype)
        rows[f"linear step {NAMES[dtype]}"] = Row(step_kernel, inner | {"ON_DEVICE": True}, dtype)
        constants = {"P": 16, "BN": SCAN_COLUMNS, "POWERS": TURNS, "num_warps": 4}
        rows[f"scan {NAMES[dtype]}"] = Row(scan_kernel, constants, dtype)
    return rows


def direction(transpose: bool) -> str:
    """Which way the product goes."""
    return "transposed" if transpose else "forward"


def fused_rows() -> dict[str, Row]:
    """The fused kernels with all three kinds of heads."""
    states = {"HAS_LIVE": True, "HAS_COMPACT": True, "HAS_DENSE": True}
    rows = {}
    for (name, dtype), dims in FUSED.items():
        for dim in dims:
            config = fused_config(dim=dim, dtype=dtype, grouped=name == "grouped", few=name == "few")
            kernel, blocks, more = {
                "keys": (key_block_kernel, config.keys, states | {"GROUPED": False}),
                "grouped": (key_block_kernel, config.keys, states | {"GROUPED": True}),
                "forward": (fused_forward_kernel, config.forward, states),
                "few": (fused_forward_kernel, config.forward, states | {"HAS_DENSE": False}),
                "queries": (query_block_kernel, config.queries, {}),
            }[name]
            constants = block_constants(blocks, 4096, dim, pad=name != "queries") | more
            rows[f"fused {name} {NAMES[dtype]} D{dim}"] = Row(kernel, constants, dtype)
    return rows


def decode_rows() -> dict[str, Row]:
    """Few queries: one of a head, and of an uneven group of four, with live heads and without."""
    rows = {}
    for dtype, dims in DECODE.items():
        for dim in dims:
            for live, group, even in ((9, 1, True), (9, 4, False), (0, 1, True)):
                how = {"even": even, "ordered": even, "on_device": True, "padded": True}
                keys = keys_at_once(dim, dtype.itemsize, SHARED_MEMORY)
                constants = decode_constants(live, live // group, group, 3, group, 1, dim, **how, keys=keys)
                rows[f"decode {NAMES[dtype]} D{dim} {live}x{group}"] = Row(flash_decode_kernel, constants, dtype)
            rows[f"merge {NAMES[dtype]} D{dim}"] = Row(merge_kernel, merge_constants(9, 3, 1, dim), dtype)
    return rows


def small_rows() -> dict[str, Row]:
    """The kernels around the products: sums of tables, scaling, row sums, the loss, GELU."""
    constants = {"BM": toeplitz.ROWS, "BK": toeplitz.COLUMNS, "num_warps": toeplitz.WARPS}
    rows = {"convolution fp64": Row(toeplitz.causal_convolution_kernel, constants, torch.float64)}
    for dtype in OPERANDS:
        label = NAMES[dtype]
        for dim in (64, 192):
            constants = {"D": dim, "BT": 32, "BN": 128, "FOLD": 1, "FIRST": 0, "TILE": toeplitz.TILE, "num_warps": 4}
            rows[f"prescale {label} D{dim}"] = Row(toeplitz.prescale_kernel, constants, dtype)
            padded = 64 if dim == 64 else 256
            rows[f"delta {label} D{dim}"] = Row(delta_kernel, {"D": dim, "DP": padded, "BM": 64, "num_warps": 4}, dtype)
        constants = {"IGNORED": -100, "BLOCK": decoder.COLUMNS, "STAGES": decoder.STAGES, "num_warps": 8}
        rows[f"softmax {label}"] = Row(decoder.softmax_gradient_kernel, constants, dtype)
        for name in ("gelu_kernel", "gelu_backward_kernel"):
            constants = {"BLOCK": decoder.BLOCK, "num_warps": decoder.WARPS}
            rows[f"{name} {label}"] = Row(getattr(decoder, name), constants, dtype)
    return rows
