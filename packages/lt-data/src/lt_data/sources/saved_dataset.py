"""Folders of `datasets.save_to_disk`: their Arrow files in order, read without `datasets`.

`state.json` lists the files of one split; a folder of several splits has `dataset_dict.json` and one folder per split.
"""

from collections.abc import Callable
from typing import Any

from lt_data import strict_json
from lt_data.errors import DataError
from lt_data.file_names import is_plain_name

STATE_FILE, DATASET_DICT_FILE = "state.json", "dataset_dict.json"
ReadFile = Callable[[str], bytes | None]


def list_arrow_files(name: str, read: ReadFile, split: str | None) -> list[str] | None:
    """Return the Arrow files of a folder, relative to it; None if it is not a saved dataset.

    Args:
        name: the folder, for messages.
        read: function that returns the content of a file of the folder, or None if it does not exist.
        split: split to read, if there are several.

    Raises:
        DataError: no such split, a slice, or a file list that is broken or not supported.
    """
    if (content := read(DATASET_DICT_FILE)) is not None:
        splits = _read_list(f"{name}/{DATASET_DICT_FILE}", content, "splits")
        if foreign := [name for name in splits if not isinstance(name, str) or not is_plain_name(name)]:
            raise DataError(
                f"{name}/{DATASET_DICT_FILE}: {foreign[0]!r} is not a folder of this one; save the dataset again"
            )
        chosen = splits[0] if split is None and len(splits) == 1 else split
        if chosen not in splits:
            raise DataError(
                f"{name}: the splits of this saved dataset are {', '.join(splits)}, not {split}; choose one of them "
                "with split (--split), without a slice"
            )
        if (content := read(f"{chosen}/{STATE_FILE}")) is None:
            raise DataError(f"{name}/{chosen}: {STATE_FILE} is missing; save the dataset again")
        return [f"{chosen}/{file}" for file in _parse_files(f"{name}/{chosen}", content)]
    if (content := read(STATE_FILE)) is None or read("dataset_info.json") is None:
        return None
    return _parse_files(name, content)


def _parse_files(name: str, content: bytes) -> list[str]:
    path = f"{name}/{STATE_FILE}"
    values = _parse_json(path, content)
    if values.get("_indices_data_files") or values.get("_indices_files"):
        raise DataError(f"{path}: the rows are not in the order of the files; load and save it with datasets again")
    entries = _read_list(path, content, "_data_files")
    files = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
    valid = [file for file in files if isinstance(file, str) and is_plain_name(file)]
    if len(valid) != len(files):
        raise DataError(f"{path}: _data_files does not name files of the folder; save the dataset again")
    return valid


def _read_list(path: str, content: bytes, name: str) -> list[Any]:
    values = _parse_json(path, content).get(name)
    if not isinstance(values, list):
        raise DataError(f"{path}: no list {name}; save the dataset again")
    return values


def _parse_json(path: str, content: bytes) -> dict[str, Any]:
    return strict_json.load_object(content, path, "save the dataset again")
