"""Addresses of folders in buckets, as text: what can be told of one without asking a store, and without boto3."""

import re

from lt_ckpt.errors import CheckpointError

_URL = re.compile(r"s3://([a-z0-9][a-z0-9.\-]{1,61}[a-z0-9])(?:/([!-~]+))?")


def split(url: str) -> tuple[str, str]:
    """Splits an address into the bucket and the prefix of all names in the folder: empty, or with a slash at its end.

    Raises:
        CheckpointError: It is no address of a folder in a bucket.

    Example:
        >>> split("s3://bucket/runs/a")
        ('bucket', 'runs/a/')
    """
    found = _URL.fullmatch(url.rstrip("/"))
    parts = (found[2] or "").split("/") if found else []
    if found is None or (found[2] and any(part in ("", ".", "..") for part in parts)):
        raise CheckpointError(f"{url}: must be s3://bucket/folder")
    return found[1], f"{found[2]}/" if found[2] else ""
