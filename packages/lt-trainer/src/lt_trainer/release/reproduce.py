"""Reproduction of a release: an environment from its sources, its script run in it, losses and weights compared.

This is the one command that runs what a release contains: `reproduce.sh`, and the build of lt from source/. So the
hashes are checked first. Everything is written into the work folder, which stays; sources that may not be in the
release are put there before, as sources/STORE/NAME. Cost: that of the run.
"""

import math
import os
import subprocess
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lt_ckpt import open_source
from lt_data import TokenStore
from lt_trainer.release.bundle import REQUIREMENTS, RUN_DIR, SOURCE_ARCHIVE, SOURCE_PATCH, ReleaseError, check_hashes
from lt_trainer.release.facts import Facts
from lt_trainer.release.weight_files import MODEL_FOLDER, hash_tensors, stated_hashes
from lt_trainer.run_directory.jsonl import read_jsonl

COMPARED = ("loss", "grad_norm")
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def reproduce_release(
    bundle: Path,
    work: Path,
    *,
    steps: int = 0,
    python: Path | None = None,
    expect: str = "",
    notify: Callable[[str], None] = lambda text: None,
) -> tuple[list[str], bool]:
    """Reproduce a release; return what is told of it, and True if no loss differs by more than the tolerance.

    Args:
        bundle: Its folder.
        work: Folder for environment, data and run; new, or with the sources that are not in the release.
        steps: Steps to run; 0 for all.
        python: Interpreter of an existing environment with lt; None to make one from the release.
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
    problems = [
        f"source {entry.path}: not in the release ({entry.left_out}); put the file with SHA-256 {entry.sha256}"
        f"{f' from {entry.url}' if entry.url else ''} at {work / entry.file}"
        for store in facts.stores
        for entry in store.sources
        if not store.has_tokens and entry.left_out and not (work / entry.file).is_file()
    ]
    if work.exists() and {path.name for path in work.iterdir()} - {"sources"}:
        problems.append(f"--out = {work}: is not empty; give a new folder")
    if steps > facts.release.step or not train:
        problems.append(f"--steps = {steps}: losses of {len(facts.train)} steps were logged")
    if problems:
        raise ReleaseError(f"DIR = {bundle}: cannot be reproduced here", problems)
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
    told += [
        f"data/{name}: its tokens are not those that the run has read"
        for name, store in facts.release.stores.items()
        if TokenStore(work / "data" / name).manifest.fingerprint != store.fingerprint
    ]
    return told, is_within


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
    packages = sorted((source / "packages").iterdir())
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
    different = [ours["step"] for ours, theirs in pairs if any(_difference(ours[n], theirs[n]) for n in COMPARED)]
    if not different:
        return [f"losses of {len(pairs)} steps: bit-equal"], True
    largest, tolerance = max(_difference(a["loss"], b["loss"]) for a, b in pairs), facts.info.release.tolerance
    told = [
        f"losses of {len(pairs)} steps: first different at step {different[0]}",
        f"  largest relative difference {largest:.3g}, stated tolerance {tolerance:g}",
    ]
    return told, largest <= tolerance


def _difference(a: float | None, b: float | None) -> float:
    """Return the relative difference: 0 for equal bits, infinity where one is not finite, or None."""
    if a is None or b is None:
        return 0.0 if a is b else math.inf
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) / max(abs(a), abs(b)) if math.isfinite(a - b) else math.inf
