"""S3 addresses of folders, parsed without a request and without boto3."""

import re

from lt_ckpt.errors import CheckpointError

_URL = re.compile(r"s3://([a-z0-9][a-z0-9.\-]{1,61}[a-z0-9])(?:/([!-~]+))?")


def split_url(url: str) -> tuple[str, str]:
    """Split an address into bucket and key prefix: empty, or with a slash at its end.

    Raises:
        CheckpointError: Not an address of a folder in a bucket.

    Example:
        >>> split_url("s3://bucket/runs/a")
        ('bucket', 'runs/a/')
    """
    found = _URL.fullmatch(url.rstrip("/"))
    parts = (found[2] or "").split("/") if found else []
    if found is None or (found[2] and any(part in ("", ".", "..") for part in parts)):
        raise CheckpointError(f"{url}: must be s3://bucket/folder")
    return found[1], f"{found[2]}/" if found[2] else ""
