#!/usr/bin/env bash
# Makes the bucket and the Managed Lustre instance of env.sh, lets the runs' service account use the bucket
# (Workload Identity), and gives the cluster volumes of both. Again, it changes nothing that is there.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

there() { [ -z "${DRY_RUN:-}" ] && "$@" >/dev/null 2>&1; }
ask() { if [ -n "${DRY_RUN:-}" ]; then echo "$1"; else "${@:2}"; fi; } # ask ANSWER-OF-A-DRY-RUN COMMAND...

# Checkpoints rename nothing in a bucket, but list and delete folders: quicker with a hierarchical namespace.
there gcloud storage buckets describe "gs://$BUCKET" --project="$PROJECT" ||
    run gcloud storage buckets create "gs://$BUCKET" --project="$PROJECT" --location="$REGION" \
        --uniform-bucket-level-access --enable-hierarchical-namespace
number=$(ask 123456789012 gcloud projects describe "$PROJECT" --format="value(projectNumber)")
pool=projects/$number/locations/global/workloadIdentityPools/$PROJECT.svc.id.goog
# Pods on the host's network (Pathways, several slices) have the identity of their node.
for member in "principal://iam.googleapis.com/$pool/subject/ns/$NAMESPACE/sa/$SERVICE_ACCOUNT" \
    "serviceAccount:$number-compute@developer.gserviceaccount.com"; do
    run gcloud storage buckets add-iam-policy-binding "gs://$BUCKET" --member="$member" --role=roles/storage.objectUser
done
apply storage

if [ -n "$LUSTRE_INSTANCE" ]; then
    instance=("$LUSTRE_INSTANCE" --location="$ZONE" --project="$PROJECT")
    there gcloud lustre instances describe "${instance[@]}" ||
        run gcloud lustre instances create "${instance[@]}" --network="projects/$PROJECT/global/networks/$NETWORK" \
            --filesystem="$LUSTRE_FILESYSTEM" --capacity-gib="$LUSTRE_CAPACITY_GIB" \
            --per-unit-storage-throughput="$LUSTRE_THROUGHPUT"
    # mountPoint is <ip>@tcp:/<file system>
    mount_point=$(ask "10.0.0.2@tcp:/$LUSTRE_FILESYSTEM" gcloud lustre instances describe "${instance[@]}" \
        --format="value(mountPoint)")
    export LUSTRE_IP=${LUSTRE_IP:-${mount_point%%@*}}
    apply lustre
fi
