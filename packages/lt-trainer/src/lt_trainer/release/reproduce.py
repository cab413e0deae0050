"""Reproduction of a release: an environment from its sources, its script run in it, losses and weights compared.

This is the one command that runs what a release contains: `reproduce.sh`, and the build of lt from source/. So the
hashes are checked first. What the run needs that may not be in the release is found by hash in given folders.
Everything is written into the work folder, which stays. Cost: that of the run.
"""

import math
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lt_ckpt import open_source
from lt_data import TokenStore
from lt_trainer.config.section import flatten
from lt_trainer.release.bundle import (
    REQUIREMENTS,
    RUN_DIR,
    SOURCE_ARCHIVE,
    SOURCE_PATCH,
    ReleaseError,
    check_hashes,
    read_json,
)
from lt_trainer.release.data_files import find_source_files
from lt_trainer.release.facts import Facts
from lt_trainer.release.weight_files import MODEL_FOLDER, hash_tensors, stated_hashes
from lt_trainer.run_directory.jsonl import read_jsonl

COMPARED = ("loss", "grad_norm")
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PLACES = ("commit", "hostname", "variables.MASTER_ADDR", "variables.MASTER_PORT", "variables.SLURM_JOB_ID")
"""Entries of environment.json that say where a run was, which no result depends on."""


def reproduce_release(
    bundle: Path,
    work: Path,
    *,
    steps: int = 0,
    python: Path | None = None,
    source_folders: Sequence[Path] = (),
    expect: str = "",
    notify: Callable[[str], None] = lambda text: None,
) -> tuple[list[str], bool]:
    """Reproduce a release; return what is told of it, and True if no loss differs by more than the tolerance.

    Args:
        bundle: Its folder.
        work: New or empty folder for environment, data and run.
        steps: Steps to run; 0 for all.
        python: Interpreter of an existing environment with lt; None to make one from the release.
        source_folders: Where source files that are not in the release are looked for, by hash.
        expect: SHA-256 that SHA256SUMS must have; "" for any.
        notify: Called with what is being done.

    Raises:
        ReleaseError: The release was changed, sources are missing, or a step of the reproduction failed.
    """
    notify(f"this runs what {bundle} contains: its sources of lt and reproduce.sh")
    if problems := check_hashes(bundle, expect)[2]:
        raise ReleaseError(f"DIR = {bundle}: was changed", problems)
    bundle, work = bundle.resolve(), work.resolve()
    facts = Facts(bundle)
    steps = steps or facts.release.step
    train = [record for record in facts.train if record["step"] <= steps]
    sources, problems = _find_sources(bundle, facts, source_folders)
    if work.exists() and any(work.iterdir()):
        problems.append(f"--out = {work}: is not empty; give a new folder")
    if steps > facts.release.step or not train:
        logged = [record["step"] for record in facts.train] or [0]
        problems.append(f"--steps = {steps}: losses of steps {logged[0]} to {logged[-1]} were logged")
    if problems:
        raise ReleaseError(f"DIR = {bundle}: cannot be reproduced here", problems)
    for name, path in sources.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, work / name)
    work.mkdir(parents=True, exist_ok=True)
    programs = python.parent if python else _make_environment(bundle, work, facts, notify)
    notify(f"running {steps} step(s); output in {work / 'run.log'}")
    stop = [str(steps)] if steps < facts.recipe["schedule"]["max_steps"] else []
    _execute(["bash", bundle / "reproduce.sh", *stop], work, "run", path=programs)
    told, is_within = _compare_losses(facts, train, work / RUN_DIR)
    if steps == facts.release.step:
        stated = stated_hashes(bundle)[MODEL_FOLDER]
        actual = hash_tensors(open_source(work / MODEL_FOLDER), stated)
        number = sum(actual[name] != digest for name, digest in stated.items())
        told.append(f"final weights: {number} tensor(s) differ" if number else "final weights: bit-equal")
    return told + _environment_differences(facts, work), is_within


def _find_sources(bundle: Path, facts: Facts, folders: Sequence[Path]) -> tuple[dict[str, Path], list[str]]:
    """Return path below the work folder → source file, of the stores that are not whole, and what is missing."""
    partial = [store for store in facts.stores if not store.has_tokens]
    entries = [entry for store in partial for entry in store.sources]
    found = find_source_files({entry.sha256: entry.bytes for entry in entries if entry.left_out}, (), folders)
    missing = [
        f"source {entry.path}: not in the release ({entry.left_out}); give a folder that has the file with SHA-256 "
        f"{entry.sha256} as --sources" + (f"; it can be obtained from {entry.url}" if entry.url else "")
        for entry in entries
        if entry.left_out and entry.sha256 not in found
    ]
    paths = {entry.file: found.get(entry.sha256, bundle / entry.file) for entry in entries}
    return paths, missing


def _make_environment(bundle: Path, work: Path, facts: Facts, notify: Callable[[str], None]) -> Path:
    """Make a virtual environment with the pinned packages and lt from its sources; return its folder of programs."""
    notify(f"making an environment; output in {work / 'environment.log'}")
    source = work / "source"
    with tarfile.open(bundle / SOURCE_ARCHIVE) as archive:
        archive.extractall(source, filter="data")
    if (bundle / SOURCE_PATCH).exists():
        _execute(["git", "apply", bundle / SOURCE_PATCH], source, "../environment")
    _execute(["uv", "venv", "--quiet", "--python", facts.release.python, work / "env"], work, "environment")
    programs = work / "env" / "bin"
    install = ["uv", "pip", "install", "--quiet", "--python", programs / "python"]
    _execute([*install, "--require-hashes", "-r", bundle / REQUIREMENTS], work, "environment")
    packages = [source / "packages" / name for name in facts.release.lt]
    _execute([*install, "--no-deps", *packages], work, "environment")
    return programs


def _execute(command: Sequence[str | Path], work: Path, log_name: str, *, path: Path | None = None) -> None:
    """Run a command in a folder with its output in a log there, and with the programs of a folder first.

    Raises:
        ReleaseError: It ended with another exit code than 0; the message has the end of the log.
    """
    variables = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    variables |= {"GIT_CEILING_DIRECTORIES": str(work.parent)}  # a repository around the folder is not meant
    if path is not None:
        variables |= {"PATH": f"{path}{os.pathsep}{os.environ['PATH']}"}
    log = work / f"{log_name}.log"
    with open(log, "ab") as file:
        done = subprocess.run(
            command, cwd=work, env=variables, stdin=subprocess.DEVNULL, stdout=file, stderr=file, check=False
        )
    if done.returncode:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:])
        raise ReleaseError(f"{command[0]} failed", [f"exit code {done.returncode}; last lines of {log}:\n{tail}"])


def _compare_losses(facts: Facts, train: Sequence[Mapping[str, Any]], run: Path) -> tuple[list[str], bool]:
    """Compare losses and gradient norms bit by bit; a step that was not repeated differs."""
    repeated = {record["step"]: record for record in read_jsonl(run / "metrics.jsonl") if "loss" in record}
    pairs = [(record, repeated.get(record["step"], dict.fromkeys(COMPARED, math.inf))) for record in train]
    different = [ours["step"] for ours, theirs in pairs if not all(_equal(ours[n], theirs[n]) for n in COMPARED)]
    if not different:
        return [f"losses of {len(pairs)} steps: bit-equal"], True
    largest, tolerance = max(_relative(a["loss"], b["loss"]) for a, b in pairs), facts.info.release.tolerance
    told = [
        f"losses of {len(pairs)} steps: first different at step {different[0]}",
        f"  largest relative difference {largest:.3g}, stated tolerance {tolerance:g}",
    ]
    return told, largest <= tolerance


def _environment_differences(facts: Facts, work: Path) -> list[str]:
    before, now = flatten(facts.environment), flatten(read_json(work / RUN_DIR / "environment.json"))
    told = [
        f"environment: {name}: {before.get(name, 'absent')} in the release, {now.get(name, 'absent')} here"
        for name in {**before, **now}
        if name not in PLACES and before.get(name) != now.get(name) and "<" not in str(before.get(name, ""))
    ]
    told += [
        f"data/{name}: its tokens are not those that the run has read; give the options that the store does not record "
        f"in [stores.{name}.prepare] of licences.toml when the release is made"
        for name, store in facts.release.stores.items()
        if TokenStore.open(work / "data" / name).manifest.fingerprint != store.fingerprint
    ]
    return told


def _equal(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _relative(a: float, b: float) -> float:
    difference = 0.0 if _equal(a, b) else abs(a - b) / max(abs(a), abs(b))
    return difference if math.isfinite(difference) else math.inf
