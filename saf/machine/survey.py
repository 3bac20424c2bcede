"""What this machine has: devices, compilers, installed packages."""

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch


def devices() -> list[dict[str, Any]]:
    """Return the CPU and every CUDA device with its memory and compute capability."""
    found: list[dict[str, Any]] = [
        {"device": "cpu", "name": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    ]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "memory_bytes": properties.total_memory,
                "capability": f"{properties.major}.{properties.minor}",
                "cuda": torch.version.cuda,
                "cudnn": torch.backends.cudnn.version(),
            }
        )
    return found


def compilers() -> dict[str, str | None]:
    """Return the C++ compiler, and for torch.compile on each kind of device None or what is missing for it."""
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    found = {
        "c++": compiler,
        "torch.compile on cpu": None if compiler else "needs a C++ compiler (c++, g++ or clang++)",
    }
    if torch.cuda.is_available():
        missing = None if package_version("triton") else "needs triton"
        found["torch.compile on cuda"] = missing
    return found


def package_version(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
