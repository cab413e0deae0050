"""Folders of `datasets.save_to_disk`: their Arrow files in order, read without `datasets`.

`state.json` lists the files of one split; a folder of several splits has `dataset_dict.json` and one folder per split.
"""

from collections.abc import Callable, Mapping
from typing import Any

from lt_data import strict_json
from lt_data.errors import DataError
from lt_data.file_names import check_name

STATE_FILE, DATASET_DICT_FILE = "state.json", "dataset_dict.json"
_REMEDY = "load and save the dataset with datasets again"


def list_arrow_files(name: str, read: Callable[[str], bytes | None], split: str | None) -> list[str] | None:
    """Return the Arrow files of a folder, relative to it; None if it is not a saved dataset.

    Args:
        name: the folder, for messages.
        read: function that returns the content of a file of the folder, or None if it does not exist.
        split: split to read, if there are several.

    Raises:
        DataError: no such split, a slice, or a file list that is broken or not supported.
    """
    if (content := read(DATASET_DICT_FILE)) is not None:
        splits = _read_names(f"{name}/{DATASET_DICT_FILE}", content, "splits", lambda entry: entry)
        chosen = splits[0] if split is None and len(splits) == 1 else split
        if chosen not in splits:
            names = ", ".join(splits)
            raise DataError(f"{name}: the splits are {names}, not {split}; choose one with split (--split), not sliced")
        prefix = f"{chosen}/"
        if (content := read(prefix + STATE_FILE)) is None:
            raise DataError(f"{name}/{prefix}{STATE_FILE}: missing; {_REMEDY}")
    elif (content := read(STATE_FILE)) is None or read("dataset_info.json") is None:
        return None
    else:
        prefix = ""
    path = f"{name}/{prefix}{STATE_FILE}"
    files = _read_names(path, content, "_data_files", lambda entry: entry["filename"])
    _check_selection(strict_json.load_object(content, path, _REMEDY), path)
    return [prefix + file for file in files]


def _check_selection(state: Mapping[str, Any], path: str) -> None:
    """Raise DataError if the dataset is not all rows of its files, unchanged and in order.

    `datasets` 1.2 to 1.4 has the indices of the rows in `_indices_data_files`; before, a slice of a file is in its
    entry, and changes are in `_inplace_history`.
    """
    files = state["_data_files"]
    has_indices = state.get("_indices_files") or state.get("_indices_data_files")
    has_slices = any("skip" in entry or "take" in entry for entry in files)
    no_changes = [{"transforms": []}] * len(files)
    has_changes = state.get("_inplace_history") not in (None, [], no_changes)
    if has_indices or has_slices or has_changes:
        raise DataError(f"{path}: the dataset is not all rows of its files in their order; {_REMEDY}")


def _read_names(path: str, content: bytes, field: str, get: Callable[[Any], Any]) -> list[str]:
    try:
        names = [get(entry) for entry in strict_json.load_object(content, path, _REMEDY)[field]]
    except (KeyError, TypeError) as exc:
        raise DataError(f"{path}: no list {field}; {_REMEDY}") from exc
    return [check_name(name, path) for name in names]
