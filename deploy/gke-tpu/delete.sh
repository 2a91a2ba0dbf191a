#!/usr/bin/env bash
# Stops a run: delete.sh RUN_NAME. Its processes get SIGTERM, save and end; checkpoints and metrics stay, and
# submit.sh with the same name continues.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[ $# = 1 ] || { echo "usage: delete.sh RUN_NAME" >&2 && exit 2; }
workload=$("$PYTHON" "$here/manifests.py" --workload-name "$1")
for kind in pathwaysjob rayjob jobset configmap; do # a kind that the cluster does not know is no error here
    name=$workload
    [ $kind = configmap ] && name=$workload-config
    run kubectl delete "$kind" "$name" --namespace="$NAMESPACE" --ignore-not-found || true
done
