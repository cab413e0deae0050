"""Reproduction of a release: its data prepared again, its recipe run again, every loss compared.

1. The bundle's hashes are checked: its packages are about to be installed and run.
2. The sources are found, in the bundle or by hash in the given folders; all that are missing are in one list.
3. A virtual environment is made from lock and wheels, with the run's Python; or one that exists is used.
4. Each store is prepared and packed again in a process of that environment, and must have the run's fingerprint.
5. The recipe runs in the work folder, with the run's number of ranks and threads, for all its steps or for the first N.
6. Losses and gradient norms are compared step by step, after a full run the weights too; of the environments, what
   differs is listed.

Everything is written into the work folder, which stays. Cost: that of the run.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lt_ckpt import list_steps, open_source
from lt_ckpt.hash_list import HASH_LIST
from lt_trainer.constants import EXIT_DONE, EXIT_REQUEUE
from lt_trainer.files import open_for_appending, read_json, write_atomic
from lt_trainer.release.commands import prepare_arguments, thread_variables
from lt_trainer.release.comparison import LossComparison, compare_environments, compare_losses
from lt_trainer.release.data_files import SourceEntry, find_source_files, hash_file
from lt_trainer.release.errors import DAMAGE, ReleaseError, describe_damage
from lt_trainer.release.facts import Facts, StoreFacts, read_facts
from lt_trainer.release.run_files import RUN_DIR
from lt_trainer.release.task_files import TASK_FOLDER
from lt_trainer.release.verify import check_hashes
from lt_trainer.release.weight_files import stated_hashes, tensor_hashes
from lt_trainer.run_directory.jsonl import read_jsonl
from lt_trainer.run_directory.records import drop_superseded_records

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
THREAD_VALUE = re.compile(r"[0-9A-Za-z_,]*")
PYTHON_VERSION = re.compile(r"\d+\.\d+\.\d+[0-9A-Za-z.+]*")


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions:
    """Options of `reproduce_release`.

    Attributes:
        steps: Steps to run; 0 for all.
        python: Interpreter of an existing environment with lt; None to make one from the bundle.
        source_folders: Where source files that are not in the bundle are looked for, by hash.
        expect: SHA-256 that SHA256SUMS must have; "" for any.
    """

    steps: int = 0
    python: Path | None = None
    source_folders: tuple[Path, ...] = ()
    expect: str = ""


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Facts of the release that the steps need.

    Attributes:
        python: Version of the run's Python.
        variables: Environment variables of the steps: those of a rank are absent, threads are the run's.
        jobs: Store → job of `lt_trainer.release.rebuild`.
        world: Number of ranks.
        planned_steps: Steps of the recipe.
    """

    python: str
    variables: Mapping[str, str]
    jobs: Mapping[str, dict[str, Any]]
    world: int
    planned_steps: int


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """Result of a reproduction.

    Attributes:
        losses: Comparison of the losses.
        different_tensors: After a full run, tensors whose bits differ from the released ones; None after fewer steps.
        environment: Differences of the environments.
    """

    losses: LossComparison
    different_tensors: tuple[str, ...] | None
    environment: tuple[str, ...]


def reproduce_release(
    bundle: Path, work: Path, options: ReproduceOptions, *, notify: Callable[[str], None] = lambda text: None
) -> Reproduction:
    """Reproduce a release.

    Args:
        bundle: Its folder.
        work: New or empty folder for environment, data and run.
        options: See `ReproduceOptions`.
        notify: Called with what is being done.

    Raises:
        ReleaseError: The bundle was changed, sources are missing, or a step of the reproduction failed.
    """
    facts, sources = _check(bundle, work, options)
    bundle, work = bundle.resolve(), work.resolve()
    try:
        plan = _plan(bundle, work, facts, sources)
    except DAMAGE as exc:
        raise ReleaseError(f"DIR = {bundle}: cannot be read", [describe_damage(exc)]) from exc
    work.mkdir(parents=True, exist_ok=True)
    if options.python is None:
        notify("making an environment from the lock and the wheels")
        python = _make_environment(bundle, work, facts, plan)
    else:
        python = options.python
    for name, job in plan.jobs.items():
        notify(f"preparing {name}")
        _rebuild(python, work, name, job, plan.variables)
    if (bundle / TASK_FOLDER).is_dir():
        shutil.copytree(bundle / TASK_FOLDER, work / TASK_FOLDER)
    last_step = options.steps or facts.provenance.step
    notify(f"running {last_step} step(s)")
    _run(python, bundle, work, plan, last_step)
    run = work / RUN_DIR
    repeated = [r for r in drop_superseded_records(read_jsonl(run / "metrics.jsonl")) if "loss" in r]
    losses = compare_losses(facts.train, repeated, last_step=last_step, tolerance=facts.info.release.tolerance)
    different = _compare_weights(bundle, run) if last_step == facts.provenance.step else None
    environment = compare_environments(facts.environment, read_json(run / "environment.json"))
    start = next((event for event in reversed(read_jsonl(run / "events.jsonl")) if event.get("event") == "start"), {})
    environment += [
        f"{name}: {facts.start_event.get(name)} in the release, {start.get(name)} here"
        for name in ("world", "device", "resolved")
        if facts.start_event.get(name) != start.get(name)
    ]
    return Reproduction(losses=losses, different_tensors=different, environment=tuple(environment))


def _check(bundle: Path, work: Path, options: ReproduceOptions) -> tuple[Facts, dict[str, Path]]:
    """Check all that the reproduction needs; return the facts and the source files by SHA-256."""
    if not (bundle / HASH_LIST).is_file():
        raise ReleaseError(
            f"DIR = {bundle}", [f"not a release (it has no {HASH_LIST}); pass a folder of lt release make"]
        )
    list_hash = hash_file(bundle / HASH_LIST)
    problems = check_hashes(bundle)[1]
    if options.expect and options.expect.lower() != list_hash:
        problems.append(f"{HASH_LIST}: is {list_hash}, expected {options.expect}")
    if problems:
        raise ReleaseError(f"DIR = {bundle}: was changed", problems)
    try:
        facts = read_facts(bundle)
    except DAMAGE as exc:
        raise ReleaseError(f"DIR = {bundle}: cannot be read", [describe_damage(exc)]) from exc
    if work.exists() and any(work.iterdir()):
        problems.append(f"--out = {work}: is not empty; give a new folder")
    if not 0 <= options.steps <= facts.provenance.step:
        problems.append(
            f"--steps = {options.steps}: the release has {facts.provenance.step} steps; give 1 to that, or 0"
        )
    logged = min((int(record["step"]) for record in facts.train), default=None)
    if logged is None:
        problems.append("run/metrics.jsonl: has no loss to compare with; nothing can be shown by a repetition")
    elif 0 < options.steps < logged:
        problems.append(
            f"--steps = {options.steps}: the first loss that was logged is of step {logged}; give at least it"
        )
    sources = {entry.sha256: bundle / entry.file for entry in facts.sources if entry.file}
    wanted = [entry for entry in facts.sources if entry.sha256 not in sources]
    sources |= find_source_files([entry.as_source_file() for entry in wanted], options.source_folders)
    problems += _missing_parts(facts)
    problems += [_describe_missing(entry) for entry in wanted if entry.sha256 not in sources]
    if problems:
        raise ReleaseError(f"DIR = {bundle}: cannot be reproduced here", problems)
    return facts, {digest: path.resolve() for digest, path in sources.items()}


def _missing_parts(facts: Facts) -> Iterator[str]:
    """Yield what the run needed and the release cannot have."""
    data, model = facts.recipe["data"], facts.recipe["model"]
    if data.get("loader"):
        yield f"data.loader = {data['loader']!r}: the loader is not in the release"
    if model.get("init_from"):
        yield f"model.init_from = {model['init_from']!r}: the weights that it starts from are not in the release"
    for store in facts.stores:
        if store.manifest.get("map"):
            yield f"{store.field}: its record function {store.manifest['map']['function']} is not in the release"
        if not any(entry.store == store.name for entry in facts.sources):
            yield f"{store.field}: its sources are not known"
        if facts.provenance.stores[store.name]["kind"] == "joined":
            yield f"{store.field}: a store that was joined or appended to is not prepared again"


def _describe_missing(entry: SourceEntry) -> str:
    where = f"; it can be obtained from {entry.url}" if entry.url else ""
    return (
        f"source {entry.path}: not in the release ({entry.left_out}); give a folder that has the file with SHA-256 "
        f"{entry.sha256} as --sources{where}"
    )


def _plan(bundle: Path, work: Path, facts: Facts, sources: Mapping[str, Path]) -> _Plan:
    """Read all that the steps need before the first of them."""
    variables = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    jobs: dict[str, dict[str, Any]] = {}
    for store in facts.stores:
        paths = [sources[entry.sha256] for entry in facts.sources if entry.store == store.name]
        given = dict(facts.info.prepare.get(store.name, {}))
        tokenizer = bundle / "data" / store.name / "tokenizer"
        jobs[store.name] = rebuild_job(store, work / "data" / store.name, paths, tokenizer, given)
    python = facts.environment["python"]
    if not isinstance(python, str) or PYTHON_VERSION.fullmatch(python) is None:
        raise ValueError(f"environment/environment.json: python = {python!r} is no version of Python")
    # What is compared after the run must be readable before it.
    compare_losses(facts.train, facts.train, last_step=facts.provenance.step, tolerance=0.0)
    compare_environments(facts.environment, facts.environment)
    stated_hashes(bundle)
    threads = {name: str(value) for name, value in thread_variables(facts).items()}
    if unfit := [f"{name} = {value!r}" for name, value in threads.items() if not THREAD_VALUE.fullmatch(value)]:
        raise ValueError(f"environment/environment.json: {unfit[0]} is no value of that variable")
    return _Plan(
        python=python,
        variables=variables | threads,
        jobs=jobs,
        world=int(facts.start_event.get("world", 1)),
        planned_steps=int(facts.recipe["schedule"]["max_steps"]),
    )


def _make_environment(bundle: Path, work: Path, facts: Facts, plan: _Plan) -> Path:
    """Make a virtual environment with the locked packages and the bundle's wheels; return its interpreter."""
    lock = bundle / "environment" / "requirements.txt"
    hashes = () if facts.provenance.without_hash else ("--require-hashes",)
    wheels = [str(bundle / name) for name in facts.wheels]
    python = work / "env" / "bin" / "python"
    if uv := shutil.which("uv"):
        install = (uv, "pip", "install", "--quiet", "--python", str(python))
        _execute((uv, "venv", "--quiet", "--python", plan.python, str(work / "env")), work, "environment")
    else:
        install = (str(python), "-m", "pip", "install", "--quiet")
        _execute((sys.executable, "-m", "venv", str(work / "env")), work, "environment")
    _execute((*install, *hashes, "-r", str(lock)), work, "environment")
    _execute((*install, "--no-deps", *wheels), work, "environment")
    return python


def rebuild_job(
    store: StoreFacts, out: Path, sources: Sequence[Path], tokenizer: Path, given: dict[str, Any]
) -> dict[str, Any]:
    """Return the job of `lt_trainer.release.rebuild` that makes a store again.

    Args:
        store: The released store.
        out: Folder to make.
        sources: Its source files, in the manifest's order.
        tokenizer: Folder of the tokenizer.
        given: Options of `lt data prepare` that the store does not record.
    """
    manifest, pack = store.manifest, store.pack
    min_seq_len = {"min_seq_len": min(length for length, _ in pack["buckets"])} if pack["mode"] == "buckets" else {}
    return {
        "out": str(out),
        "sources": [str(path) for path in sources],
        "tokenizer": str(tokenizer),
        "arguments": prepare_arguments(store, given),
        "parts": manifest["merged_from"],
        "split": manifest.get("split"),
        "fingerprint": manifest["fingerprint"],
        "pack": {"seq_len": pack["seq_len"], "mode": pack["mode"], **min_seq_len},
        "pack_fingerprint": pack["fingerprint"],
    }


def _rebuild(python: Path, work: Path, name: str, job: dict[str, Any], variables: Mapping[str, str]) -> None:
    path = work / f"prepare-{name}.json"
    write_atomic(path, json.dumps(job, indent=1) + "\n")
    command = (str(python), "-m", "lt_trainer.release.rebuild", str(path))
    _execute(command, work, f"prepare-{name}", variables)


def _run(python: Path, bundle: Path, work: Path, plan: _Plan, last_step: int) -> None:
    """Train with the run's number of ranks, all on this machine."""
    recipe = str(bundle / "recipe" / "recipe.toml")
    start = ("lt_trainer", "run", recipe) if plan.world == 1 else ("lt_trainer.release.rerun", recipe, str(plan.world))
    stop = ("--stop-after-step", str(last_step)) if last_step < plan.planned_steps else ()
    command = (str(python), "-m", *start, *stop)
    _execute(command, work, "run", plan.variables, codes=(EXIT_DONE, EXIT_REQUEUE) if stop else (EXIT_DONE,))


def _execute(
    command: tuple[str, ...],
    work: Path,
    log_name: str,
    variables: Mapping[str, str] | None = None,
    codes: tuple[int, ...] = (0,),
) -> None:
    """Run a command in the work folder with its output in a log.

    Raises:
        ReleaseError: It ended with another exit code; the message has the end of the log.
    """
    path = work / f"{log_name}.log"
    with os.fdopen(open_for_appending(path), "ab") as log:
        log.write(f"$ {' '.join(command)}\n".encode())
        log.flush()
        done = subprocess.run(
            command,
            cwd=work,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode not in codes:
        tail = path.read_text(encoding="utf-8", errors="replace").splitlines()[-8:]
        problem = f"exit code {done.returncode}; last lines of {path}:\n" + "\n".join(tail)
        raise ReleaseError(f"{log_name} failed", [problem])


def _compare_weights(bundle: Path, run: Path) -> tuple[str, ...]:
    """Return the tensors of the repeated run's newest checkpoint whose bits differ from the released ones."""
    stated = stated_hashes(bundle)
    newest = list_steps(run / "checkpoints")[0][1]
    actual = tensor_hashes(open_source(newest), list(stated))
    return tuple(name for name, digest in stated.items() if actual[name] != digest)
