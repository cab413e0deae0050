"""Verification of a release, from its own files.

    SHA256SUMS      every file has its hash, no file is missing and none is extra; otherwise nothing else is read
    weights         each exported tensor has the bits of the checkpoint (weights.json)
    stores          manifests, tokens and packs (`lt data verify`); their fingerprints are those that the run has read
    sources         each included file has the hash in its store's manifest, and its license allows it
    class           mof.yml states the class that the files reach

Nothing in the release is executed, and no network is asked. Cost: one read of everything.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

from lt_data import DataError, TokenStore
from lt_data import verify as verify_store
from lt_data.store.manifest import read_manifest
from lt_trainer.release.bundle import check_hashes, hash_file
from lt_trainer.release.data_files import readable_path
from lt_trainer.release.facts import Facts, StoreFacts
from lt_trainer.release.mof import MofResult
from lt_trainer.release.weight_files import MODEL_FOLDER, find_weight_problems, step_folder


class Verification(NamedTuple):
    """Result of a verification.

    Attributes:
        list_hash: SHA-256 of SHA256SUMS itself: who knows it from elsewhere knows every file.
        n_files: Listed files.
        problems: What is wrong, one text each; empty if nothing is.
        openness: Class that the files reach; None if they were not read.
    """

    list_hash: str
    n_files: int
    problems: tuple[str, ...]
    openness: MofResult | None = None


def verify_release(bundle: Path, *, expect: str = "") -> Verification:
    """Verify a release.

    Args:
        bundle: Its folder.
        expect: SHA-256 that SHA256SUMS must have; "" for any.

    Raises:
        ReleaseError: There is no release in the folder.
    """
    list_hash, n_files, problems = check_hashes(bundle, expect)
    if problems:
        return Verification(list_hash, n_files, tuple(problems))
    try:
        facts = Facts(bundle)
        problems += find_weight_problems(bundle, [MODEL_FOLDER, *map(step_folder, facts.release.earlier_steps)])
        for store in facts.stores:
            problems += _store_problems(bundle, store, facts.release.stores[store.name].fingerprint)
        stated = yaml.safe_load((bundle / "mof.yml").read_bytes())["evaluation"]["class"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError) as exc:
        return Verification(list_hash, n_files, (*problems, f"the release cannot be read: {exc}"))
    if stated != facts.openness.class_number:
        problems.append(f"mof.yml: states class {stated!r}, the files reach {facts.openness.name}")
    return Verification(list_hash, n_files, tuple(problems), facts.openness)


def _store_problems(bundle: Path, store: StoreFacts, fingerprint: str) -> Iterator[str]:
    folder = bundle / "data" / store.name
    try:
        manifest = read_manifest(folder)
        if store.has_tokens:
            yield from (f"data/{store.name}: {problem}" for problem in verify_store(TokenStore(folder)))
    except DataError as exc:
        yield f"data/{store.name}: {exc}"
        return
    if manifest.fingerprint != fingerprint:
        yield f"data/{store.name}: is of the tokens {manifest.fingerprint[:16]}, the run has read {fingerprint[:16]}"
    sources = [part["sources"].get("listed", ()) for part in store.manifest["parts"]]
    listed = [(readable_path(file["path"]), file["sha256"]) for files in sources for file in files]
    if listed and listed != [(entry.path, entry.sha256) for entry in store.sources]:
        yield f"data/sources.jsonl: its files of {store.name} are not those of the store's manifest"
    if store.has_tokens and not all(entry.license and entry.redistribute for entry in store.sources):
        yield f"data/{store.name}: has tokens of a source that may not be redistributed"
    for entry in store.sources:
        if entry.left_out:
            continue
        if not entry.redistribute:
            yield f"{entry.file}: may not be redistributed"
        if not (bundle / entry.file).is_file() or hash_file(bundle / entry.file) != entry.sha256:
            yield f"{entry.file}: is not the source file {entry.sha256[:16]} of {entry.path}"
