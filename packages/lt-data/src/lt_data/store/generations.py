"""Search for the generation of a store that a stream has read; lt_data.store.joined defines them.

The fingerprint of a sequence of rows begins each store's fingerprint. A folder that names a generation means that one;
the folder of the store means its newest, unless what was read says otherwise.

Cost: one read of the joined manifest of each generation.
"""

import os
from pathlib import Path

from lt_data.store.joined import GENERATION_FOLDER, find_generation


def names_generation(path: str | Path) -> bool:
    """Return whether a path names one generation of a store, such as `STORE/generations/00001`."""
    return _absolute(path).parent.name == GENERATION_FOLDER


def locate_generation(path: str | Path, fingerprint: str) -> Path | None:
    """Return the generation with this beginning of its fingerprint, if any.

    Args:
        path: the store, or one of its generations.
        fingerprint: beginning of a fingerprint.

    Raises:
        DataError: a manifest of a generation is broken, or one is missing.
    """
    root = _absolute(path).parent.parent if names_generation(path) else Path(path)
    return find_generation(root, fingerprint)


def _absolute(path: str | Path) -> Path:
    return Path(os.path.abspath(path))
