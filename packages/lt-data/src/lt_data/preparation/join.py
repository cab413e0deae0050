"""Join of token stores without copying: one manifest that names them (lt_data.store.joined).

Cost: the manifests are read and the sizes of all shards compared; the manifest is written, and of 1024 shards or more
an index.
"""

import os
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lt_data.errors import DataError
from lt_data.file_names import to_portable_name
from lt_data.progress import NoticeCallback, no_notice
from lt_data.storage import fsync_folder, make_folder_synced, translate_os_errors, write_file
from lt_data.store.combined_manifest import LoadedPart
from lt_data.store.joined import PART_FOLDERS, join_parts, load_store
from lt_data.store.joined_index import INDEX_FILE
from lt_data.store.manifest import MANIFEST_FILE, DropList, StoreManifest
from lt_data.store.token_store import TokenStore

_BUILDING = ".tmp-"


def join(
    out: str | Path,
    stores: Sequence[str | Path],
    *,
    dropped: DropList | None = None,
    notify: NoticeCallback = no_notice,
) -> StoreManifest:
    """Make a joined store of other stores, which stay where they are.

    Of a joined store its parts are taken.

    Args:
        out: folder of the joined store: a new one, or one that contains the stores.
        stores: folders of the stores, in the order of their documents.
        dropped: what to leave out of them; the file of the extents that are left is in `out`.
        notify: called with notices for the user.

    Returns:
        The manifest of a flat store with the same shards.

    Raises:
        DataError: a store is missing or damaged, they have different tokenizers or options, or `out` is a store already
            or unwritable.
    """
    out = Path(out)
    if isinstance(stores, str | Path) or not stores:
        raise DataError(f"stores = {stores!r}: give a list of stores")
    with translate_os_errors("read", out):
        if os.path.lexists(out / MANIFEST_FILE):
            raise DataError(f"out = {out}: holds a store already; choose another folder")
    parts: list[LoadedPart] = []
    for store in stores:
        if str(store).startswith("s3://"):
            raise DataError(f"{store}: only stores in folders can be joined; download it first (lt data download)")
        if TokenStore(store).manifest.dropped is not None:
            raise DataError(
                f"{store}: leaves out duplicates of its parts, so it cannot be a part itself; make one store of all "
                "sources, or use the stores as a mixture"
            )
        parts += [replace(part, path=_path_of(part.folder, out)) for part in load_store(Path(store)).parts]
    joined, manifest, index = join_parts(parts, dropped=dropped)
    with translate_os_errors("create", out):
        make_folder_synced(out)
    if index is not None:
        replace_file(out / INDEX_FILE, index)
    replace_file(out / MANIFEST_FILE, joined.encode())
    if elsewhere := [part.path for part in joined.parts if part.is_elsewhere]:
        notify(
            f"{len(elsewhere)} parts lie outside of {out}, such as {elsewhere[0]}: to open it, list folders that have "
            f"them in the environment variable {PART_FOLDERS}"
        )
    return manifest


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees nothing of it or all.

    Raises:
        DataError: a file system error; nothing is left.
    """
    building = path.with_name(f"{path.name}{_BUILDING}{secrets.token_hex(4)}")
    try:
        write_file(building, content)
        with translate_os_errors("write", path):
            building.rename(path)
            fsync_folder(path.parent)
    finally:
        building.unlink(missing_ok=True)


def remove_unfinished(path: Path) -> None:
    """Remove what killed processes left of `replace_file`; one that is writing the file fails."""
    for left in path.parent.glob(f"{path.name}{_BUILDING}*"):
        left.unlink(missing_ok=True)


def _path_of(part: Path, out: Path) -> str:
    """Return the path of a part in the manifest: relative if it is inside `out`, without symbolic links."""
    folder, root = os.path.realpath(part), os.path.realpath(out)
    inside = os.path.commonpath([folder, root]) == root
    return to_portable_name(Path(os.path.relpath(folder, root) if inside else folder).as_posix())
