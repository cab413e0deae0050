"""Addresses of channels and results, and the folders of this machine that stand for them.

An address is s3://BUCKET/FOLDER, fsx://FILE_SYSTEM_ID/FOLDER or efs://FILE_SYSTEM_ID/FOLDER. A folder that stands for
an address stands for what is below it, too; the longest address decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["FILE_SYSTEMS", "address_of", "channel_address", "local_folder"]

FILE_SYSTEMS = {"fsx": "FSxLustre", "efs": "EFS"}
"""Type of a file system, by the scheme of its addresses."""


def address_of(source: Mapping[str, Any]) -> str:
    """Return the address of a request's DataSource."""
    if s3 := source.get("S3DataSource"):
        return s3["S3Uri"]
    system = source["FileSystemDataSource"]
    scheme = next(name for name, kind in FILE_SYSTEMS.items() if kind == system["FileSystemType"])
    return f"{scheme}://{system['FileSystemId']}{system['DirectoryPath']}"


def channel_address(source: str) -> str:
    """Return the address in a channel's text, as `address_of` gives it: without ?ro or ?rw."""
    scheme, _, rest = source.partition("://")
    if scheme not in FILE_SYSTEMS:
        return source
    identifier, _, path = rest.partition("?")[0].partition("/")
    return f"{scheme}://{identifier}/{path}"


def local_folder(address: str, folders: Mapping[str, str]) -> str:
    """Return the folder that stands for an address; "" if there is none.

    Args:
        address: the address.
        folders: folder by address.
    """
    below = address.rstrip("/")
    for known in sorted(folders, key=len, reverse=True):
        start = known.rstrip("/")
        if below == start or below.startswith(f"{start}/"):
            return str(Path(folders[known]) / below[len(start) :].lstrip("/"))
    return ""
