#!/usr/bin/env bash
# Everything that must pass: lint, formatting, types, then the tests, quick ones first.
# With arguments, only pytest with these: scripts/test.sh tests/models -k rope
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh
python=.venv/bin/python
# Many tests start programs that compile the same things: for this one call they share what is compiled.
cache=$(mktemp -d)
trap 'rm -rf "$cache"' EXIT
export JAX_COMPILATION_CACHE_DIR=$cache
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1

if [ $# -gt 0 ]; then
    "$python" -m pytest "$@"
    exit
fi

failed=()
step() {
    local name=$1
    shift
    echo "== $name"
    "$@" || failed+=("$name")
}
step "ruff check" "$python" -m ruff check .
step "ruff format" "$python" -m ruff format --check .
step "mypy" "$python" -m mypy
step "quick tests" "$python" -m pytest -m "not slow"
step "slow tests" "$python" -m pytest -m slow
if [ ${#failed[@]} -gt 0 ]; then
    (IFS=, && echo "FAILED: ${failed[*]}")
    exit 1
fi
echo "everything passed"
