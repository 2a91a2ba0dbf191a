#!/usr/bin/env bash
# Deletes what cluster.sh and storage.sh made and what costs money: the cluster with its TPUs, and the Lustre
# instance with all that is on it. The bucket stays, unless --bucket is given: cleanup.sh [--bucket]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
case ${1:-} in "" | --bucket) ;; *) echo "usage: cleanup.sh [--bucket]" >&2 && exit 2 ;; esac
if [ -z "${DRY_RUN:-}" ]; then
    echo "This deletes cluster $CLUSTER${LUSTRE_INSTANCE:+, Lustre instance $LUSTRE_INSTANCE}${1:+, bucket $BUCKET}." >&2
    read -r -p "Type the cluster's name to go on: " answer
    [ "$answer" = "$CLUSTER" ] || { echo "nothing was deleted" >&2 && exit 1; }
fi
run "$XPK" cluster delete ${DRY_RUN:+--dry-run} --cluster="$CLUSTER" --project="$PROJECT" --zone="$ZONE" --force
if [ -n "$LUSTRE_INSTANCE" ]; then
    run gcloud lustre instances delete "$LUSTRE_INSTANCE" --location="$ZONE" --project="$PROJECT" --quiet
fi
if [ "${1:-}" = --bucket ]; then
    run gcloud storage rm "gs://$BUCKET" --recursive
fi
