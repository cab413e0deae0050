"""Map of source records by a function of the user, `module:function`, before documents are selected.

The function gets a record (a dict) and the arguments by name; it returns a record, None or `LeftOut` with a reason. It
must depend on nothing but its arguments: any process calls it for any unit, again after a kill. Its identity is the
SHA-256 of its module's file, or of every Python file of the package that it is in: for each, in name order, the line
`NAME SIZE` and the bytes. Cost: one call per record; hashing reads the package once.
"""

import hashlib
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

from lt_data.errors import DataError
from lt_data.sources.document import Document
from lt_data.sources.options import SourceOptions
from lt_data.sources.record import TOKEN_FIELDS, BadRecord, extract_value
from lt_data.store.manifest import RecordMapInfo

LEFT_OUT_BY_MAP = "map"
MAX_REASONS = 100
_imported: dict[str, str] = {}  # module -> hash of its code at its first use in this process


@dataclass(frozen=True)
class LeftOut:
    """Result of a map that leaves a record out, counted as `map: REASON` in the manifest.

    >>> def select(record, *, least):
    ...     return record if record["score"] >= least else LeftOut("low score")
    >>> select({"text": "A text.", "score": 1}, least=3)
    LeftOut(reason='low score')
    """

    reason: str

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str) or not 0 < len(self.reason) <= 100 or not self.reason.isprintable():
            raise DataError(f"reason = {self.reason!r}: give a category of 1 to 100 printable characters")


class RecordMap:
    """Function of the user over records; made by `load_record_map`.

    Attributes:
        info: its name, arguments and hash, for the manifest.
    """

    def __init__(self, function: Callable[..., Any], info: RecordMapInfo, options: SourceOptions) -> None:
        self.info = info
        self._function = function
        self._options = options
        self._reasons: set[str] = set()

    def apply(self, document: Document) -> Document | str:
        """Return the document of the mapped record, or the reason for which it is left out.

        Raises:
            DataError: the function raised an exception, or returned something else.
        """
        options = self._options
        if document.ids is not None and options.tokens_field is None:  # ids of the caller
            options = replace(options, tokens_field=TOKEN_FIELDS[0])
        record = document.fields
        if record is None:
            ids = document.ids
            record = {options.text_field: document.text} if ids is None else {options.tokens_field: ids.tolist()}
        where = f"{document.source}: map = {self.info.function}"
        try:
            result = self._function(record, **self.info.arguments)
        except Exception as exc:  # whatever the user's code raises is an error for the user
            frame = traceback.extract_tb(exc.__traceback__)[-1]
            at = f"{Path(frame.filename).name}:{frame.lineno}"
            raise DataError(f"{where} raised {type(exc).__name__}: {exc} ({at}); correct the function") from exc
        if result is None:
            return LEFT_OUT_BY_MAP
        if isinstance(result, LeftOut):
            self._reasons.add(result.reason)
            if len(self._reasons) > MAX_REASONS:
                raise DataError(f"{where}: more than {MAX_REASONS} reasons; return categories, not values")
            return f"{LEFT_OUT_BY_MAP}: {result.reason}"
        if not isinstance(result, dict):
            raise DataError(f"{where} returned {type(result).__name__}; return a record (dict), None or LeftOut")
        value, _ = extract_value(result, options)
        if isinstance(value, BadRecord):
            raise DataError(f"{where} returned a record with {value.message}")
        text, ids = (value, None) if isinstance(value, str) else (None, value)
        return replace(document, text=text, ids=ids, fields=result)


def load_record_map(
    function: str | None, arguments: Mapping[str, Any] | None, options: SourceOptions
) -> RecordMap | None:
    """Import `module:function`, also from the working directory, and hash its code.

    Args:
        function: `module:function`; None for no map.
        arguments: arguments that the function gets by name: JSON values.
        options: read options, which name the field of the text or ids.

    Raises:
        DataError: no such function, code that cannot be hashed or that changed since this process imported it, or
            arguments that are not JSON values or without a function.
    """
    if function is None:
        if arguments is not None:
            raise DataError("map_args (--map-args): only with record_map (--map)")
        return None
    at = f"map = {function!r}"
    name, _, attribute = function.partition(":")
    if not name or not attribute:
        raise DataError(f"{at}: write it as module:function")
    try:
        values = json.loads(json.dumps(dict(arguments or {}), allow_nan=False))  # as they are read from the manifest
    except (TypeError, ValueError) as exc:
        raise DataError(f"{at}: map_args are not JSON values ({exc})") from exc
    module = _import(name, at)
    try:
        value: Any = reduce(getattr, attribute.split("."), module)
    except AttributeError as exc:
        raise DataError(f"{at}: {name} has no {attribute}; write it as module:function") from exc
    if not callable(value):
        raise DataError(f"{at}: {type(value).__name__}, not a function; write it as module:function")
    sha256 = _hash_code(module, at)
    if _imported.setdefault(name, sha256) != sha256:
        raise DataError(f"{at}: its code was changed after it was imported; start Python again")
    return RecordMap(value, RecordMapInfo(function=function, arguments=values, sha256=sha256), options)


def _import(name: str, at: str) -> ModuleType:
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise DataError(
            f"{at}: cannot be imported: {exc}; install the module, add its folder to PYTHONPATH, or start in its folder"
        ) from exc
    except Exception as exc:  # the user's code, as above
        raise DataError(f"{at}: importing it raised {type(exc).__name__}: {exc}; correct the module") from exc


def _hash_code(module: ModuleType, at: str) -> str:
    top = sys.modules[module.__name__.partition(".")[0]]
    folders = [Path(folder) for folder in getattr(top, "__path__", ())]
    files = {path.relative_to(folder).as_posix(): path for folder in folders for path in folder.rglob("*.py")}
    if not folders and (origin := getattr(module, "__file__", None)):
        files = {Path(origin).name: Path(origin)}
    if not files:
        raise DataError(f"{at}: has no file whose hash could be recorded; use a function of a Python file")
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode("utf-8", "surrogateescape"))
        digest.update(content)
    return digest.hexdigest()
