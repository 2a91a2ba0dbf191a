#!/usr/bin/env bash
# Makes the GKE cluster of env.sh with XPK, for one kind of workload: cluster.sh [--pathways] [--ray]
# XPK adds the TPU node pools, JobSet and Kueue, and the drivers of Managed Lustre and Cloud Storage FUSE.
# Again on a cluster that is there, it changes what differs (for example the number of slices).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

kind=create ray=
for option in "$@"; do
    case $option in
        --pathways) kind=create-pathways ;; # as `create`, and the CPU nodes on which Pathways and its program run
        --ray) ray=yes ;;                   # KubeRay, with the add-on that sets up TPUs in Ray's workers
        *) echo "usage: cluster.sh [--pathways] [--ray]" >&2 && exit 2 ;;
    esac
done
case $CAPACITY in
    reservation/*) how=(--reservation="${CAPACITY#reservation/}") ;;
    *) how=("--$CAPACITY") ;;
esac

# Lustre is reached over the network of the cluster, through private services access; once a network.
if [ -n "$LUSTRE_INSTANCE" ]; then
    run gcloud services enable servicenetworking.googleapis.com lustre.googleapis.com --project="$PROJECT"
    range=$NETWORK-lustre
    if [ -n "${DRY_RUN:-}" ] || ! gcloud compute addresses describe "$range" --global --project="$PROJECT" >/dev/null 2>&1; then
        run gcloud compute addresses create "$range" --global --purpose=VPC_PEERING --prefix-length=20 \
            --network="$NETWORK" --project="$PROJECT"
        run gcloud services vpc-peerings connect --service=servicenetworking.googleapis.com --ranges="$range" \
            --network="$NETWORK" --project="$PROJECT"
        run gcloud compute firewall-rules create "$NETWORK-allow-lustre" --network="$NETWORK" --allow=tcp:988,tcp:6988 \
            --source-ranges=10.0.0.0/8 --project="$PROJECT"
    fi
fi

run "$XPK" cluster "$kind" ${DRY_RUN:+--dry-run} --cluster="$CLUSTER" --project="$PROJECT" --zone="$ZONE" \
    --tpu-type="$XPK_TYPE" --num-slices="$SLICES" "${how[@]}" \
    --enable-workload-identity --enable-gcsfuse-csi-driver ${LUSTRE_INSTANCE:+--enable-lustre-csi-driver} \
    --custom-cluster-arguments="--network=$NETWORK --subnetwork=$NETWORK" --force
if [ -n "$ray" ]; then
    run gcloud container clusters update "$CLUSTER" --location="$REGION" --project="$PROJECT" \
        --update-addons=RayOperator=ENABLED
fi
