#!/usr/bin/env bash
# make_venv.sh FOLDER EXTRAS: a virtual environment with this package (editable) and the pinned versions of constraints.txt.
set -euo pipefail
venv=$1
extras=$2
python=${PYTHON:-python3}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "Python 3.11 or newer is needed, got $("$python" --version); name one with PYTHON=..." >&2
  exit 1
fi
echo "Setting up $venv (once; one to three minutes and about 3 GB for a CPU build of torch)"
"$python" -m venv "$venv"
# torch first: the package then builds with the setuptools that torch brings, without a second download of either.
"$venv/bin/python" -m pip install -q --no-input -c constraints.txt torch
"$venv/bin/python" -m pip install -q --no-input -c constraints.txt --no-build-isolation -e ".[$extras]"
