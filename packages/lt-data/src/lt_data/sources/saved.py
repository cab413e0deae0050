"""Folders that `datasets` wrote with `save_to_disk`: which Arrow files they hold, in which order, without `datasets`.

`state.json` lists the files of one split; the folder of several has `dataset_dict.json` and a folder for each.
"""

import json
from collections.abc import Callable
from typing import Any

from lt_data.errors import DataError

STATE, SPLITS = "state.json", "dataset_dict.json"
Read = Callable[[str], bytes | None]


def arrow_files(name: str, read: Read, split: str | None) -> list[str] | None:
    """The Arrow files of a folder, relative to it; None where it is no saved dataset.

    Args:
        name: the folder, for messages.
        read: the content of a file of the folder; None where there is none.
        split: which of several.

    Raises:
        DataError: no such split, a slice, or a list that is broken or of a kind that cannot be read here.
    """
    if (content := read(SPLITS)) is not None:
        splits = _field(f"{name}/{SPLITS}", content, "splits")
        chosen = splits[0] if split is None and len(splits) == 1 else split
        if chosen not in splits:
            raise DataError(
                f"{name}: the splits of this saved dataset are {', '.join(splits)}, not {split}; choose one of them "
                "with split (--split), without a slice"
            )
        if (content := read(f"{chosen}/{STATE}")) is None:
            raise DataError(f"{name}/{chosen}: {STATE} is missing; save the dataset again")
        return [f"{chosen}/{file}" for file in _files(f"{name}/{chosen}", content)]
    if (content := read(STATE)) is None or read("dataset_info.json") is None:
        return None
    return _files(name, content)


def _files(name: str, content: bytes) -> list[str]:
    where = f"{name}/{STATE}"
    values = _json(where, content)
    if values.get("_indices_data_files") or values.get("_indices_files"):
        raise DataError(f"{where}: the rows are in another order than the files; load and save it with datasets again")
    entries = _field(where, content, "_data_files")
    files = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
    named = [file for file in files if isinstance(file, str) and "/" not in file]
    if len(named) != len(files):
        raise DataError(f"{where}: _data_files does not name files of the folder; save the dataset again")
    return named


def _field(where: str, content: bytes, name: str) -> list[Any]:
    found = _json(where, content).get(name)
    if not isinstance(found, list):
        raise DataError(f"{where}: no list {name}; save the dataset again")
    return found


def _json(where: str, content: bytes) -> dict[str, Any]:
    try:
        values = json.loads(content)
    except ValueError as exc:
        raise DataError(f"{where}: not JSON ({exc}); save the dataset again") from exc
    if not isinstance(values, dict):
        raise DataError(f"{where}: not the description of a saved dataset; save the dataset again")
    return values
