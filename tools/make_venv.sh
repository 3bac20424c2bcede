#!/usr/bin/env bash
# make_venv.sh FOLDER EXTRAS: a virtual environment with this package (editable) and the pinned versions of constraints.txt.
# One dot per package; the whole of pip's output is in FOLDER/install.log.
set -euo pipefail
venv=$1
extras=$2
log="$venv/install.log"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

install() { # LABEL PIP_ARGUMENTS...
  SECONDS=0
  printf '  %s ' "$1"
  shift
  if ! "$venv/bin/python" -m pip install --no-input --progress-bar off -c constraints.txt "$@" 2>&1 | tee -a "$log" | progress; then
    printf '\nInstallation failed; the end of %s:\n' "$log" >&2
    tail -n 20 "$log" >&2
    exit 1
  fi
  echo " ${SECONDS} s"
}

progress() {
  while IFS= read -r line; do
    case $line in
      Collecting*) printf . ;;
      Installing\ collected*) printf ' installing' ;;
    esac
  done
}

if ! "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "Python 3.11 or newer is needed, got $("${PYTHON:-python3}" --version); name one with PYTHON=..." >&2
  exit 1
fi
echo "Setting up $venv (once; one to three minutes and about 3 GB for a CPU build of torch)"
"${PYTHON:-python3}" -m venv "$venv"
: >"$log"
# torch first: the package then builds with the setuptools that torch brings, without a second download of either.
install torch torch
install "saf[$extras]" --no-build-isolation -e ".[$extras]"
