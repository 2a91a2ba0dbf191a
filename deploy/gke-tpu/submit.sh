#!/usr/bin/env bash
# Starts a run on the cluster of env.sh: submit.sh CONFIG [key=value ...]; submit.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
exec "$PYTHON" "$here/submit.py" "$@"
