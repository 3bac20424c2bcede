#!/usr/bin/env bash
# Run a small call of every kernel under compute-sanitizer: memcheck, then racecheck. About a minute on a GPU.
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
echo "compiling and running once without the sanitizer"
"$python" tools/sanitize_cases.py
for tool in memcheck racecheck; do
  echo "$tool"
  "$sanitizer" --tool "$tool" --error-exitcode 1 --print-limit 20 "$python" tools/sanitize_cases.py
done
echo "sanitize: no errors"
