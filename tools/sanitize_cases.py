"""One small call of every kernel, forward and backward: what `tools/sanitize.sh` runs under compute-sanitizer.

    python tools/sanitize_cases.py        # on CUDA; TRITON_INTERPRET=1 runs it on a CPU

Shapes leave remainders in every block. Results are only checked for NaN: tests compare them.
"""

import os

import torch

from saf.calibration.kernels import measure_by_kernel
from saf.ops.decode.op import decode_tables, flash_decode
from saf.ops.decoder_kernels import gelu, gelu_backward, softmax_gradient
from saf.ops.frozen_heads import FrozenHeads
from saf.ops.fused.kernels import choose_config, fused_backward, fused_forward
from saf.ops.fused.op import COMPACT, DENSE, LIVE, FusedPatterns, HeadMaps
from saf.ops.positions import CachePosition
from saf.ops.toeplitz.kernels import ToeplitzConfig, convolve, toeplitz_matmul
from saf.ops.toeplitz.op import make_tiles
from saf.patterns import CompactPattern

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
WIDE = torch.float16 if DEVICE == "cpu" else torch.bfloat16
"""The interpreter's products of bfloat16 are wrong."""
LENGTH, STORED = 130, 192
BATCH = 1 if DEVICE == "cpu" else 2
"""The interpreter takes programs one after another, and a second sequence has the same ones."""


def operand(*heads: int, dim: int = 64, dtype: torch.dtype = WIDE) -> list[torch.Tensor]:
    """Return random `[B, heads, T, D]` stored as `[B, T, heads, D]`, one tensor a count."""
    return [torch.randn(BATCH, LENGTH, n, dim, device=DEVICE).to(dtype).transpose(1, 2) for n in heads]


def pattern(count: int) -> CompactPattern:
    """Return random patterns of `STORED` positions."""
    logits = torch.randn(2, count, STORED, dtype=torch.float64).to(DEVICE)
    return CompactPattern.from_parameters(logits[0] / 2, logits[1] / 2)


def toeplitz() -> None:
    """Multiply through addresses and descriptors, folded and not, in both directions."""
    for config, dim, dtype in (
        (ToeplitzConfig(), 60, WIDE),
        (ToeplitzConfig(descriptors=True), 64, WIDE),
        (ToeplitzConfig(descriptors=True, fold=2), 64, WIDE),
        (ToeplitzConfig(block_m=64, block_n=64, block_k=32, num_stages=2), 64, torch.float32),
    ):
        (x,) = operand(3, dim=dim, dtype=dtype)
        table = make_tiles(torch.rand(3, STORED, device=DEVICE).to(dtype))
        scales = torch.rand(2, 3, STORED, device=DEVICE)
        for transpose in (False, True):
            finite(toeplitz_matmul(x, table, *scales, transpose=transpose, config=config))


def fused() -> None:
    """Attend with live, compact and dense heads: one value head each, and groups; both sizes of blocks."""
    compact = pattern(2).balanced()
    dense = pattern(1).dense().to(WIDE)
    patterns = FusedPatterns.build(compact.alpha, compact.rho, compact.log_z, dense)
    for value_slot in ((0, 1, 2, 3, 4), (0, 0, 1, 1, 1)):
        states = (LIVE, COMPACT, DENSE, LIVE, COMPACT)
        maps = HeadMaps.build(states, value_slot, DEVICE)
        query, key, value, gradient = operand(2, 2, max(value_slot) + 1, 5)
        for few in (True, False):
            config = choose_config(dim=value.shape[-1], dtype=WIDE, few=few)
            output, log_sums = fused_forward(query, key, value, maps, patterns, config=config)
            finite(output, log_sums)
        finite(*fused_backward(gradient, query, key, value, output, log_sums, maps, patterns))


def decode() -> None:
    """Compute rows of two frozen heads, alone and beside two live ones, padded, at a position that the device knows."""
    kv_head, device = (0, 0, 1, 2), torch.device(DEVICE)
    frozen = FrozenHeads.from_patterns(pattern(2), dtype=WIDE, device=device, kv_head=kv_head)
    tables = frozen.tables(WIDE) | decode_tables(kv_head, 2, device)
    query, key, value = operand(2, 1, 3)
    rows = CachePosition(torch.tensor(100, device=device), 3, torch.tensor([0, 7], device=device)[:BATCH])
    for live in (2, 0):
        heads = query[:, :live, :3], key[:, : min(1, live)], value
        finite(flash_decode(*heads, kv_head[:live], kv_head[2:], tables, rows, None))


def loss() -> None:
    """Take losses of rows longer than a block, one of them ignored."""
    logits = torch.randn(4, 5003, device=DEVICE).to(WIDE)
    labels = torch.tensor([0, 5002, -100, 17], device=DEVICE)
    finite(softmax_gradient(logits, labels, torch.tensor(3, device=DEVICE), ignored=-100), logits)


def activation() -> None:
    """Apply GELU to a size that no block divides."""
    x, gradient = torch.randn(2, 3001, device=DEVICE).to(WIDE)
    finite(gelu(x), gelu_backward(x, gradient), gradient)


def sums() -> None:
    """Sum normalisers of trained patterns over a length that no block divides."""
    finite(convolve(*torch.rand(2, 3, LENGTH, dtype=torch.float64, device=DEVICE)))


def calibration() -> None:
    """Measure grouped heads, by blocks on and off the diagonal."""
    query, key = operand(4, 2)
    finite(*measure_by_kernel(query, key, kv_head=[0, 0, 1, 1]))


def finite(*results: torch.Tensor) -> None:
    """Raise when a result holds NaN or infinity."""
    for result in results:
        if not result.isfinite().all():
            raise SystemExit("a result is not finite")


if __name__ == "__main__":
    torch.manual_seed(0)
    for case in (toeplitz, fused, decode, loss, activation, sums, calibration):
        case()
        print(f"{case.__name__}: ran", flush=True)
