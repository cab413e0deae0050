"""When a stage counts as done: by content, never by the time of day.

A stage that has succeeded leaves `done.json` with a key and with a fingerprint of each output. It is done as long as
the key is still the same (command, environment, recipe, image, index, fingerprints of the inputs, keys of the stages it
comes after) and every output is what it was.

The fingerprint of a file is its size and a SHA-256: of all of it up to 16 MiB, above that of its first and last
mebibyte and its time of change, so that a terabyte costs nothing to look at. A folder is its sorted names with theirs.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from .places import Place, Table, completed, read_table, write_table

WHOLE, PIECE = 16 << 20, 1 << 20
VERSION = 1


def fingerprint(path: Path) -> str:
    """What a file or folder holds; "missing" where there is none."""
    if path.is_symlink() and not path.exists():
        return "missing"
    if path.is_file():
        return _file(path)
    if not path.is_dir():
        return "missing"
    digest = hashlib.sha256()
    for folder, names, files in os.walk(path):
        names.sort()
        for name in sorted(files):
            one = Path(folder) / name
            digest.update(f"{one.relative_to(path)}\0{_file(one)}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _file(path: Path) -> str:
    try:
        size = path.stat().st_size
        digest = hashlib.sha256(str(size).encode())
        with open(path, "rb") as file:
            if size <= WHOLE:
                for piece in iter(lambda: file.read(PIECE), b""):
                    digest.update(piece)
            else:
                digest.update(file.read(PIECE))
                file.seek(-PIECE, os.SEEK_END)
                digest.update(file.read(PIECE) + str(path.stat().st_mtime_ns).encode())
    except FileNotFoundError:
        return "missing"
    return digest.hexdigest()


def key(spec: Table, place: Place) -> str:
    """What decides the result of a stage, as one hash."""
    cwd = Path(spec.get("cwd") or ".")
    stages = place.folder.parent
    before = {}
    for stage in spec.get("after") or []:
        width = stage.get("array") or 0
        names = [f"{stage['name']}.{i}" for i in range(width)] if width else [stage["name"]]
        before.update({name: (read_table(stages / name / "done.json") or {}).get("key") for name in names})
    decides = {
        "version": VERSION,
        "argv": spec["argv"],
        "setup": spec.get("setup") or [],
        "env": spec.get("env") or {},
        "recipe": spec.get("recipe") or "",
        "image": spec.get("image") or "",
        "index": place.index,
        "array": spec.get("array") or 0,
        "after": before,
        "inputs": {name: fingerprint(cwd / name) for name in spec.get("inputs") or []},
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


def outputs(spec: Table) -> dict[str, str]:
    """Fingerprints of the outputs by name."""
    cwd = Path(spec.get("cwd") or ".")
    return {name: fingerprint(cwd / name) for name in spec.get("outputs") or []}


def done(spec: Table, place: Place) -> bool:
    """Whether a stage need not run."""
    stamp = read_table(place.stamp)
    if stamp is None or stamp.get("key") != key(spec, place) or stamp.get("outputs") != outputs(spec):
        return False
    return spec.get("completion") != "run_dir" or completed(str(Path(spec.get("cwd") or ".") / spec["run_dir"]))


def mark(spec: Table, place: Place, key_before: str | None = None) -> str:
    """Leave the stamp of a stage that has succeeded; a sentence on what is missing where an output is not there.

    Args:
        spec: what was run.
        place: where the stamp goes.
        key_before: the key when it began: what changed while it ran was not what it read.
    """
    made = outputs(spec)
    missing = [name for name, found in made.items() if found == "missing"]
    if missing:
        return f"the stage ended with 0 but did not make {', '.join(missing)}"
    write_table(place.stamp, {"version": VERSION, "key": key_before or key(spec, place), "outputs": made})
    return ""
