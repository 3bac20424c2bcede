"""`saf doctor`: what is installed, what this machine has, and which path would run here."""

import platform
from dataclasses import dataclass
from typing import Any

import torch

from saf.adapters import FAMILIES
from saf.cli.output import show
from saf.machine.survey import compilers, devices, package_version
from saf.ops import explain
from saf.ops.live import FLASH_PACKAGES, KERNELS, obstacle
from saf.records.table import Cell, Table

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
        """Look around, show and return what was found."""
        result = {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": {name: package_version(name) for name in ("saf", *REQUIRED)},
            "optional": {name: package_version(name) for name in OPTIONAL},
            "devices": devices(),
            "compilers": compilers(),
            "backends": backends(),
            "live_kernels": live_kernels(),
            "families": {family.name: family.particular for family in FAMILIES},
        }
        show(result, *_tables(result), as_json=self.json)
        return result


def backends() -> list[dict[str, Any]]:
    """Return what `saf.ops.explain` says for each device and dtype worth asking about."""
    asked = [("cpu", torch.float32)]
    if torch.cuda.is_available():
        asked += [("cuda", torch.bfloat16), ("cuda", torch.float32)]
    return [
        {"device": device, "dtype": str(dtype).removeprefix("torch."), "lines": list(explain(device, dtype))}
        for device, dtype in asked
    ]


def live_kernels() -> dict[str, str | None]:
    """Return for each attention kernel that live heads may be pinned to None, or why it cannot run here."""
    if not torch.cuda.is_available():
        return dict.fromkeys(KERNELS, "no CUDA device") | dict.fromkeys(("flash", "math"))
    cudnn = None if torch.backends.cudnn.is_available() else "this build of torch has no cuDNN"
    return dict.fromkeys(KERNELS) | {name: obstacle(name, "cuda") for name in FLASH_PACKAGES} | {"cudnn": cudnn}


def _tables(result: dict[str, Any]) -> list[Any]:
    """Return the tables and lines that the terminal shows of what was found on this machine."""
    packages = {"python": result["python"], **{n: v or "missing" for n, v in result["packages"].items()}}
    optional = [[name, result["optional"][name] or "missing", purpose] for name, (purpose, _) in OPTIONAL.items()]
    wanted = sorted({extra for name, (_, extra) in OPTIONAL.items() if result["optional"][name] is None})
    hint = [f"for what is missing: pip install 'saf[{','.join(wanted)}]'"] if wanted else []
    compiled = {
        name: value or ("not found" if name == "c++" else "available") for name, value in result["compilers"].items()
    }
    tables: list[Any] = [
        Table.facts("installed", packages),
        Table.of("optional", ["package", "version", "for"], optional),
        *hint,
    ]
    tables += [Table.facts(device["device"], _device_rows(device)) for device in result["devices"]]
    tables.append(Table.facts("compilers", compiled))
    kernels = {name: f"no: {reason}" if reason else "available" for name, reason in result["live_kernels"].items()}
    tables.append(Table.facts("attention kernels of live heads", kernels))
    families = [[Cell(text=name), particular] for name, particular in result["families"].items()]
    tables.append(Table.of("models of transformers that freeze", ["family", "what is particular"], families))
    for asked in result["backends"]:
        tables.append(f"\nfrozen heads on {asked['device']}, {asked['dtype']}:")
        tables += [f"  {line}" for line in asked["lines"]]
    return tables


def _device_rows(device: dict[str, Any]) -> dict[str, Any]:
    rows = {key: value for key, value in device.items() if key not in ("device", "memory_bytes")}
    if "memory_bytes" in device:
        rows["memory"] = f"{device['memory_bytes'] / 2**30:.1f} GiB"
    return rows
