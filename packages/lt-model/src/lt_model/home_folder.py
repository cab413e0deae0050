"""`~` at the beginning of a path: the home folder, as a shell reads it.

A shell leaves it as it is in quotes, in a file and after `--out=`; then a folder of that name would be made.
"""

import os

from lt_model.errors import ModelError


def expand_home(path: str) -> str:
    """Return a path with a leading `~` or `~USER` replaced by the home folder.

    Raises:
        ModelError: there is no such user, or the home folder is unknown.
    """
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        user = path.partition("/")[0]
        raise ModelError(f"{path}: there is no home folder {user}; write ./{path} for a name that begins with ~")
    return expanded
