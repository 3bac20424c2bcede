"""The arms of a benchmark, which of them are compared, and what an arm runs where nothing is asked for."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from saf.ops.backends import BACKENDS

Role = Literal["control", "kernel", "keeping", "apart", "frozen", "free", "pruned"]
FREE = "free"
"""The backend whose frozen heads cost nothing."""
PRUNED = "pruned"
"""In the place of a backend: the heads are gone, values and output columns included."""
FLEX = "flex"
"""The kernel of ordinary attention that is PyTorch's flex attention."""


@dataclass(frozen=True)
class Arm:
    """Describe one way to run a model or a layer: the kernel of live heads, and what frozen heads run on."""

    kernel: str
    backend: str | None = None
    rate: float = 0.0
    control: bool = False
    """A second, independent ordinary model."""
    keeping: bool = False
    """An ordinary model that keeps every activation where the other arms compute them again."""
    apart: bool = False
    """An ordinary model of each process by itself, which sends nothing where the other arms' processes share one."""

    @property
    def name(self) -> str:
        """Return a short label."""
        if self.backend is None:
            more = " keeping" * self.keeping + " apart" * self.apart
            return f"{'control' if self.control else 'ordinary'}{more} {self.kernel}"
        return f"{100 * self.rate:g}% {self.backend} {self.kernel}"

    @property
    def live_kernel(self) -> str:
        """Return the kernel to ask for where heads are frozen: none for a backend that computes live heads itself."""
        backend = BACKENDS.get(str(self.backend))
        return "auto" if backend is not None and backend.mixes_live else self.kernel

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Comparison:
    """Pair an arm with the ordinary arm that its times are divided into."""

    baseline: Arm
    arm: Arm
    role: Role


def plan(
    *,
    kernels: Sequence[str],
    others: Sequence[str],
    backends: Sequence[str],
    rates: Sequence[float],
    free: bool,
    pruned: bool = False,
) -> list[Comparison]:
    """Return what to compare, controls first.

    Every kernel has an ordinary baseline, a control and its frozen arms, with `pruned` one without these heads too;
    ordinary arms of the kernels after the first, and of `others`, are compared with the first one.
    """
    comparisons = [Comparison(Arm(kernel), Arm(kernel, control=True), "control") for kernel in dict.fromkeys(kernels)]
    first = Arm(kernels[0])
    rest = [kernel for kernel in dict.fromkeys([*kernels, *others]) if kernel != first.kernel]
    comparisons += [Comparison(first, Arm(kernel), "kernel") for kernel in rest]
    for kernel in dict.fromkeys(kernels):
        for rate in rates:
            ways: list[tuple[str, Role]] = [(backend, "frozen") for backend in backends]
            if free:
                ways.append((FREE, "free"))
            if pruned:
                ways.append((PRUNED, "pruned"))
            comparisons += [Comparison(Arm(kernel), Arm(kernel, way, rate), role) for way, role in ways]
    return comparisons


def arms_of(comparisons: Sequence[Comparison]) -> list[Arm]:
    """Return every arm once, in the order of first use."""
    return list(dict.fromkeys(arm for comparison in comparisons for arm in (comparison.baseline, comparison.arm)))


def default_backends(backends: Sequence[str], device_type: str) -> tuple[str, ...]:
    """Return the backends asked for; by default Toeplitz products and, on CUDA, the paper's execution beside them."""
    return tuple(backends) or (("toeplitz", "fused") if device_type == "cuda" else ("toeplitz",))


def default_others(others: Sequence[str] | None, device_type: str, *, compiled: bool) -> tuple[str, ...]:
    """Return the other kernels asked for; by default what PyTorch has on CUDA (flex if compiled), none elsewhere."""
    if others is not None:
        return tuple(others)
    return ("auto", "flash", *([FLEX] if compiled else [])) if device_type == "cuda" else ()


def default_kernels(kernels: Sequence[str], device_type: str) -> tuple[str, ...]:
    """Return the kernels asked for; by default cuDNN on CUDA and PyTorch's own choice elsewhere."""
    return tuple(kernels) or (("cudnn",) if device_type == "cuda" else ("auto",))
