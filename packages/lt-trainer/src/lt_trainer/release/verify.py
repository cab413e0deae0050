"""Verification of a release, from its own files.

    SHA256SUMS      every file has its hash, no file is missing and none is extra
    weights         each exported tensor has the bits of the checkpoint (weights.json, or the run itself)
    stores          manifests, tokens and packs (`lt data verify`); their fingerprints are those that the run has read
    sources, tasks  each included source file has the hash in its store's manifest, and its license allows it
    recipe          it loads, names the bundle's stores, and recipe.json and recipe.toml agree
    results         metrics of tasks are those of their items
    schemas         documents of other formats, by their own libraries as far as they are installed
    documents       cards, class, results and figures are made again from the files and compared byte for byte

A release that another lt-trainer made, whose wheel is in it, is checked without the last part, which is said. Nothing
in the bundle is executed. Cost: one read of everything.
"""

import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lt_ckpt.errors import CheckpointError
from lt_ckpt.hash_list import HASH_LIST, read_hash_list
from lt_data import DataError, TokenStore
from lt_data import verify as verify_store
from lt_data.store.manifest import MANIFEST_FILE, read_manifest
from lt_trainer.config.recipe import from_dict, load, to_dict
from lt_trainer.errors import TrainerError
from lt_trainer.release.data_files import hash_file, readable_path
from lt_trainer.release.documents import render_documents
from lt_trainer.release.errors import DAMAGE, ReleaseError, describe_damage
from lt_trainer.release.facts import Facts, read_facts
from lt_trainer.release.mof import MofResult
from lt_trainer.release.run_files import validation_results
from lt_trainer.release.schemas import find_schema_problems
from lt_trainer.release.scores import find_score_problems
from lt_trainer.release.weight_files import MODEL_FOLDER, compare_with_checkpoint, find_weight_problems, step_folder
from lt_trainer.run_directory.environment import list_package_files


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Result of a verification.

    Attributes:
        list_hash: SHA-256 of SHA256SUMS itself: who knows it from elsewhere knows every file.
        n_files: Listed files.
        problems: What is wrong, one text each; empty if nothing is.
        notes: What was not checked.
        openness: Class that the files reach; None if they could not be read.
        has_documents: True if cards, figures and documents were compared with the files.
    """

    list_hash: str
    n_files: int
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    openness: MofResult | None
    has_documents: bool = True


def verify_release(
    bundle: Path, *, expect: str = "", run: Path | None = None, notify: Callable[[str], None] = lambda text: None
) -> Verification:
    """Verify a release.

    Args:
        bundle: Its folder.
        expect: SHA-256 that SHA256SUMS must have; "" for any.
        run: The run directory, if it is still there: the weights are compared with its checkpoints.
        notify: Called with what is being done.

    Raises:
        ReleaseError: There is no release in the folder.
    """
    if not (bundle / HASH_LIST).is_file():
        raise ReleaseError(
            f"DIR = {bundle}", [f"not a release (it has no {HASH_LIST}); pass a folder of lt release make"]
        )
    list_hash = hash_file(bundle / HASH_LIST)
    problems = [] if not expect or expect.lower() == list_hash else [f"{HASH_LIST}: is {list_hash}, expected {expect}"]
    notify("hashes")
    n_files, found = check_hashes(bundle)
    problems += found
    try:
        facts = read_facts(bundle)
    except DAMAGE as exc:
        problems.append(f"the release cannot be read: {describe_damage(exc)}")
        return Verification(list_hash=list_hash, n_files=n_files, problems=tuple(problems), notes=(), openness=None)
    notify("weights")
    problems += _attempt("weights.json", lambda: find_weight_problems(bundle))
    notes: list[str] = []
    if run is None:
        notes.append("weights were compared with the recorded hashes of the checkpoint (--run compares with the run)")
    else:
        folders = {step_folder(step): step for step in facts.provenance.earlier_steps}
        steps = {MODEL_FOLDER: facts.provenance.step, **folders}
        problems += _attempt("--run", lambda: compare_with_checkpoint(bundle, run, steps))
    notify("data")
    for name in facts.provenance.stores:
        problems += _attempt(f"data/{name}", lambda name=name: list(_check_store(bundle, name, facts)))
    problems += _attempt("data/sources.jsonl", lambda: list(_check_sources(bundle, facts)))
    problems += _attempt("recipe/recipe.toml", lambda: _check_recipe(bundle, facts))
    problems += _attempt("results", lambda: list(find_score_problems(bundle)))
    found, unchecked = find_schema_problems(bundle)
    problems, notes = problems + found, notes + unchecked
    has_documents = _has_same_renderer(bundle)
    if has_documents:
        problems += _attempt("documents", lambda: list(_check_documents(bundle, facts)))
    else:
        notes.append(
            "cards, figures and documents were not compared with the files: another lt-trainer has made them; verify "
            "with the one in wheels/"
        )
    return Verification(
        list_hash=list_hash,
        n_files=n_files,
        problems=tuple(dict.fromkeys(problems)),
        notes=tuple(notes),
        openness=facts.openness,
        has_documents=has_documents,
    )


def _has_same_renderer(bundle: Path) -> bool:
    """Return True if the lt-trainer in the bundle makes documents with the same code as this one."""
    package, prefix = "lt-trainer", "release/"
    wheels = list(bundle.glob("wheels/lt_trainer-*.whl"))
    ours = {name: path for name, path in list_package_files(package).items() if name.startswith(prefix)}
    try:
        with zipfile.ZipFile(wheels[0]) as archive:
            return all(archive.read(f"lt_trainer/{name}") == path.read_bytes() for name, path in ours.items())
    except (IndexError, KeyError, OSError, zipfile.BadZipFile):
        return False


def _attempt(name: str, check: Callable[[], list[str]]) -> list[str]:
    try:
        return check()
    except DAMAGE as exc:
        return [f"{name}: cannot be read: {describe_damage(exc)}"]


def check_hashes(bundle: Path) -> tuple[int, list[str]]:
    """Compare every file with the list; return the number of listed files and the problems."""
    try:
        listed = read_hash_list(bundle)
    except CheckpointError as exc:
        return 0, [str(exc)]
    assert listed is not None
    problems: list[str] = []
    for name in listed.hashes:
        try:
            listed.check_file(name)
        except CheckpointError as exc:
            problems.append(str(exc))
    problems += [f"{name}: is not in {HASH_LIST}" for name in listed.find_unlisted()]
    return len(listed.hashes), problems


def _check_store(bundle: Path, name: str, facts: Facts) -> Iterator[str]:
    folder = bundle / "data" / name
    try:
        manifest = read_manifest(folder)
        if (folder / "shards").is_dir():
            yield from (f"data/{name}: {problem}" for problem in verify_store(TokenStore.open(folder)))
    except DataError as exc:
        yield f"data/{name}: {exc}"
        return
    read = facts.provenance.stores[name]["fingerprint"]
    if manifest.fingerprint != read:
        yield f"data/{name}/{MANIFEST_FILE}: is of the tokens {manifest.fingerprint[:16]}, the run has read {read[:16]}"


def _check_sources(bundle: Path, facts: Facts) -> Iterator[str]:
    stores = {store.name: store for store in facts.stores}
    for store in facts.stores:
        entries = [entry for entry in facts.sources if entry.store == store.name]
        files = store.manifest["sources"]["listed"]
        stated = [(entry.path, entry.sha256) for entry in entries]
        if files and stated != [(readable_path(file["path"]), file["sha256"]) for file in files]:
            yield f"data/sources.jsonl: its files of {store.name} are not those of the store's manifest"
        if store.has_tokens and not all(entry.license and entry.redistribute for entry in entries):
            yield f"data/{store.name}: has tokens of a source that may not be redistributed"
    for task in facts.tasks:
        path = bundle / task.file
        if task.file and not (task.license and task.redistribute):
            yield f"{task.file}: may not be redistributed"
        if task.file and (not path.is_file() or hash_file(path) != task.sha256):
            yield f"{task.file}: is not the file {task.sha256[:16]} of the task {task.name}"
    for entry in facts.sources:
        if entry.store not in stores:
            yield f"data/sources.jsonl: {entry.path} is of the store {entry.store}, which is not in the release"
        if not entry.file:
            continue
        if not entry.redistribute:
            yield f"{entry.file}: may not be redistributed"
        path = bundle / entry.file
        if not path.is_file() or hash_file(path) != entry.sha256:
            yield f"{entry.file}: is not the source file {entry.sha256[:16]} of {entry.path}"


def _check_recipe(bundle: Path, facts: Facts) -> list[str]:
    try:
        loaded = load(bundle / "recipe" / "recipe.toml").recipe
        stated = from_dict(facts.recipe, source="recipe/recipe.json")
    except TrainerError as exc:
        return [f"recipe/recipe.toml: {exc}"]
    problems: list[str] = []
    if to_dict(loaded) != to_dict(stated):
        problems.append("recipe/recipe.toml: is another recipe than recipe/recipe.json")
    named = set(loaded.data.store_paths().values())
    there: Any = {f"data/{name}" for name in facts.provenance.stores}
    if named != there:
        problems.append(f"recipe/recipe.toml: names {sorted(named)}, the release has {sorted(there)}")
    return problems


def _check_documents(bundle: Path, facts: Facts) -> Iterator[str]:
    """Make the documents again and compare them."""
    texts = render_documents(facts)
    if facts.validation:
        texts["results/validation.json"] = validation_results(facts)
    for name, text in texts.items():
        path = bundle / name
        if not path.is_file() or path.read_bytes() != text.encode():
            yield f"{name}: is not what the files of this release give"


def hash_of_list(bundle: Path) -> str:
    """Return the SHA-256 of a release's hash list."""
    return hash_file(bundle / HASH_LIST)
