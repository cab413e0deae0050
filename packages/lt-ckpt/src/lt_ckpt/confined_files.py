"""Files of a model's folder, whose links may not lead elsewhere.

They are copied into every output, so a link to any file of the machine would publish it: a tokenizer's file unchanged,
weights as those of another model. Who made a link cannot be seen, so one rule holds for all files, weights too: a link
may lead to another file of the folder or, in the cache of the Hugging Face hub, whose snapshots consist of links, to
the blobs of the same model: `models--ORG--NAME/snapshots/REVISION/FILE` → `models--ORG--NAME/blobs/HASH`. The folder
itself, and a file that the user names, may be links to anywhere.
"""

import os
from pathlib import Path

from lt_ckpt import files
from lt_ckpt.errors import CheckpointError, translate_os_errors


def resolve_confined(folder: Path, name: str) -> Path:
    """Return the path of a folder's file without links.

    Raises:
        CheckpointError: It is a link out of the folder.
    """
    path = folder / name
    with translate_os_errors("reading", path):
        inside = Path(os.path.realpath(folder))  # `Path.resolve` fails at a link to itself
        target = Path(os.path.realpath(path))
    if target == inside / name:
        return target
    blobs = _hub_blobs(inside)
    if not target.is_relative_to(inside) and not (blobs and target.is_relative_to(blobs)):
        raise CheckpointError(
            f"{path}: is a link to {target}, outside of the model's folder; put the file itself there (a copy or a "
            "hard link), or give the folder in which it lies"
        )
    return target


def _hub_blobs(folder: Path) -> Path | None:
    """Return the blobs of the model whose snapshot in the hub's cache `folder` is, or is a part of."""
    for revision in (folder, *folder.parents):
        model = revision.parent.parent
        if revision.parent.name == "snapshots" and model.name.startswith("models--"):
            return model / "blobs"
    return None


def read_confined(folder: Path, name: str, max_bytes: int) -> bytes | None:
    """Return the content of a folder's file; None if there is none.

    Raises:
        CheckpointError: It is a link out of the folder, too large, or cannot be read.
    """
    path = folder / name
    with translate_os_errors("reading", path):
        if not os.path.lexists(path):
            return None
        target = resolve_confined(folder, name)
        return files.read_bounded(target, max_bytes) if target.is_file() else None
