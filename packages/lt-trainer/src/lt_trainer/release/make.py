"""Making of a release: all is checked first, and the folder appears complete or not at all.

Order: read the run and the license file; verify checkpoints and stores; compare the installed packages with the run's;
then write into a hidden folder beside the output: weights, data, recipe, logs, wheels and lock, documents, SHA256SUMS.
It is renamed at the end. Where a class of the Model Openness Framework was asked for and is not reached, nothing is
left. The same run with the same lt gives the same bytes: no clock is read.

Cost: reads the released checkpoints twice and the stores once; copies what is released.
"""

import getpass
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lt_ckpt import Checkpoint, list_steps
from lt_ckpt.atomic_folder import AtomicFolder
from lt_ckpt.hash_list import HASH_LIST, format_hash_list
from lt_data import DataError, TokenStore
from lt_data import verify as verify_store
from lt_trainer.config.recipe import from_dict
from lt_trainer.config.sections.data import DataOptions
from lt_trainer.data.training_data import STORES
from lt_trainer.errors import RecipeError, TrainerError
from lt_trainer.files import read_json, read_text
from lt_trainer.release.data_files import (
    ReleasedStore,
    describe_store,
    hash_file,
    release_store,
    store_names,
    write_source_list,
)
from lt_trainer.release.documents import DOCUMENTS, render_documents
from lt_trainer.release.errors import DAMAGE, ReleaseError, describe_damage
from lt_trainer.release.facts import CODE_LICENSE_TEXT, LICENSE_FILE, Facts, Provenance, read_facts, write_provenance
from lt_trainer.release.filtering import TextFilter, find_secrets
from lt_trainer.release.license_file import LicenseFile, read_license_file
from lt_trainer.release.lock import format_requirements, installed_closure, lock_packages, normalize, read_lock_hashes
from lt_trainer.release.mof import CLASS_NAMES
from lt_trainer.release.run_files import (
    copy_paper,
    known_hosts,
    release_logs,
    release_recipe,
    release_results,
    write_validation_results,
)
from lt_trainer.release.schemas import find_schema_problems
from lt_trainer.release.scores import find_foreign_results
from lt_trainer.release.task_files import ReleasedTask, describe_tasks, release_tasks
from lt_trainer.release.weight_files import choose_checkpoints, release_weights
from lt_trainer.release.wheels import (
    SourceState,
    license_files,
    lt_distributions,
    make_wheel,
    source_folder,
    source_state,
)
from lt_trainer.run_directory.environment import hash_package
from lt_trainer.run_directory.jsonl import read_jsonl

LT_EXTRAS = {"lt-trainer": ("cli", "torch"), "lt-data": ("cli", "fast", "parquet", "zstd"), "lt-ckpt": ("cli", "fast")}
"""Extras of lt's packages that a rerun uses."""
DAY = re.compile(r"\d{4}-\d\d-\d\dT")


@dataclass(frozen=True, kw_only=True)
class MakeOptions:
    """Options of `make_release`.

    Attributes:
        licenses: The license file; None for none.
        checkpoints: "all", "final" or steps separated by commas.
        source_folders: Where source files are looked for by hash, besides their own paths.
        results: Folders or files of evaluation results to include, besides those in the run directory.
        lock: uv.lock or requirements file with hashes; None for the uv.lock beside lt's sources.
        mof_class: Class that must be reached; 0 for any.
    """

    licenses: Path | None = None
    checkpoints: str = "all"
    source_folders: tuple[Path, ...] = ()
    results: tuple[Path, ...] = ()
    lock: Path | None = None
    mof_class: int = 0


@dataclass(frozen=True, kw_only=True)
class _Run:
    path: Path
    record: Mapping[str, Any]
    environment: Mapping[str, Any]
    events: list[dict[str, Any]]
    licenses: LicenseFile
    license_text: str
    checkpoints: list[Checkpoint]
    stores: list[ReleasedStore]
    tasks: list[ReleasedTask]
    text_filter: TextFilter


def make_release(
    run: Path, out: Path, options: MakeOptions, *, notify: Callable[[str], None] = lambda text: None
) -> Facts:
    """Make the release of a run.

    Args:
        run: Run directory.
        out: Folder to make; an existing one must be empty.
        options: See `MakeOptions`.
        notify: Called with what is being done.

    Raises:
        ReleaseError: All that is missing or wrong; nothing is written then.
        CheckpointError: `out` is not empty, or the disk fails.
    """
    gathered = _gather(run, options, notify)
    with AtomicFolder(out) as folder:
        bundle = folder.temp_path
        notify(f"weights of steps {', '.join(str(checkpoint.step) for checkpoint in gathered.checkpoints)}")
        release_weights(bundle, gathered.checkpoints)
        notify("data, recipe, logs")
        for released in gathered.stores:
            release_store(released, bundle, gathered.text_filter)
        write_source_list(bundle, gathered.stores)
        release_tasks(bundle, gathered.tasks)
        entries = [task.entry for task in gathered.tasks]
        changed = release_recipe(bundle, gathered.record, entries, gathered.text_filter)
        release_logs(bundle, run, gathered.text_filter)
        release_results(bundle, (run / "evaluation", *options.results), gathered.text_filter)
        (bundle / LICENSE_FILE).write_text(gathered.license_text, encoding="utf-8")
        notify("packages of lt, environment")
        facts = _finish(bundle, gathered, changed, options)
        lacking = facts.openness.missing.get(options.mof_class, ())
        if lacking:
            raise ReleaseError(f"RUN = {run}: {CLASS_NAMES[options.mof_class]} is not reached", lacking)
        leaked = [name for name in list_files(bundle) if _is_text(name) and _has_secret(bundle / name)]
        if leaked:
            raise ReleaseError("these files have what looks like a secret", leaked)
        if unfit := [repr(name) for name in list_files(bundle) if not name.isprintable()]:
            raise ReleaseError("these files have names that not every tool reads; rename them", unfit)
        invalid, _ = find_schema_problems(bundle)
        if invalid:
            raise ReleaseError("these documents are not as their formats ask", invalid)
        _sync_files(bundle)
        (bundle / HASH_LIST).write_bytes(format_hash_list(list_hashes(bundle)))
    return facts


def _finish(bundle: Path, gathered: _Run, changed: Mapping[str, Any], options: MakeOptions) -> Facts:
    """Write wheels, lock, provenance, results and documents; return the facts."""
    state, without_hash = _write_environment(bundle, gathered, options)
    events = gathered.events
    final = gathered.checkpoints[-1].step
    there = {step for step, _ in list_steps(gathered.path / "checkpoints")}
    saved = {event["step"] for event in events if event.get("event") == "checkpoint"}
    paper = gathered.licenses.release.paper
    assert options.licenses is not None or not paper
    provenance = Provenance(
        lt={name: package.version for name, package in lt_distributions().items()},
        date=str(events[-1]["time"])[:10],
        run=gathered.path.resolve().name,
        step=final,
        earlier_steps=[checkpoint.step for checkpoint in gathered.checkpoints[:-1]],
        removed_steps=sorted(step for step in saved - there if step <= final),
        commit=state.commit,
        has_patch=bool(state.patch),
        untracked=list(state.untracked),
        without_hash=without_hash,
        stores={
            released.name: {
                "field": released.field,
                "fingerprint": released.store.manifest.fingerprint,
                "kind": "joined" if released.store.is_joined else "flat",
            }
            for released in gathered.stores
        },
        changed_fields=changed,
        filtered={name: number for name, number in sorted(gathered.text_filter.counts.items()) if number},
        paper=copy_paper(bundle, options.licenses.parent / paper) if paper and options.licenses else "",
    )
    write_provenance(bundle, provenance)
    try:
        write_validation_results(bundle, read_facts(bundle))
        facts = read_facts(bundle)  # with the results
        texts = render_documents(facts)
    except DAMAGE as exc:
        raise ReleaseError(
            f"RUN = {gathered.path}: its logs or results cannot be read", [describe_damage(exc)]
        ) from exc
    for name, text in texts.items():
        (bundle / name).parent.mkdir(exist_ok=True)
        (bundle / name).write_text(text, encoding="utf-8")
    return facts


def _gather(run: Path, options: MakeOptions, notify: Callable[[str], None]) -> _Run:
    """Read and verify all that goes into the release; raise all problems at once."""
    if not (run / ".lt-run").exists():
        raise ReleaseError(f"RUN = {run}", ["not a run directory (it has no .lt-run); pass the folder in run.dir"])
    problems: list[str] = []
    licenses, license_text = _read_licenses(options.licenses, problems)
    record = _read_tables(run / "recipe.json", ("origins",), problems, required=("recipe", "origins"))
    environment = _read_tables(run / "environment.json", ("packages", "sources", "variables"), problems)
    notify("verifying checkpoints")
    checkpoints, found = choose_checkpoints(run, options.checkpoints)
    problems += found
    problems += [f"--results = {path}: no such file or folder" for path in options.results if not path.exists()]
    names = {os.path.basename(os.path.realpath(path)) for path in options.results}
    if len(names | {"evaluation"}) <= len(options.results):
        problems.append("--results: two of one name, or one of the name evaluation; rename one")
    problems += find_foreign_results(options.results, checkpoints)
    problems += _version_problems(environment)
    events: list[dict[str, Any]] = []
    for name in ("events.jsonl", "metrics.jsonl"):
        try:
            events = read_jsonl(run / name) if name == "events.jsonl" else events
            _ = read_jsonl(run / name)
        except TrainerError as exc:
            problems.append(str(exc))
    monitor = [record for path in sorted(run.glob("monitor/*.jsonl")) for record in read_jsonl(path)]
    user = _user_name()
    text_filter = TextFilter(
        hosts=known_hosts(run, environment, monitor) | {os.uname().nodename},
        users=() if user in ("", "root") else (user,),
        folders=(str(run.resolve().parent), str(Path.cwd())),
        homes=(os.path.expanduser("~"),),
    )
    stores: list[ReleasedStore] = []
    tasks: list[ReleasedTask] = []
    try:
        recipe = from_dict(record["recipe"], source="recipe.json") if record else None
    except RecipeError as exc:
        problems.append(f"recipe.json: {exc}")
        recipe = None
    if recipe is not None:
        notify("verifying stores")
        stores = _open_stores(recipe.data, checkpoints, licenses, text_filter, options, problems)
        tasks = describe_tasks(recipe.evaluation, licenses, text_filter, problems)
    problems += _event_problems(run / "events.jsonl", events)
    if problems:
        raise ReleaseError(f"RUN = {run}: cannot be released", problems)
    return _Run(
        path=run,
        record=record,
        environment=environment,
        events=events,
        licenses=licenses,
        license_text=license_text,
        checkpoints=checkpoints,
        stores=stores,
        tasks=tasks,
        text_filter=text_filter,
    )


def _event_problems(path: Path, events: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not events:
        yield f"{path}: has no event"
    elif DAY.match(str(events[-1].get("time"))) is None:
        yield f"{path}: its last event has no time; remove the line"
    if not all(type(event.get("step")) is int for event in events if event.get("event") == "checkpoint"):
        yield f"{path}: an event of a checkpoint has no step; remove the line"


def _user_name() -> str:
    """Return the user's name; "" for one that the system does not know, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def _read_licenses(path: Path | None, problems: list[str]) -> tuple[LicenseFile, str]:
    licenses, text = LicenseFile(), ""
    if path is not None:
        try:
            licenses, text = read_license_file(path), read_text(path)
        except ReleaseError as exc:
            problems += [f"{path}: {problem}" for problem in exc.problems]
            return licenses, text
        if find_secrets(text):
            problems.append(f"{path}: has what looks like a secret; remove it")
        if licenses.release.paper and not (path.parent / licenses.release.paper).is_file():
            problems.append(f"release.paper = {licenses.release.paper!r} ({path}): no such file; give one beside it")
    source = path or LICENSE_FILE
    for name in ("name", "producer"):
        if not getattr(licenses.release, name):
            problems.append(
                f"release.{name} ({source}): missing; write it in [release] of the file given as --licenses"
            )
    return licenses, text


def _read_tables(
    path: Path, tables: Sequence[str], problems: list[str], *, required: Sequence[str] = ()
) -> dict[str, Any]:
    """Return a JSON object of the run; {} and a problem if it is none, or a table of texts in it is none."""
    try:
        values = read_json(path)
        if not isinstance(values, dict):
            raise ValueError("not a JSON object")
        if missing := [name for name in required if name not in values]:
            raise ValueError(f"has no {missing[0]}")
        for name in tables:
            table = values.get(name, {})
            if not isinstance(table, dict) or not all(isinstance(text, str) for text in table.values()):
                raise ValueError(f"{name} is not a table of texts")
    except (OSError, ValueError) as exc:
        problems.append(f"{path}: cannot be read ({exc}); start the run again to rewrite it")
        return {}
    return values


def _version_problems(environment: Mapping[str, Any]) -> list[str]:
    """Return the packages whose version or files are not the run's: wheels would be of other code."""
    run = {
        name: text
        for name, text in environment.get("packages", {}).items()
        if name.startswith("lt-") or name == "torch"
    }
    here = {name: package.version for name, package in lt_distributions().items()} | installed_closure(_lt_roots())
    problems = [
        f"{name}: the run used {text}, here is {here[name]}; make the release in the run's environment"
        for name, text in run.items()
        if name in here and here[name] != text
    ]
    changed = [name for name, digest in environment.get("sources", {}).items() if hash_package(name) != digest]
    if changed and not problems:
        problems.append(
            f"{', '.join(changed)}: the files are not those with which the run has trained; make the release from the "
            "commit of the run"
        )
    return problems


def _lt_roots() -> dict[str, tuple[str, ...]]:
    return {name: LT_EXTRAS.get(name, ()) for name in lt_distributions()}


def _open_stores(
    data: DataOptions,
    checkpoints: list[Checkpoint],
    licenses: LicenseFile,
    text_filter: TextFilter,
    options: MakeOptions,
    problems: list[str],
) -> list[ReleasedStore]:
    """Open and verify the stores of the recipe, which must be those that the run has read."""
    read = (checkpoints[-1].manifest.data or {}).get(STORES, {}) if checkpoints else {}
    released: list[ReleasedStore] = []
    for name, (field, path) in store_names(data).items():
        try:
            store = TokenStore.open(path, packs=data.packs)
            if store.manifest.dropped is not None:
                problems.append(
                    f"{field} = {path!r}: leaves out duplicates of its parts by a list, which a release has no place "
                    "for; make a flat store of it (lt data merge --units) before the run"
                )
                continue
            if read.get(field, store.manifest.fingerprint) != store.manifest.fingerprint:
                problems.append(
                    f"{field} = {path!r}: the store has changed: the run has read {read[field][:16]}, this is "
                    f"{store.manifest.fingerprint[:16]}; put back the store of the run"
                )
                continue
            damage = verify_store(store)
            problems += [f"{field} = {path!r}: {problem}; copy the store again" for problem in damage]
            if not damage:
                released.append(describe_store(name, field, store, data, licenses, text_filter, options.source_folders))
        except DataError as exc:
            problems.append(f"{field} = {path!r}: {exc}; relative paths are taken from the current folder")
    return released


def _write_environment(bundle: Path, gathered: _Run, options: MakeOptions) -> tuple[SourceState, list[str]]:
    """Write wheels/ and environment/; return the state of lt's sources and the packages without a hash."""
    packages = lt_distributions()
    (bundle / "wheels").mkdir()
    for package in packages.values():
        name, data = make_wheel(package)
        (bundle / "wheels" / name).write_bytes(data)
    folder = source_folder(packages["lt-trainer"])
    state = source_state(folder)
    license_name = packages["lt-trainer"].metadata["License-Expression"]
    (bundle / "wheels" / "LICENSE.spdx").write_text(f"{license_name}\n", encoding="utf-8")
    (text,) = license_files(packages["lt-trainer"]).values()
    shutil.copyfile(text, bundle / CODE_LICENSE_TEXT)
    if state.patch:
        patch = gathered.text_filter.apply(state.patch)
        (bundle / "environment" / "lt.patch").write_text(patch, encoding="utf-8")
    lock = options.lock
    if lock is None and folder is not None:
        lock = next((parent / "uv.lock" for parent in folder.parents if (parent / "uv.lock").is_file()), None)
    try:
        hashes = read_lock_hashes(lock) if lock is not None else {}
    except (OSError, ValueError) as exc:
        raise ReleaseError(
            f"--lock = {lock}", [f"cannot be read ({exc}); give a uv.lock or requirements file"]
        ) from exc
    locked = lock_packages(installed_closure(_lt_roots()), hashes)
    own = {normalize(name) for name in packages}
    locked = tuple(package for package in locked if package.name not in own)
    (bundle / "environment" / "requirements.txt").write_text(format_requirements(locked), encoding="utf-8")
    return state, [package.name for package in locked if not package.hashes]


def list_files(bundle: Path) -> list[str]:
    """Return the files of a bundle but its hash list, relative to it."""
    names = sorted(path.relative_to(bundle).as_posix() for path in bundle.rglob("*") if path.is_file())
    return [name for name in names if name != HASH_LIST]


def list_hashes(bundle: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a bundle but its hash list, by path."""
    return {name: hash_file(bundle / name) for name in list_files(bundle)}


def _is_text(name: str) -> bool:
    own_texts = name.startswith(("recipe/", "run/", "environment/", "results/")) or name in DOCUMENTS
    return own_texts or name in (LICENSE_FILE, "data/sources.jsonl", "release.json")


def _has_secret(path: Path) -> bool:
    return find_secrets(path.read_text(encoding="utf-8", errors="replace")) > 0


def _sync_files(bundle: Path) -> None:
    for path in bundle.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
