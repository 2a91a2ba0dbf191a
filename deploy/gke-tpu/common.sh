# Sourced by the scripts beside it: the variables of env.sh, checked, and what follows from them (REGION, SLICES,
# XPK_TYPE); `run`, which prints a command and runs it, and `apply`. With DRY_RUN=1 they only print.
# shellcheck shell=bash
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PYTHON=${PYTHON:-$here/../../.venv/bin/python}
[ -x "$PYTHON" ] || PYTHON=$(command -v "$PYTHON" || command -v python3)
export XPK=${XPK:-$here/.venv/bin/xpk}
# shellcheck source=env.sh
source "${JAXRL_ENV:-$here/env.sh}"
derived=$("$PYTHON" "$here/manifests.py" --derived) # ends with code 2 and a message when a variable is wrong
IFS=' ' read -r REGION SLICES XPK_TYPE <<<"$derived"
export REGION SLICES XPK_TYPE

run() {
    printf '+' >&2
    printf ' %q' "$@" >&2
    echo >&2
    if [ -z "${DRY_RUN:-}" ] || [[ " $* " == *" --dry-run "* ]]; then "$@"; fi
}

# apply TEMPLATE: creates or updates what manifests/TEMPLATE.yaml describes.
apply() {
    echo "+ kubectl apply -f - # manifests/$1.yaml" >&2
    local text
    text=$("$PYTHON" "$here/manifests.py" "$1")
    if [ -n "${DRY_RUN:-}" ]; then printf -- '---\n%s\n' "$text"; else kubectl apply -f - <<<"$text"; fi
}
