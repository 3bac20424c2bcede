"""Run the cases of areas on the GPU or under Triton's interpreter and print {case: results} as JSON."""

import importlib
import json
import sys

import torch

import tests.quick_interpreter  # noqa: F401


def main() -> None:
    """Import the areas' cases and run them."""
    torch.set_num_threads(2)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    areas = [importlib.import_module(f"tests.ops.{name}") for name in sys.argv[1:]]
    print(json.dumps({name: area.run(case, device) for area in areas for name, case in area.CASES.items()}))


if __name__ == "__main__":
    main()
