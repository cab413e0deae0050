"""Names of files that come from a file, an index or a listing."""

from pathlib import PureWindowsPath

from lt_ckpt.errors import CheckpointError


def check_name(name: object, source: object) -> str:
    r"""Return a name that stays inside the folder of what names it: relative, without empty parts, `.` and `..`.

    Args:
        name: What an index, a list of hashes or a listing gives; parts are separated by "/", a "\" is refused.
        source: File or address that gives it, for the message.

    Raises:
        CheckpointError: The name leads elsewhere, or is none.
    """
    if not isinstance(name, str) or not name.isprintable():
        raise CheckpointError(f"{source}: {name!r} is no file name")
    if {"", ".", ".."} & {*name.split("/")} or "\\" in name or PureWindowsPath(name).drive:
        raise CheckpointError(f"{source}: file name {name!r} leads out of its folder; names are relative, without '..'")
    return name
