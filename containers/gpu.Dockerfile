# lt with CUDA torch. Build it in the root of the repository: docker build -f containers/gpu.Dockerfile -t lt:gpu .
# torch's wheels bring CUDA and NCCL; EFA needs libfabric and aws-ofi-nccl, which the SageMaker and HyperPod base images
# have: name one of them as BASE there.
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE}

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential ca-certificates git openssh-client \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/lt
COPY packages packages
# The engine of this image, the launcher's agent and the tools for data; quickstart and tests stay outside.
RUN python -m pip install --no-cache-dir \
        "./packages/lt-model[cli,torch]" \
        "./packages/lt-data[cli,s3,zstd]" \
        "./packages/lt-ckpt[cli,hub,s3]" \
        "./packages/lt-trainer[cli,s3,torch]" \
        ./packages/lt-trainer-gpu \
        ./packages/lt-launch \
    && python -m pip check

ENV OMP_NUM_THREADS=1 \
    PYTHONUNBUFFERED=1
WORKDIR /workspace
CMD ["lt", "--help"]
