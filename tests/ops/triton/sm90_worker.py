"""Compile what the written rules choose for compute capability 9.0 and print registers, spills and memory as JSON."""

import inspect
import json
import pkgutil
import re
import subprocess
import tempfile
from importlib import import_module
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import saf.ops.triton
from saf.ops.triton import gelu, softmax_gradient
from saf.ops.triton.fused import block_constants, padded
from saf.ops.triton.fused_backward_kernel import delta_kernel, key_block_kernel, query_block_kernel
from saf.ops.triton.fused_config import choose_fused_config
from saf.ops.triton.fused_forward_kernel import fused_forward_kernel
from saf.ops.triton.rule import choose_config
from saf.ops.triton.tables import TILE
from saf.ops.triton.toeplitz import kernel_constants, kernel_options, toeplitz_kernel
from saf.ops.triton.toeplitz_descriptor_kernel import toeplitz_descriptor_kernel
from saf.ops.triton.toeplitz_kernel import prescale_kernel
from saf.ops.triton.tuning import CANDIDATES

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
SHAPES = [
    (512, 64, 3, 64),
    (1024, 32, 3, 64),
    (4096, 8, 3, 64),
    (4096, 8, 4, 64),
    (8192, 4, 6, 64),
    (8192, 2, 4, 96),
    (16384, 2, 3, 64),
    (4096, 1, 3, 64),
    (16384, 1, 3, 64),
    (65536, 1, 3, 64),
    (8192, 64, 6, 64),
]
NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
ALIGNED = ("T", "rows", "scale", "H", "L", "num_m", "num_n", "num_f", "slabs", "num_value_heads")
INTEGER_POINTERS = ["state", "query", "key", "value", "pattern", "live", "group_start", "group_heads"]
FLOAT_POINTERS = ["pre", "post", "lse", "delta", "alpha", "band", "log_z", "loss"]
LONG_POINTERS = ["labels", "count"]


def pointer_type(name: str, dtype: torch.dtype) -> str:
    """Return the Triton type of an argument."""
    if not name.endswith("_ptr"):
        return "fp32" if name == "scale" else "i32"
    stem = name.removesuffix("_ptr")
    if stem in INTEGER_POINTERS or stem in LONG_POINTERS:
        return "*i32" if stem in INTEGER_POINTERS else "*i64"
    return "*fp32" if stem in FLOAT_POINTERS else f"*{NAMES[dtype]}"


def resources(kernel, constants: dict, dtype: torch.dtype, blocks: dict[str, list[int]] | None = None) -> dict:
    """Compile one kernel with strides that 16 divides and return what it takes; `blocks` are those of descriptors."""
    names = list(inspect.signature(kernel.fn).parameters)
    options = {key: constants.pop(key) for key in ("num_warps", "num_stages", "maxnreg") if key in constants}
    signature = {name: "constexpr" if name in constants else pointer_type(name, dtype) for name in names}
    described = {name: f"tensordesc<{NAMES[dtype]}{shape}>" for name, shape in (blocks or {}).items()}
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if name not in constants and name not in ALIGNED and name not in described
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
        "wgmma": "wgmma" in compiled.asm["ptx"],
        "long_sums": re.search(r"tt\.dot %\w+, %\w+, %(?!cst)", compiled.asm["ttir"]) is not None,
    }


def toeplitz_rows() -> dict:
    """Resources of the Toeplitz product for every distinct choice of the rule."""
    rows = {}
    for dtype in NAMES:
        for length, batch, heads, dim in SHAPES:
            config = choose_config(length=length, columns=batch * dim, heads=heads, dtype=dtype)
            for transpose in (False, True):
                name = f"toeplitz {NAMES[dtype]} D{dim} {config.name} {'transposed' if transpose else 'forward'}"
                if name not in rows:
                    constants = kernel_constants(config, length, batch * dim, dim, transpose, "ieee")
                    rows[name] = resources(toeplitz_kernel, constants | kernel_options(config), dtype)
    return rows


def fused_rows() -> dict:
    """Resources of the fused kernels with all three kinds of heads."""
    rows = {}
    states = {"HAS_LIVE": True, "HAS_COMPACT": True, "HAS_DENSE": True}
    for dtype, dim, grouped in (
        (torch.bfloat16, 64, False),
        (torch.bfloat16, 96, False),
        (torch.bfloat16, 128, False),
        (torch.bfloat16, 64, True),
        (torch.float32, 64, False),
    ):
        config = choose_fused_config(dim=dim, dtype=dtype, grouped=grouped)
        plan = [("keys", key_block_kernel, config.keys, states | {"GROUPED": grouped})]
        if not grouped:
            plan += [
                ("forward", fused_forward_kernel, config.forward, states),
                ("queries", query_block_kernel, config.queries, {}),
            ]
        for name, kernel, blocks, more in plan:
            constants = block_constants(blocks, 4096, dim, "ieee", pad=name != "queries") | more
            label = f"fused {name} {NAMES[dtype]} D{dim}{' grouped' if grouped else ''}"
            rows[label] = resources(kernel, constants, dtype)
    return rows


def descriptor_rows() -> dict:
    """Resources of the product through descriptors, for every distinct choice of the rule and folded candidates."""
    rows = {}
    chosen = [
        (dim, choose_config(length=length, columns=batch * dim, heads=heads, dtype=torch.bfloat16, descriptors=True))
        for length, batch, heads, dim in SHAPES
    ]
    folded = [(64, config) for config in CANDIDATES if config.fold > 1]
    for dim, config in chosen + folded:
        for transpose in (False, True):
            name = f"descriptor bf16 D{dim} {config.name} {'transposed' if transpose else 'forward'}"
            if config.loads == "pointer" or name in rows:
                continue
            tile = [config.block_k, config.block_m] if transpose else [config.block_m, config.block_k]
            blocks = {"x_desc": [1, config.block_k, config.block_n], "tiles_desc": tile}
            constants = {
                "D": dim,
                "BM": config.block_m,
                "BN": config.block_n,
                "BK": config.block_k,
                "TRANSPOSE": transpose,
                "TILE": TILE,
                "STAGES": config.num_stages,
                "SPECIALIZE": False,
                "FOLD": config.fold,
            }
            rows[name] = resources(
                toeplitz_descriptor_kernel, constants | kernel_options(config), torch.bfloat16, blocks
            )
    return rows


def small_rows() -> dict:
    """Resources of the kernels around the products: scaling, row sums, the loss, GELU."""
    rows = {}
    for dtype, label in NAMES.items():
        for dim in (64, 96, 128):
            constants = {"D": dim, "BT": 32, "BN": 128, "FOLD": 1, "FIRST": 0, "TILE": TILE, "num_warps": 4}
            rows[f"prescale {label} D{dim}"] = resources(prescale_kernel, constants, dtype)
            constants = {"D": dim, "DP": padded(dim), "BM": 64, "num_warps": 4}
            rows[f"delta {label} D{dim}"] = resources(delta_kernel, constants, dtype)
        constants = {"IGNORED": -100, "BLOCK": softmax_gradient.BLOCK, "STAGES": softmax_gradient.STAGES}
        constants["num_warps"] = 8
        rows[f"softmax {label}"] = resources(softmax_gradient.softmax_gradient_kernel, constants, dtype)
        for name in ("gelu_kernel", "gelu_backward_kernel"):
            constants = {"BLOCK": gelu.BLOCK, "num_warps": gelu.WARPS}
            rows[f"{name} {label}"] = resources(getattr(gelu, name), constants, dtype)
    return rows


def every_kernel() -> list[str]:
    """Return the names of all kernels below `saf.ops.triton`."""
    modules = [import_module(f"saf.ops.triton.{found.name}") for found in pkgutil.iter_modules(saf.ops.triton.__path__)]
    names = {name for module in modules for name, one in vars(module).items() if isinstance(one, triton.JITFunction)}
    return sorted(name for name in names if name.endswith("_kernel"))


if __name__ == "__main__":
    if CUOBJDUMP.exists():
        rows = toeplitz_rows() | fused_rows() | descriptor_rows() | small_rows()
        print(json.dumps({"rows": rows, "kernels": every_kernel()}))
    else:
        print(json.dumps({"skip": f"no cuobjdump beside triton {triton.__version__}"}))
