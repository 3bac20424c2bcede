"""Layers with kernels in place, small enough for the interpreter: every hard pattern, kind of head, and few tokens."""

import dataclasses

import torch

from saf.ops import FrozenHeads, mixed_attention
from saf.patterns import CompactPattern
from tests.ops.hard_patterns import NAMES
from tests.ops.layers import Case
from tests.ops.layers import run as run_layer
from tests.ops.properties import Frozen, problems

HALF, FULL = torch.float16, torch.float32
HARD = {"heads": len(NAMES), "frozen": tuple(range(len(NAMES))), "patterns": NAMES}
LAYERS = [
    Case(length=1, dim=16, batch=1, dtype=HALF, frozen=(0,)),
    Case(length=70, dim=80, batch=1, dtype=FULL, heads=4, group=2, frozen=(0, 2)),
    Case(length=40, dim=16, dtype=FULL, heads=8, group=4, frozen=(0, 1, 4), memory="channels"),
    Case(length=129, dim=16, batch=1, dtype=FULL, **HARD),
]
FUSED = [
    Case(length=129, batch=1, dtype=FULL, heads=3, frozen=(1,)),
    Case(length=1, dim=16, dtype=FULL, frozen=(0, 1)),
    Case(length=40, dim=60, batch=1, dtype=FULL, heads=4, group=2, frozen=(0, 1, 2), memory="channels", dense=1),
    Case(length=66, dim=16, batch=1, dtype=FULL, heads=8, group=4, frozen=(0, 1, 2, 3, 6), dense=1),
    Case(length=70, dim=16, batch=1, dtype=FULL, **HARD),
    Case(length=66, dim=16, batch=1, dtype=FULL, heads=5, frozen=(0, 2, 4), dense=2),
    Case(length=65, dim=128, batch=1, dtype=FULL, heads=2, frozen=(1,), memory="contiguous"),
    # Not bfloat16: the interpreter truncates to it where devices round, so that its errors are no measure of theirs.
    Case(length=70, dim=16, batch=1, dtype=HALF, heads=3, frozen=(0, 1), dense=1),
    Case(length=130, batch=1, dtype=HALF, heads=2, frozen=(1,)),
    Case(length=66, dim=16, batch=1, dtype=HALF, group=4, frozen=(1,)),
]
FUSED = [dataclasses.replace(case, backend="fused") for case in FUSED]
CASES: dict[str, Case | tuple] = {case.name: case for case in LAYERS + FUSED} | {
    "few tokens": (0, 1, 2, 3),
    "few tokens, grouped": (0, 0, 1, 1),
    "properties-fused": (20, 16, FULL, "fused"),
}


def run(case: Case | tuple, device: str) -> list[str]:
    """Return what breaks a budget, a bound or a property, and which kernels ran in the place of the backend's own."""
    _kernels_in_place(device)
    if isinstance(case, tuple) and isinstance(case[-1], int):
        return few_tokens(case, device)
    backend = case.backend if isinstance(case, Case) else case[3]
    wrong = run_layer(case, device).problems() if isinstance(case, Case) else problems(Frozen(*case, device))
    launched = set(LAUNCHED)
    own = {"fused_forward_kernel", "key_block_kernel"}
    if backend == "fused":
        right = own <= launched and not any(name.startswith("toeplitz") for name in launched)
    else:
        right = "toeplitz_kernel" in launched and not launched & own
    return wrong + ([] if right else [f"launched {sorted(launched)}"])


def few_tokens(kv_head: tuple[int, ...], device: str) -> list[str]:
    """Mix few tokens in the one launch of backend `toeplitz`: at most twice as far off as dense patterns and SDPA."""
    import saf.ops.fused as fused

    fused.serves_few = lambda device, dtype: True
    generator = torch.Generator().manual_seed(0)
    pattern = CompactPattern.from_parameters(*torch.randn(2, 2, 160, generator=generator, dtype=torch.float64))
    counts = (2, len(set(kv_head[:2])), max(kv_head) + 1)
    inputs = [torch.randn(2, 150, count, 16, generator=generator).half().transpose(1, 2) for count in counts]
    actual = []
    for backend, dtype in (("toeplitz", HALF), ("reference", HALF), ("reference", torch.float64)):
        frozen = FrozenHeads.from_patterns(pattern, backend=backend, dtype=dtype, device=device, kv_head=kv_head)
        with torch.no_grad():
            actual.append(mixed_attention(*(x.to(device, dtype) for x in inputs), frozen).double())
    exact = actual[-1]
    error, sdpa, rounding = ((x - exact).norm() / exact.norm() for x in (*actual[:2], exact.half().double()))
    right = LAUNCHED == ["fused_forward_kernel"] and error <= 2 * sdpa + rounding
    return [] if right else [f"launched {LAUNCHED}, error {error:.2e}, {sdpa:.2e} by SDPA"]


LAUNCHED: list[str] = []
"""Every kernel launched in a case."""


def _kernels_in_place(device: str) -> None:
    """Let the interpreter stand in for a device, and note every kernel launched from then on."""
    from saf.ops import fused_kernels as fused
    from saf.ops import launch
    from saf.ops import toeplitz as op
    from saf.ops import toeplitz_kernels as kernels
    from saf.ops.fused import Fused

    if device == "cpu":
        Fused.unsupported_reason = lambda self, device, dtype: None  # type: ignore[method-assign]
        op.uses_triton = lambda device, dtype: dtype in (HALF, FULL)
    LAUNCHED.clear()

    def noting(kernel, *arguments, **constants) -> None:
        LAUNCHED.append(kernel.fn.__name__)
        launch.launch(kernel, *arguments, **constants)

    kernels.launch = fused.launch = noting
