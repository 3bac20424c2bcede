"""FlashAttention kernels beyond PyTorch's own, from packages that users may have; PyTorch holds one at a time."""

from importlib.util import find_spec
from typing import NamedTuple

from torch.nn import attention


class Package(NamedTuple):
    """Where a flash kernel comes from: PyTorch's name for it, the module that provides it, how to get it."""

    implementation: str
    module: str
    install: str


FLASH_PACKAGES = {
    "fa3": Package("FA3", "flash_attn_interface", "FlashAttention-3, built from hopper/ of Dao-AILab/flash-attention"),
    "fa4": Package("FA4", "flash_attn.cute.interface", "FlashAttention-4: pip install flash-attn-4"),
}
_settled: dict[str, str] = {}


def obstacle(kernel: str, device: str) -> str | None:
    """Return why a kernel of `FLASH_PACKAGES` cannot run on a type of device; None when nothing speaks against it."""
    package = FLASH_PACKAGES[kernel]
    if device != "cuda":
        return f"it needs CUDA tensors, these are on {device}"
    try:
        found = find_spec(package.module)
    except ImportError:  # a parent package is missing or broken
        found = None
    return None if found else f"the module {package.module} cannot be found ({package.install})"


def settle_flash(kernel: str, device: str) -> str | None:
    """Make SDPA's flash kernel the one named, "flash" for PyTorch's own; return the reason when that cannot be.

    PyTorch replaces its flash kernel for the whole process, calls compiled earlier included. So the first name used in
    a process stays: another one is refused rather than measured, or run, under a wrong name.
    """
    if kernel in FLASH_PACKAGES and (reason := obstacle(kernel, device)):
        return reason
    wanted = FLASH_PACKAGES[kernel].implementation if kernel in FLASH_PACKAGES else None
    active = attention.current_flash_attention_impl()
    if active == wanted and _settled.setdefault("kernel", kernel) == kernel:
        return None
    if active is not None or "kernel" in _settled:
        first = _settled.get("kernel", active)
        return f"this process already uses {first!r} for flash attention and PyTorch holds one; use another process"
    try:
        attention.activate_flash_attention_impl(str(wanted))
    except Exception as error:  # whatever a package raises while it is imported
        return f"{type(error).__name__} while activating {wanted}: {error}"
    _settled["kernel"] = kernel
    return None


# What torch.compiler.assume_constant_result sets: compiled code decides while it is traced. Asking for the decorator
# would load the compiler with the package.
settle_flash._dynamo_marked_constant = True  # type: ignore[attr-defined]
