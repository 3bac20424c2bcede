"""The paper's execution: one Triton launch a layer for live and frozen heads, tiles of P rebuilt in registers.

    live heads     P = softmax(scale Q K^T)
    compact ones   P(i, j) = exp(alpha(j) + rho(i - j) - log Z(i))   (Eq. 3)
    dense ones     P as stored
    forward        O = P V
    backward       dV = P^T dO of all heads, dQ and dK of live ones   (section 3.3)

In plain PyTorch these are `live_attention` and `Reference` (saf/ops/backend.py). Here are the tables, the operator with
its gradients, and the backend; fused_kernels.py has the launches. The backend is the paper's row in every benchmark;
`toeplitz` is faster. It takes whole sequences without padding.

Backend `toeplitz` uses its forward launch for few tokens without gradients (`mix_few`), where a launch costs more than
its work: in a CUDA graph of 1 x 512 an ordinary layer takes 70 us, one with frozen heads 67 by one launch and 80 by two
(124M, 25% frozen, H200).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from saf.ops.backend import TRITON_DTYPES, Backend, Tables, ValueHeads, forbid_second_derivative, has_triton, operator
from saf.ops.live import score_scale
from saf.ops.tensors import heads_like, unit_stride, unpadded
from saf.patterns import Pattern

# Kinds of a head in the kernels: ordinary attention, a compact pattern, a dense one.
LIVE, COMPACT, DENSE = 0, 1, 2
# Logarithms times this are exponents of 2.
LOG2E = 1 / math.log(2)
# Shifted copies of rho: one of them is aligned for a 16-byte load of four float32 elements at any distance.
BAND_SHIFTS = 4

# --- tables


# What the kernels read of a layer with H heads, live ones first, in the order of the operators' `tables`.
MAPS = (  # int32
    "state",  # [H] kind of each head: LIVE, COMPACT or DENSE
    "key",  # [H] slot in the key, for live heads; others hold 0, which is never read
    "value",  # [H] slot in the value
    "pattern",  # [H] slot among the patterns of the head's own kind
    "group_start",  # [H_kv + 1] first entry of each value head in `group_heads`; [0] where each serves one head
    "group_heads",  # [H] heads sorted by value slot
)
PATTERNS = (  # float32 in units of log 2, but for `dense`
    "alpha",  # [F_compact, T]
    # [F_compact, 4, PAD + W] copies of rho, copy s shifted by s, -inf before distance 0; W is T rounded up to PAD
    "band",
    "log_z",  # [F_compact, T]
    "dense",  # [F_dense, T, T] in the values' dtype
)


def head_maps(state: Sequence[int], value: Sequence[int], device: torch.device | str) -> Tables:
    """Return the maps of heads with these kinds and value slots; keys lie in the order of their value heads."""
    heads, num_value_heads, live = range(len(state)), max(value) + 1, state.count(LIVE)
    used = sorted(set(value[:live]))
    # Where every value head serves one head the backward kernel has no loop over heads (`GROUPED`).
    one_to_one = sorted(value) == list(range(num_value_heads))
    bounds = [] if one_to_one else range(num_value_heads + 1)
    maps = {
        "state": state,
        "key": [used.index(value[head]) if head < live else 0 for head in heads],
        "value": value,
        "pattern": [state[:head].count(state[head]) for head in heads],
        "group_start": [sum(each < bound for each in value) for bound in bounds],
        "group_heads": sorted(heads, key=lambda head: value[head]),
    }
    return {name: torch.tensor(each, dtype=torch.int32, device=device) for name, each in maps.items()}


def pattern_tables(patterns: Sequence[Pattern], dtype: torch.dtype, device: torch.device) -> Tables:
    """Return `alpha`, `band` and `log_z` of the compact patterns, and `dense` of the others."""
    length, logits, stored = patterns[0].length, [], []
    for pattern in patterns:
        if (compact := pattern.compact()) is None:
            stored.append(pattern.dense().to(device=device, dtype=dtype))
        else:
            level = compact.to(device=device, dtype=torch.float64).level()
            logits.append(torch.stack([level.alpha, level.rho, level.log_z]))
    empty = torch.zeros(3, 0, length, dtype=torch.float64, device=device)
    alpha, rho, log_z = torch.stack(logits, 1) * LOG2E if logits else empty
    dense = torch.stack(stored) if stored else torch.zeros(0, length, length, dtype=dtype, device=device)
    return {"alpha": alpha.float(), "band": shifted_band(rho), "log_z": log_z.float(), "dense": dense}


def shifted_band(rho: Tensor) -> Tensor:
    """Return the `band` of `rho [F, T]`."""
    from saf.ops.fused_kernels import PAD

    heads, length = rho.shape
    width = PAD + -(-length // PAD) * PAD
    # Minus infinity makes weights of zero: for future keys in front of rho, beyond T behind it.
    padded = rho.new_full((heads, width), -math.inf)
    padded[:, PAD : PAD + length] = rho
    band = rho.new_full((heads, BAND_SHIFTS, width), -math.inf, dtype=torch.float32)
    for shift in range(BAND_SHIFTS):  # shifted in float64, rounded once
        band[:, shift, shift:] = padded[:, : width - shift].float()
    return band


def layer_tables(kinds: Sequence[int], layout: str, kv_head: Sequence[int], device: torch.device) -> Tables:
    """Return the maps of a layer's heads and the numbers of live, compact and dense ones, as `LAYOUT_NAME`.

    The last heads have `kinds`; those before them are live.
    """
    kinds = [LIVE] * (len(kv_head) - len(kinds)) + list(kinds)
    maps = {f"{layout}_{name}": table for name, table in head_maps(kinds, kv_head, device).items()}
    return maps | {f"{layout}_counts": tuple(kinds.count(kind) for kind in (LIVE, COMPACT, DENSE))}


def operator_tables(tables: Tables, layout: str) -> tuple[list[Tensor], list[int]]:
    """Return the tensors of MAPS and PATTERNS and the numbers of heads of each kind, as the operators take them."""
    maps = [tables[f"{layout}_{name}"] for name in MAPS]
    return maps + [tables[name] for name in PATTERNS], list(tables[f"{layout}_counts"])


# --- the operator and its gradients


def _gradients_like(gradient, query, key, value, output, log_sums, tables, counts, scale) -> tuple[Tensor, ...]:
    return tuple(heads_like(x, x.shape[1]) for x in (query, key, value))


@operator("fused_backward", fake=_gradients_like)
def fused_product_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, log_sums: Tensor,
    tables: list[Tensor], counts: list[int], scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients to query, key and value, of frozen heads dV = P^T dO alone (section 3.3 of the paper)."""
    from saf.ops.fused_kernels import fused_backward

    gradient, query, key, value = (unit_stride(x) for x in (gradient, query, key, value))
    return fused_backward(gradient, query, key, value, output, log_sums, tables, counts, scale)


def _save_operands(ctx, inputs, output) -> None:
    query, key, value, tables, ctx.counts, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, *tables)


def operand_gradients(ctx, gradient: Tensor, _):
    """Return the gradients to query, key and value; tables have none."""
    forbid_second_derivative()
    query, key, value, output, log_sums, *tables = ctx.saved_tensors
    operands = gradient, query, key, value, output, log_sums
    gradients = fused_product_backward(*operands, tables, ctx.counts, ctx.scale)
    return (*gradients, [None] * len(tables), None, None)


def _product_like(query, key, value, tables, counts, scale) -> tuple[Tensor, Tensor]:
    batch, live, length, _ = query.shape
    return heads_like(value, sum(counts)), value.new_empty(batch, live, length, dtype=torch.float32)


@operator("fused", fake=_product_like, gradient=operand_gradients, context=_save_operands)
def fused_product(
    query: Tensor, key: Tensor, value: Tensor, tables: list[Tensor], counts: list[int], scale: float
) -> tuple[Tensor, Tensor]:
    """Mix all heads of a layer, in head order, `[B, H, T, D]`, and return the live heads' row log-sum-exps `[B, L, T]`.

    `query [B, L, T, D]`, `key [B, K, T, D]`, `value [B, H_kv, T, D]`; `tables` are the tensors of MAPS and
    PATTERNS, `counts` the numbers of live, compact and dense heads.
    """
    from saf.ops.fused_kernels import fused_forward

    query, key, value = (unit_stride(x) for x in (query, key, value))
    return fused_forward(query, key, value, tables, counts, scale)


class Fused(Backend):
    """Execute frozen heads as the paper does, in one launch with live ones.

    Its tables: those of PATTERNS, and of MAPS as `frozen_*` of the frozen heads alone and, where `kv_head` names their
    value heads, as `mixed_*` of all slots.
    """

    how = "one Triton launch a layer for live and frozen heads (the paper's execution)"
    mixes_live = True
    dtypes = TRITON_DTYPES

    def unsupported_reason(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cuda" or not has_triton():
            return f"it needs a CUDA device and Triton, got {device.type}"
        return super().unsupported_reason(device, dtype)

    def prepare(
        self, patterns: Sequence[Pattern], dtypes: Sequence[torch.dtype], device: torch.device,
        kv_head: ValueHeads = None,
    ) -> dict[torch.dtype, Tables]:  # fmt: skip
        kinds = [DENSE if pattern.compact() is None else COMPACT for pattern in patterns]
        maps = layer_tables(kinds, "frozen", range(len(kinds)), device)
        if kv_head is not None:
            maps |= layer_tables(kinds, "mixed", kv_head, device)
        return {dtype: pattern_tables(patterns, dtype, device) | maps for dtype in dtypes}

    def forward(self, value: Tensor, tables: Tables, left_pad: Tensor | None = None) -> Tensor:
        def product(x: Tensor) -> Tensor:
            return fused_product(x[:, :0], x[:, :0], x, *operator_tables(tables, "frozen"), 1.0)[0]

        return unpadded(product, value, left_pad)

    def mixed(self, query: Tensor, key: Tensor, value: Tensor, tables: Tables, scale: float | None) -> Tensor:
        factor = score_scale(scale, value.shape[-1])
        return fused_product(query, key, value, *operator_tables(tables, "mixed"), factor)[0]


# --- few tokens of backend `toeplitz`


# Microseconds of a layer in a graph, ordinary / by two launches / by one (12 heads of 64 channels, 25% frozen, H200):
#     2 x 1,024   25.5 / 30.0 / 25.2        8 x 512   29.5 / 38.1 / 30.0
#     4 x 1,024   38.7 / 44.0 / 37.3       16 x 512   48.2 / 61.7 / 53.1
#     8 x 1,024   63.7 / 73.3 / 70.2      1 x 2,048   37.7 / 39.3 / 40.4
# At 50% one launch loses from 4 x 1,024 on (43.5 for 42.7), so the limits end below.

# Longest sequence of few tokens, and so the length of their tables; no longer one is within the limits below.
MAX_LENGTH = 4096
# Positions up to which one launch was no slower than two on an H200, at the batches that `SHORT_PAIRS` allows.
SHORT = 1024
# Shorter sequences count as if they had this length: their time no longer falls with its square.
SHORTEST = 256
# B x H x T x T up to which one launch is faster on the device: with 12 heads some 3 x 1,024 or 12 x 512 tokens.
SHORT_PAIRS = 40 * SHORT**2
# B x T x C x (12 C + T), half a layer's operations, up to which launching takes the host longer than the device works.
# It is a layer of the 124M model at two sequences of 4,096 tokens: without a graph, a prompt had 0.53x the speed of
# ordinary attention by two launches, 0.94x by one. The device is faster by two, so CUDA graphs take two.
HOST_BOUND = 2 * 4096 * 768 * (12 * 768 + 4096)
# Channels up to which the limits were measured; wider heads leave the kernel few registers.
MAX_DIM = 128


def serves_few(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `mix_few` can run on a device and was measured to be faster there: Hopper and later."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return hopper and has_triton() and dtype in (torch.bfloat16, torch.float16)


def are_few(value: Tensor, heads: int, *, replayed: bool) -> bool:
    """Return whether one launch is faster than two for values `[B, H_kv, T, D]` of a layer of `heads`.

    With `replayed` a CUDA graph launches the kernels, so that only the device's time counts.
    """
    batch, _, length, dim = value.shape
    if dim > MAX_DIM or length > MAX_LENGTH:
        return False
    if length <= SHORT and batch * heads * length * max(length, SHORTEST) <= SHORT_PAIRS:
        return True
    width = heads * dim  # 12 C + T: products of a layer and attention, per token and channel
    return not replayed and batch * length * width * (12 * width + length) <= HOST_BOUND


def few_tables(patterns: Sequence[Pattern], dtype: torch.dtype, device: torch.device, kv_head: ValueHeads) -> Tables:
    """Return the tables of `mix_few` for compact patterns, in addition to another backend's; {} where it cannot run."""
    if kv_head is None or not serves_few(device, dtype):
        return {}
    first = [pattern.prefix(min(MAX_LENGTH, pattern.length)) for pattern in patterns]
    return pattern_tables(first, dtype, device) | layer_tables([COMPACT] * len(first), "mixed", kv_head, device)


def mix_few(
    query: Tensor, key: Tensor, value: Tensor, tables: Tables, scale: float | None, *, replayed: bool
) -> Tensor | None:
    """Return all heads, `[B, H, T, D]`, from one launch where that is faster; None elsewhere.

    Code compiled for one shape launches the kernel itself, which costs the host a fraction of an operator. With dynamic
    lengths it returns None: a comparison with them would be a guard, and compile one more program.
    """
    if "mixed_counts" not in tables:
        return None
    compiling = torch.compiler.is_compiling()
    if compiling:
        from torch.fx.experimental.symbolic_shapes import has_static_value

        if not all(has_static_value(size) for size in value.shape):
            return None
    arguments = operator_tables(tables, "mixed")
    if not are_few(value, sum(arguments[1]), replayed=replayed):
        return None
    factor = score_scale(scale, value.shape[-1])
    # Only code that Dynamo traces launches the kernel itself by this form; elsewhere it is slower than the operator.
    if torch.compiler.is_dynamo_compiling():
        from saf.ops.fused_kernels import visible_forward

        return visible_forward(unit_stride(query), unit_stride(key), unit_stride(value), *arguments, factor)
    return fused_product(query, key, value, *arguments, factor)[0]
