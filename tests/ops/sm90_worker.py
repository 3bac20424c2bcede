"""Compile launches for compute capability 9.0, several at a time, and print registers, spills and memory as JSON."""

import json
import multiprocessing
import os
import pkgutil
import re
import subprocess
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

import saf.ops
from tests.ops.sm90_rows import NAMES, Launch, all_rows

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
PROCESSES = min(8, os.cpu_count() or 1)
OPTIONS = ("num_warps", "num_stages", "maxnreg")


def described(argument: Any, varies: bool) -> tuple[str, bool]:
    """Return the Triton type of an argument, and whether it is compiled for multiples of 16."""
    if isinstance(argument, torch.Tensor):
        return f"*{NAMES[argument.dtype]}", True
    if isinstance(argument, TensorDescriptor):
        return f"tensordesc<{NAMES[argument.base.dtype]}{list(argument.block_shape)}>", False
    if isinstance(argument, float):
        return "fp32", False
    if argument == 1 and not varies:
        return "constexpr", False
    return "i32", argument % 16 == 0 and not varies


def source(launch: Launch) -> tuple[ASTSource, dict[str, Any]]:
    """Return what Triton would compile at a launch, and the options of the compiler."""
    parameters, constants = launch.kernel.params, dict(launch.constants)
    options = {key: constants.pop(key) for key in OPTIONS if key in constants}
    signature: dict[str, str] = dict.fromkeys(constants, "constexpr")
    attributes = {}
    for place, (parameter, argument) in enumerate(zip(parameters, launch.arguments, strict=False)):
        signature[parameter.name], divisible = described(argument, parameter.do_not_specialize)
        if signature[parameter.name] == "constexpr":
            constants[parameter.name] = argument
        if divisible:
            attributes[place,] = [["tt.divisibility", 16]]
    names = [parameter.name for parameter in parameters]
    values = {(names.index(name),): value for name, value in constants.items()}
    return ASTSource(launch.kernel, {name: signature[name] for name in names}, values, attributes), options


def resources(launch: Launch) -> dict[str, Any]:
    """Compile what is launched, and return what it takes."""
    ast, options = source(launch)
    compiled = triton.compile(ast, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        dump = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        usage = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    numbers = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert numbers, usage
    return {
        "kernel": launch.kernel.fn.__name__,
        "half": any("16" in kind for kind in ast.signature.values()),
        "registers": int(numbers[1]),
        "stack": int(numbers[2]),
        "shared": compiled.metadata.shared,
        "warps": options["num_warps"],
        "constants": {name: value for name, value in launch.constants.items() if isinstance(value, int)},
        "matrix_units": next((name for name in ("wgmma", "mma.sync") if name in compiled.asm["ptx"]), None),
        "long_sums": re.search(r"tt\.dot %\w+, %\w+, %(?!cst)", compiled.asm["ttir"]) is not None,
    }


def named_resources(name: str) -> tuple[str, dict[str, Any]]:
    """Compile the launch of this name."""
    return name, resources(ROWS[name])


def every_kernel() -> list[str]:
    """Return the names of all kernels below `saf.ops`."""
    modules = [import_module(actual.name) for actual in pkgutil.walk_packages(saf.ops.__path__, "saf.ops.")]
    names = {name for module in modules for name, one in vars(module).items() if isinstance(one, triton.JITFunction)}
    return sorted(name for name in names if name.endswith("_kernel"))


if __name__ == "__main__":
    if CUOBJDUMP.exists():
        ROWS = all_rows()
        # Forked processes have triton and the kernels loaded; no thread or device is in use yet.
        with multiprocessing.get_context("fork").Pool(PROCESSES) as pool:
            rows = dict(pool.imap(named_resources, ROWS))
        print(json.dumps({"rows": rows, "kernels": every_kernel()}))
    else:
        print(json.dumps({"skip": f"no cuobjdump beside triton {triton.__version__}"}))
