"""What is compiled for compute capability 9.0: every kernel, cut as the written rules do for shapes of models."""

from dataclasses import dataclass
from typing import Any

import torch

from saf.ops.decoder import gelu_kernel as gelu
from saf.ops.decoder import loss_kernel as softmax_gradient
from saf.ops.fused.kernels import delta_kernel, fused_forward_kernel, key_block_kernel, query_block_kernel
from saf.ops.fused.launch import block_constants, choose_fused_config, padded
from saf.ops.launch import SHARED_MEMORY
from saf.ops.linear.kernels import mix_kernel, scan_kernel, states_kernel
from saf.ops.linear.launch import SCAN_COLUMNS, linear_constants
from saf.ops.linear.launch import choose_config as linear_config
from saf.ops.linear.operator import CHUNK, TURNS
from saf.ops.rows.kernels import (
    join_constants,
    join_kernel,
    keys_at_once,
    merge_kernel,
    rows_constants,
    rows_kernel,
    split_constants,
    split_kernel,
)
from saf.ops.toeplitz import kernels as convolution
from saf.ops.toeplitz.config import TILE, Config, choose_config
from saf.ops.toeplitz.kernels import prescale_kernel, toeplitz_descriptor_kernel
from saf.ops.toeplitz.launch import kernel_constants, kernel_options, toeplitz_kernel

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
OPERANDS = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = [
    (512, 1, 3, 64),
    (512, 4, 3, 64),
    (1024, 1, 3, 64),
    (512, 64, 3, 64),
    (1024, 32, 3, 64),
    (4096, 8, 3, 64),
    (4096, 8, 4, 64),
    (8192, 4, 6, 64),
    (8192, 2, 4, 96),
    (16384, 2, 3, 64),
    (16384, 2, 6, 64),
    (4096, 1, 3, 64),
    (16384, 1, 3, 64),
    (65536, 1, 3, 64),
    (8192, 64, 6, 64),
]
"""Positions, sequences, heads, channels."""
HALF_SHAPES = [(512, 4, 3, 64), (512, 64, 3, 64), (4096, 2, 4, 192)]
"""Those of float16: its kernels are bfloat16's with another type, but for short inputs' scaling."""
FUSED = {
    ("keys", torch.bfloat16): (64, 96, 128, 192),
    ("grouped", torch.bfloat16): (64, 96, 128, 192),
    ("forward", torch.bfloat16): (64, 128, 192),
    ("few", torch.bfloat16): (64, 96, 128),
    ("few", torch.float16): (64, 128),
    ("queries", torch.bfloat16): (64, 96, 128, 192),
    ("keys", torch.float16): (128,),
    ("keys", torch.float32): (64, 128, 192),
    ("grouped", torch.float32): (128,),
    ("forward", torch.float32): (64, 96, 192),
    ("queries", torch.float32): (128,),
}
"""Channels by kernel; grouped queries are a case of the key-block kernel alone, few tokens one of the forward."""
ROWS = {torch.bfloat16: (8, 64, 96, 128, 256), torch.float16: (128,), torch.float32: (64, 128, 256)}
"""Channels of single rows: 8 are padded to 16, 96 to 128; float16 is bfloat16 by another name, so bfloat16 has all."""


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
        return self.constants.get({key_block_kernel: "BN", mix_kernel: "C"}.get(self.kernel, "BM"), 0)


def all_rows() -> dict[str, Row]:
    """Return every row by name; equal ones, once."""
    return toeplitz_rows() | linear_rows() | fused_rows() | descriptor_rows() | single_rows() | small_rows()


def shapes(dtype: torch.dtype) -> list[tuple[int, int, int, int]]:
    """The shapes of a dtype."""
    return HALF_SHAPES if dtype == torch.float16 else SHAPES


def toeplitz_rows() -> dict[str, Row]:
    """The Toeplitz product, every distinct choice of the rule."""
    rows = {}
    for dtype in OPERANDS:
        label = NAMES[dtype]
        for length, batch, heads, dim in shapes(dtype):
            config = choose_config(length=length, columns=batch * dim, heads=heads, dtype=dtype)
            for transpose in (False, True):
                name = f"toeplitz {label} D{dim} {compiled_name(config)} {direction(transpose)}"
                constants = kernel_constants(config, length, batch * dim, dim, transpose, "ieee")
                rows[name] = Row(toeplitz_kernel, constants | kernel_options(config), dtype)
    return rows


def linear_rows() -> dict[str, Row]:
    """The linear product: bands of one chunk and of two."""
    rows = {}
    for dtype in (torch.bfloat16, torch.float32):
        for band in (CHUNK, 2 * CHUNK):
            for dim in (64, 96, 256):
                config = linear_config(length=32768, columns=2 * dim, heads=3, dtype=dtype)
                for reverse in (False, True):
                    product, states, mix = linear_constants(
                        config, rows=CHUNK, reach=1 + band // CHUNK, poles=16, powers=TURNS, dim=dim, columns=2 * dim,
                        reverse=reverse, mapped=False, precision="ieee",
                    )  # fmt: skip
                    name = f"{NAMES[dtype]} D{dim} band {band} {direction(reverse)}"
                    rows[f"linear mix {name}"] = Row(mix_kernel, product | mix, dtype)
                    rows[f"linear states {name}"] = Row(states_kernel, product | states, dtype)
        constants = {"P": 16, "BN": SCAN_COLUMNS, "POWERS": TURNS, "num_warps": 4}
        rows[f"scan {NAMES[dtype]}"] = Row(scan_kernel, constants, dtype)
    return rows


def descriptor_rows() -> dict[str, Row]:
    """The product through descriptors, every distinct choice of the rule."""
    chosen = [
        (dtype, dim, choose_config(length=length, columns=batch * dim, heads=heads, dtype=dtype, descriptors=True))
        for dtype in (torch.bfloat16, torch.float16)
        for length, batch, heads, dim in shapes(dtype)
    ]
    rows = {}
    for dtype, dim, config in chosen:
        for transpose in (False, True) if config.loads == "descriptor" else ():
            name = f"descriptor {NAMES[dtype]} D{dim} {compiled_name(config)} {direction(transpose)}"
            rows[name] = descriptor_row(config, dim, dtype, transpose)
    return rows


def descriptor_row(config: Config, dim: int, dtype: torch.dtype, transpose: bool) -> Row:
    """The product through descriptors, one configuration."""
    tile = [config.block_k, config.block_m] if transpose else [config.block_m, config.block_k]
    constants = {
        "D": dim,
        "BM": config.block_m,
        "BN": config.block_n,
        "BK": config.block_k,
        "TRANSPOSE": transpose,
        "TILE": TILE,
        "STAGES": config.num_stages,
        "FOLD": config.fold,
    }
    blocks = {"x_desc": [1, config.block_k, config.block_n], "tiles_desc": tile}
    return Row(toeplitz_descriptor_kernel, constants | kernel_options(config), dtype, blocks)


def compiled_name(config: Config) -> str:
    """A configuration's name without what the compiler never sees."""
    return config.name.replace(f" g{config.slabs}", "")


def direction(transpose: bool) -> str:
    """Which way the product goes."""
    return "transposed" if transpose else "forward"


def fused_rows() -> dict[str, Row]:
    """The fused kernels with all three kinds of heads."""
    states = {"HAS_LIVE": True, "HAS_COMPACT": True, "HAS_DENSE": True}
    rows = {}
    for (name, dtype), dims in FUSED.items():
        for dim in dims:
            config = choose_fused_config(dim=dim, dtype=dtype, grouped=name == "grouped", few=name == "few")
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


def single_rows() -> dict[str, Row]:
    """Single rows: one of a head, of a group of four as in decoding, and many, as where guesses are checked."""
    rows = {}
    for dtype in OPERANDS:
        for dim in ROWS[dtype]:
            for count, group in ((1, 1), (1, 4), (16, 4)):
                keys = keys_at_once(dim, dtype.itemsize, 1, SHARED_MEMORY)
                constants = rows_constants(count, group, dim, moves=True, padded=True, precision="ieee", keys=keys)
                rows[f"rows {NAMES[dtype]} D{dim} {count}x{group}"] = Row(rows_kernel, constants, dtype)
            for count, group, even in ((1, 1, True), (1, 4, False)) if dtype != torch.float32 else ():
                how = {"even": even, "ordered": even, "moves": True, "padded": True, "precision": "ieee"}
                how["keys"] = keys_at_once(dim, dtype.itemsize, 2, SHARED_MEMORY)
                constants = split_constants(9, 9 // group, group, 3, group, count, dim, **how)
                rows[f"split {NAMES[dtype]} D{dim} {count}x{group}"] = Row(split_kernel, constants, dtype)
            rows[f"join {NAMES[dtype]} D{dim}"] = Row(join_kernel, join_constants(9, 3, 1, dim), dtype)
            rows[f"merge {NAMES[dtype]} D{dim}"] = Row(merge_kernel, join_constants(9, 3, 1, dim), dtype)
    return rows


def small_rows() -> dict[str, Row]:
    """The kernels around the products: sums of tables, scaling, row sums, the loss, GELU."""
    constants = {"ROWS": convolution.ROWS, "COLUMNS": convolution.COLUMNS, "num_warps": convolution.WARPS}
    rows = {"convolution fp64": Row(convolution.causal_convolution_kernel, constants, torch.float64)}
    for dtype in OPERANDS:
        label = NAMES[dtype]
        for dim in (64, 192):
            constants = {"D": dim, "BT": 32, "BN": 128, "FOLD": 1, "FIRST": 0, "TILE": TILE, "num_warps": 4}
            rows[f"prescale {label} D{dim}"] = Row(prescale_kernel, constants, dtype)
            rows[f"delta {label} D{dim}"] = Row(
                delta_kernel, {"D": dim, "DP": padded(dim), "BM": 64, "num_warps": 4}, dtype
            )
        constants = {"IGNORED": -100, "BLOCK": softmax_gradient.BLOCK, "STAGES": softmax_gradient.STAGES}
        rows[f"softmax {label}"] = Row(softmax_gradient.softmax_gradient_kernel, constants | {"num_warps": 8}, dtype)
        for name in ("gelu_kernel", "gelu_backward_kernel"):
            constants = {"BLOCK": gelu.BLOCK, "num_warps": gelu.WARPS}
            rows[f"{name} {label}"] = Row(getattr(gelu, name), constants, dtype)
    return rows
