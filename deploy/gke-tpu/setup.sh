#!/usr/bin/env bash
# Makes .venv beside this file with the version of XPK that the tests check (xpk.lock). Quick when it is there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
venv=${1:-.venv}
stamp=$venv/xpk.lock
cmp -s xpk.lock "$stamp" && exit 0
"${PYTHON:-python3}" -m venv --clear "$venv"
pip=("$venv/bin/python" -m pip install --disable-pip-version-check --quiet)
"${pip[@]}" --no-deps -r xpk.lock
cp xpk.lock "$stamp"
