"""The linear product (S.32) and its recurrent state on a GPU: kernels and their launches.

`states_kernel` sums up stretches of chunks, `scan_kernel` adds these up, `mix_kernel` computes the rows. A stretch is
as many chunks as one program walks. States are `[P, BN]` twice, cosine and sine parts, in float32. With REVERSE chunks
are counted from the last position, which makes the product its own adjoint: the gradient dV = P^T dO takes the same
kernels. For decoding `fill_kernel` writes the state after a prompt, `step_kernel` computes rows one after another.
Names are those of saf/ops/launch.py; a chunk has C rows, P poles make a state.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saf.ops.heads import heads_like
from saf.ops.launch import add_product, cdiv, launch, strides
from saf.ops.linear.tables import CHUNK, LinearTables

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# The device language's constants and ranges are not what their annotations say.


@triton.jit
def load_padding(pad_ptr, o_n, m_n, D: tl.constexpr, PADDED: tl.constexpr):
    """Load the first real position of the sequence of each column; zeros without padding."""
    pad = o_n * 0
    if PADDED:
        pad = tl.load(pad_ptr + o_n // D, mask=m_n, other=0).to(tl.int32)
    return pad


@triton.jit
def find_columns(
    x_ptr, before_ptr, pad_ptr, i_h, i_n, N, x_stride_b, x_stride_h, before_stride_h,
    D: tl.constexpr, BN: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Return a block's columns: numbers, mask, offsets in x, its head's x and scaling, and the padding of each."""
    o_n = i_n * BN + tl.arange(0, BN)
    m_n = o_n < N
    o_x = (o_n // D).to(tl.int64) * x_stride_b + o_n % D
    p_x, p_before = x_ptr + i_h * x_stride_h, before_ptr + i_h * before_stride_h
    return o_n, m_n, o_x, p_x, p_before, load_padding(pad_ptr, o_n, m_n, D, PADDED)


@triton.jit
def _scales(p_scale, row, inside, pad, PADDED: tl.constexpr):
    """Load the scaling of rows: [C, 1], or [C, BN] counted from the first real position of each column's sequence."""
    if PADDED:
        own = row[:, None] - pad[None, :]
        b_scale = tl.load(p_scale + own, mask=inside[:, None] & (own >= 0), other=0.0)
    else:
        b_scale = tl.load(p_scale + row, mask=inside, other=0.0)[:, None]
    return b_scale


@triton.jit
def _find_rows(p, chunk, T, stride_t, EARLIER: tl.constexpr, C: tl.constexpr, REVERSE: tl.constexpr):
    """Return the rows of a chunk, [C]: their numbers, which exist, and pointers to them, [C, 1].

    Chunks may be EARLIER than the first one.
    """
    o_t = tl.arange(0, C)
    time = chunk * C + o_t
    inside = (time >= 0) & (time < T) if EARLIER else time < T
    if REVERSE:
        row = T - 1 - time
        p_rows = p + (T - 1 - chunk * C).to(tl.int64) * stride_t - o_t[:, None] * stride_t
    else:
        row = time
        p_rows = p + (chunk * C).to(tl.int64) * stride_t + o_t[:, None] * stride_t
    return row, inside, p_rows


@triton.jit
def load_chunk(
    p_x, p_before, pad, chunk, T, o_x, x_stride_t, m_n,
    C: tl.constexpr, REVERSE: tl.constexpr, PADDED: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """Load the scaled rows [C, BN] of a chunk, rounded to the dtype of values; zeros outside of the sequence."""
    row, inside, p_rows = _find_rows(p_x, chunk, T, x_stride_t, True, C, REVERSE)
    mask = inside[:, None] if EVEN_N else inside[:, None] & m_n[None, :]
    b_x = tl.load(p_rows + o_x[None, :], mask=mask, other=0.0)
    return (b_x.to(tl.float32) * _scales(p_before, row, inside, pad, PADDED)).to(b_x.dtype)


@triton.jit
def load_turn(p_turns, o_p, P: tl.constexpr):
    """Load the factor over one chunk, or of the power of two that `p_turns` points at: cosine and sine part, [P, 1]."""
    return tl.load(p_turns + o_p)[:, None], tl.load(p_turns + P + o_p)[:, None]


@triton.jit
def turned(b_re, b_im, t_re, t_im):
    """Return a state one or more chunks later, without what these add."""
    return t_re * b_re - t_im * b_im, t_im * b_re + t_re * b_im


@triton.jit
def _turn_over(p_turns, o_p, chunks, P: tl.constexpr, POWERS: tl.constexpr):
    """Return the factor over so many chunks, below 2**POWERS: the product over their binary digits."""
    t_re, t_im = tl.full((P, 1), 1.0, tl.float32), tl.zeros((P, 1), tl.float32)
    for power in tl.range(0, POWERS):
        if (chunks >> power) & 1:
            f_re, f_im = load_turn(p_turns + power * 2 * P, o_p, P)
            t_re, t_im = turned(t_re, t_im, f_re, f_im)
    return t_re, t_im


@triton.jit(do_not_specialize=["T", "stretch", "back"])
def states_kernel(
    x_ptr, before_ptr, pad_ptr, write_ptr, turns_ptr, states_ptr, T, N, stretch, back,
    x_stride_b, x_stride_h, x_stride_t, before_stride_h,
    D: tl.constexpr, C: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, POWERS: tl.constexpr, REVERSE: tl.constexpr,
    PADDED: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the state [2, P, N] that each stretch adds: `states [F, stretches, 2, P, N]`.

    Stretches begin and end `back` chunks earlier than those of `mix_kernel`: tiles serve these.
    """
    i_s, i_h, i_n = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    o_p, o_t = tl.arange(0, P), tl.arange(0, C)
    o_n, m_n, o_x, p_x, p_before, pad = find_columns(
        x_ptr, before_ptr, pad_ptr, i_h, i_n, N, x_stride_b, x_stride_h, before_stride_h,
        D, BN, PADDED,
    )  # fmt: skip
    p_write = write_ptr + i_h * 2 * P * C + o_p[:, None] * C + o_t[None, :]
    b_w_re, b_w_im = tl.load(p_write), tl.load(p_write + P * C)
    t_re, t_im = load_turn(turns_ptr + i_h * POWERS * 2 * P, o_p, P)
    b_re, b_im = tl.zeros((P, BN), tl.float32), tl.zeros((P, BN), tl.float32)
    for step in tl.range(0, stretch, num_stages=STAGES):
        chunk = i_s * stretch + step - back
        b_u = load_chunk(p_x, p_before, pad, chunk, T, o_x, x_stride_t, m_n, C, REVERSE, PADDED, EVEN_N)
        b_re, b_im = turned(b_re, b_im, t_re, t_im)
        b_re = add_product(b_re, b_w_re, b_u, PRECISION)
        b_im = add_product(b_im, b_w_im, b_u, PRECISION)
    place = i_h * tl.num_programs(0) + i_s
    p_state = states_ptr + place * 2 * P * N + o_p[:, None] * N + o_n[None, :]
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
    ready = m_n & (at < stretches)
    p_state += at * 2 * P * N
    tl.store(p_state, b_re, mask=ready)
    tl.store(p_state + P * N, b_im, mask=ready)


@triton.jit(do_not_specialize=["stretches", "stretch"])
def scan_kernel(states_ptr, turns_ptr, N, stretches, stretch, P: tl.constexpr, BN: tl.constexpr, POWERS: tl.constexpr):
    """Turn what each stretch adds into the state at its end, in place: one program a head and block of columns.

    Four stretches at a time: a load may not pass the store before it, and would wait for it each time.
    """
    i_h, i_n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_p = tl.arange(0, P)
    o_n = i_n * BN + tl.arange(0, BN)
    m_n = (o_n < N)[None, :]
    p_state = states_ptr + i_h * stretches * 2 * P * N + o_p[:, None] * N + o_n[None, :]
    t_re, t_im = _turn_over(turns_ptr + i_h * POWERS * 2 * P, o_p, stretch, P, POWERS)
    d_re, d_im = tl.zeros((P, BN), tl.float32), tl.zeros((P, BN), tl.float32)
    for at in range(0, stretches, 4):
        a_re, a_im = _load_state(p_state, at, stretches, m_n, N, P)
        b_re, b_im = _load_state(p_state, at + 1, stretches, m_n, N, P)
        c_re, c_im = _load_state(p_state, at + 2, stretches, m_n, N, P)
        e_re, e_im = _load_state(p_state, at + 3, stretches, m_n, N, P)
        d_re, d_im = turned(d_re, d_im, t_re, t_im)
        a_re, a_im = a_re + d_re, a_im + d_im
        d_re, d_im = turned(a_re, a_im, t_re, t_im)
        b_re, b_im = b_re + d_re, b_im + d_im
        d_re, d_im = turned(b_re, b_im, t_re, t_im)
        c_re, c_im = c_re + d_re, c_im + d_im
        d_re, d_im = turned(c_re, c_im, t_re, t_im)
        d_re, d_im = e_re + d_re, e_im + d_im
        _store_state(p_state, at, stretches, m_n, N, a_re, a_im, P)
        _store_state(p_state, at + 1, stretches, m_n, N, b_re, b_im, P)
        _store_state(p_state, at + 2, stretches, m_n, N, c_re, c_im, P)
        _store_state(p_state, at + 3, stretches, m_n, N, d_re, d_im, P)


@triton.jit
def _store_chunk(
    p_out, p_after, pad, chunk, T, o_x, out_stride_t, m_n, b_o,
    C: tl.constexpr, REVERSE: tl.constexpr, PADDED: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    row, inside, p_rows = _find_rows(p_out, chunk, T, out_stride_t, False, C, REVERSE)
    mask = inside[:, None] if EVEN_N else inside[:, None] & m_n[None, :]
    b_o *= _scales(p_after, row, inside, pad, PADDED)
    tl.store(p_rows + o_x[None, :], b_o.to(p_out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "stretch"])
def mix_kernel(
    x_ptr, before_ptr, pad_ptr, after_ptr, near_ptr, write_ptr, read_ptr, turns_ptr, states_ptr, out_ptr,
    T, N, stretch, x_stride_b, x_stride_h, x_stride_t, out_stride_b, out_stride_h, out_stride_t,
    before_stride_h, after_stride_h,
    D: tl.constexpr, C: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, REACH: tl.constexpr,
    POWERS: tl.constexpr, REVERSE: tl.constexpr, PADDED: tl.constexpr, EVEN_N: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the rows of one stretch: tiles of g for the REACH nearest chunks, the state for what is further back."""
    i_s, i_h, i_n = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    o_p, o_t = tl.arange(0, P), tl.arange(0, C)
    o_n, m_n, o_x, p_x, p_before, pad = find_columns(
        x_ptr, before_ptr, pad_ptr, i_h, i_n, N, x_stride_b, x_stride_h, before_stride_h,
        D, BN, PADDED,
    )  # fmt: skip
    o_out = (o_n // D).to(tl.int64) * out_stride_b + o_n % D
    p_out, p_after = out_ptr + i_h * out_stride_h, after_ptr + i_h * after_stride_h
    p_turns = turns_ptr + i_h * POWERS * 2 * P
    p_state = states_ptr + i_h * (tl.num_programs(0) - 1) * 2 * P * N + o_p[:, None] * N + o_n[None, :]
    p_state += (i_s - 1) * 2 * P * N
    ready = m_n[None, :] & (i_s > 0)
    b_re, b_im = tl.load(p_state, mask=ready, other=0.0), tl.load(p_state + P * N, mask=ready, other=0.0)

    p_tile = near_ptr + i_h * REACH * C * C + o_t[:, None] * C + o_t[None, :]
    b_g0 = tl.load(p_tile)
    b_g1 = tl.load(p_tile + (REACH > 1) * C * C)
    b_g2 = tl.load(p_tile + (REACH > 2) * 2 * C * C)
    p_write = write_ptr + i_h * 2 * P * C + o_p[:, None] * C + o_t[None, :]
    b_w_re, b_w_im = tl.load(p_write), tl.load(p_write + P * C)
    p_read = read_ptr + i_h * 2 * P * C + o_t[:, None] * 2 * P + o_p[None, :]
    b_l_re, b_l_im = tl.load(p_read), tl.load(p_read + P)
    t_re, t_im = load_turn(p_turns, o_p, P)

    begin = i_s * stretch
    b_1 = load_chunk(p_x, p_before, pad, begin - 1, T, o_x, x_stride_t, m_n, C, REVERSE, PADDED, EVEN_N)
    b_2 = b_1
    if REACH > 2:
        b_2 = load_chunk(p_x, p_before, pad, begin - 2, T, o_x, x_stride_t, m_n, C, REVERSE, PADDED, EVEN_N)
    for step in tl.range(0, stretch, num_stages=STAGES):
        b_0 = load_chunk(p_x, p_before, pad, begin + step, T, o_x, x_stride_t, m_n, C, REVERSE, PADDED, EVEN_N)
        b_o = add_product(tl.zeros((C, BN), tl.float32), b_g0, b_0, PRECISION)
        if REACH > 1:
            b_o = add_product(b_o, b_g1, b_1, PRECISION)
        if REACH > 2:
            b_o = add_product(b_o, b_g2, b_2, PRECISION)
        b_o = add_product(b_o, b_l_re, b_re.to(b_l_re.dtype), PRECISION)
        b_o = add_product(b_o, b_l_im, b_im.to(b_l_im.dtype), PRECISION)
        _store_chunk(p_out, p_after, pad, begin + step, T, o_out, out_stride_t, m_n, b_o, C, REVERSE, PADDED, EVEN_N)
        # The chunk that the next one's tiles no longer reach.
        b_last = b_2 if REACH > 2 else (b_1 if REACH > 1 else b_0)
        b_re, b_im = turned(b_re, b_im, t_re, t_im)
        b_re = add_product(b_re, b_w_re, b_last, PRECISION)
        b_im = add_product(b_im, b_w_im, b_last, PRECISION)
        b_2 = b_1
        b_1 = b_0


WAVE = 396
"""Programs that run at once: three on each of the 132 multiprocessors of an H100 or H200. Programs beyond
them wait for a second wave, and fewer leave room unused (4K x 8, 6 heads: 768 programs 68 us, 384 52 us, 192 68 us)."""
SCAN_COLUMNS = 32
"""Columns of a program that adds states up: few, since it waits for memory and not for arithmetic."""


class LinearConfig(NamedTuple):
    """How the kernels are cut into programs.

    Attributes:
        stretch: chunks that a program walks.
        columns: of B x D that it computes, a power of two.
        warps: of `states_kernel` and of `mix_kernel`.
        stages: loads in flight, of each.
    """

    stretch: int
    columns: int
    warps: tuple[int, int] = (4, 4)
    stages: tuple[int, int] = (2, 2)


def choose_config(*, length: int, columns: int, heads: int, dtype: torch.dtype) -> LinearConfig:
    """Return the written rule: as many programs as run at once, or as little more as there are heads and columns.

    Shorter stretches than two chunks would read more for the chunks before them than for their own.
    """
    exact = dtype == torch.float32  # sums in registers, without matrix units
    block = min(16 if exact else 64, max(16, 1 << (columns - 1).bit_length()))
    stretch = _stretch(cdiv(length, CHUNK), heads * cdiv(columns, block))
    # Loads three chunks ahead: 5% sooner than two, and four are no better.
    warps, stages = (8, (2, 1)) if exact else (4, (3, 3))
    return LinearConfig(stretch, block, (4, warps), stages)


def _stretch(chunks: int, others: int) -> int:
    """Return the chunks of a program beside so many programs of `others`."""
    return max(2, cdiv(chunks, max(1, WAVE // others)))


def linear_matmul(
    x: Tensor, tables: LinearTables, before: Tensor, after: Tensor, *, transpose: bool,
    left_pad: Tensor | None = None, out: Tensor | None = None, config: LinearConfig | None = None,
    precision: str = "ieee",
) -> Tensor:  # fmt: skip
    """Compute `after[i] sum_j g(i - j) before[j] x[j]` over j <= i, with `transpose` over j >= i, head by head.

    Deterministic; neither memory beyond the T positions of x nor scalings beyond T are read.

    `x [B, H, T, D]` has unit stride in D and any others, in bfloat16, float16 or float32; `tables` are in x's dtype,
    `before` and `after` `[H, >=T]` in float32. `left_pad [B]`, contiguous, is the first real position of each sequence,
    from which scalings count; outputs before it are zero. `out`, `config` and `precision` are those of
    `toeplitz_matmul`.
    """
    assert (x.stride(3), tables.near.dtype, len(tables.near)) == (1, x.dtype, x.shape[1])
    assert tables.near.shape[1] <= 3, "a band must end within two chunks"
    batch, _, length, dim = x.shape
    heads, reach, rows, _ = tables.near.shape
    poles, powers, columns = tables.write.shape[1] // 2, tables.turns.shape[1], batch * dim
    if out is None:
        out = heads_like(x, heads)
    if not out.numel():
        return out
    config = config or choose_config(length=length, columns=columns, heads=heads, dtype=x.dtype)
    adding, mixing = linear_constants(
        config, rows=rows, reach=reach, poles=poles, powers=powers, dim=dim, columns=columns, reverse=transpose,
        padded=left_pad is not None, precision=precision,
    )  # fmt: skip
    blocks, stretches = cdiv(columns, config.columns), cdiv(cdiv(length, rows), config.stretch)
    states = before.new_empty(heads, max(1, stretches - 1), 2, poles, columns, dtype=torch.float32)
    pad = before if left_pad is None else left_pad  # never read then
    if stretches > 1:
        launch(
            states_kernel, (stretches - 1, heads, blocks), x, before, pad, tables.write, tables.turns, states,
            length, columns, config.stretch, reach - 1, *strides(x), before.stride(0), **adding, device=x.device,
        )  # fmt: skip
    if stretches > 2:
        _scan(states, tables.turns, stretches - 1, config.stretch)
    launch(
        mix_kernel, (stretches, heads, blocks), x, before, pad, after, *tables, states, out, length, columns,
        config.stretch, *strides(x, out), before.stride(0), after.stride(0), **mixing, device=x.device,
    )  # fmt: skip
    return out


def _scan(states: Tensor, turns: Tensor, stretches: int, stretch: int) -> None:
    """Turn what each stretch adds, `[F, stretches, 2, P, N]`, into the state at its end."""
    heads, _, _, poles, columns = states.shape
    launch(
        scan_kernel, (heads, cdiv(columns, SCAN_COLUMNS)), states, turns, columns, stretches, stretch,
        P=poles, BN=SCAN_COLUMNS, POWERS=turns.shape[1], num_warps=4, device=states.device,
    )  # fmt: skip


def linear_constants(
    config: LinearConfig, *, rows: int, reach: int, poles: int, powers: int, dim: int, columns: int, reverse: bool,
    padded: bool, precision: str,
) -> tuple[dict[str, Any], dict[str, Any]]:  # fmt: skip
    """Return the compile-time arguments of `states_kernel` and of `mix_kernel`."""
    both = {
        "D": dim, "C": rows, "P": poles, "BN": config.columns, "POWERS": powers, "REVERSE": reverse,
        "PADDED": padded, "EVEN_N": columns % config.columns == 0, "PRECISION": precision,
    }  # fmt: skip
    adding, mixing = (
        both | {"STAGES": stages, "num_warps": warps, "num_stages": stages}
        for warps, stages in zip(config.warps, config.stages, strict=True)
    )
    return adding, mixing | {"REACH": reach}


# --- the recurrent state

STEP_COLUMNS = 32
"""Columns of a program: a step of one sequence has few, and should fill many multiprocessors."""


@triton.jit(do_not_specialize=["T", "stretches"])
def fill_kernel(
    x_ptr, before_ptr, pad_ptr, write_ptr, turns_ptr, states_ptr, ring_ptr, sums_ptr, T, N, stretches,
    x_stride_b, x_stride_h, x_stride_t, before_stride_h,
    D: tl.constexpr, C: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, REACH: tl.constexpr, POWERS: tl.constexpr,
    PADDED: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the last REACH + 1 chunks of a prompt, and the sums of the last chunk and of the one before it.

    `states [F, stretches, 2, P, N]` end with the sum of the chunk before the last one.
    """
    i_h, i_n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_p, o_t = tl.arange(0, P), tl.arange(0, C)
    o_n, m_n, o_x, p_x, p_before, pad = find_columns(
        x_ptr, before_ptr, pad_ptr, i_h, i_n, N, x_stride_b, x_stride_h, before_stride_h,
        D, BN, PADDED,
    )  # fmt: skip
    place = (o_n // D).to(tl.int64) * tl.num_programs(0) + i_h
    p_ring = ring_ptr + place[None, :] * ((REACH + 1) * C * D) + o_t[:, None] * D + (o_n % D)[None, :]
    p_sums = sums_ptr + place[None, :] * (4 * P * D) + o_p[:, None] * D + (o_n % D)[None, :]
    p_state = states_ptr + (i_h * stretches + stretches - 1) * 2 * P * N + o_p[:, None] * N + o_n[None, :]
    ready = m_n[None, :] & (stretches > 0)
    b_re, b_im = tl.load(p_state, mask=ready, other=0.0), tl.load(p_state + P * N, mask=ready, other=0.0)
    last = (T - 1) // C
    p_earlier, p_last = p_sums + ((last + 1) % 2) * 2 * P * D, p_sums + (last % 2) * 2 * P * D
    tl.store(p_earlier, b_re, mask=m_n[None, :])
    tl.store(p_earlier + P * D, b_im, mask=m_n[None, :])

    b_u = load_chunk(p_x, p_before, pad, last - REACH, T, o_x, x_stride_t, m_n, C, False, PADDED, EVEN_N)
    p_write = write_ptr + i_h * 2 * P * C + o_p[:, None] * C + o_t[None, :]
    b_re, b_im = turned(b_re, b_im, *load_turn(turns_ptr + i_h * POWERS * 2 * P, o_p, P))
    tl.store(p_last, add_product(b_re, tl.load(p_write), b_u, PRECISION), mask=m_n[None, :])
    tl.store(p_last + P * D, add_product(b_im, tl.load(p_write + P * C), b_u, PRECISION), mask=m_n[None, :])
    for back in tl.static_range(0, REACH + 1):
        b_u = load_chunk(p_x, p_before, pad, last - back, T, o_x, x_stride_t, m_n, C, False, PADDED, EVEN_N)
        slot = (last - back + REACH + 1) % (REACH + 1)
        tl.store(p_ring + slot * C * D, b_u, mask=m_n[None, :])


@triton.jit(do_not_specialize=["rows", "place"])
def step_kernel(
    x_ptr, before_ptr, pad_ptr, after_ptr, near_ptr, write_ptr, read_ptr, turns_ptr, first_ptr, ring_ptr,
    sums_ptr, out_ptr, rows, place, N, x_stride_b, x_stride_h, x_stride_t, out_stride_b, out_stride_h, out_stride_t,
    before_stride_h, after_stride_h,
    D: tl.constexpr, C: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, REACH: tl.constexpr, POWERS: tl.constexpr,
    PADDED: tl.constexpr, ON_DEVICE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute some rows one after another, from position `place` or `first_ptr` on, and write each into the state."""
    i_h, i_n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_p, o_t = tl.arange(0, P), tl.arange(0, C)
    o_n = i_n * BN + tl.arange(0, BN)
    m_n = o_n < N
    o_seq, o_d = (o_n // D).to(tl.int64), o_n % D
    p_x = x_ptr + i_h * x_stride_h + o_seq * x_stride_b + o_d
    p_out = out_ptr + i_h * out_stride_h + o_seq * out_stride_b + o_d
    p_before, p_after = before_ptr + i_h * before_stride_h, after_ptr + i_h * after_stride_h
    pad = load_padding(pad_ptr, o_n, m_n, D, PADDED)
    p_ring = ring_ptr + (o_seq * tl.num_programs(0) + i_h) * ((REACH + 1) * C * D) + o_d
    p_tile = p_ring[None, :] + o_t[:, None] * D
    p_sums = sums_ptr + ((o_seq * tl.num_programs(0) + i_h) * (4 * P * D) + o_d)[None, :] + o_p[:, None] * D
    m_p = m_n[None, :]
    first = tl.load(first_ptr).to(tl.int32) if ON_DEVICE else place
    for row in range(0, rows):
        chunk, t = (first + row) // C, (first + row) % C
        p_now, p_earlier = p_sums + (chunk % 2) * 2 * P * D, p_sums + ((chunk + 1) % 2) * 2 * P * D
        if t == 0:  # the chunk that tiles no longer reach
            b_u = tl.load(p_tile + ((chunk + 1) % (REACH + 1)) * C * D, mask=m_p, other=0.0)
            b_re, b_im = tl.load(p_earlier, mask=m_p, other=0.0), tl.load(p_earlier + P * D, mask=m_p, other=0.0)
            b_re, b_im = turned(b_re, b_im, *load_turn(turns_ptr + i_h * POWERS * 2 * P, o_p, P))
            p_write = write_ptr + i_h * 2 * P * C + o_p[:, None] * C + o_t[None, :]
            tl.store(p_now, add_product(b_re, tl.load(p_write), b_u, PRECISION), mask=m_p)
            tl.store(p_now + P * D, add_product(b_im, tl.load(p_write + P * C), b_u, PRECISION), mask=m_p)
        own = first + row - pad
        real = m_n & (own >= 0)
        b_x = tl.load(p_x + row * x_stride_t, mask=m_n, other=0.0)
        b_u = b_x.to(tl.float32) * tl.load(p_before + own, mask=real, other=0.0)
        tl.store(p_ring + ((chunk % (REACH + 1)) * C + t) * D, b_u.to(b_x.dtype), mask=m_n)
        tl.debug_barrier()  # what the program stored, other threads of it read
        p_read = read_ptr + i_h * 2 * P * C + t * 2 * P + o_p
        l_re, l_im = tl.load(p_read).to(tl.float32), tl.load(p_read + P).to(tl.float32)
        b_re, b_im = tl.load(p_now, mask=m_p, other=0.0), tl.load(p_now + P * D, mask=m_p, other=0.0)
        b_o = tl.sum(l_re[:, None] * b_re + l_im[:, None] * b_im, 0)
        for back in tl.static_range(0, REACH):
            b_g = tl.load(near_ptr + (i_h * REACH + back) * C * C + t * C + o_t).to(tl.float32)
            slot = (chunk + REACH + 1 - back) % (REACH + 1)
            b_u = tl.load(p_tile + slot * C * D, mask=m_p, other=0.0)
            b_o += tl.sum(b_g[:, None] * b_u.to(tl.float32), 0)
        b_o *= tl.load(p_after + own, mask=real, other=0.0)
        tl.store(p_out + row * out_stride_t, b_o.to(out_ptr.dtype.element_ty), mask=m_n)
        tl.debug_barrier()


def fill(
    x: Tensor, tables: LinearTables, before: Tensor, left_pad: Tensor | None, ring: Tensor,
    sums: Tensor, *, precision: str,
) -> None:  # fmt: skip
    """Fill `ring [B, F, N + 1, C, D]` and `sums [B, F, 2, 2P, D]`, contiguous, after values `x [B, H, T, D]`."""
    batch, _, length, dim = x.shape
    heads, reach, rows, _ = tables.near.shape
    poles, powers, columns = tables.write.shape[1] // 2, tables.turns.shape[1], batch * dim
    common = {
        "D": dim, "C": rows, "P": poles, "BN": STEP_COLUMNS, "POWERS": powers,
        "PADDED": left_pad is not None, "EVEN_N": columns % STEP_COLUMNS == 0, "PRECISION": precision,
        "num_warps": 4, "device": x.device,
    }  # fmt: skip
    pad = before if left_pad is None else left_pad  # never read then
    blocks = cdiv(columns, STEP_COLUMNS)
    chunks = max(0, (length - 1) // rows - reach)  # those that the sum of the chunk before the last one holds
    stretch = _stretch(chunks, heads * blocks)
    stretches = cdiv(chunks, stretch)
    states = before.new_empty(heads, max(1, stretches), 2, poles, columns)
    operands = x, before, pad, tables.write, tables.turns, states
    if stretches:
        launch(
            states_kernel, (stretches, heads, blocks), *operands, length, columns, stretch,
            stretches * stretch - chunks, *strides(x), before.stride(0), **common,
            REVERSE=False, STAGES=2, num_stages=2,
        )  # fmt: skip
    if stretches > 1:
        _scan(states, tables.turns, stretches, stretch)
    launch(
        fill_kernel, (heads, blocks), *operands, ring, sums, length, columns, stretches, *strides(x),
        before.stride(0), **common, REACH=reach,
    )  # fmt: skip


def step(
    x: Tensor, tables: LinearTables, before: Tensor, after: Tensor, left_pad: Tensor | None,
    first: Tensor | int, ring: Tensor, sums: Tensor, out: Tensor, *, precision: str,
) -> None:  # fmt: skip
    """Write the rows of values `x [B, H, rows, D]`, which stand from position `first` on, into `out` and the state."""
    batch, _, rows, dim = x.shape
    heads, reach, chunk, _ = tables.near.shape
    columns, on_device = batch * dim, isinstance(first, Tensor)
    pad = before if left_pad is None else left_pad  # never read then
    launch(
        step_kernel, (heads, cdiv(columns, STEP_COLUMNS)), x, before, pad, after, *tables,
        first if on_device else before, ring, sums, out, rows, 0 if on_device else first, columns, *strides(x, out),
        before.stride(0), after.stride(0),
        D=dim, C=chunk, P=tables.write.shape[1] // 2, BN=STEP_COLUMNS, REACH=reach, POWERS=tables.turns.shape[1],
        PADDED=left_pad is not None, ON_DEVICE=on_device, PRECISION=precision, num_warps=4,
        device=x.device,
    )  # fmt: skip
