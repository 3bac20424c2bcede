"""Device code of the linear product: `states_kernel` sums up stretches of chunks, `mix_kernel` computes the rows.

A stretch is as many chunks as one program walks. Both kernels hold a state `[P, BN]` twice, cosine and sine
parts, in float32. With REVERSE chunks are counted from the last position, which makes the product its own adjoint.
"""

import triton
import triton.language as tl

from saf.ops.launch import add_product

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# The device language's constants and ranges are not what their annotations say.


@triton.jit
def _load_chunk(
    p_x, p_before, chunk, T, o_n, x_stride_t, m_n, C: tl.constexpr, REVERSE: tl.constexpr, EVEN_N: tl.constexpr
):
    """Load the scaled rows [C, BN] of a chunk, rounded to the dtype of values; zeros outside of the sequence."""
    o_t = tl.arange(0, C)
    place = chunk * C + o_t
    inside = (place >= 0) & (place < T)
    if REVERSE:
        row = T - 1 - place
        p_rows = p_x + (T - 1 - chunk * C).to(tl.int64) * x_stride_t - o_t[:, None] * x_stride_t
    else:
        row = place
        p_rows = p_x + (chunk * C).to(tl.int64) * x_stride_t + o_t[:, None] * x_stride_t
    mask = inside[:, None] if EVEN_N else inside[:, None] & m_n[None, :]
    b_x = tl.load(p_rows + o_n[None, :], mask=mask, other=0.0)
    b_before = tl.load(p_before + row, mask=inside, other=0.0)
    return (b_x.to(tl.float32) * b_before[:, None]).to(b_x.dtype)


@triton.jit
def _load_turn(p_turns, o_p, P: tl.constexpr):
    """Load the factor over one chunk, or of the power of two that `p_turns` points at: cosine and sine part, [P, 1]."""
    return tl.load(p_turns + o_p)[:, None], tl.load(p_turns + P + o_p)[:, None]


@triton.jit
def _turned(b_re, b_im, t_re, t_im):
    """Return a state one or more chunks later, without what these add."""
    return t_re * b_re - t_im * b_im, t_im * b_re + t_re * b_im


@triton.jit
def _turn_over(p_turns, o_p, chunks, P: tl.constexpr, POWERS: tl.constexpr):
    """Return the factor over so many chunks, below 2**POWERS: the product over their binary digits."""
    t_re, t_im = tl.full((P, 1), 1.0, tl.float32), tl.zeros((P, 1), tl.float32)
    for power in tl.range(0, POWERS):
        if (chunks >> power) & 1:
            f_re, f_im = _load_turn(p_turns + power * 2 * P, o_p, P)
            t_re, t_im = _turned(t_re, t_im, f_re, f_im)
    return t_re, t_im


@triton.jit(do_not_specialize=["T", "stretch"])
def states_kernel(
    x_ptr, before_ptr, sources_ptr, write_ptr, turns_ptr, states_ptr, T, N, stretch,
    x_stride_b, x_stride_f, x_stride_t, before_stride_f,
    D: tl.constexpr, C: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, REACH: tl.constexpr,
    POWERS: tl.constexpr, REVERSE: tl.constexpr, MAPPED: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Write the state [2, P, N] that every stretch but the last adds: `states [F, stretches - 1, 2, P, N]`.

    A stretch is read up to its end less the REACH - 1 chunks that tiles serve, and begins as much earlier.
    """
    i_s, i_f, i_n = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    o_p, o_t = tl.arange(0, P), tl.arange(0, C)
    o_col = i_n * BN + tl.arange(0, BN)
    m_n = o_col < N
    o_n = (o_col // D).to(tl.int64) * x_stride_b + o_col % D
    i_x = tl.load(sources_ptr + i_f).to(tl.int64) if MAPPED else i_f
    p_x, p_before = x_ptr + i_x * x_stride_f, before_ptr + i_f * before_stride_f
    p_write = write_ptr + i_f * 2 * P * C + o_p[:, None] * C + o_t[None, :]
    b_w_re, b_w_im = tl.load(p_write), tl.load(p_write + P * C)
    t_re, t_im = _load_turn(turns_ptr + i_f * POWERS * 2 * P, o_p, P)
    b_re, b_im = tl.zeros((P, BN), tl.float32), tl.zeros((P, BN), tl.float32)
    for step in tl.range(0, stretch, num_stages=STAGES):
        b_u = _load_chunk(
            p_x, p_before, i_s * stretch + step - (REACH - 1), T, o_n, x_stride_t, m_n, C, REVERSE, EVEN_N
        )
        b_re, b_im = _turned(b_re, b_im, t_re, t_im)
        b_re = add_product(b_re, b_w_re, b_u, PRECISION)
        b_im = add_product(b_im, b_w_im, b_u, PRECISION)
    place = i_f * tl.num_programs(0) + i_s
    p_state = states_ptr + place * 2 * P * N + o_p[:, None] * N + o_col[None, :]
    tl.store(p_state, b_re, mask=m_n[None, :])
    tl.store(p_state + P * N, b_im, mask=m_n[None, :])


@triton.jit
def _load_state(p_state, at, stretches, m_n, N, P: tl.constexpr):
    """Load what one stretch adds, [P, BN] twice; zeros beyond the last one."""
    ready = m_n & (at < stretches)
    p_state += at * 2 * P * N
    return tl.load(p_state, mask=ready, other=0.0), tl.load(p_state + P * N, mask=ready, other=0.0)


@triton.jit
def _store_state(p_state, at, stretches, m_n, N, b_re, b_im, P: tl.constexpr):
    """Store the state at the end of one stretch."""
    ready = m_n & (at < stretches)
    p_state += at * 2 * P * N
    tl.store(p_state, b_re, mask=ready)
    tl.store(p_state + P * N, b_im, mask=ready)


@triton.jit(do_not_specialize=["stretches", "stretch"])
def scan_kernel(states_ptr, turns_ptr, N, stretches, stretch, P: tl.constexpr, BN: tl.constexpr, POWERS: tl.constexpr):
    """Turn what each stretch adds into the state at its end, in place: one program a head and block of columns.

    Four stretches at a time: a load may not pass the store before it, and would wait for it each time.
    """
    i_f, i_n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_p = tl.arange(0, P)
    o_col = i_n * BN + tl.arange(0, BN)
    m_n = (o_col < N)[None, :]
    p_state = states_ptr + i_f * stretches * 2 * P * N + o_p[:, None] * N + o_col[None, :]
    t_re, t_im = _turn_over(turns_ptr + i_f * POWERS * 2 * P, o_p, stretch, P, POWERS)
    d_re, d_im = tl.zeros((P, BN), tl.float32), tl.zeros((P, BN), tl.float32)
    for at in range(0, stretches, 4):
        a_re, a_im = _load_state(p_state, at, stretches, m_n, N, P)
        b_re, b_im = _load_state(p_state, at + 1, stretches, m_n, N, P)
        c_re, c_im = _load_state(p_state, at + 2, stretches, m_n, N, P)
        e_re, e_im = _load_state(p_state, at + 3, stretches, m_n, N, P)
        d_re, d_im = _turned(d_re, d_im, t_re, t_im)
        a_re, a_im = a_re + d_re, a_im + d_im
        d_re, d_im = _turned(a_re, a_im, t_re, t_im)
        b_re, b_im = b_re + d_re, b_im + d_im
        d_re, d_im = _turned(b_re, b_im, t_re, t_im)
        c_re, c_im = c_re + d_re, c_im + d_im
        d_re, d_im = _turned(c_re, c_im, t_re, t_im)
        d_re, d_im = e_re + d_re, e_im + d_im
        _store_state(p_state, at, stretches, m_n, N, a_re, a_im, P)
        _store_state(p_state, at + 1, stretches, m_n, N, b_re, b_im, P)
        _store_state(p_state, at + 2, stretches, m_n, N, c_re, c_im, P)
        _store_state(p_state, at + 3, stretches, m_n, N, d_re, d_im, P)


@triton.jit
def _store_chunk(
    p_out, p_after, chunk, T, o_n, out_stride_t, m_n, b_o, C: tl.constexpr, REVERSE: tl.constexpr, EVEN_N: tl.constexpr
):
    """Store the rows [C, BN] of a chunk, scaled."""
    o_t = tl.arange(0, C)
    place = chunk * C + o_t
    inside = place < T
    if REVERSE:
        row = T - 1 - place
        p_rows = p_out + (T - 1 - chunk * C).to(tl.int64) * out_stride_t - o_t[:, None] * out_stride_t
    else:
        row = place
        p_rows = p_out + (chunk * C).to(tl.int64) * out_stride_t + o_t[:, None] * out_stride_t
    b_after = tl.load(p_after + row, mask=inside, other=0.0)
    mask = inside[:, None] if EVEN_N else inside[:, None] & m_n[None, :]
    tl.store(p_rows + o_n[None, :], (b_o * b_after[:, None]).to(p_out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "stretch"])
def mix_kernel(
    x_ptr, before_ptr, sources_ptr, after_ptr, near_ptr, write_ptr, read_ptr, turns_ptr, states_ptr, out_ptr, T, N,
    stretch, x_stride_b, x_stride_f, x_stride_t, out_stride_b, out_stride_f, out_stride_t,
    before_stride_f, after_stride_f,
    D: tl.constexpr, C: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, REACH: tl.constexpr,
    POWERS: tl.constexpr, REVERSE: tl.constexpr, MAPPED: tl.constexpr, EVEN_N: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the rows of one stretch: tiles of g for the REACH nearest chunks, the state for what is further back."""
    i_s, i_f, i_n = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    o_p, o_t = tl.arange(0, P), tl.arange(0, C)
    o_col = i_n * BN + tl.arange(0, BN)
    m_n = o_col < N
    o_n = (o_col // D).to(tl.int64) * x_stride_b + o_col % D
    o_out = (o_col // D).to(tl.int64) * out_stride_b + o_col % D
    i_x = tl.load(sources_ptr + i_f).to(tl.int64) if MAPPED else i_f
    p_x, p_before = x_ptr + i_x * x_stride_f, before_ptr + i_f * before_stride_f
    p_out, p_after = out_ptr + i_f * out_stride_f, after_ptr + i_f * after_stride_f
    p_turns = turns_ptr + i_f * POWERS * 2 * P
    p_state = states_ptr + i_f * (tl.num_programs(0) - 1) * 2 * P * N + o_p[:, None] * N + o_col[None, :]
    p_state += (i_s - 1) * 2 * P * N
    ready = m_n[None, :] & (i_s > 0)
    b_re, b_im = tl.load(p_state, mask=ready, other=0.0), tl.load(p_state + P * N, mask=ready, other=0.0)

    p_tile = near_ptr + i_f * REACH * C * C + o_t[:, None] * C + o_t[None, :]
    b_g0 = tl.load(p_tile)
    b_g1 = tl.load(p_tile + (REACH > 1) * C * C)
    b_g2 = tl.load(p_tile + (REACH > 2) * 2 * C * C)
    p_write = write_ptr + i_f * 2 * P * C + o_p[:, None] * C + o_t[None, :]
    b_w_re, b_w_im = tl.load(p_write), tl.load(p_write + P * C)
    p_read = read_ptr + i_f * 2 * P * C + o_t[:, None] * 2 * P + o_p[None, :]
    b_l_re, b_l_im = tl.load(p_read), tl.load(p_read + P)
    t_re, t_im = _load_turn(p_turns, o_p, P)

    b_1 = _load_chunk(p_x, p_before, i_s * stretch - 1, T, o_n, x_stride_t, m_n, C, REVERSE, EVEN_N)
    b_2 = b_1
    if REACH > 2:
        b_2 = _load_chunk(p_x, p_before, i_s * stretch - 2, T, o_n, x_stride_t, m_n, C, REVERSE, EVEN_N)
    for step in tl.range(0, stretch, num_stages=STAGES):
        b_0 = _load_chunk(p_x, p_before, i_s * stretch + step, T, o_n, x_stride_t, m_n, C, REVERSE, EVEN_N)
        b_o = add_product(tl.zeros((C, BN), tl.float32), b_g0, b_0, PRECISION)
        if REACH > 1:
            b_o = add_product(b_o, b_g1, b_1, PRECISION)
        if REACH > 2:
            b_o = add_product(b_o, b_g2, b_2, PRECISION)
        b_o = add_product(b_o, b_l_re, b_re.to(b_l_re.dtype), PRECISION)
        b_o = add_product(b_o, b_l_im, b_im.to(b_l_im.dtype), PRECISION)
        _store_chunk(p_out, p_after, i_s * stretch + step, T, o_out, out_stride_t, m_n, b_o, C, REVERSE, EVEN_N)
        # The chunk that the next one's tiles no longer reach.
        b_last = b_2 if REACH > 2 else (b_1 if REACH > 1 else b_0)
        b_re, b_im = _turned(b_re, b_im, t_re, t_im)
        b_re = add_product(b_re, b_w_re, b_last, PRECISION)
        b_im = add_product(b_im, b_w_im, b_last, PRECISION)
        b_2 = b_1
        b_1 = b_0
