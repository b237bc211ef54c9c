#!/usr/bin/env bash
# Runs this project on this machine's CUDA device, in ten minutes at most: a table, and build/gpu-check/result.json.
#
#   deploy/gpu/check.sh               on a CUDA device
#   deploy/gpu/check.sh --rehearse    the same rows on the CPU
#
# It needs no network: packages come from the folder that `make gpu-wheels` has filled, torch from this machine.
# PYTHON (python3): the Python that has torch. WHEELS (build/gpu-wheels): the folder. OUT (build/gpu-check): the results.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
check=$root/deploy/gpu/check.py
PYTHON=${PYTHON:-python3}
WHEELS=${WHEELS:-$root/build/gpu-wheels}
OUT=${OUT:-$root/build/gpu-check}

refuse() {
    echo "error: $1" >&2
    exit 2
}

command -v "$PYTHON" >/dev/null || refuse "there is no $PYTHON: name a Python that has torch, as in PYTHON=/opt/conda/bin/python3"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || refuse "$PYTHON is older than Python 3.11"
"$PYTHON" -W ignore "$check" --look "$@" >/dev/null
[[ -f $WHEELS/requirements.txt ]] || refuse "there are no wheels in $WHEELS: run make gpu-wheels where there is a network, and copy the folder"

mkdir -p "$OUT"
"$PYTHON" -m venv --clear --system-site-packages "$OUT/env" || refuse "$PYTHON cannot create environments: install python3-venv"
python=$OUT/env/bin/python
# Before Python 3.12 an environment has an old setuptools of its own, which hides the one that torch asks for.
"$python" -m pip uninstall --quiet --yes setuptools 2>/dev/null
if ! "$python" -c 'import torch' 2>/dev/null; then # torch is in an environment itself
    site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$PYTHON" -c 'import sys; print(*(f"import site; site.addsitedir({each!r})" for each in sys.path if "-packages" in each), sep="\n")' \
        >"$site/machine.pth"
fi
install=(env -u PIP_CONSTRAINT PIP_CONFIG_FILE=/dev/null "$python" -m pip install --quiet --disable-pip-version-check
    --no-index --find-links "$WHEELS")
if ! { "${install[@]}" -r "$WHEELS/requirements.txt" && "${install[@]}" --no-deps -r "$WHEELS/data.txt"; }; then
    refuse "the wheels in $WHEELS cannot be installed for $("$PYTHON" --version): they are for Python 3.11 and 3.12 on x86-64"
fi
exec "$python" "$check" "$@" --directory "$OUT" --limit $((600 - SECONDS))
