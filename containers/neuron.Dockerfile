# lt with AWS Neuron's torch 2.9 line. The driver is the host's; the compiler, the runtime's libraries and torch-neuronx come
# from the AWS Neuron apt and pip repositories, whose addresses stand on AWS's set-up page (containers/README.md). In the root:
#   docker build -f containers/neuron.Dockerfile -t lt:neuron --build-arg NEURON_APT=... --build-arg NEURON_PIP=... .
ARG BASE=ubuntu:22.04
FROM ${BASE}
ARG NEURON_APT
ARG NEURON_PIP
ARG NEURON_SDK=2.28.1

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV DEBIAN_FRONTEND=noninteractive \
    PATH=/opt/venv/bin:/opt/aws/neuron/bin:${PATH}

# hadolint ignore=DL3008
RUN : "${NEURON_APT:?give the address of the AWS Neuron apt repository}" \
    && apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates curl gnupg python3.11 python3.11-venv \
    && curl --fail --silent --show-error "${NEURON_APT}/GPG-PUB-KEY-AMAZON-AWS-NEURON.PUB" \
        | gpg --dearmor --output /usr/share/keyrings/neuron.gpg \
    && echo "deb [signed-by=/usr/share/keyrings/neuron.gpg] ${NEURON_APT} jammy main" \
        > /etc/apt/sources.list.d/neuron.list \
    && apt-get update \
    && apt-get install --yes --no-install-recommends aws-neuronx-collectives aws-neuronx-runtime-lib aws-neuronx-tools \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/lt
COPY packages packages
COPY constraints constraints
RUN : "${NEURON_PIP:?give the address of the AWS Neuron pip repository}" \
    && python3.11 -m venv /opt/venv \
    && python -m pip install --no-cache-dir --extra-index-url "${NEURON_PIP}" \
        --constraint "constraints/neuron-${NEURON_SDK}.txt" \
        "./packages/lt-model[cli,torch]" \
        "./packages/lt-data[cli,s3,zstd]" \
        "./packages/lt-ckpt[cli,hub,s3]" \
        "./packages/lt-trainer[cli,s3,torch]" \
        "./packages/lt-trainer-neuron[neuron]" \
        ./packages/lt-launch

ENV OMP_NUM_THREADS=1 \
    PYTHONUNBUFFERED=1
WORKDIR /workspace
CMD ["lt", "--help"]
