#!/usr/bin/env bash
# Builds the image of env.sh from this checkout and pushes it: image.sh [docker|cloud-build]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$here/../.."
case ${1:-docker} in
    docker)
        run docker build -f deploy/gke-tpu/Dockerfile -t "$IMAGE" .
        run docker push "$IMAGE"
        ;;
    cloud-build) run gcloud builds submit --project="$PROJECT" --config=deploy/gke-tpu/cloudbuild.yaml --substitutions="_IMAGE=$IMAGE" . ;;
    *) echo "usage: image.sh [docker|cloud-build]" >&2 && exit 2 ;;
esac
