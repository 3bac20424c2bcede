"""Cases of the fused kernels and the float64 answer, forward and gradients, they are held against."""

import dataclasses
import math

import torch

LIVE, COMPACT, DENSE = 0, 1, 2
FROZEN = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 4.5e-3}
"""Largest relative error where no head is live."""
LOG_SUMS = 1e-6
"""Largest relative error of log-sum-exps, float32 in every dtype of operands."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One layer: a state a head, the value head each head reads, and the shape."""

    states: tuple[int, ...] = (LIVE, COMPACT, LIVE, COMPACT)
    groups: int = 1
    batch: int = 2
    length: int = 129
    dim: int = 64
    extra: int = 63
    dtype: str = "float32"
    dense_dtype: str = "float32"
    blocks: tuple[int, int] | None = (64, 32)
    spread: float = 0.0
    """Standard deviation of key and distance logits; 0 for smooth ones."""


CASES = {
    "paper-T129-D64": Case(batch=1),
    "T1": Case(length=1, dim=16, extra=0),
    "D60": Case(states=(LIVE, COMPACT), length=70, dim=60, batch=1),
    "D128": Case(states=(LIVE, COMPACT), length=65, dim=128, batch=1),
    "all-live": Case(states=(LIVE,) * 2, length=66, dim=16),
    "all-compact": Case(states=(COMPACT,) * 3, length=66, dim=16),
    "three-kinds": Case(states=(DENSE, LIVE, COMPACT, LIVE, DENSE), length=66, dim=16, batch=1),
    "dense-half": Case(states=(DENSE, LIVE), length=66, dim=16, dense_dtype="float16"),
    "grouped": Case(states=(LIVE, COMPACT, LIVE, DENSE, COMPACT, COMPACT), groups=2, length=66, dim=16, batch=1),
    "tall-m": Case(states=(LIVE, COMPACT), length=130, dim=16, blocks=(64, 16), batch=1),
    "wide-n": Case(states=(LIVE, COMPACT), length=130, dim=16, blocks=(16, 64), batch=1),
    "spread-8": Case(states=(COMPACT,) * 3, length=66, dim=16, spread=8.0),
    "spread-8-half": Case(states=(COMPACT,) * 3, length=66, dim=16, spread=8.0, dtype="float16"),
    "half": Case(states=(LIVE, COMPACT), length=66, dim=64, dtype="float16", batch=1),
    "default": Case(states=(LIVE, COMPACT), length=66, dim=32, blocks=None, batch=1),
    "bfloat-default": Case(dtype="bfloat16", blocks=None),
    "half-default-D128": Case(dtype="float16", dim=128, blocks=None, batch=1),
}


def run(case: Case, device: str) -> list[str] | None:
    """Return which tensors are further from float64 than twice SDPA beside dense patterns, and one rounding."""
    from saf.ops.fused.kernels import Blocks, FusedConfig, fused_backward, fused_forward
    from saf.ops.fused.tables import FusedPatterns, HeadMaps

    if device == "cpu" and (case.dtype == "bfloat16" or (case.blocks is None and case.dtype == "float16")):
        return None  # too large for the interpreter, whose products of bfloat16 are wrong too
    generator = torch.Generator().manual_seed(0)
    live = [head for head, state in enumerate(case.states) if state == LIVE]
    value_slot = [head // case.groups for head in range(len(case.states))]
    key_heads = sorted({value_slot[head] for head in live})
    key_slot = [key_heads.index(slot) if slot in key_heads else 0 for slot in value_slot]
    num_value_heads = value_slot[-1] + 1
    query = _operand(case, len(live), generator, device)
    key = _operand(case, len(key_heads), generator, device)
    value = _operand(case, num_value_heads, generator, device)
    grad = _operand(case, len(case.states), generator, device)
    stored = case.length + case.extra
    compact = case.states.count(COMPACT)
    alpha = torch.randn(compact, stored, generator=generator, dtype=torch.float64) * 0.5
    rho = -torch.rand(compact, 1, generator=generator).double() * torch.arange(stored).double().log1p()
    if case.spread:
        alpha, rho = torch.randn(2, compact, stored, generator=generator, dtype=torch.float64) * case.spread
    log_z = _log_z(alpha, rho)
    dense = torch.rand(case.states.count(DENSE), stored, stored, generator=generator, dtype=torch.float64).tril()
    dense = (dense / dense.sum(-1, keepdim=True)).to(getattr(torch, case.dense_dtype))
    maps = HeadMaps.build(case.states, key=key_slot, value=value_slot, num_value_heads=num_value_heads, device=device)
    patterns = FusedPatterns.build(alpha.to(device), rho.to(device), log_z.to(device), dense.to(device))
    for table in (patterns.alpha, patterns.log_z):
        table[:, case.length :] = float("nan")
    config = None
    if case.blocks:
        blocks = Blocks(*case.blocks, num_warps=4, num_stages=1)
        config = FusedConfig(forward=blocks, keys=blocks, queries=blocks)
    out, lse = fused_forward(query, key, value, maps, patterns, config=config)
    got = fused_backward(grad, query, key, value, out, lse, maps, patterns, config=config)
    answer = (case, query, key, value, grad, alpha, rho, log_z, dense, key_slot, value_slot)
    want, beside = _answer(*answer, torch.float64, "cpu"), _answer(*answer, value.dtype, device)
    names = ("out", "lse", "dq", "dk", "dv")
    results = zip(names, (out, lse, *got), beside, want, strict=True)
    wrong = [line for each in results if (line := _broken(case, *each))]
    if device == "cuda":
        again = fused_backward(grad, query, key, value, out, lse, maps, patterns, config=config)
        wrong += ["a repetition differs"] * (not all(torch.equal(a, b) for a, b in zip(got, again, strict=True)))
    return wrong


def _broken(case: Case, name: str, found: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> str:
    """Return how far a tensor is off where that is too far, else nothing."""
    limit = 2 * _error(theirs, exact) + _error(exact.to(getattr(torch, case.dtype)), exact)
    if LIVE not in case.states:
        limit = FROZEN[case.dtype]
    elif name == "lse":
        limit = LOG_SUMS
    elif case.length == 1 and name in ("dq", "dk"):  # zero: the difference of two equal sums over channels
        limit += case.dim * 2**-24
    error = _error(found, exact)
    return "" if error <= limit else f"{name} {error:.2e} > {limit:.2e}"


def _operand(case: Case, heads: int, generator: torch.Generator, device: str) -> torch.Tensor:
    """A random [B, heads, T, D] view inside NaN-filled memory."""
    shape = (case.batch, case.length + 3, heads + 1, case.dim + 4)
    buffer = torch.full(shape, float("nan"), dtype=getattr(torch, case.dtype), device=device)
    view = buffer[:, : case.length, :heads, : case.dim].transpose(1, 2)
    view.copy_(torch.randn(case.batch, heads, case.length, case.dim, generator=generator))
    return view


def _distances(length: int) -> torch.Tensor:
    """[T, T] query position minus key position."""
    i = torch.arange(length)
    return i[:, None] - i[None, :]


def _logits(alpha: torch.Tensor, rho: torch.Tensor) -> torch.Tensor:
    """[F, T, T] alpha(j) + rho(i - j), minus infinity at future keys."""
    distance = _distances(alpha.shape[-1])
    logits = alpha[:, None, :] + rho[:, distance.clamp(min=0)]
    return torch.where(distance >= 0, logits, -math.inf)


def _log_z(alpha: torch.Tensor, rho: torch.Tensor) -> torch.Tensor:
    """[F, T] row normalisers."""
    return _logits(alpha, rho).logsumexp(-1)


def _answer(case, query, key, value, grad, alpha, rho, log_z, dense, key_slot, value_slot, dtype, device):
    """Output, log-sum-exps and gradients by automatic differentiation: in float64 written out, else with SDPA."""
    length = case.length
    operands = (tensor.detach().to(device, dtype) for tensor in (query, key, value))
    query, key, value = (tensor.clone(memory_format=torch.contiguous_format).requires_grad_() for tensor in operands)
    compact = (_logits(alpha, rho) - log_z[..., None]).exp()[:, :length, :length].to(device, dtype)
    stored = dense[:, :length, :length].to(device, dtype)
    future = (_distances(length) < 0).to(device)
    outputs, sums, seen = [], [], [0, 0, 0]
    for head, state in enumerate(case.states):
        slot = seen[state]
        seen[state] += 1
        own_value = value[:, value_slot[head]]
        if state == LIVE:
            own_query, own_key = query[:, slot], key[:, key_slot[head]]
            scores = own_query.double() @ own_key.double().mT * case.dim**-0.5
            scores = scores.masked_fill(future, -math.inf)
            sums.append(scores.detach().logsumexp(-1))
            if dtype == torch.float64:
                outputs.append(scores.softmax(-1) @ own_value)
            else:
                one = (x[:, None] for x in (own_query, own_key, own_value))
                outputs.append(torch.nn.functional.scaled_dot_product_attention(*one, is_causal=True)[:, 0])
        else:
            outputs.append((compact if state == COMPACT else stored)[slot] @ own_value)
    out = torch.stack(outputs, 1)
    upstream = grad.to(device, dtype)
    gradients = torch.autograd.grad(out, (query, key, value), upstream, allow_unused=True)
    lse = torch.stack(sums, 1) if sums else torch.zeros(case.batch, 0, length)
    filled = [g if g is not None else torch.zeros_like(x) for g, x in zip(gradients, (query, key, value), strict=True)]
    return out.detach(), lse.detach(), *filled


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2 error, absolute where the answer is near zero; 1e30 for NaN, zero for nothing."""
    if want.numel() == 0:
        return 0.0 if got.numel() == 0 else 1e30
    want = want.cpu().double()
    error = ((got.cpu().double() - want).norm() / want.norm().clamp(min=1)).item()
    return error if error == error else 1e30
