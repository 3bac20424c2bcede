"""Run one area's cases on the GPU or under Triton's interpreter and print {case: results} as JSON."""

import importlib
import json
import sys

import torch


def main() -> None:
    """Import the area's cases and run them."""
    torch.set_num_threads(2)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = importlib.import_module(f"tests.ops.{sys.argv[1]}")
    print(json.dumps({name: cases.run(case, device) for name, case in cases.CASES.items()}))


if __name__ == "__main__":
    main()
