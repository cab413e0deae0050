"""Run files: TOML parsed into a checked pipeline.

A run file is one of three things. A *recipe* (it has none of the tables below) trains: `lt launch run recipe.toml`. A
file with `[job]` is one job; a file with `[[stages]]` a pipeline, where `[job]` has the fields shared by all stages:

    [pipeline]
    name = "wiki"                       # default: the file's name
    out = "runs/wiki"                   # the launch's folder; default: the run directory, or runs/NAME
    [job]                               # shared by all stages
    cwd = "/shared/work"
    [[stages]]
    name = "prepare"
    argv = ["lt", "data", "prepare", "text", "--tokenizer", "tok", "--out", "store"]
    outputs = ["store"]
    [[stages]]
    name = "train"
    after = ["prepare"]
    recipe = "run.toml"                 # a training job: `lt train run` on every device
    sets = ["optimizer.lr=1e-3"]
    nodes = 2
    procs_per_node = 8
    time_limit = "36h"
    [profile.slurm]                     # profile values of this run
    partition = "train"

Paths of recipes and hostfiles are relative to the run file, all others to the working folder of the job. Cost: one
recipe is resolved per training job; no engine is opened and nothing heavy is imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lt_launch.errors import LaunchError
from lt_launch.job import Job, Pipeline, Stage
from lt_launch.profile import Profile, check_profile_keys, read_values
from lt_trainer.config.recipe import load, to_toml
from lt_trainer.config.section import Given, build, flatten, suggest
from lt_trainer.errors import RecipeError

TABLES = ("job", "stages", "pipeline", "profile")
JOB_FIELDS = {*Job.model_fields, "sets", "time_limit"}
SECONDS_PER_UNIT = {"s": 1, "m": 60, "h": 3600, "d": 86400}
TRAIN_ARGV = ("python", "-P", "-m", "lt_trainer", "run", "{recipe}")


@dataclass(frozen=True, kw_only=True)
class RunOverrides:
    """Command-line overrides of a run file; None and empty leave the value of the file."""

    nodes: int | None = None
    procs_per_node: int | None = None
    name: str = ""
    out: str = ""
    env: Mapping[str, str] | None = None
    sets: Sequence[str] = ()
    """Overrides of the recipe of every training job."""
    stage: str = ""
    """Run only this stage, without its predecessors."""
    target_capacity: Callable[[Profile], tuple[int, int]] | None = None
    """Nodes and processes per node of the target, for a training job that states neither; 0 = unknown."""


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """A resolved run file."""

    pipeline: Pipeline
    profile: Profile
    path: Path


def read_run_file(path: str | Path, profile: Profile, overrides: RunOverrides | None = None) -> RunFile:
    """Read a run file.

    Args:
        path: the file: a recipe, a job, or a pipeline.
        profile: the user's; `[profile]` of the file overrides it.
        overrides: values from the command line.

    Raises:
        RecipeError: unreadable, unknown key, wrong type, contradiction; with field, value, source and remedy.
    """
    path, overrides = Path(path), overrides or RunOverrides()
    given = read_values(path, "profile.")
    if not any(name.partition(".")[0] in TABLES for name in given):
        given = {"job.recipe": Given(str(path.absolute()), str(path))}
    _check_table_names(given)
    profile_values = {name.partition(".")[2]: value for name, value in given.items() if name.startswith("profile.")}
    check_profile_keys(profile_values)
    merged_profile = profile.with_overrides(profile_values)
    shared = {name: value for name, value in given.items() if name.startswith("job.")}
    tables = given["stages"].value if "stages" in given else None
    header = _pipeline_table(given)
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._") or "run"
    if tables is None:
        stages = [_stage(shared, {}, path, overrides, merged_profile, overrides.name or stem)]
    else:
        stages = [
            _stage(shared, _stage_table(table, number, path), path, overrides, merged_profile, "")
            for number, table in enumerate(tables)
        ]
    pipeline = _pipeline(stages, header, overrides, stem, alone=tables is None)
    return RunFile(pipeline=pipeline, profile=merged_profile, path=path)


def _pipeline(
    stages: list[Stage], header: Mapping[str, str], overrides: RunOverrides, stem: str, *, alone: bool
) -> Pipeline:
    if overrides.stage:
        found = Pipeline(name=stem, stages=tuple(stages)).stage(overrides.stage)
        stages = [Stage(job=found.job, array=found.array, inputs=found.inputs, outputs=found.outputs)]
    name = overrides.name or header.get("name") or (stages[0].name if alone else stem)
    default = stages[0].job.run_dir if alone else ""
    return Pipeline(
        name=name, stages=tuple(stages), out=overrides.out or header.get("out") or default or f"runs/{name}"
    )


def _pipeline_table(given: Mapping[str, Given]) -> dict[str, str]:
    table: dict[str, str] = {}
    for name, value in given.items():
        if name.startswith("pipeline.") or name == "pipeline":
            key = name.partition(".")[2]
            if key not in ("name", "out") or not isinstance(value.value, str):
                remedy = "[pipeline] has name and out, both text"
                raise RecipeError("is invalid", values={name: value.value}, origins={name: value.source}, remedy=remedy)
            table[key] = value.value
    return table


def _check_table_names(given: Mapping[str, Given]) -> None:
    for name, value in given.items():
        head = name.partition(".")[0]
        if head not in TABLES:
            near = suggest(head, TABLES)
            hint = (
                f"did you mean [{near}]?"
                if near
                else f"a run file has the tables {', '.join(TABLES)}; a recipe has none of them"
            )
            raise RecipeError("unknown table", values={name: value.value}, origins={name: value.source}, remedy=hint)


def _stage_table(table: Any, number: int, path: Path) -> dict[str, Given]:
    if not isinstance(table, Mapping):
        raise LaunchError(f"{path}: stages must be written as [[stages]] tables")
    source = f"{path} [[stages]] {table.get('name', number + 1)}"
    return {name: Given(value, source) for name, value in flatten(table).items()}


def _stage(
    shared: Mapping[str, Given],
    own: Mapping[str, Given],
    path: Path,
    overrides: RunOverrides,
    profile: Profile,
    name: str,
) -> Stage:
    """Build one stage from the shared fields and its own table of job and stage fields."""
    of_stage = Stage.model_fields.keys() - {"job"}
    job = {key.partition(".")[2]: value for key, value in shared.items()}
    job |= {key: value for key, value in own.items() if key not in of_stage}
    for key in own.keys() - of_stage:
        if key.partition(".")[0] not in JOB_FIELDS and (near := suggest(key, [*of_stage, *JOB_FIELDS])) in of_stage:
            problem, found = "unknown field", {f"stages.{key}": own[key].value}
            raise RecipeError(
                problem, values=found, origins={f"stages.{key}": own[key].source}, remedy=f"did you mean {near}?"
            )
    if "name" not in job:
        if not name:
            raise LaunchError(f'{path}: a [[stages]] table has no name; add name = "prepare" or the like')
        job["name"] = Given(name, str(path))
    made = _job(job, path, overrides, profile, alone=bool(name))
    values = {key: value for key, value in own.items() if key in of_stage}
    return build(Stage, values | {"job": Given(made, str(path))}, "stage")


def _job(given: Mapping[str, Given], path: Path, overrides: RunOverrides, profile: Profile, *, alone: bool) -> Job:
    plain = {name: value for name, value in given.items() if value.value != {}}
    recipe, sets, limit = (plain.pop(name, None) for name in ("recipe", "sets", "time_limit"))
    if limit is not None:
        plain["time_limit_s"] = Given(parse_duration(limit), limit.source)
    for name, option in (("nodes", "--nodes"), ("procs_per_node", "--nproc-per-node")):
        value = getattr(overrides, name)
        if value is not None and (recipe is not None or alone):
            plain[name] = Given(value, option)
    plain |= {f"env.{name}": Given(value, "--env") for name, value in (overrides.env or {}).items()}
    if recipe is not None:
        plain = _training_fields(plain, recipe, sets, path, overrides, profile) | plain
    elif sets is not None:
        raise _wrong("sets", sets, "has no effect without a recipe", "set recipe, or leave it out")
    return build(Job, plain, "job")


def _wrong(name: str, given: Given, problem: str, remedy: str = "") -> RecipeError:
    name = f"job.{name}"
    return RecipeError(problem, values={name: given.value}, origins={name: given.source}, remedy=remedy)


def _training_fields(
    plain: Mapping[str, Given],
    recipe: Given,
    sets: Given | None,
    path: Path,
    overrides: RunOverrides,
    profile: Profile,
) -> dict[str, Given]:
    """Return the job fields derived from a training recipe, unless the run file sets them.

    The launcher decides the number of nodes and writes it into the recipe that is sent.
    """
    if "argv" in plain:
        raise _wrong("argv", plain["argv"], "a training job has its own command", "leave out argv or recipe")
    if not isinstance(recipe.value, str):
        raise _wrong("recipe", recipe, "expected text")
    words = [*(list(sets.value) if sets is not None else []), *overrides.sets]
    file = path.parent / recipe.value
    if not file.exists():
        remedy = "give the path of a recipe relative to the run file"
        raise _wrong("recipe", recipe, f"no such file: {file}", remedy)
    resolved = load(file, overrides=words)
    target_nodes, target_procs = overrides.target_capacity(profile) if overrides.target_capacity is not None else (0, 0)
    nodes = resolved.recipe.parallel.n_nodes if resolved.is_given("parallel.n_nodes") else target_nodes or 1
    nodes = plain["nodes"].value if "nodes" in plain else nodes
    procs = plain["procs_per_node"].value if "procs_per_node" in plain else target_procs or 1
    if nodes != resolved.recipe.parallel.n_nodes:
        resolved = load(file, overrides=[*words, f"parallel.n_nodes={nodes}"])
    training_recipe = resolved.recipe
    if isinstance(nodes, int) and isinstance(procs, int):
        try:
            training_recipe.accumulation_steps(
                nodes * procs
            )  # reject parallel degrees or a batch size that do not fit the ranks
        except RecipeError as exc:
            raise exc.with_origins(resolved.origins) from None
    values = {
        "argv": TRAIN_ARGV,
        "completion": "run_dir",
        "run_dir": training_recipe.run.dir,
        "engine": training_recipe.run.engine,
        "grace_period_s": training_recipe.fault_tolerance.grace_period_s,
        "nodes": nodes,
        "procs_per_node": procs,
        "recipe": to_toml(training_recipe, resolved.origins),
    }
    return {name: Given(value, str(file)) for name, value in values.items()}


def parse_duration(given: Given) -> int:
    """Parse a duration such as "36h", "90m" or a number of seconds.

    Raises:
        RecipeError: it is not a duration.
    """
    text = str(given.value).strip()
    if match := re.fullmatch(r"(\d+)\s*([smhd]?)", text):
        return int(match[1]) * SECONDS_PER_UNIT[match[2] or "s"]
    raise _wrong("time_limit", given, "is not a duration", 'write it as "36h", "90m", "2d" or in seconds')
