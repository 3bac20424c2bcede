"""`saf doctor` shows installed packages, this machine, the backend of frozen heads, and what is missing."""

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from saf.cli import EXTRAS
from saf.cli.output import show
from saf.cli.parsing import parse
from saf.ops import choose_backend, explain
from saf.ops.live import KERNELS
from saf.records.result import package_version
from saf.records.table import Table, byte_size

REQUIRED = ("torch", "numpy", "safetensors", "scipy", "tokenizers", "tyro", "rich", "tensorboard")
OPTIONAL = {
    "triton": "the CUDA kernels",
    "transformers": "Hugging Face models",
    "accelerate": "the Trainer of transformers",
    "datasets": "Hugging Face datasets, Parquet and .zst as text sources",
    "lm_eval": "zero-shot tasks",
}
"""The use of each optional package."""


@dataclass(kw_only=True)
class Command:
    """Show versions, devices, compilers and backends, and end with what works here, what does not, and what to do."""

    json: bool = False
    """Print JSON instead of tables."""

    def run(self) -> dict[str, Any]:
        # torch.compile needs one for code on a CPU.
        compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
        # The dtypes of training: float32, and under autocast on CUDA bfloat16.
        devices_and_dtypes = [("cpu", torch.float32)]
        if torch.cuda.is_available():
            devices_and_dtypes += [("cuda", torch.bfloat16), ("cuda", torch.float32)]
        result: dict[str, Any] = {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": {name: package_version(name) for name in ("saf", *REQUIRED)},
            "optional": {name: package_version(name) for name in OPTIONAL},
            "devices": devices(),
            "compiler": compiler,
            "backends": [
                {"device": device, "dtype": str(dtype).removeprefix("torch."), "lines": list(explain(device, dtype))}
                for device, dtype in devices_and_dtypes
            ],
            "live_kernels": live_kernels(),
        }
        result["verdict"] = verdict(result)
        show(result, *_tables(result), "", *result["verdict"].values(), as_json=self.json)
        return result


def devices() -> list[dict[str, Any]]:
    """Return the CPU and every CUDA device with its memory and compute capability."""
    versions = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    result: list[dict[str, Any]] = [
        {"device": "cpu", "name": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    ]
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        facts = {"device": f"cuda:{index}", "name": gpu.name, "memory_bytes": gpu.total_memory}
        result.append({**facts, "capability": f"{gpu.major}.{gpu.minor}", **versions})
    return result


def live_kernels() -> dict[str, str | None]:
    """Return why each attention kernel of live heads cannot run here, by its name; None where it can."""
    if not torch.cuda.is_available():
        # Of the named kernels PyTorch has these two on a CPU.
        return dict.fromkeys(KERNELS, "no CUDA device") | dict.fromkeys(("flash", "math"))
    cudnn = None if torch.backends.cudnn.is_available() else "this build of torch has no cuDNN"
    return dict.fromkeys(KERNELS) | {"cudnn": cudnn}


def verdict(result: dict[str, Any]) -> dict[str, str]:
    """Return one sentence on what works here, one on what does not, and one on what to do."""
    cuda = torch.cuda.is_available()
    device = result["devices"][-1]  # the last GPU, or the CPU where there is none
    dtype = torch.bfloat16 if cuda else torch.float32
    backend = choose_backend("auto", device=torch.device("cuda" if cuda else "cpu"), dtypes=[dtype])
    not_installed = [name for name, version in result["optional"].items() if version is None]
    if not cuda and "triton" in not_installed:
        not_installed.remove("triton")  # useless without a GPU
    missing = [OPTIONAL[name] for name in not_installed]
    extras = sorted({EXTRAS[name] for name in not_installed})
    steps = [f"pip install 'saf[{','.join(extras)}]'"] if extras else []
    if not cuda:
        missing.insert(0, "the CUDA kernels (torch sees no GPU, and a CPU saves hardly any time)")
        steps.append("measure speed on a GPU, by `saf bench update`")
    if result["compiler"] is None:
        missing.append("torch.compile on the CPU")
        steps.append("install a C++ compiler (c++, g++ or clang++)")
    return {
        "works": f"Works here: training, freezing, evaluating on {device['name']}, frozen heads by {backend}.",
        "does_not": f"Does not: {'; '.join(missing)}." if missing else "Nothing is missing.",
        "to_do": f"To do: {'; '.join(steps) or 'nothing'}; begin with `saf --help`.",
    }


def _tables(result: dict[str, Any]) -> Iterator[Table]:
    versions = {name: version or "missing" for name, version in result["packages"].items()}
    yield Table.facts("installed", {"python": result["python"], **versions, "C++ compiler": result["compiler"]})
    optional = [[name, result["optional"][name] or "missing", purpose] for name, purpose in OPTIONAL.items()]
    yield Table.of("optional", ["package", "version", "for"], optional)
    for device in result["devices"]:
        memory = byte_size(device["memory_bytes"]) if "memory_bytes" in device else None
        # Values of None are left out: the device is the title, and bytes are shown as "memory".
        yield Table.facts(device["device"], {**device, "device": None, "memory_bytes": None, "memory": memory})
    kernels = {name: f"no: {reason}" if reason else "available" for name, reason in result["live_kernels"].items()}
    yield Table.facts("attention kernels of live heads", kernels)
    for entry in result["backends"]:
        # Each line is "backend: how it runs, or why it cannot"; the last one says what "auto" takes.
        lines = dict(line.partition(": ")[::2] for line in entry["lines"])
        yield Table.facts(f"frozen heads on {entry['device']}, {entry['dtype']}", lines)


parse_words = partial(parse, Command, prog="saf doctor")
