"""The written rule that picks how a Toeplitz product runs; measured on an H200 (docs/log.md)."""

import dataclasses
from functools import cache

import torch

from saf.ops.triton.config import Config

CACHED = 32 << 20
"""Bytes of input that programs running together may share: about half of a data-centre GPU's second-level cache."""
FULL_PRECISION = Config(
    tables="shifted", prescale="tile", block_m=64, block_n=64, block_k=32, num_warps=4, num_stages=2
)
"""float32 operands: products in plain float32, without matrix units."""


@cache
def choose_config(
    *,
    length: int,
    columns: int,
    heads: int,
    dtype: torch.dtype,
    tables: str | None = None,
    descriptors: bool = False,
    shared_memory: int = 227 << 10,
) -> Config:
    """Pick a configuration by rule.

    Args:
        length: positions T of one call.
        columns: B x D, the columns that share one Toeplitz matrix.
        heads: frozen heads in the call.
        dtype: of the operands.
        tables: kind of table at hand; default: the kind to build, "shifted" for float32 and "tiles" otherwise.
        descriptors: whether the device has the bulk copy engine.
        shared_memory: bytes that one program may have; where the choice needs more, its pipeline is made shorter.

    Returns:
        The configuration.
    """
    if dtype == torch.float32:
        return dataclasses.replace(FULL_PRECISION, tables=tables or FULL_PRECISION.tables)
    if tables not in (None, "tiles"):
        return Config(tables=tables, prescale="tile")
    config = _by_shape(length, columns, heads, dtype, descriptors)
    if descriptors and config.prescale == "pass" and columns % config.block_n == 0:
        config = dataclasses.replace(config, loads="descriptor")
    stages = min(config.num_stages, max(2, shared_memory // _stage_bytes(config, dtype)))
    config = dataclasses.replace(config, num_stages=stages)
    return in_slabs(config, length=length, columns=columns, heads=heads, dtype=dtype)


def _by_shape(length: int, columns: int, heads: int, dtype: torch.dtype, descriptors: bool) -> Config:
    """Return blocks, where the scaling goes and how deep the pipeline is."""
    rows = -(-length // 128)
    tiles = rows * -(-columns // 128) * heads
    if length <= 1024 and (short := _scaled_in_tile(length, columns, tiles, dtype)):
        return short
    if columns <= 64 and columns % 8 == 0 and length > 32768 and descriptors:
        return Config(num_warps=8, num_stages=4, fold=2, loads="descriptor")
    if (columns <= 64 and length > 2048 and rows * heads > 96) or (columns > 128 and length <= 2048 and tiles < 132):
        return Config(block_n=64, num_stages=5)
    if columns <= 64 or (columns <= 128 and length <= 4096):
        return Config(block_m=64, block_n=64, block_k=128)
    if columns > 128 and length > 4096 and rows * -(-columns // 256) * heads >= 256:
        return Config(block_n=256, num_warps=8)
    # Few tiles: one program a multiprocessor, its loads further ahead; more tiles: two that take turns.
    return Config(num_stages=4 if tiles < 400 else 3)


def _scaled_in_tile(length: int, columns: int, tiles: int, dtype: torch.dtype) -> Config | None:
    """Return how to run short inputs, whose scaling costs less in every step than in a pass; None where it does not.

    With few programs float16 keeps the pass: its range is narrow, and there is little to gain.
    """
    if tiles >= 160 and columns <= 128:
        return None
    if tiles >= 256:
        return Config(prescale="packed" if dtype == torch.bfloat16 else "tile")
    if dtype != torch.bfloat16:
        return None
    if tiles >= 160:
        return Config(prescale="tile") if length <= 512 else None
    if columns >= 256:
        return Config(prescale="tile", block_m=64, block_k=128)
    return Config(prescale="tile", block_m=32, block_n=32, block_k=128) if length <= 512 else None


def in_slabs(config: Config, *, length: int, columns: int, heads: int, dtype: torch.dtype) -> Config:
    """Return a configuration that computes as many slabs together as fit in the cache; arguments as above."""
    total = -(-config.fold * columns // config.block_n) * heads
    fitting = max(1, CACHED // (max(1, length) * config.block_n * dtype.itemsize))
    return dataclasses.replace(config, slabs=fitting if fitting < total else 0)


def _stage_bytes(config: Config, dtype: torch.dtype) -> int:
    """Return the bytes of both operands of one step."""
    return (config.block_m + config.block_n) * config.block_k * dtype.itemsize
