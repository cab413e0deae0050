"""The AWS Trainium (neuronx-distributed) engine of lt."""
