#!/usr/bin/env bash
# Rehearses a run on this machine's CPU before a slice is booked: its own data, template, rewards, checkpoint, kill,
# resume and evaluation, with a small model on the same mesh axes. scripts/smoke.sh configs/my_run.yaml [key=value ...]
set -euo pipefail
[ $# -gt 0 ] || { echo "usage: scripts/smoke.sh CONFIG [key=value ...]" >&2; exit 2; }
python="$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/python"
[ -x "$python" ] || python=python3
JAX_PLATFORMS=cpu exec "$python" -m jaxrl.smoke "$@"
