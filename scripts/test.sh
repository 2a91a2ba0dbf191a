#!/usr/bin/env bash
# Everything that must pass: lint, formatting, types, prose, then the tests, quick ones first.
# With arguments, only pytest with these: scripts/test.sh tests/models -k rope
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh --integration
python=.venv/bin/python
if [ $# -gt 0 ]; then
    exec "$python" -m pytest "$@"
fi

# The two runs of pytest compile many of the same programs.
if [ -z "${JAX_COMPILATION_CACHE_DIR:-}" ]; then
    JAX_COMPILATION_CACHE_DIR=$(mktemp -d)
    trap 'rm -rf "$JAX_COMPILATION_CACHE_DIR"' EXIT
    export JAX_COMPILATION_CACHE_DIR JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
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
step "prose" "$python" scripts/prose.py
# Two workers: compilation of the tests' programs takes one core. Each begins at its own end of the list, as
# tests of one file share programs.
step "quick tests" "$python" -m pytest -n 2 --dist worksteal -m "not slow"
step "slow tests" "$python" -m pytest -n 2 --dist worksteal -m slow
if [ ${#failed[@]} -gt 0 ]; then
    (IFS=, && echo "FAILED: ${failed[*]}")
    exit 1
fi
echo "everything passed"
