#!/usr/bin/env bash
# Stops a run: delete.sh RUN_NAME. Its processes get SIGTERM, save and end; checkpoints and metrics stay, and
# submit.sh with the same name continues.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[ $# = 1 ] || { echo "usage: delete.sh RUN_NAME" >&2 && exit 2; }
workload=$("$PYTHON" "$here/manifests.py" --workload-name "$1")
for kind in pathwaysjob rayjob jobset; do # a kind that the cluster does not know is no error here
    run kubectl delete "$kind" "$workload" --namespace="$NAMESPACE" --ignore-not-found || true
done
run kubectl delete configmap --selector="app.kubernetes.io/instance=$workload" --namespace="$NAMESPACE"
