# What the scripts in this folder work on. Copy it, fill it in, and say where it is: export JAXRL_ENV=my-env.sh
# Values that are already in the environment win.
# shellcheck shell=bash
export PROJECT=${PROJECT:-}     # Google Cloud project id
export ZONE=${ZONE:-}           # zone of the TPUs, as us-west4-a
export CLUSTER=${CLUSTER:-}     # name of the GKE cluster
export BUCKET=${BUCKET:-}       # Cloud Storage bucket, without gs://
export IMAGE=${IMAGE:-}         # container image with its tag, as us-west4-docker.pkg.dev/my-project/jaxrl/jaxrl:v1
export TPU=${TPU:-}             # slices, as v5e:4x4, v6e:4x4 or 2*v5e:16x16; the names of python -m jaxrl.plan

export CAPACITY=${CAPACITY:-on-demand}         # on-demand, spot, flex (flex-start) or reservation/NAME
export NETWORK=${NETWORK:-default}             # VPC network of the cluster and of Lustre
export NAMESPACE=${NAMESPACE:-default}         # Kubernetes namespace of the runs
export SERVICE_ACCOUNT=${SERVICE_ACCOUNT:-jaxrl} # Kubernetes service account of the runs; storage.sh lets it use the bucket
export SECRET=${SECRET:-jaxrl-secrets}         # Kubernetes secret whose keys become environment variables (HF_TOKEN, ...)
export QUEUE=${QUEUE:-multislice-queue}        # Kueue's LocalQueue; this is XPK's

export LUSTRE_INSTANCE=${LUSTRE_INSTANCE:-}    # Managed Lustre instance; empty: runs are kept in the bucket alone
export LUSTRE_FILESYSTEM=${LUSTRE_FILESYSTEM:-jaxrl}       # its file system, at most 8 letters and digits
export LUSTRE_CAPACITY_GIB=${LUSTRE_CAPACITY_GIB:-18000}   # GiB; which sizes there are depends on the throughput
export LUSTRE_THROUGHPUT=${LUSTRE_THROUGHPUT:-500}         # MB/s for each TiB: 125, 250, 500 or 1000
export LUSTRE_IP=${LUSTRE_IP:-}                # its address; empty: storage.sh asks for it

export MAX_RESTARTS=${MAX_RESTARTS:-10}        # of one workload, by interruptions and failures together
export RUN_AS_USER=${RUN_AS_USER:-0}           # user of the training processes; TPU devices and new volumes are root's
export METRICS_PORT=${METRICS_PORT:-9464}      # where the first process serves its metrics
export RAY_WORKERS=${RAY_WORKERS:-2}           # CPU workers of a RayJob
export PATHWAYS_VERSION=${PATHWAYS_VERSION:-latest} # tag of the Pathways images of a PathwaysJob
