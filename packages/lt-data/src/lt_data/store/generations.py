"""Generations of a store: its manifest as it was before each time that documents were appended.

    STORE/manifest.json         the newest generation
    STORE/manifest-00000.json   the store as it was prepared
    STORE/manifest-00001.json   generation 1: the same parts, then those of the first documents that were appended
    STORE/appended/00001/       the parts with these documents, a store of their own
    STORE/packs-00001/          packs of generation 1

The path of such a manifest opens that generation, and that of the folder the newest; a store to which nothing was
appended has `manifest.json` alone. What an older generation names is never changed, so a run that has read it goes on
with it: the fingerprint of a sequence of rows begins each store's fingerprint.

Cost: one read of each manifest.
"""

from pathlib import Path

from lt_data.store.manifest import MANIFEST_NAME, read_manifest


def generation_file(folder: Path, number: int) -> Path:
    """Return the path of the manifest of a generation."""
    return folder / f"manifest-{number:05d}.json"


def list_generations(folder: Path) -> list[Path]:
    """Return the manifests of the generations of a store, oldest first; none if nothing was appended to it."""
    found = [path for path in folder.glob("manifest-*.json") if names_generation(path)]
    return sorted(found, key=lambda path: (len(path.name), path.name))


def names_generation(path: str | Path) -> bool:
    """Return whether a path names one generation of a store, such as `STORE/manifest-00001.json`."""
    found = MANIFEST_NAME.fullmatch(Path(path).name)
    return found is not None and found[1] is not None


def locate_generation(path: str | Path, fingerprint: str) -> Path | None:
    """Return the manifest of the generation with this beginning of its fingerprint, if any.

    Args:
        path: the store, or one of its generations.
        fingerprint: beginning of a fingerprint.

    Raises:
        DataError: a manifest of a generation is broken.
    """
    folder = Path(path).parent if names_generation(path) else Path(path)
    for file in reversed(list_generations(folder)):
        if read_manifest(file).fingerprint.startswith(fingerprint):
            return file
    return None
