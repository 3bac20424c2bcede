"""The seam's sweep with the kernels in place, small enough for the interpreter: both backends, every hard pattern."""

from functools import cache

import torch

from tests.ops.hard_patterns import NAMES
from tests.ops.layer_case import Case
from tests.ops.layer_outcome import run as run_layer
from tests.ops.properties import Frozen, problems

HALF, FULL = torch.float16, torch.float32
HARD = {"heads": len(NAMES), "frozen": tuple(range(len(NAMES))), "patterns": NAMES}
LAYERS = [
    Case(length=1, dim=16, batch=1, dtype=HALF, frozen=(0,)),
    Case(length=63, dim=60, dtype=FULL, frozen=(3,), layout="contiguous", extra=0),
    Case(length=64, dim=16, batch=8, dtype=HALF, frozen=(0, 1, 2, 3), layout="channels"),
    Case(length=70, dim=80, batch=1, dtype=FULL, heads=4, group=2, frozen=(0, 2)),
    Case(length=70, dim=192, batch=1, dtype=HALF, heads=2, frozen=(0,)),
    Case(length=40, dim=16, dtype=FULL, heads=8, group=4, frozen=(0, 1, 4)),
    Case(length=129, dim=16, batch=1, dtype=FULL, **HARD),
    Case(length=129, dim=16, batch=1, dtype=HALF, **HARD),
]
FUSED = [
    Case(length=1, dim=16, dtype=FULL, frozen=(0, 1), backend="fused"),
    Case(
        length=40, dim=60, batch=1, dtype=FULL, heads=4, group=2, frozen=(0, 1, 2), layout="channels", backend="fused"
    ),
    Case(length=40, dim=16, batch=1, dtype=FULL, group=4, frozen=(1,), layout="contiguous", backend="fused"),
    Case(length=70, dim=16, batch=1, dtype=FULL, **HARD, backend="fused"),
    Case(length=129, batch=1, dtype=FULL, heads=3, frozen=(1,), backend="fused"),
    Case(length=66, dim=16, batch=1, dtype=FULL, heads=3, frozen=(0, 1), dense=True, backend="fused"),
    Case(length=66, dim=16, batch=1, dtype=HALF, heads=3, frozen=(0, 1), dense=True, backend="fused"),
    # Not bfloat16: the interpreter truncates to it where devices round, so that its errors are no measure of theirs.
    Case(length=129, batch=1, dtype=HALF, heads=3, frozen=(1,), backend="fused"),
]
CASES: dict[str, Case | tuple] = {case.name: case for case in LAYERS + FUSED} | {
    "properties-toeplitz": (70, 16, FULL, "toeplitz"),
    "properties-fused": (37, 16, FULL, "fused"),
}


def run(case: Case | tuple, device: str) -> dict:
    """Return what breaks a budget, a bound or a property, and whether the kernels ran."""
    launched = _kernels_in_place(device)
    found = run_layer(case, device).problems() if isinstance(case, Case) else problems(Frozen(*case, device))
    return {"problems": found, "launched": launched}


def _kernels_in_place(device: str) -> list[str]:
    """Let the interpreter stand in for a device; the list returned names every kernel launched from then on."""
    import saf.ops.backends.fused
    import saf.ops.toeplitz.operator
    from saf.ops import launch
    from saf.ops.fused import launch as fused_backward

    if device == "cpu":
        saf.ops.backends.fused.fused_obstacle = lambda device, dtype: None
        saf.ops.toeplitz.operator.uses_triton = lambda device, dtype: dtype in (HALF, FULL)
    names: list[str] = []

    def noting(kernel, *arguments, **constants) -> None:
        names.append(kernel.fn.__name__)
        launch.launch(kernel, *arguments, **constants)

    prepared = _prepared()

    def noting_prepared(self, *tensors, **descriptors) -> None:
        names.append(self._kernel.fn.__name__)
        prepared(self, *tensors, **descriptors)

    fused_backward.launch = noting
    launch.PreparedLaunch.__call__ = noting_prepared
    return names


@cache
def _prepared():
    """Return what calls a prepared launch, as it was before any case put something else in its place."""
    from saf.ops.launch import PreparedLaunch

    return PreparedLaunch.__call__
