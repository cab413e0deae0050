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

Paths of recipes are relative to the run file, all others to the working folder of the job. Cost: one recipe
is resolved per training job; no engine is opened and nothing heavy is imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lt_launch.errors import LaunchError
from lt_launch.job import Job, Pipeline, Stage
from lt_launch.profile import Profile, check_profile_keys
from lt_trainer.config.fields import build, flatten, leaves, suggest
from lt_trainer.config.sources import Assignment, coerce_assignments, read_toml
from lt_trainer.errors import RecipeError

__all__ = ["RunFile", "RunOverrides", "read_run_file"]

TABLES = ("job", "stages", "pipeline", "profile")
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
    given = read_toml(path)
    if not any(name.partition(".")[0] in TABLES for name in given):
        given = {"job.recipe": Assignment(str(path.absolute()), str(path))}
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


def _pipeline_table(given: Mapping[str, Assignment]) -> dict[str, str]:
    table: dict[str, str] = {}
    for name, value in given.items():
        if name.startswith("pipeline.") or name == "pipeline":
            key = name.partition(".")[2]
            if key not in ("name", "out") or not isinstance(value.value, str):
                remedy = "[pipeline] has name and out, both text"
                raise RecipeError("is invalid", values={name: value.value}, origins={name: value.source}, remedy=remedy)
            table[key] = value.value
    return table


def _check_table_names(given: Mapping[str, Assignment]) -> None:
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


def _stage_table(table: Any, number: int, path: Path) -> dict[str, Assignment]:
    if not isinstance(table, Mapping):
        raise LaunchError(f"{path}: stages must be written as [[stages]] tables")
    source = f"{path} [[stages]] {table.get('name', number + 1)}"
    return {name: Assignment(value, source) for name, value in flatten(table).items()}


def _stage(
    shared: Mapping[str, Assignment],
    own: Mapping[str, Assignment],
    path: Path,
    overrides: RunOverrides,
    profile: Profile,
    name: str,
) -> Stage:
    """Build one stage from the shared fields and its own table of job and stage fields."""
    stage_fields = {leaf.partition(".")[2] for leaf in leaves(Stage, "stage.") if not leaf.startswith("stage.job.")}
    job_fields = leaves(Job, "job.")
    given = dict(shared)
    stage_values: dict[str, Assignment] = {}
    for key, value in own.items():
        if key in stage_fields or (
            f"job.{key}" not in job_fields and suggest(key, {*stage_fields, *job_fields}) in stage_fields
        ):
            stage_values[f"stage.{key}"] = value
        else:
            given[f"job.{key}"] = value
    if "job.name" not in given:
        if not name:
            raise LaunchError(f'{path}: a [[stages]] table has no name; add name = "prepare" or the like')
        given["job.name"] = Assignment(name, str(path))
    job = _job(given, path, overrides, profile, alone=bool(name))
    values = coerce_assignments(
        stage_values, {k: v for k, v in leaves(Stage, "stage.").items() if not k.startswith("stage.job.")}
    )
    sources = {key: value.source for key, value in (given | stage_values).items()}
    try:
        return Stage(job=job, **{key.partition(".")[2]: value for key, value in values.items()})
    except RecipeError as exc:
        raise exc.with_origins(sources) from None


def _job(given: Mapping[str, Assignment], path: Path, overrides: RunOverrides, profile: Profile, *, alone: bool) -> Job:
    env = {name[8:]: value for name, value in given.items() if name.startswith("job.env.")}
    plain = {name: value for name, value in given.items() if not name.startswith("job.env") and value.value != {}}
    recipe, sets = plain.pop("job.recipe", None), plain.pop("job.sets", None)
    limit = plain.pop("job.time_limit", None)
    if limit is not None:
        plain["job.time_limit_s"] = Assignment(parse_duration(limit), limit.source)
    for name, value in (("nodes", overrides.nodes), ("procs_per_node", overrides.procs_per_node)):
        if value is not None and (recipe is not None or alone):
            plain[f"job.{name}"] = Assignment(value, f"--{'nproc-per-node' if name == 'procs_per_node' else name}")
    schema = {name: leaf for name, leaf in leaves(Job, "job.").items() if name != "job.recipe"}
    derived: dict[str, Any] = {}
    if recipe is not None:
        derived = _training_fields(plain, recipe, sets, path, overrides, profile)
    elif sets is not None:
        problem, remedy = "has no effect without a recipe", "set recipe, or leave it out"
        raise RecipeError(problem, values={"job.sets": sets.value}, origins={"job.sets": sets.source}, remedy=remedy)
    values = {
        **{f"job.{name}": value for name, value in derived.items() if name != "recipe"},
        **coerce_assignments(plain, schema),
    }
    variables = {**{name: value.value for name, value in env.items()}, **(overrides.env or {})}
    try:
        return build(Job, values, "job.", env=variables, recipe=derived.get("recipe", ""))
    except RecipeError as exc:
        raise exc.with_origins({name: value.source for name, value in given.items()}) from None


def _training_fields(
    plain: Mapping[str, Assignment],
    recipe: Assignment,
    sets: Assignment | None,
    path: Path,
    overrides: RunOverrides,
    profile: Profile,
) -> dict[str, Any]:
    """Return the job fields derived from a training recipe, unless the run file sets them.

    The launcher decides the number of nodes and writes it into the recipe that is sent.
    """
    from lt_trainer.config.recipe import load, to_toml

    if "job.argv" in plain:
        problem, remedy = "a training job has its own command", "leave out argv or recipe"
        found = plain["job.argv"]
        raise RecipeError(problem, values={"job.argv": found.value}, origins={"job.argv": found.source}, remedy=remedy)
    if not isinstance(recipe.value, str):
        raise RecipeError("expected text", values={"job.recipe": recipe.value}, origins={"job.recipe": recipe.source})
    words = [*(list(sets.value) if sets is not None else []), *overrides.sets]
    file = path.parent / recipe.value
    if not file.exists():
        problem, remedy = f"no such file: {file}", "give the path of a recipe relative to the run file"
        found = {"job.recipe": recipe.value}
        raise RecipeError(problem, values=found, origins={"job.recipe": recipe.source}, remedy=remedy)
    resolved = load(file, overrides=words)
    target_nodes, target_procs = overrides.target_capacity(profile) if overrides.target_capacity is not None else (0, 0)
    nodes = resolved.recipe.parallel.n_nodes if resolved.is_given("parallel.n_nodes") else target_nodes or 1
    nodes = plain["job.nodes"].value if "job.nodes" in plain else nodes
    procs = plain["job.procs_per_node"].value if "job.procs_per_node" in plain else target_procs or 1
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
    return {
        "argv": TRAIN_ARGV,
        "completion": "run_dir",
        "run_dir": training_recipe.run.dir,
        "engine": training_recipe.run.engine,
        "grace_period_s": training_recipe.fault_tolerance.grace_period_s,
        "nodes": nodes,
        "procs_per_node": procs,
        "recipe": to_toml(training_recipe, resolved.origins),
    }


def parse_duration(given: Assignment) -> int:
    """Parse a duration such as "36h", "90m" or a number of seconds.

    Raises:
        RecipeError: it is not a duration.
    """
    text = str(given.value).strip()
    if match := re.fullmatch(r"(\d+)\s*([smhd]?)", text):
        return int(match[1]) * SECONDS_PER_UNIT[match[2] or "s"]
    raise RecipeError(
        "is not a duration",
        values={"job.time_limit": given.value},
        origins={"job.time_limit": given.source},
        remedy='write it as "36h", "90m", "2d" or in seconds',
    )
