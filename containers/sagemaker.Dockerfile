# A SageMaker training image on top of one of the others:
#   docker build -f containers/sagemaker.Dockerfile --build-arg BASE=lt:gpu -t ACCOUNT.dkr.ecr.REGION.amazonaws.com/lt:1 .
ARG BASE=lt:gpu
# hadolint ignore=DL3006
FROM ${BASE}

# The service runs the image with the argument "train"; the entry is process 1, so that SIGTERM reaches it.
RUN printf '#!/bin/sh\nexec lt launch sagemaker-entrypoint\n' > /usr/local/bin/train \
    && chmod 755 /usr/local/bin/train

# Isolated containers have no network: nothing may wait for it.
ENV HF_HUB_OFFLINE=1 \
    TRANSFORMERS_OFFLINE=1
WORKDIR /opt/ml
ENTRYPOINT []
CMD ["train"]
