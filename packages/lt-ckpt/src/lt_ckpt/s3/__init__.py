"""Checkpoints in S3: sending, fetching, mirroring. Only `lt_ckpt.s3.client.client` knows boto3."""
