"""Recurrent state on a GPU: a kernel that fills it after a prompt, and one for steps of a few rows.

The state is laid out as `saf.ops.linear.recurrent` says. Programs are of one head and BN columns of B x D.
"""

import triton
import triton.language as tl
from torch import Tensor

from saf.ops.launch import add_product, cdiv, launch
from saf.ops.linear.kernels import (
    SCAN_COLUMNS,
    WAVE,
    load_chunk,
    load_padding,
    load_turn,
    scan_kernel,
    states_kernel,
    turned,
)
from saf.ops.linear.tables import LinearTables

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# The device language's constants and ranges are not what their annotations say.

COLUMNS = 32
"""Columns of a program: a step of one sequence has few, and should fill many multiprocessors."""


@triton.jit(do_not_specialize=["T", "stretches"])
def fill_kernel(
    x_ptr, before_ptr, sources_ptr, pad_ptr, write_ptr, turns_ptr, states_ptr, ring_ptr, sums_ptr, T, N, stretches,
    x_stride_b, x_stride_f, x_stride_t, before_stride_f,
    D: tl.constexpr, C: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, REACH: tl.constexpr, POWERS: tl.constexpr,
    MAPPED: tl.constexpr, PADDED: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the last REACH + 1 chunks of a prompt, and the sums of the last chunk and of the one before it.

    `states [F, stretches, 2, P, N]` end with the sum of the chunk before the last one.
    """
    i_f, i_n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_p, o_t = tl.arange(0, P), tl.arange(0, C)
    o_col = i_n * BN + tl.arange(0, BN)
    m_n = o_col < N
    o_n = (o_col // D).to(tl.int64) * x_stride_b + o_col % D
    i_x = tl.load(sources_ptr + i_f).to(tl.int64) if MAPPED else i_f
    p_x, p_before = x_ptr + i_x * x_stride_f, before_ptr + i_f * before_stride_f
    pad = load_padding(pad_ptr, o_col, m_n, D, PADDED)
    place = (o_col // D).to(tl.int64) * tl.num_programs(0) + i_f
    p_ring = ring_ptr + place[None, :] * ((REACH + 1) * C * D) + o_t[:, None] * D + (o_col % D)[None, :]
    p_sums = sums_ptr + place[None, :] * (4 * P * D) + o_p[:, None] * D + (o_col % D)[None, :]
    p_state = states_ptr + (i_f * stretches + stretches - 1) * 2 * P * N + o_p[:, None] * N + o_col[None, :]
    ready = m_n[None, :] & (stretches > 0)
    b_re, b_im = tl.load(p_state, mask=ready, other=0.0), tl.load(p_state + P * N, mask=ready, other=0.0)
    last = (T - 1) // C
    p_earlier, p_last = p_sums + ((last + 1) % 2) * 2 * P * D, p_sums + (last % 2) * 2 * P * D
    tl.store(p_earlier, b_re, mask=m_n[None, :])
    tl.store(p_earlier + P * D, b_im, mask=m_n[None, :])

    b_u = load_chunk(p_x, p_before, pad, last - REACH, T, o_n, x_stride_t, m_n, C, False, PADDED, EVEN_N)
    p_write = write_ptr + i_f * 2 * P * C + o_p[:, None] * C + o_t[None, :]
    b_re, b_im = turned(b_re, b_im, *load_turn(turns_ptr + i_f * POWERS * 2 * P, o_p, P))
    tl.store(p_last, add_product(b_re, tl.load(p_write), b_u, PRECISION), mask=m_n[None, :])
    tl.store(p_last + P * D, add_product(b_im, tl.load(p_write + P * C), b_u, PRECISION), mask=m_n[None, :])
    for back in tl.static_range(0, REACH + 1):
        b_u = load_chunk(p_x, p_before, pad, last - back, T, o_n, x_stride_t, m_n, C, False, PADDED, EVEN_N)
        slot = (last - back + REACH + 1) % (REACH + 1)
        tl.store(p_ring + slot * C * D, b_u, mask=m_n[None, :])


@triton.jit(do_not_specialize=["rows", "place"])
def step_kernel(
    x_ptr, before_ptr, sources_ptr, pad_ptr, after_ptr, near_ptr, write_ptr, read_ptr, turns_ptr, first_ptr, ring_ptr,
    sums_ptr, out_ptr, rows, place, N, x_stride_b, x_stride_f, x_stride_t, out_stride_b, out_stride_f, out_stride_t,
    before_stride_f, after_stride_f,
    D: tl.constexpr, C: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, REACH: tl.constexpr, POWERS: tl.constexpr,
    MAPPED: tl.constexpr, PADDED: tl.constexpr, MOVES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute some rows one after another, from position `place` or `first_ptr` on, and write each into the state."""
    i_f, i_n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_p, o_t = tl.arange(0, P), tl.arange(0, C)
    o_col = i_n * BN + tl.arange(0, BN)
    m_n = o_col < N
    o_seq, o_d = (o_col // D).to(tl.int64), o_col % D
    i_x = tl.load(sources_ptr + i_f).to(tl.int64) if MAPPED else i_f
    p_x = x_ptr + i_x * x_stride_f + o_seq * x_stride_b + o_d
    p_out = out_ptr + i_f * out_stride_f + o_seq * out_stride_b + o_d
    p_before, p_after = before_ptr + i_f * before_stride_f, after_ptr + i_f * after_stride_f
    pad = load_padding(pad_ptr, o_col, m_n, D, PADDED)
    p_ring = ring_ptr + (o_seq * tl.num_programs(0) + i_f) * ((REACH + 1) * C * D) + o_d
    p_tile = p_ring[None, :] + o_t[:, None] * D
    p_sums = sums_ptr + ((o_seq * tl.num_programs(0) + i_f) * (4 * P * D) + o_d)[None, :] + o_p[:, None] * D
    m_p = m_n[None, :]
    first = tl.load(first_ptr).to(tl.int32) if MOVES else place
    for row in range(0, rows):
        chunk, t = (first + row) // C, (first + row) % C
        p_now, p_earlier = p_sums + (chunk % 2) * 2 * P * D, p_sums + ((chunk + 1) % 2) * 2 * P * D
        if t == 0:  # the chunk that tiles no longer reach
            b_u = tl.load(p_tile + ((chunk + 1) % (REACH + 1)) * C * D, mask=m_p, other=0.0)
            b_re, b_im = tl.load(p_earlier, mask=m_p, other=0.0), tl.load(p_earlier + P * D, mask=m_p, other=0.0)
            b_re, b_im = turned(b_re, b_im, *load_turn(turns_ptr + i_f * POWERS * 2 * P, o_p, P))
            p_write = write_ptr + i_f * 2 * P * C + o_p[:, None] * C + o_t[None, :]
            tl.store(p_now, add_product(b_re, tl.load(p_write), b_u, PRECISION), mask=m_p)
            tl.store(p_now + P * D, add_product(b_im, tl.load(p_write + P * C), b_u, PRECISION), mask=m_p)
        own = first + row - pad
        real = m_n & (own >= 0)
        b_x = tl.load(p_x + row * x_stride_t, mask=m_n, other=0.0)
        b_u = b_x.to(tl.float32) * tl.load(p_before + own, mask=real, other=0.0)
        tl.store(p_ring + ((chunk % (REACH + 1)) * C + t) * D, b_u.to(b_x.dtype), mask=m_n)
        tl.debug_barrier()  # what the program stored, other threads of it read
        p_read = read_ptr + i_f * 2 * P * C + t * 2 * P + o_p
        l_re, l_im = tl.load(p_read).to(tl.float32), tl.load(p_read + P).to(tl.float32)
        b_re, b_im = tl.load(p_now, mask=m_p, other=0.0), tl.load(p_now + P * D, mask=m_p, other=0.0)
        b_o = tl.sum(l_re[:, None] * b_re + l_im[:, None] * b_im, 0)
        for back in tl.static_range(0, REACH):
            b_g = tl.load(near_ptr + (i_f * REACH + back) * C * C + t * C + o_t).to(tl.float32)
            slot = (chunk + REACH + 1 - back) % (REACH + 1)
            b_u = tl.load(p_tile + slot * C * D, mask=m_p, other=0.0)
            b_o += tl.sum(b_g[:, None] * b_u.to(tl.float32), 0)
        b_o *= tl.load(p_after + own, mask=real, other=0.0)
        tl.store(p_out + row * out_stride_t, b_o.to(out_ptr.dtype.element_ty), mask=m_n)
        tl.debug_barrier()


def fill(
    x: Tensor, tables: LinearTables, before: Tensor, sources: Tensor | None, left_pad: Tensor | None, ring: Tensor,
    sums: Tensor, *, precision: str,
) -> None:  # fmt: skip
    """Fill `ring [B, F, N + 1, C, D]` and `sums [B, F, 2, 2P, D]`, contiguous, after values `x [B, H, T, D]`."""
    batch, _, length, dim = x.shape
    heads, reach, rows, _ = tables.near.shape
    poles, columns = tables.write.shape[1] // 2, batch * dim
    common = {
        "D": dim, "C": rows, "P": poles, "BN": COLUMNS, "POWERS": tables.turns.shape[1], "MAPPED": sources is not None,
        "PADDED": left_pad is not None, "EVEN_N": columns % COLUMNS == 0, "PRECISION": precision,
    }  # fmt: skip
    maps = before if sources is None else sources, before if left_pad is None else left_pad
    blocks = cdiv(columns, COLUMNS)
    chunks = max(0, (length - 1) // rows - reach)  # those that the sum of the chunk before the last one holds
    stretch = max(2, cdiv(chunks, max(1, WAVE // (heads * blocks))))
    stretches = cdiv(chunks, stretch)
    states = before.new_empty(heads, max(1, stretches), 2, poles, columns)
    if stretches:
        launch(
            states_kernel, (stretches, heads, blocks), x, before, *maps, tables.write, tables.turns, states, length,
            columns, stretch, stretches * stretch - chunks, *x.stride()[:3], before.stride(0),
            **common, REVERSE=False, STAGES=2, num_warps=4, num_stages=2, device=x.device,
        )  # fmt: skip
    if stretches > 1:
        launch(
            scan_kernel, (heads, cdiv(columns, SCAN_COLUMNS)), states, tables.turns, columns, stretches, stretch,
            P=poles, BN=SCAN_COLUMNS, POWERS=common["POWERS"], num_warps=4, device=x.device,
        )  # fmt: skip
    launch(
        fill_kernel, (heads, blocks), x, before, *maps, tables.write, tables.turns, states, ring, sums, length, columns,
        stretches, *x.stride()[:3], before.stride(0), **common, REACH=reach, num_warps=4, device=x.device,
    )  # fmt: skip


def step(
    x: Tensor, tables: LinearTables, before: Tensor, after: Tensor, sources: Tensor | None, left_pad: Tensor | None,
    first: Tensor | int, ring: Tensor, sums: Tensor, out: Tensor, *, precision: str,
) -> None:  # fmt: skip
    """Write the rows of values `x [B, H, rows, D]`, which stand from position `first` on, into `out` and the state."""
    batch, _, rows, dim = x.shape
    heads, reach, chunk, _ = tables.near.shape
    columns, moves = batch * dim, isinstance(first, Tensor)
    launch(
        step_kernel, (heads, cdiv(columns, COLUMNS)), x, before, before if sources is None else sources,
        before if left_pad is None else left_pad, after, tables.near, tables.write, tables.read, tables.turns,
        first if moves else before, ring, sums, out, rows, 0 if moves else first, columns, *x.stride()[:3],
        *out.stride()[:3], before.stride(0), after.stride(0),
        D=dim, C=chunk, P=tables.write.shape[1] // 2, BN=COLUMNS, REACH=reach, POWERS=tables.turns.shape[1],
        MAPPED=sources is not None, PADDED=left_pad is not None, MOVES=moves, PRECISION=precision, num_warps=4,
        device=x.device,
    )  # fmt: skip
