"""The linear product, Eq. (S.32), and its recurrent state in Triton: launches, their kernels, then device functions.

Positions are cut into chunks of C rows. With u = before * x and N = REACH tiles of g, chunk c of the output is

    y_c = after * (G_0 u_c + G_1 u_{c-1} + ... + G_{N-1} u_{c-N+1} + L h_c),     h_c = M h_{c-1} + W u_{c-N}

A state h has P complex numbers a column: real parts `b_re [P, BN]` and imaginary parts `b_im [P, BN]`, float32. M
multiplies by the complex factors `t_re + i t_im`; W (`write`) and L (`read`) hold real parts before imaginary ones. A
stretch is the run of chunks that one program computes. A product takes three launches:

    states_kernel   what the chunks of each stretch add to the state       [F, stretches, 2, P, N]
    scan_kernel     the state at the end of each stretch, in place         one program for all stretches
    mix_kernel      y, from the state at the beginning of each stretch     [B, F, T, D]

With REVERSE chunks are counted from the last position, so that the same kernels compute P^T x. `fill_kernel` writes the
state of decoding after a prompt, `step_kernel` goes on from it row by row. `tables` are those of linear.py: near
`[F, N, C, C]`, write `[F, 2P, C]`, read `[F, C, 2P]`, turns `[F, K, 2, P]`. Names are those of launch.py.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saf.ops.launch import add_product, cdiv, launch, product_precision, strides
from saf.ops.tensors import heads_like

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# The device language's constants and ranges are not what their annotations say.

# Programs that run at once: three on each of the 132 multiprocessors of an H100 or H200. More would wait for a second
# wave, fewer leave room unused (eight sequences of 4K, 6 heads: 768 programs 68 us, 384 52 us, 192 68 us).
WAVE = 396
# Columns of a program of `scan_kernel`: few, since it waits for memory and not for arithmetic.
SCAN_COLUMNS = 32


class LinearConfig(NamedTuple):
    """How a product is cut into programs: chunks that each computes one after another, and columns of B x D."""

    stretch: int
    columns: int


def choose_config(*, chunks: int, columns: int, heads: int, dtype: torch.dtype) -> LinearConfig:
    """Choose blocks, powers of two, and stretches: the shortest with which all programs run at once."""
    largest = 16 if dtype == torch.float32 else 64  # float32 sums are in registers, without matrix units
    block = min(largest, max(16, 1 << (columns - 1).bit_length()))
    return LinearConfig(_stretch(chunks, heads * cdiv(columns, block)), block)


def _stretch(chunks: int, blocks: int) -> int:
    """Return the chunks of a stretch where every stretch takes `blocks` programs.

    Two at least: a program reads up to two chunks before its first one.
    """
    return max(2, cdiv(chunks, max(1, WAVE // blocks)))


def linear_matmul(
    x: Tensor, tables: Sequence[Tensor], before: Tensor, after: Tensor, *, transpose: bool,
    left_pad: Tensor | None = None, out: Tensor | None = None, config: LinearConfig | None = None,
) -> Tensor:  # fmt: skip
    """Do `linear_product`, whose arguments these are, head by head; deterministic.

    `x` has unit stride in D and any others, `before` and `after` are float32. `out` and `config` are those of
    `toeplitz_matmul`. Memory and scalings beyond the T positions of x are not used.
    """
    near, reach, chunk = tables[0], tables[0].shape[1], tables[0].shape[-1]
    assert (x.stride(3), near.dtype, len(near)) == (1, x.dtype, x.shape[1])
    # `mix_kernel` keeps the tiles in registers; bands are 64 or 128 wide, which needs two or three.
    assert reach <= 3, "a band must end within two chunks"
    batch, heads, length, dim = x.shape
    columns, chunks = batch * dim, cdiv(length, chunk)
    if out is None:
        out = heads_like(x, heads)
    if not out.numel():
        return out
    config = config or choose_config(chunks=chunks, columns=columns, heads=heads, dtype=x.dtype)
    # Loads three chunks ahead: 5% sooner than two, and four are no better; float32 operands leave less room.
    exact = x.dtype == torch.float32
    states_stages, mix_stages, mix_warps = (2, 1, 8) if exact else (3, 3, 4)
    pad, constants = _constants(x, tables, before, left_pad, config.columns)
    constants |= {"REVERSE": transpose, "EVEN_N": columns % config.columns == 0}
    stretches = cdiv(chunks, config.stretch)
    # No state of the last stretch, as no other reads it. Stretches of states end where the tiles of `mix_kernel` begin.
    states = _states(x, tables, before, pad, stretches - 1, config.stretch, reach - 1, states_stages, constants)
    launch(
        mix_kernel, (stretches, heads, cdiv(columns, config.columns)), x, before, pad, after, *tables, states, out,
        length, columns, config.stretch, *strides(x, out), before.stride(0), after.stride(0), **constants,
        REACH=reach, STAGES=mix_stages, num_warps=mix_warps, num_stages=mix_stages,
    )  # fmt: skip
    return out


def _constants(
    x: Tensor, tables: Sequence[Tensor], before: Tensor, left_pad: Tensor | None, block: int
) -> tuple[Tensor, dict[str, Any]]:
    """Return a pointer to the padding, and what launches with blocks of `block` columns have in common."""
    _, write, _, turns = tables
    constants = {
        "D": x.shape[3], "C": write.shape[2], "P": write.shape[1] // 2, "BN": block,
        "POWERS": turns.shape[1], "PADDED": left_pad is not None, "PRECISION": product_precision(x.dtype),
        "device": x.device,
    }  # fmt: skip
    return before if left_pad is None else left_pad, constants  # any pointer: unpadded kernels do not read it


def _states(
    x: Tensor, tables: Sequence[Tensor], before: Tensor, pad: Tensor, stretches: int, stretch: int, back: int,
    stages: int, constants: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Return the state at the end of each stretch, `[F, stretches, 2, P, N]`; the first begins `back` chunks early."""
    (batch, heads, length, dim), (_, write, _, turns), poles = x.shape, tables, constants["P"]
    columns = batch * dim
    states = before.new_empty(heads, max(1, stretches), 2, poles, columns, dtype=torch.float32)
    if stretches:
        launch(
            states_kernel, (stretches, heads, cdiv(columns, constants["BN"])), x, before, pad, write,
            turns, states, length, columns, stretch, back, *strides(x), before.stride(0), **constants,
            STAGES=stages, num_warps=4, num_stages=stages,
        )  # fmt: skip
    if stretches > 1:
        launch(
            scan_kernel, (heads, cdiv(columns, SCAN_COLUMNS)), states, turns, columns, stretches, stretch,
            P=poles, BN=SCAN_COLUMNS, POWERS=constants["POWERS"], num_warps=4, device=x.device,
        )  # fmt: skip
    return states


@triton.jit(do_not_specialize=["T", "stretch", "back"])
def states_kernel(
    x_ptr, before_ptr, pad_ptr, write_ptr, turns_ptr, states_ptr, T, N, stretch, back,
    x_stride_b, x_stride_h, x_stride_t, before_stride_h,
    D: tl.constexpr, C: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, POWERS: tl.constexpr, REVERSE: tl.constexpr,
    PADDED: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write what each stretch adds to the state, `states [F, stretches, 2, P, N]`: its last h, from h = 0 before it.

    Stretches begin and end `back` chunks before those of `mix_kernel`, since tiles serve the chunks between.
    """
    i_s, i_h, i_n = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    o_p, o_t = tl.arange(0, P), tl.arange(0, C)
    o_n, m_n, o_x, p_x, p_before, pad = find_columns(
        x_ptr, before_ptr, pad_ptr, i_h, i_n, N, x_stride_b, x_stride_h, before_stride_h, D, BN, PADDED
    )
    w_re, w_im = _load_write(write_ptr, i_h, o_p, o_t, P, C)
    t_re, t_im = load_factor(turns_ptr + i_h * POWERS * 2 * P, o_p, P)
    b_re, b_im = tl.zeros((P, BN), tl.float32), tl.zeros((P, BN), tl.float32)
    for step in tl.range(0, stretch, num_stages=STAGES):
        # The first stretch begins `back` chunks before the sequence: these load as zeros and leave h = 0.
        chunk = i_s * stretch + step - back
        b_u = load_chunk(p_x, p_before, pad, chunk, T, o_x, x_stride_t, m_n, C, REVERSE, PADDED, EVEN_N)
        b_re, b_im = _next_state(b_re, b_im, t_re, t_im, w_re, w_im, b_u, PRECISION)  # h_c of (S.32)
    place = i_h * tl.num_programs(0) + i_s
    p_state = states_ptr + place * 2 * P * N + o_p[:, None] * N + o_n[None, :]
    _store_state(p_state, b_re, b_im, m_n[None, :], P * N)


@triton.jit(do_not_specialize=["stretches", "stretch"])
def scan_kernel(states_ptr, turns_ptr, N, stretches, stretch, P: tl.constexpr, BN: tl.constexpr, POWERS: tl.constexpr):
    """Replace what each stretch adds by the state at its end: one program a head and block of columns.

    It loads four stretches at a time, because a load waits for the store before it.
    """
    i_h, i_n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_p = tl.arange(0, P)
    o_n = i_n * BN + tl.arange(0, BN)
    m_n = (o_n < N)[None, :]
    p_state = states_ptr + i_h * stretches * 2 * P * N + o_p[:, None] * N + o_n[None, :]
    t_re, t_im = _factor_over(turns_ptr + i_h * POWERS * 2 * P, o_p, stretch, P, POWERS)
    # In order, not as a tree: there are 396 stretches at most (WAVE).
    h_re, h_im = tl.zeros((P, BN), tl.float32), tl.zeros((P, BN), tl.float32)
    for i_s in range(0, stretches, 4):
        p_0, m_0 = _find_stretch(p_state, i_s, stretches, m_n, N, P)
        p_1, m_1 = _find_stretch(p_state, i_s + 1, stretches, m_n, N, P)
        p_2, m_2 = _find_stretch(p_state, i_s + 2, stretches, m_n, N, P)
        p_3, m_3 = _find_stretch(p_state, i_s + 3, stretches, m_n, N, P)
        b0_re, b0_im = _load_state(p_0, m_0, P * N)
        b1_re, b1_im = _load_state(p_1, m_1, P * N)
        b2_re, b2_im = _load_state(p_2, m_2, P * N)
        b3_re, b3_im = _load_state(p_3, m_3, P * N)
        b0_re, b0_im = _add_earlier(h_re, h_im, t_re, t_im, b0_re, b0_im)
        b1_re, b1_im = _add_earlier(b0_re, b0_im, t_re, t_im, b1_re, b1_im)
        b2_re, b2_im = _add_earlier(b1_re, b1_im, t_re, t_im, b2_re, b2_im)
        h_re, h_im = _add_earlier(b2_re, b2_im, t_re, t_im, b3_re, b3_im)
        _store_state(p_0, b0_re, b0_im, m_0, P * N)
        _store_state(p_1, b1_re, b1_im, m_1, P * N)
        _store_state(p_2, b2_re, b2_im, m_2, P * N)
        _store_state(p_3, h_re, h_im, m_3, P * N)


@triton.jit
def _find_stretch(p_state, i_s, stretches, m_n, N, P: tl.constexpr):
    """Return the pointers of a stretch's state, and a mask that is false beyond the last stretch."""
    return p_state + i_s * 2 * P * N, m_n & (i_s < stretches)


@triton.jit
def _add_earlier(h_re, h_im, t_re, t_im, b_re, b_im):
    """Return b + M^stretch h: the state after a stretch that adds b, from the state h before it; `t` is M^stretch."""
    h_re, h_im = turned(h_re, h_im, t_re, t_im)
    return b_re + h_re, b_im + h_im


@triton.jit(do_not_specialize=["T", "stretch"])
def mix_kernel(
    x_ptr, before_ptr, pad_ptr, after_ptr, near_ptr, write_ptr, read_ptr, turns_ptr, states_ptr, out_ptr,
    T, N, stretch, x_stride_b, x_stride_h, x_stride_t, out_stride_b, out_stride_h, out_stride_t,
    before_stride_h, after_stride_h,
    D: tl.constexpr, C: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, REACH: tl.constexpr,
    POWERS: tl.constexpr, REVERSE: tl.constexpr, PADDED: tl.constexpr, EVEN_N: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the rows of one stretch, y_c = after (G_0 u_c + G_1 u_{c-1} + G_2 u_{c-2} + L h_c), chunk by chunk.

    Tiles, W, L and M stay in registers; u_{c-1} and u_{c-2} are those of the steps before.
    """
    i_s, i_h, i_n = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    o_p, o_t = tl.arange(0, P), tl.arange(0, C)
    o_n, m_n, o_x, p_x, p_before, pad = find_columns(
        x_ptr, before_ptr, pad_ptr, i_h, i_n, N, x_stride_b, x_stride_h, before_stride_h, D, BN, PADDED
    )
    o_out = (o_n // D).to(tl.int64) * out_stride_b + o_n % D
    p_out, p_after = out_ptr + i_h * out_stride_h, after_ptr + i_h * after_stride_h
    p_state = states_ptr + i_h * (tl.num_programs(0) - 1) * 2 * P * N + o_p[:, None] * N + o_n[None, :]
    p_state += (i_s - 1) * 2 * P * N  # the stretch before this one; masked for the first, which has none
    b_re, b_im = _load_state(p_state, m_n[None, :] & (i_s > 0), P * N)

    p_tile = near_ptr + i_h * REACH * C * C + o_t[:, None] * C + o_t[None, :]
    b_g0 = tl.load(p_tile)
    # Without a second or third tile the first is loaded in its place, and never used.
    b_g1 = tl.load(p_tile + (REACH > 1) * C * C)
    b_g2 = tl.load(p_tile + (REACH > 2) * 2 * C * C)
    w_re, w_im = _load_write(write_ptr, i_h, o_p, o_t, P, C)
    p_read = read_ptr + i_h * 2 * P * C + o_t[:, None] * 2 * P + o_p[None, :]
    l_re, l_im = tl.load(p_read), tl.load(p_read + P)
    t_re, t_im = load_factor(turns_ptr + i_h * POWERS * 2 * P, o_p, P)

    begin = i_s * stretch
    b_u1 = load_chunk(p_x, p_before, pad, begin - 1, T, o_x, x_stride_t, m_n, C, REVERSE, PADDED, EVEN_N)
    b_u2 = b_u1  # defined for every REACH, since the loop carries it
    if REACH > 2:
        b_u2 = load_chunk(p_x, p_before, pad, begin - 2, T, o_x, x_stride_t, m_n, C, REVERSE, PADDED, EVEN_N)
    for step in tl.range(0, stretch, num_stages=STAGES):
        b_u0 = load_chunk(p_x, p_before, pad, begin + step, T, o_x, x_stride_t, m_n, C, REVERSE, PADDED, EVEN_N)
        # y_c of (S.32), before it is scaled.
        b_o = add_product(tl.zeros((C, BN), tl.float32), b_g0, b_u0, PRECISION)
        if REACH > 1:
            b_o = add_product(b_o, b_g1, b_u1, PRECISION)
        if REACH > 2:
            b_o = add_product(b_o, b_g2, b_u2, PRECISION)
        # L h = Re L Re h - Im L Im h; the table holds -Im L.
        b_o = add_product(b_o, l_re, b_re.to(l_re.dtype), PRECISION)
        b_o = add_product(b_o, l_im, b_im.to(l_im.dtype), PRECISION)
        _store_chunk(p_out, p_after, pad, begin + step, T, o_out, out_stride_t, m_n, b_o, C, REVERSE, PADDED, EVEN_N)
        # u_{c+1-N}, which the next chunk's tiles no longer reach.
        b_last = b_u2 if REACH > 2 else (b_u1 if REACH > 1 else b_u0)
        b_re, b_im = _next_state(b_re, b_im, t_re, t_im, w_re, w_im, b_last, PRECISION)
        b_u2 = b_u1
        b_u1 = b_u0


# --- the state of decoding: chunk c of u is entry c modulo N + 1 of the ring, h_c entry c modulo 2 of the sums

# Columns of a program of `fill_kernel` and `step_kernel`: one sequence has few, for many multiprocessors.
STEP_COLUMNS = 32


def fill(
    x: Tensor, tables: Sequence[Tensor], before: Tensor, left_pad: Tensor | None, ring: Tensor, sums: Tensor
) -> None:
    """Do `fill_state`, whose arguments these are; `ring` and `sums` are contiguous."""
    batch, heads, length, dim = x.shape
    (near, write, _, turns), columns = tables, batch * dim
    reach, chunk = near.shape[1], near.shape[-1]
    blocks = cdiv(columns, STEP_COLUMNS)
    pad, constants = _constants(x, tables, before, left_pad, STEP_COLUMNS)
    constants |= {"EVEN_N": columns % STEP_COLUMNS == 0}
    chunks = max(0, (length - 1) // chunk - reach)  # those in h_{c-1}, where c is the prompt's last chunk
    stretch = _stretch(chunks, heads * blocks)
    stretches = cdiv(chunks, stretch)
    back = stretches * stretch - chunks  # counted from the end, so that the last stretch ends with h_{c-1}
    states = _states(x, tables, before, pad, stretches, stretch, back, 2, constants | {"REVERSE": False})
    launch(
        fill_kernel, (heads, blocks), x, before, pad, write, turns, states, ring, sums, length, columns,
        stretches, *strides(x), before.stride(0), **constants, REACH=reach, num_warps=4,
    )  # fmt: skip


def step(
    x: Tensor, tables: Sequence[Tensor], before: Tensor, after: Tensor, first: Tensor | int, left_pad: Tensor | None,
    ring: Tensor, sums: Tensor,
) -> Tensor:  # fmt: skip
    """Do `step_state`, whose arguments these are; `first` is on the device or a number."""
    batch, heads, rows, dim = x.shape
    columns, on_device, out = batch * dim, isinstance(first, Tensor), heads_like(x, heads)
    pad, constants = _constants(x, tables, before, left_pad, STEP_COLUMNS)
    if out.numel():
        launch(
            step_kernel, (heads, cdiv(columns, STEP_COLUMNS)), x, before, pad, after, *tables,
            first if on_device else before, ring, sums, out, rows, 0 if on_device else first, columns,
            *strides(x, out), before.stride(0), after.stride(0), **constants, REACH=tables[0].shape[1],
            ON_DEVICE=on_device, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["T", "stretches"])
def fill_kernel(
    x_ptr, before_ptr, pad_ptr, write_ptr, turns_ptr, states_ptr, ring_ptr, sums_ptr, T, N, stretches,
    x_stride_b, x_stride_h, x_stride_t, before_stride_h,
    D: tl.constexpr, C: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, REACH: tl.constexpr, POWERS: tl.constexpr,
    PADDED: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write u of the last N + 1 chunks of a prompt, h_{c-1} and h_c of its last chunk c.

    `states [F, stretches, 2, P, N]` end with h_{c-1}; without stretches it is zero.
    """
    i_h, i_n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_p, o_t = tl.arange(0, P), tl.arange(0, C)
    o_n, m_n, o_x, p_x, p_before, pad = find_columns(
        x_ptr, before_ptr, pad_ptr, i_h, i_n, N, x_stride_b, x_stride_h, before_stride_h, D, BN, PADDED
    )
    place = (o_n // D).to(tl.int64) * tl.num_programs(0) + i_h
    p_ring = ring_ptr + place[None, :] * ((REACH + 1) * C * D) + o_t[:, None] * D + (o_n % D)[None, :]
    p_sums = sums_ptr + place[None, :] * (4 * P * D) + o_p[:, None] * D + (o_n % D)[None, :]
    p_state = states_ptr + (i_h * stretches + stretches - 1) * 2 * P * N + o_p[:, None] * N + o_n[None, :]
    b_re, b_im = _load_state(p_state, m_n[None, :] & (stretches > 0), P * N)
    last = (T - 1) // C
    # Entry c modulo 2: of a chunk's two states one is its own, and one that of the chunk before.
    p_earlier, p_last = p_sums + ((last + 1) % 2) * 2 * P * D, p_sums + (last % 2) * 2 * P * D
    _store_state(p_earlier, b_re, b_im, m_n[None, :], P * D)

    # h_c = M h_{c-1} + W u_{c-N}, the last step by itself, as both states are stored.
    b_u = load_chunk(p_x, p_before, pad, last - REACH, T, o_x, x_stride_t, m_n, C, False, PADDED, EVEN_N)
    w_re, w_im = _load_write(write_ptr, i_h, o_p, o_t, P, C)
    t_re, t_im = load_factor(turns_ptr + i_h * POWERS * 2 * P, o_p, P)
    b_re, b_im = _next_state(b_re, b_im, t_re, t_im, w_re, w_im, b_u, PRECISION)
    _store_state(p_last, b_re, b_im, m_n[None, :], P * D)
    for back in tl.static_range(0, REACH + 1):
        b_u = load_chunk(p_x, p_before, pad, last - back, T, o_x, x_stride_t, m_n, C, False, PADDED, EVEN_N)
        slot = (last - back + REACH + 1) % (REACH + 1)  # % of a negative number would be negative here
        tl.store(p_ring + slot * C * D, b_u, mask=m_n[None, :])


@triton.jit(do_not_specialize=["rows", "place"])
def step_kernel(
    x_ptr, before_ptr, pad_ptr, after_ptr, near_ptr, write_ptr, read_ptr, turns_ptr, first_ptr, ring_ptr,
    sums_ptr, out_ptr, rows, place, N, x_stride_b, x_stride_h, x_stride_t, out_stride_b, out_stride_h, out_stride_t,
    before_stride_h, after_stride_h,
    D: tl.constexpr, C: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, REACH: tl.constexpr, POWERS: tl.constexpr,
    PADDED: tl.constexpr, ON_DEVICE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute some rows one after another, from position `place` or `first_ptr` on, and write each into the state.

    A row is y_c of `mix_kernel` with sums instead of matrix products: row t of the tiles and of L.
    """
    i_h, i_n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_p, o_t = tl.arange(0, P), tl.arange(0, C)
    o_n, m_n, o_x, p_x, p_before, pad = find_columns(
        x_ptr, before_ptr, pad_ptr, i_h, i_n, N, x_stride_b, x_stride_h, before_stride_h, D, BN, PADDED
    )
    o_seq, o_d = (o_n // D).to(tl.int64), o_n % D
    p_out = out_ptr + i_h * out_stride_h + o_seq * out_stride_b + o_d
    p_after = after_ptr + i_h * after_stride_h
    o_state = o_seq * tl.num_programs(0) + i_h
    p_ring = ring_ptr + o_state * ((REACH + 1) * C * D) + o_d
    p_tile = p_ring[None, :] + o_t[:, None] * D
    p_sums = sums_ptr + (o_state * (4 * P * D) + o_d)[None, :] + o_p[:, None] * D
    m_p = m_n[None, :]
    first = tl.load(first_ptr).to(tl.int32) if ON_DEVICE else place
    for row in range(0, rows):
        chunk, t = (first + row) // C, (first + row) % C
        p_now, p_earlier = p_sums + (chunk % 2) * 2 * P * D, p_sums + ((chunk + 1) % 2) * 2 * P * D
        if t == 0:  # h_c = M h_{c-1} + W u_{c-N}
            b_u = tl.load(p_tile + ((chunk + 1) % (REACH + 1)) * C * D, mask=m_p, other=0.0)
            b_re, b_im = _load_state(p_earlier, m_p, P * D)
            t_re, t_im = load_factor(turns_ptr + i_h * POWERS * 2 * P, o_p, P)
            w_re, w_im = _load_write(write_ptr, i_h, o_p, o_t, P, C)
            b_re, b_im = _next_state(b_re, b_im, t_re, t_im, w_re, w_im, b_u, PRECISION)
            _store_state(p_now, b_re, b_im, m_p, P * D)
        own = first + row - pad  # the position in the pattern; negative in the padding, whose scalings load as zero
        real = m_n & (own >= 0)
        b_x = tl.load(p_x + o_x + row * x_stride_t, mask=m_n, other=0.0)
        b_u = b_x.to(tl.float32) * tl.load(p_before + own, mask=real, other=0.0)
        tl.store(p_ring + ((chunk % (REACH + 1)) * C + t) * D, b_u.to(b_x.dtype), mask=m_n)
        tl.debug_barrier()  # what the program stored, other threads of it read
        p_read = read_ptr + i_h * 2 * P * C + t * 2 * P + o_p
        l_re, l_im = tl.load(p_read).to(tl.float32), tl.load(p_read + P).to(tl.float32)
        b_re, b_im = _load_state(p_now, m_p, P * D)
        b_o = tl.sum(l_re[:, None] * b_re + l_im[:, None] * b_im, 0)
        for back in tl.static_range(0, REACH):
            b_g = tl.load(near_ptr + (i_h * REACH + back) * C * C + t * C + o_t).to(tl.float32)
            # Rows of this chunk behind t hold what an earlier chunk left: row t of the first tile is zero there.
            slot = (chunk + REACH + 1 - back) % (REACH + 1)
            b_u = tl.load(p_tile + slot * C * D, mask=m_p, other=0.0)
            b_o += tl.sum(b_g[:, None] * b_u.to(tl.float32), 0)
        b_o *= tl.load(p_after + own, mask=real, other=0.0)
        tl.store(p_out + row * out_stride_t, b_o.to(out_ptr.dtype.element_ty), mask=m_n)
        tl.debug_barrier()  # the next row is written into the chunk that slower threads still load whole


# --- states, in device code


@triton.jit
def load_factor(p_turns, o_p, P: tl.constexpr):
    """Load M for one chunk, or for the power of two that `p_turns` points at: real and imaginary part, [P, 1]."""
    return tl.load(p_turns + o_p)[:, None], tl.load(p_turns + P + o_p)[:, None]


@triton.jit
def turned(b_re, b_im, t_re, t_im):
    """Return M h, the complex product (t_re + i t_im)(b_re + i b_im)."""
    return t_re * b_re - t_im * b_im, t_im * b_re + t_re * b_im


@triton.jit
def _factor_over(p_turns, o_p, chunks, P: tl.constexpr, POWERS: tl.constexpr):
    """Return M^chunks, [P, 1], for chunks < 2^POWERS: the product of M^1, M^2, M^4, ... over its binary digits."""
    t_re, t_im = tl.full((P, 1), 1.0, tl.float32), tl.zeros((P, 1), tl.float32)
    for power in tl.range(0, POWERS):
        if (chunks >> power) & 1:
            f_re, f_im = load_factor(p_turns + power * 2 * P, o_p, P)
            t_re, t_im = turned(t_re, t_im, f_re, f_im)
    return t_re, t_im


@triton.jit
def _load_write(write_ptr, i_h, o_p, o_t, P: tl.constexpr, C: tl.constexpr):
    """Load W of a head: real and imaginary part, [P, C]."""
    p_write = write_ptr + i_h * 2 * P * C + o_p[:, None] * C + o_t[None, :]
    return tl.load(p_write), tl.load(p_write + P * C)


@triton.jit
def _next_state(b_re, b_im, t_re, t_im, w_re, w_im, b_u, PRECISION: tl.constexpr):
    """Return M h + W u."""
    b_re, b_im = turned(b_re, b_im, t_re, t_im)
    return add_product(b_re, w_re, b_u, PRECISION), add_product(b_im, w_im, b_u, PRECISION)


@triton.jit
def _load_state(p_state, mask, stride):
    """Load a state [P, BN] twice, its imaginary part `stride` behind the real one; zeros outside of the mask."""
    return tl.load(p_state, mask=mask, other=0.0), tl.load(p_state + stride, mask=mask, other=0.0)


@triton.jit
def _store_state(p_state, b_re, b_im, mask, stride):
    tl.store(p_state, b_re, mask=mask)
    tl.store(p_state + stride, b_im, mask=mask)


# --- rows of chunks, in device code


@triton.jit
def find_columns(
    x_ptr, before_ptr, pad_ptr, i_h, i_n, N, x_stride_b, x_stride_h, before_stride_h,
    D: tl.constexpr, BN: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Return a block's columns [BN], their mask, their offsets in x, its head's x and `before`, and their padding.

    Column n is channel n mod D of sequence n div D.
    """
    o_n = i_n * BN + tl.arange(0, BN)
    m_n = o_n < N
    o_x = (o_n // D).to(tl.int64) * x_stride_b + o_n % D
    p_x, p_before = x_ptr + i_h * x_stride_h, before_ptr + i_h * before_stride_h
    pad = o_n * 0  # a block of zeros of the type that a load has
    if PADDED:
        pad = tl.load(pad_ptr + o_n // D, mask=m_n, other=0).to(tl.int32)
    return o_n, m_n, o_x, p_x, p_before, pad


@triton.jit
def _find_rows(p, chunk, T, stride_t, EARLIER: tl.constexpr, C: tl.constexpr, REVERSE: tl.constexpr):
    """Return a chunk's rows [C], which of them exist, and pointers to them [C, 1]; EARLIER: `chunk` may be negative."""
    o_t = tl.arange(0, C)
    time = chunk * C + o_t
    inside = (time >= 0) & (time < T) if EARLIER else time < T
    # Offsets of a chunk are 64 bits wide, those within it 32: long sequences have more than 2^31 elements.
    if REVERSE:
        row = T - 1 - time
        p_rows = p + (T - 1 - chunk * C).to(tl.int64) * stride_t - o_t[:, None] * stride_t
    else:
        row = time
        p_rows = p + (chunk * C).to(tl.int64) * stride_t + o_t[:, None] * stride_t
    return row, inside, p_rows


@triton.jit
def _scales(p_scale, row, inside, pad, PADDED: tl.constexpr):
    """Load the scaling of rows, [C, 1]; with padding [C, BN], counted from each sequence's first real position."""
    if PADDED:
        own = row[:, None] - pad[None, :]
        b_scale = tl.load(p_scale + own, mask=inside[:, None] & (own >= 0), other=0.0)
    else:
        b_scale = tl.load(p_scale + row, mask=inside, other=0.0)[:, None]
    return b_scale


@triton.jit
def load_chunk(
    p_x, p_before, pad, chunk, T, o_x, x_stride_t, m_n,
    C: tl.constexpr, REVERSE: tl.constexpr, PADDED: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """Load u = before * x of a chunk, [C, BN], rounded to the dtype of x; zeros outside of the sequence."""
    row, inside, p_rows = _find_rows(p_x, chunk, T, x_stride_t, True, C, REVERSE)
    mask = inside[:, None] if EVEN_N else inside[:, None] & m_n[None, :]  # whole blocks of columns need no mask
    b_x = tl.load(p_rows + o_x[None, :], mask=mask, other=0.0)
    # Rounded once, to the dtype of the tiles: both operands of a product on matrix units have one type.
    return (b_x.to(tl.float32) * _scales(p_before, row, inside, pad, PADDED)).to(b_x.dtype)


@triton.jit
def _store_chunk(
    p_out, p_after, pad, chunk, T, o_out, out_stride_t, m_n, b_o,
    C: tl.constexpr, REVERSE: tl.constexpr, PADDED: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """Store after * b_o, [C, BN]."""
    row, inside, p_rows = _find_rows(p_out, chunk, T, out_stride_t, False, C, REVERSE)
    mask = inside[:, None] if EVEN_N else inside[:, None] & m_n[None, :]
    b_o *= _scales(p_after, row, inside, pad, PADDED)
    tl.store(p_rows + o_out[None, :], b_o.to(p_out.dtype.element_ty), mask=mask)
