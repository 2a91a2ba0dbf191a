#!/usr/bin/env bash
# Makes .venv from requirements.lock and installs jaxrl into it, editable. Quick when nothing has changed.
# PYTHON=/path/to/python chooses the interpreter; without it, python3 or else the newest supported python3.N is used.
# With --integration also what only tests need: the TPU compiler and other systems (requirements-integration.lock).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { echo "setup: $*" >&2; }
die() { say "$@"; exit 2; }
version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
supported() { case "$(version "$1")" in 3.11 | 3.12 | 3.13) ;; *) return 1 ;; esac; }

# Debian and Ubuntu leave out parts of Python: install them when that is possible without asking, else say how.
apt_install() {
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing $* with apt-get"
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >/dev/null
    else
        die "please run: sudo apt-get update && sudo apt-get install -y $*"
    fi
}

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        supported "$PYTHON" || die "PYTHON=$PYTHON is Python '$(version "$PYTHON" || true)'; 3.11, 3.12 or 3.13 is needed"
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11; do
        if supported "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

make_venv() {
    local python
    if ! python=$(find_python); then
        [ -z "${PYTHON:-}" ] || exit 2
        if command -v python3 >/dev/null; then
            die "found only Python $(version python3); 3.11, 3.12 or 3.13 is needed (PYTHON=/path/to/python chooses one)"
        fi
        say "no Python found"
        apt_install python3 python3-venv
        python=$(find_python) || die "this system's python3 is $(version python3); 3.11, 3.12 or 3.13 is needed"
    fi
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        say "$python has no venv module"
        apt_install "python$(version "$python")-venv"
    fi
    say "making .venv with Python $(version "$python")"
    "$python" -m venv .venv
}

case "${1:-}" in
    "") lock=requirements.lock size="1.2 GB" ;;
    --integration) lock=requirements-integration.lock size="5 GB" ;;
    *) die "$1: the only option is --integration" ;;
esac
state() { echo "$(pwd -P) $1 $(cat "$1" pyproject.toml | sha256sum)"; }
stamp=.venv/jaxrl-setup # one line for each lock file that is installed
if [ ! -e .venv ]; then
    make_venv
elif ! supported .venv/bin/python || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    die ".venv is no virtual environment of Python 3.11 to 3.13 with pip in it; please run: rm -r .venv"
elif [[ $'\n'"$(cat "$stamp" 2>/dev/null)"$'\n' == *$'\n'"$(state $lock)"$'\n'* ]]; then
    exit 0
fi

say "installing the packages of $lock (about $size on disk)"
pip=(.venv/bin/python -m pip install --disable-pip-version-check --root-user-action=ignore)
[ -t 1 ] || pip+=(--quiet) # progress bars are for people
"${pip[@]}" -r "$lock"
"${pip[@]}" --no-deps --no-build-isolation -e .
{ # the larger lock file holds the smaller one's versions too
    state requirements.lock
    [ $lock = requirements.lock ] || state $lock
} >"$stamp"
say "done"
