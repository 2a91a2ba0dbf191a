#!/usr/bin/env bash
# The main job on an embedded default: a tiny model learns arithmetic, first from examples, then by GRPO.
# Arguments are settings of the GRPO part: scripts/quickstart.sh seed=1 steps=50
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh
.venv/bin/python -m jaxrl.train --config configs/quickstart_sft.yaml
.venv/bin/python -m jaxrl.train --config configs/quickstart.yaml "$@"
