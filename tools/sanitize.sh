#!/usr/bin/env bash
# Run the kernels' test cases, forward and backward, under compute-sanitizer: memcheck, then racecheck. Minutes on a GPU.
#   tools/sanitize.sh            PYTHON=... chooses the interpreter, COMPUTE_SANITIZER=... the program
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
sanitizer=${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || echo "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer")}

if [ ! -x "$sanitizer" ]; then
  echo "tools/sanitize.sh: compute-sanitizer is not on this machine (CUDA toolkit); nothing was checked" >&2
  exit 1
fi
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "tools/sanitize.sh: $python sees no CUDA device; nothing was checked" >&2
  exit 1
fi

export PYTHONPATH=.
# Every tensor in an allocation of its own, so that reading past one is an error.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
# Shapes leave remainders in every block; the cases of calibration are in one call.
calibration='import torch; from saf.calibration.kernels import measure_by_kernel
x = torch.randn(2, 130, 4, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
measure_by_kernel(x, x[:, :2], kv_head=[0, 0, 1, 1])'
run() {
  "$@" "$python" tests/ops/kernel_worker.py toeplitz linear recurrent decode decoder logits layers
  "$@" "$python" -c "$calibration"
}
echo "compiling and running once without the sanitizer"
run
for tool in memcheck racecheck; do
  echo "$tool"
  run "$sanitizer" --tool "$tool" --error-exitcode 1 --print-limit 20
done
echo "sanitize: no errors"
