"""Whose a folder of checkpoints in a bucket is, so that two runs never mix theirs there.

The object `.lt-run.json` names the run, by a random identity that it keeps for its life, and the process of that run
which sends now. Whoever starts takes the place of the holder before; a mirror looks before each checkpoint, so that a
process that was believed dead stops sending when another has gone on with its run.

    {"format":"lt-run","version":1,"run":"0123456789abcdef","holder":"fedcba9876543210"}

Cost: one request for a look, one more to take the place. Two processes that start in the same instant may both believe
that they have it; the next look tells one of them.
"""

import re
from dataclasses import dataclass

from lt_ckpt import strict_json
from lt_ckpt.errors import CheckpointError
from lt_ckpt.s3.client import S3Folder

OWNER = ".lt-run.json"
MAX_OWNER_BYTES = 2**12
_NAME = re.compile(r"[0-9a-f]{16}")


class ForeignError(CheckpointError):
    """The folder belongs to another run, or another process has taken it over."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A run, and the process of it that holds the folder; each 16 hex digits (`lt_ckpt.folders.new_token`)."""

    run: str
    holder: str

    def __post_init__(self) -> None:
        for name in (self.run, self.holder):
            if not _NAME.fullmatch(name):
                raise CheckpointError(f"{name!r}: the name of a run is 16 hex digits")


def look(root: S3Folder) -> Owner | None:
    """Returns whose the folder is; None when nobody has claimed it.

    Raises:
        ServiceError: The store refuses or cannot be reached.
        CheckpointError: What is there cannot be read.
    """
    raw = root.read(OWNER, MAX_OWNER_BYTES)
    if raw is None:
        return None
    where = f"{root.url}/{OWNER}"
    obj = strict_json.loads(raw, where)
    strict_json.check_version(obj, "lt-run", 1, where)
    return Owner(run=strict_json.field(obj, "run", str, where), holder=strict_json.field(obj, "holder", str, where))


def take(root: S3Folder, me: Owner) -> None:
    """Takes the folder, whoever had it: `look` first."""
    root.write(OWNER, strict_json.dumps({"format": "lt-run", "version": 1, **vars(me)}, OWNER))


def hold(root: S3Folder, me: Owner, *, first: bool) -> None:
    """Makes sure that the folder is this process's; it is taken when nobody has it.

    Args:
        root: The folder.
        me: This run and process.
        first: Also take it from another process of the same run: it is this process's first look.

    Raises:
        ForeignError: It is another's.
        ServiceError: The store refuses or cannot be reached.
    """
    found = look(root)
    if found == me:
        return
    if found is not None and found.run != me.run:
        raise ForeignError(
            f"{root.url}: belongs to another run (its name is {found.run}, this one's {me.run}): two runs cannot be "
            "mirrored to one folder"
        )
    if found is not None and not first:
        raise ForeignError(f"{root.url}: another process has gone on with this run, and sends its checkpoints there")
    take(root, me)
