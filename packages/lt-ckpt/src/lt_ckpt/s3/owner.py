"""Ownership of a folder of checkpoints in a bucket, so that two runs never mix their checkpoints.

The object `.lt-run.json` names the run, by a random id that it keeps for its life, and the process of that run which
uploads now. A starting process takes over from the previous one; a mirror checks before each checkpoint, so that a
process that was believed dead stops uploading once another has resumed its run.

    {"run": "0123456789abcdef", "holder": "fedcba9876543210"}

Cost: one request to check, one more to take over. Two processes that start in the same instant may both believe that
they own it; the next check tells one of them.
"""

import json
from dataclasses import asdict, dataclass

from lt_ckpt.errors import CheckpointError
from lt_data.remote.s3_folder import S3Folder

OWNER_FILE = ".lt-run.json"


class NotOwnerError(CheckpointError):
    """Folder owned by another run, or taken over by another process."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Run and its owning process; each 16 hex digits (`lt_ckpt.folders.random_id`)."""

    run: str
    holder: str


def read_owner(root: S3Folder) -> Owner | None:
    """Return the owner of the folder; None if it is unclaimed.

    Raises:
        RemoteError: S3 refuses or cannot be reached.
        CheckpointError: The object is not of a run.
    """
    content = root.read(OWNER_FILE, 2**12)
    if content is None:
        return None
    try:
        return Owner(**json.loads(content))
    except (ValueError, TypeError, RecursionError):
        raise CheckpointError(f"{root.url}/{OWNER_FILE}: names no run; give another folder, or remove it") from None


def ensure_owner(root: S3Folder, owner: Owner, *, allow_takeover: bool) -> None:
    """Make sure that this process owns the folder; claim it if it is unclaimed.

    Args:
        root: The folder.
        owner: This run and process.
        allow_takeover: Also take it over from another process of the same run (this process's first check).

    Raises:
        NotOwnerError: It belongs to another run or process.
        RemoteError: S3 refuses or cannot be reached.
    """
    current = read_owner(root)
    if current == owner:
        return
    if current is not None and current.run != owner.run:
        raise NotOwnerError(
            f"{root.url}: belongs to another run (its id is {current.run}, this one's {owner.run}): two runs cannot be "
            "mirrored to one folder"
        )
    if current is not None and not allow_takeover:
        raise NotOwnerError(f"{root.url}: another process has resumed this run and uploads its checkpoints there")
    root.write(OWNER_FILE, json.dumps(asdict(owner)).encode())
