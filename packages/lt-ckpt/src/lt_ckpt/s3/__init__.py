"""Checkpoints in S3 buckets, by lt-data's upload and download (`lt-ckpt[s3]`)."""

from importlib.util import find_spec

from lt_ckpt.errors import CheckpointError

if find_spec("lt_data") is None:
    raise CheckpointError("s3://: needs lt-data: pip install 'lt-ckpt[s3]'")
