"""Making of a release: all is checked first, and the folder appears complete or not at all.

Order: read the run and the license file; verify checkpoints and stores; then write into a hidden folder beside the
output: weights, data, recipe, logs, sources of lt, documents, SHA256SUMS. It is renamed at the end. Where a class of
the Model Openness Framework was asked for and is not reached, nothing is left. No clock is read.

Cost: reads the checkpoints twice and the stores once; copies what is released.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lt_ckpt.atomic_folder import AtomicFolder
from lt_ckpt.hash_list import HASH_LIST, format_hash_list
from lt_data import DataError, TokenStore
from lt_data import verify as verify_store
from lt_trainer.config.recipe import from_dict, to_dict, to_toml
from lt_trainer.config.section import flatten, unflatten
from lt_trainer.data.training_data import STORES
from lt_trainer.release.bundle import LICENSE_FILE, RUN_DIR, Release, ReleasedStore, ReleaseError, hash_file, list_files
from lt_trainer.release.cards import make_documents
from lt_trainer.release.data_files import StoreToRelease, store_names, write_source_list
from lt_trainer.release.facts import Facts
from lt_trainer.release.filtering import TextFilter
from lt_trainer.release.license_file import LicenseFile, parse_license_file
from lt_trainer.release.mof import CLASS_NAMES
from lt_trainer.release.script import reproduction_script
from lt_trainer.release.source_files import find_source_tree, release_sources
from lt_trainer.release.weight_files import release_weights, verified_checkpoints
from lt_trainer.run_directory.jsonl import read_jsonl
from lt_trainer.toml import format_value

RUN_FILES = ("recipe.json", "environment.json", "metrics.jsonl", "events.jsonl", "monitor/*.jsonl", "evaluation/**/*")
REPLACED_FIELDS: Mapping[str, Any] = {
    "run.dir": RUN_DIR,
    "data.packs": "",
    "checkpoint.mirror_url": "",
    "checkpoint.mirror_keep_last": 0,
    "checkpoint.mirror_keep_every": 0,
    "metrics.sinks": [],
    "evaluation.tasks": [],
    "evaluation.include_path": "",
}
"""Fields of the released recipe: it writes only below its run.dir, and needs no files of tasks. No loss changes."""


def make_release(
    run: Path,
    out: Path,
    *,
    licenses: Path,
    source_folders: Sequence[Path] = (),
    mof_class: int = 0,
    notify: Callable[[str], None] = lambda text: None,
) -> Facts:
    """Make the release of a run.

    Args:
        run: Run directory.
        out: Folder to make; an existing one must be empty.
        licenses: The license file.
        source_folders: Where source files are looked for by hash, besides their own paths.
        mof_class: Class of the Model Openness Framework that must be reached; 0 for any.
        notify: Called with what is being done.

    Raises:
        ReleaseError: All that is missing or wrong; nothing is written then.
        CheckpointError: `out` is not empty, or the disk fails.
    """
    notify("verifying checkpoints and stores")
    gathered = _Run(run, licenses, source_folders)
    if gathered.problems:
        raise ReleaseError(f"RUN = {run}: cannot be released", gathered.problems)
    with AtomicFolder(out) as folder:
        bundle = folder.temp_path
        notify(f"weights of steps {', '.join(str(checkpoint.step) for checkpoint in gathered.checkpoints)}")
        release_weights(bundle, gathered.checkpoints)
        notify("data, recipe, logs, sources of lt")
        for store in gathered.stores:
            store.write(bundle)
        write_source_list(bundle, gathered.stores)
        _write_recipe(bundle, gathered)
        _write_texts(bundle, gathered)
        release_sources(bundle, gathered.tree, gathered.recipe["run"]["engine"])
        (bundle / "release.json").write_text(gathered.describe().model_dump_json(indent=1) + "\n", encoding="utf-8")
        facts = Facts(bundle)
        for name, text in {**make_documents(facts), "reproduce.sh": reproduction_script(facts)}.items():
            (bundle / name).write_text(text, encoding="utf-8")
        if lacking := facts.openness.missing.get(mof_class):
            raise ReleaseError(f"RUN = {run}: {CLASS_NAMES[mof_class]} is not reached", lacking)
        hashes = {}
        for name in list_files(bundle):
            hashes[name] = hash_file(bundle / name)
            with open(bundle / name, "rb") as file:
                os.fsync(file.fileno())
        folder.write_file(HASH_LIST, format_hash_list(hashes))
    return facts


class _Run:
    """What is read and verified of a run; `problems` has all that is wrong or missing."""

    def __init__(self, run: Path, license_path: Path, source_folders: Sequence[Path]) -> None:
        if not (run / ".lt-run").exists():
            raise ReleaseError(f"RUN = {run}", ["not a run directory (it has no .lt-run); pass the folder in run.dir"])
        self.path, self.tree = run, find_source_tree()
        record, self.environment = (
            json.loads((run / f"{name}.json").read_bytes()) for name in ("recipe", "environment")
        )
        self.recipe, self.origins = record["recipe"], record["origins"]
        self.events = read_jsonl(run / "events.jsonl")
        self.checkpoints, self.problems = verified_checkpoints(run)
        commit = self.environment.get("commit", self.tree.commit)
        if commit != self.tree.commit:  # the released sources would be of other code
            self.problems.append(f"lt: the run used commit {commit}, {self.tree.root} is at {self.tree.commit}")
        self.text_filter = self._make_filter()
        self.stores: list[StoreToRelease] = []
        self.fields: dict[str, str] = {}
        try:
            self.license_text = license_path.read_text(encoding="utf-8")
            licenses = parse_license_file(self.license_text, str(license_path))
        except ReleaseError as exc:
            self.problems += [f"{license_path}: {problem}" for problem in exc.problems]
            return
        except OSError as exc:
            self.problems.append(f"--licenses = {license_path}: {exc.strerror}")
            return
        self.paper = license_path.parent / licenses.release.paper if licenses.release.paper else None
        if self.paper and not self.paper.is_file():
            self.problems.append(
                f"release.paper = {format_value(licenses.release.paper)} ({license_path}): no such file beside it"
            )
        self._open_stores(licenses, source_folders)

    def _make_filter(self) -> TextFilter:
        monitored = (one for path in self.path.glob("monitor/*.jsonl") for one in read_jsonl(path))
        hosts = {self.environment["hostname"], self.environment["variables"].get("MASTER_ADDR", "")}
        hosts |= {os.uname().nodename, *(one.get("host", "") for one in monitored)}
        home = os.path.expanduser("~")
        return TextFilter(
            hosts=(hosts | {name.partition(".")[0] for name in hosts}) - {"localhost", "127", "127.0.0.1"},
            users={os.path.basename(home)} - {"root"},
            folders=(str(self.path.resolve().parent), str(Path.cwd())),
            homes=(home,),
        )

    def _open_stores(self, licenses: LicenseFile, source_folders: Sequence[Path]) -> None:
        """Open and verify the stores of the recipe, which must be those that the run has read."""
        data = from_dict(self.recipe, source="recipe.json").data
        read = (self.checkpoints[-1].manifest.data or {}).get(STORES, {}) if self.checkpoints else {}
        for name, (field, path) in store_names(data).items():
            try:
                store = TokenStore(path, packs=data.packs)
                found = _store_problems(store, read.get(field))
                if not found:
                    self.fields[name] = field
                    self.stores.append(StoreToRelease(name, store, data, licenses, self.text_filter, source_folders))
            except DataError as exc:
                found = [f"{exc}; relative paths are taken from the current folder"]
            self.problems += [f"{field} = {format_value(path)}: {problem}" for problem in found]

    def describe(self) -> Release:
        """Return the contents of release.json."""
        *earlier_steps, step = [checkpoint.step for checkpoint in self.checkpoints]
        stores = {
            store.name: ReleasedStore(
                field=self.fields[store.name],
                fingerprint=store.store.manifest.fingerprint,
                joined=store.is_joined,
            )
            for store in self.stores
        }
        return Release(
            commit=self.tree.commit,
            code_license=self.tree.license,
            date=str(self.events[-1]["time"])[:10],
            step=step,
            earlier_steps=earlier_steps,
            python=self.environment["python"],
            stores=stores,
        )


def _store_problems(store: TokenStore, read: str | None) -> list[str]:
    """Return what is wrong with a store of the run, which has read that of a fingerprint."""
    fingerprint = store.manifest.fingerprint
    if read not in (None, fingerprint):
        return [f"the store has changed: the run has read {str(read)[:16]}, this is {fingerprint[:16]}"]
    return [f"{problem}; copy the store again" for problem in verify_store(store)]


def _write_recipe(bundle: Path, run: _Run) -> None:
    """Write recipe.toml, which runs in the folder of the release; fields that were changed for it have that origin."""
    before = flatten(
        to_dict(from_dict(json.loads(run.text_filter.apply(json.dumps(run.recipe))), source="recipe.json"))
    )
    # What "auto" was on the run's machine may be something else on another.
    resolved = next((event["resolved"] for event in reversed(run.events) if "resolved" in event), {})
    wanted = {**REPLACED_FIELDS, **resolved, **{field: f"data/{name}" for name, field in run.fields.items()}}
    changed = {field: value for field, value in wanted.items() if field in before and before[field] != value}
    origins = {name: run.text_filter.apply(text) for name, text in run.origins.items()}
    (bundle / "recipe").mkdir()
    text = to_toml(from_dict(unflatten(before | changed)), origins | dict.fromkeys(changed, "release"))
    (bundle / "recipe" / "recipe.toml").write_text(text, encoding="utf-8")


def _write_texts(bundle: Path, run: _Run) -> None:
    """Write the license file, the paper, the run's records and evaluation results; texts are filtered."""
    (bundle / LICENSE_FILE).write_text(run.text_filter.apply(run.license_text), encoding="utf-8")
    for path in sorted(path for pattern in RUN_FILES for path in run.path.glob(pattern) if path.is_file()):
        target = bundle / "run" / path.relative_to(run.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8", errors="replace")
        target.write_text(run.text_filter.apply(text), encoding="utf-8")
    if run.paper:
        (bundle / "paper").mkdir()
        shutil.copyfile(run.paper, bundle / "paper" / run.paper.name)
