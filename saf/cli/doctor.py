"""`saf doctor`: installed packages, this machine, the backend of frozen heads, and what follows for a user."""

import os
import platform
import shutil
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from saf.cli.output import show
from saf.cli.parsing import parse
from saf.hf.families import FAMILIES
from saf.ops import choose_backend, explain
from saf.ops.live import FLASH_PACKAGES, KERNELS, unsupported_reason
from saf.records.result import package_version
from saf.records.table import Part, Table

REQUIRED = ("torch", "numpy", "safetensors", "scipy", "tokenizers", "tyro", "rich", "tensorboard")
OPTIONAL = {
    "triton": ("the CUDA kernels", "triton"),
    "transformers": ("Hugging Face models", "hf"),
    "accelerate": ("the Trainer of transformers", "hf"),
    "datasets": ("Hugging Face datasets, Parquet and .zst as text sources", "data"),
    "lm_eval": ("zero-shot tasks", "eval"),
}
"""What each optional package is for, and the extra that installs it."""


@dataclass(kw_only=True)
class Command:
    """Show versions, devices, compilers and backends, and end with what works here, what does not, and what to do."""

    json: bool = False
    """Print JSON instead of tables."""

    def run(self) -> dict[str, Any]:
        result: dict[str, Any] = {
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
        result["verdict"] = verdict(result)
        show(result, *_tables(result), "", *result["verdict"].values(), as_json=self.json)
        return result


def devices() -> list[dict[str, Any]]:
    """Return the CPU and every CUDA device with its memory and compute capability."""
    inventory: list[dict[str, Any]] = [
        {"device": "cpu", "name": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    ]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        inventory.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "memory_bytes": properties.total_memory,
                "capability": f"{properties.major}.{properties.minor}",
                "cuda": torch.version.cuda,
                "cudnn": torch.backends.cudnn.version(),
            }
        )
    return inventory


def compilers() -> dict[str, str | None]:
    """Return the C++ compiler, and for torch.compile on each kind of device None or the missing requirement."""
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    entries = {
        "c++": compiler,
        "torch.compile on cpu": None if compiler else "needs a C++ compiler (c++, g++ or clang++)",
    }
    if torch.cuda.is_available():
        entries["torch.compile on cuda"] = None if package_version("triton") else "needs triton"
    return entries


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
    packages = {name: unsupported_reason(name, "cuda") for name in FLASH_PACKAGES}
    return dict.fromkeys(KERNELS) | packages | {"cudnn": cudnn}


def verdict(result: dict[str, Any]) -> dict[str, str]:
    """Return a sentence each on what works here, what does not, and what to do."""
    device, cuda = result["devices"][-1], torch.cuda.is_available()
    dtype = torch.bfloat16 if cuda else torch.float32
    backend = choose_backend("auto", device=torch.device("cuda" if cuda else "cpu"), dtypes=[dtype])
    works = f"Works here: training, freezing, evaluating on {device['name']}, frozen heads by {backend}."
    lacks = [OPTIONAL[name][0] for name, version in result["optional"].items() if version is None]
    todo = [f"pip install 'saf[{','.join(_missing_extras(result))}]'"] * bool(lacks)
    if not cuda:
        lacks.insert(0, "the CUDA kernels, as torch sees no GPU: a CPU saves hardly any time")
        todo.append("measure speed on a GPU, by `saf bench update`")
    if result["compilers"]["c++"] is None:
        lacks.append("torch.compile on the CPU")
        todo.append("install a C++ compiler")
    return {
        "works": works,
        "does_not": f"Does not: {'; '.join(lacks)}." if lacks else "Nothing is missing.",
        "to_do": f"To do: {'; '.join(todo) or 'nothing'}; begin with `saf --help`.",
    }


def _missing_extras(result: dict[str, Any]) -> list[str]:
    return sorted({extra for name, (_, extra) in OPTIONAL.items() if result["optional"][name] is None})


def _tables(result: dict[str, Any]) -> list[Part]:
    packages = {"python": result["python"], **{n: v or "missing" for n, v in result["packages"].items()}}
    optional = [[name, result["optional"][name] or "missing", purpose] for name, (purpose, _) in OPTIONAL.items()]
    found = {
        name: value or ("not found" if name == "c++" else "available") for name, value in result["compilers"].items()
    }
    kernels = {name: f"no: {reason}" if reason else "available" for name, reason in result["live_kernels"].items()}
    parts: list[Part] = [
        Table.facts("installed", packages),
        Table.of("optional", ["package", "version", "for"], optional),
    ]
    for device in result["devices"]:
        rows = {key: value for key, value in device.items() if key not in ("device", "memory_bytes")}
        memory = {"memory": f"{device['memory_bytes'] / 2**30:.1f} GiB"} if "memory_bytes" in device else {}
        parts.append(Table.facts(device["device"], rows | memory))
    parts += [
        Table.facts("compilers", found),
        Table.facts("attention kernels of live heads", kernels),
        Table.of("models of transformers that freeze", ["family", "what is particular"], result["families"].items()),
    ]
    for entry in result["backends"]:
        lines = [line.partition(": ")[::2] for line in entry["lines"]]
        parts.append(Table.facts(f"frozen heads on {entry['device']}, {entry['dtype']}", dict(lines)))
    return parts


parse_words = partial(parse, Command, prog="saf doctor")
