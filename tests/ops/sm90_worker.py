"""Compile rows for compute capability 9.0, several at a time, and print registers, spills and memory as JSON."""

import inspect
import json
import multiprocessing
import os
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import saf.ops
from tests.ops.sm90_rows import NAMES, Row, all_rows

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
PROCESSES = min(8, os.cpu_count() or 1)
ALIGNED = (
    "T", "rows", "scale", "H", "L", "num_m", "num_n", "num_h", "slabs", "num_value_heads", "place", "stretch",
    "stretches", "power", "parts", "lowest", "back",
)  # fmt: skip
INTEGER_POINTERS = (
    "state", "query", "key", "value", "pattern", "live", "group_start", "group_heads", "heads", "slots", "own",
    "readers", "kv",
)  # fmt: skip
FLOAT_POINTERS = (
    "lse", "delta", "alpha", "band", "log_z", "loss", "sums", "logs", "before", "after", "turns",
    "states", "scalar", "row", "column", "diagonal",
)  # fmt: skip
LONG_POINTERS = ("labels", "count", "first", "pad")


def pointer_type(name: str, dtype: torch.dtype) -> str:
    """Return the Triton type of an argument."""
    if not name.endswith("_ptr"):
        return "fp32" if name in ("scale", "floor") else "i32"
    stem = name.removesuffix("_ptr")
    if stem in INTEGER_POINTERS or stem in LONG_POINTERS:
        return "*i32" if stem in INTEGER_POINTERS else "*i64"
    return "*fp32" if stem in FLOAT_POINTERS else f"*{NAMES[dtype]}"


def resources(row: Row, unaligned: Sequence[str] = ALIGNED) -> dict:
    """Compile one kernel, with arguments that 16 divides but for some, and return what it takes."""
    kernel, constants = row.kernel, dict(row.constants)
    names = list(inspect.signature(kernel.fn).parameters)
    options = {key: constants.pop(key) for key in ("num_warps", "num_stages", "maxnreg") if key in constants}
    signature = {name: "constexpr" if name in constants else pointer_type(name, row.dtype) for name in names}
    described = {name: f"tensordesc<{NAMES[row.dtype]}{shape}>" for name, shape in (row.blocks or {}).items()}
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if name not in constants and name not in unaligned and name not in described
    }
    signature |= described
    source = ASTSource(
        kernel, signature, {(names.index(name),): value for name, value in constants.items()}, attributes
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        dump = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        usage = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return {
        "kernel": kernel.fn.__name__,
        "registers": int(found[1]),
        "stack": int(found[2]),
        "shared": compiled.metadata.shared,
        "warps": options["num_warps"],
        "tile_rows": row.tile_rows,
        "matrix_units": next((name for name in ("wgmma", "mma.sync") if name in compiled.asm["ptx"]), None),
        "long_sums": re.search(r"tt\.dot %\w+, %\w+, %(?!cst)", compiled.asm["ttir"]) is not None,
    }


def named_resources(name: str) -> tuple[str, dict]:
    """Compile the row of this name."""
    return name, resources(ROWS[name])


def every_kernel() -> list[str]:
    """Return the names of all kernels below `saf.ops`."""
    modules = [import_module(found.name) for found in pkgutil.walk_packages(saf.ops.__path__, "saf.ops.")]
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
