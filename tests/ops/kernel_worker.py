"""Run the cases of an area on the GPU or under Triton's interpreter and print {case: what is wrong} as JSON.

A case's `run(case, device)` returns lines that say which limit it breaks, or None where it cannot run.
"""

import importlib
import json
import sys

import torch

import tests.quick_interpreter  # noqa: F401


def main() -> None:
    """Import the area's cases and run them."""
    torch.set_num_threads(2)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    area = importlib.import_module(f"tests.ops.kernels.{sys.argv[1]}")
    print(json.dumps({name: area.run(case, device) for name, case in area.CASES.items()}))


if __name__ == "__main__":
    main()
