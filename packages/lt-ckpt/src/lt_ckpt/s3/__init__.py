"""Checkpoints in S3 buckets, by lt-data's upload and download (`lt-ckpt[s3]`)."""
