"""Run the cases of some areas on the GPU or under Triton's interpreter; print {area: {case: what is wrong}} as JSON.

A case's `run(case, device)` returns lines that say which limit it breaks, or None where it cannot run.
"""

import importlib
import json
import sys

import torch

if __name__ == "__main__":
    torch.set_num_threads(2)
    device, results = "cuda" if torch.cuda.is_available() else "cpu", {}
    for name in sys.argv[1:]:
        area = importlib.import_module(f"tests.ops.kernels.{name}")
        results[name] = {case: area.run(each, device) for case, each in area.CASES.items()}
    print(json.dumps(results))
