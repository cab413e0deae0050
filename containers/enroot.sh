#!/bin/bash
# Build an image and make the .sqsh file that enroot and pyxis start: bash enroot.sh DOCKERFILE OUT.sqsh [BASE]
# Run it on a worker: its NVMe takes the layers, the head node's disk would not. OUT lies on the shared file system.
# With an image that a registry has: bash enroot.sh docker://ACCOUNT.dkr.ecr.REGION.amazonaws.com#lt:1 OUT.sqsh
set -euo pipefail

if [ $# -lt 2 ]; then
    sed -n '2,4s/^# //p' "$0"
    exit 64
fi
source=$1
out=$2
base=${3:-}

if [ -e "$out" ]; then
    echo "$out is there already; remove it, or choose another name" >&2
    exit 64
fi
command -v enroot >/dev/null || { echo 'enroot is not installed here' >&2; exit 64; }

# The largest local disk: HyperPod and ParallelCluster mount NVMe at one of these.
scratch=${LT_SCRATCH:-}
for folder in /opt/dlami/nvme /opt/sagemaker /scratch /local_scratch /mnt/nvme; do
    if [ -z "$scratch" ] && [ -w "$folder" ]; then scratch=$folder; fi
done
scratch=$(mktemp -d "${scratch:-/tmp}/lt-enroot.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
export ENROOT_CACHE_PATH=$scratch/cache ENROOT_DATA_PATH=$scratch/data ENROOT_TEMP_PATH=$scratch/temp
mkdir -p "$ENROOT_CACHE_PATH" "$ENROOT_DATA_PATH" "$ENROOT_TEMP_PATH"
echo "working in $scratch: $(df -h --output=avail "$scratch" | tail -n 1 | tr -d ' ') free" >&2

case $source in
docker://*) address=$source ;;
*)
    root=$(cd "$(dirname "$source")/.." && pwd)
    tag=lt-enroot:$(date +%Y%m%d%H%M%S)
    arguments=(--file "$source" --tag "$tag")
    if [ -n "$base" ]; then arguments+=(--build-arg "BASE=$base"); fi
    docker build "${arguments[@]}" "$root"
    address=dockerd://$tag
    ;;
esac

# Beside its place, then renamed: nobody starts half an image.
enroot import --output "$out.part" "$address"
mv "$out.part" "$out"
ls -lh "$out"
