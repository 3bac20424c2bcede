"""`saf doctor`: installed packages, this machine, and the backend that frozen heads would run on."""

import platform
from dataclasses import dataclass
from typing import Any

import torch

from saf.cli.output import show
from saf.hf.families import FAMILIES
from saf.machine import compilers, devices, package_version
from saf.ops import explain
from saf.ops.live import FLASH_PACKAGES, KERNELS, unsupported_reason
from saf.records.table import Table

REQUIRED = ("torch", "numpy", "safetensors", "scipy", "tokenizers", "tyro", "rich", "tensorboard")
OPTIONAL = {
    "triton": ("the CUDA kernels", "triton"),
    "transformers": ("Hugging Face models", "hf"),
    "accelerate": ("the Trainer of transformers", "hf"),
    "datasets": ("Hugging Face datasets, Parquet and .zst as text sources", "data"),
    "lm_eval": ("zero-shot tasks", "eval"),
}


@dataclass(kw_only=True)
class Command:
    """Show versions, devices, compilers, families of models, which backend frozen heads would run on, and why."""

    json: bool = False
    """Print JSON instead of tables."""

    def run(self) -> dict[str, Any]:
        result = {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": {name: package_version(name) for name in ("saf", *REQUIRED)},
            "optional": {name: package_version(name) for name in OPTIONAL},
            "devices": devices(),
            "compilers": compilers(),
            "backends": backends(),
            "live_kernels": live_kernels(),
            "families": {family.name: family.remark for family in FAMILIES},
        }
        show(result, *_tables(result), as_json=self.json)
        return result


def backends() -> list[dict[str, Any]]:
    """Return the lines of `saf.ops.explain` for the usual devices and dtypes."""
    usual = [("cpu", torch.float32)]
    if torch.cuda.is_available():
        usual += [("cuda", torch.bfloat16), ("cuda", torch.float32)]
    return [
        {"device": device, "dtype": str(dtype).removeprefix("torch."), "lines": list(explain(device, dtype))}
        for device, dtype in usual
    ]


def live_kernels() -> dict[str, str | None]:
    """Return for each attention kernel that live heads may be pinned to None, or why it cannot run here."""
    if not torch.cuda.is_available():
        return dict.fromkeys(KERNELS, "no CUDA device") | dict.fromkeys(("flash", "math"))
    cudnn = None if torch.backends.cudnn.is_available() else "this build of torch has no cuDNN"
    return (
        dict.fromkeys(KERNELS) | {name: unsupported_reason(name, "cuda") for name in FLASH_PACKAGES} | {"cudnn": cudnn}
    )


def _tables(result: dict[str, Any]) -> list[Any]:
    packages = {"python": result["python"], **{n: v or "missing" for n, v in result["packages"].items()}}
    optional = [[name, result["optional"][name] or "missing", purpose] for name, (purpose, _) in OPTIONAL.items()]
    missing = sorted({extra for name, (_, extra) in OPTIONAL.items() if result["optional"][name] is None})
    compiled = {
        name: value or ("not found" if name == "c++" else "available") for name, value in result["compilers"].items()
    }
    kernels = {name: f"no: {reason}" if reason else "available" for name, reason in result["live_kernels"].items()}
    families = [[name, particular] for name, particular in result["families"].items()]
    parts: list[Any] = [
        Table.facts("installed", packages),
        Table.of("optional", ["package", "version", "for"], optional),
        *([f"for what is missing: pip install 'saf[{','.join(missing)}]'"] if missing else []),
    ]
    for device in result["devices"]:
        rows = {key: value for key, value in device.items() if key not in ("device", "memory_bytes")}
        memory = {"memory": f"{device['memory_bytes'] / 2**30:.1f} GiB"} if "memory_bytes" in device else {}
        parts.append(Table.facts(device["device"], rows | memory))
    parts += [
        Table.facts("compilers", compiled),
        Table.facts("attention kernels of live heads", kernels),
        Table.of("models of transformers that freeze", ["family", "what is particular"], families),
    ]
    for entry in result["backends"]:
        parts.append(f"\nfrozen heads on {entry['device']}, {entry['dtype']}:")
        parts += [f"  {line}" for line in entry["lines"]]
    return parts
