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

Paths of recipes and hostfiles are relative to the run file, all others to the working folder of the job; `~` is the
home folder on the machine that reads the run file. Cost: one
recipe is resolved per training job; no engine is opened and nothing heavy is imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lt_launch.errors import LaunchError
from lt_launch.job import Job, Pipeline, Stage
from lt_launch.profile import Profile, read_values
from lt_model.errors import ModelError
from lt_model.home_folder import expand_home
from lt_trainer.config.recipe import load, to_toml
from lt_trainer.config.section import Given, PathText, Section, build, flatten, inside, option, suggest
from lt_trainer.errors import RecipeError

TABLES = ("job", "stages", "pipeline", "profile")
STAGE_FIELDS = Stage.model_fields.keys() - {"job"}
JOB_FIELDS = {*Job.model_fields, "sets", "time_limit"}
SECONDS_PER_UNIT = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
TRAIN_ARGV = ("python", "-P", "-m", "lt_trainer", "run", "{recipe}")


@dataclass(frozen=True, kw_only=True)
class RunOverrides:
    """Command-line overrides of a run file; None and empty leave the value of the file."""

    nodes: int | None = None
    procs_per_node: int | None = None
    out: str = ""
    env: Mapping[str, str] | None = None
    sets: Sequence[str] = ()
    """Overrides of the recipe of every training job."""
    stage: str = ""
    """Run only this stage, without its predecessors."""
    hostfile: Path | None = None
    target_capacity: Callable[[Profile], tuple[int, int]] = lambda profile: (0, 0)
    """Nodes and processes per node of the target, for a training job that states neither; 0 = unknown."""


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """A resolved run file."""

    pipeline: Pipeline
    profile: Profile


class PipelineTable(Section, table="pipeline"):
    """The table [pipeline]."""

    name: str = option("", "name of the pipeline; empty = the file's")
    out: PathText = option("", "folder of the launch; empty = runs/NAME")


def read_run_file(path: str | Path, profile: Profile, overrides: RunOverrides | None = None) -> RunFile:
    """Read a run file.

    Args:
        path: the file: a recipe, a job, or a pipeline.
        profile: the user's; `[profile]` of the file overrides it.
        overrides: values from the command line.

    Raises:
        RecipeError: unreadable, unknown key, wrong type, contradiction; with field, value, source and remedy.
        LaunchError: a stage without a name.
    """
    path, overrides = Path(path), overrides or RunOverrides()
    given = read_values(path, "profile.")
    if not any(name.partition(".")[0] in TABLES for name in given):
        given = {"job.recipe": Given(path.name, str(path))}
    _check_names(given, TABLES, "", "table", "a run file has the tables {}; a recipe has none of them")
    values = {**profile.values, **inside(given, "profile")}
    if overrides.hostfile is not None:
        values["ssh.hostfile"] = Given(str(overrides.hostfile), "--hostfile")
    profile = Profile(values=values)
    header, shared = build(PipelineTable, inside(given, "pipeline"), "pipeline"), inside(given, "job")
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._") or "run"
    if (tables := given.get("stages")) is None:
        stages = [_stage({"name": Given(stem, str(path)), **shared}, path, overrides, profile, alone=True)]
        name, out = header.name or stages[0].name, stages[0].job.run_dir
    else:
        stages, name, out = [], header.name or stem, ""
        for number, table in enumerate(tables.value):
            if not isinstance(table, Mapping):
                raise LaunchError(f"{path}: stages must be written as [[stages]] tables")
            source = f"{path} [[stages]] {table.get('name', number + 1)}"
            own = {field: Given(value, source) for field, value in flatten(table).items() if value != {}}
            if "name" not in own:
                raise LaunchError(f'{path}: a [[stages]] table has no name; add name = "prepare" or the like')
            stages.append(_stage({**shared, **own}, path, overrides, profile, alone=False))
    if overrides.stage:
        found = Pipeline(name=name, stages=tuple(stages)).stage(overrides.stage)
        stages = [found.model_copy(update={"after": ()})]
    out = overrides.out or header.out or out or f"runs/{name}"
    return RunFile(pipeline=Pipeline(name=name, stages=tuple(stages), out=out), profile=profile)


def _check_names(given: Mapping[str, Given], known: Sequence[str], table: str, what: str, remedy: str) -> None:
    for name, value in given.items():
        head, name = name.partition(".")[0], f"{table}{name}"
        if head not in known:
            near = suggest(head, known)
            hint = f"did you mean {near}?" if near else remedy.format(", ".join(sorted(known)))
            raise RecipeError(f"unknown {what}", values={name: value.value}, origins={name: value.source}, remedy=hint)


def _stage(given: dict[str, Given], path: Path, overrides: RunOverrides, profile: Profile, *, alone: bool) -> Stage:
    """Build one stage from the fields of it and its job."""
    _check_names(given, [*STAGE_FIELDS, *JOB_FIELDS], "job.", "field", "there are {}")
    job = {name: value for name, value in given.items() if name not in STAGE_FIELDS}
    recipe, sets, limit = (job.pop(name, None) for name in ("recipe", "sets", "time_limit"))
    if limit is not None:
        job["time_limit_s"] = Given(parse_duration(limit), limit.source)
    for name, option_name in (("nodes", "--nodes"), ("procs_per_node", "--nproc-per-node")):
        value = getattr(overrides, name)
        if value is not None and (recipe is not None or alone):
            job[name] = Given(value, option_name)
    job |= {f"env.{name}": Given(value, "--env") for name, value in (overrides.env or {}).items()}
    if recipe is not None:
        words = [*(list(sets.value) if sets is not None else []), *overrides.sets]
        job = _training_fields(job, recipe, words, path, overrides.target_capacity(profile)) | job
    elif sets is not None:
        raise _wrong("sets", sets, "has no effect without a recipe", "set recipe, or leave it out")
    values = {name: value for name, value in given.items() if name in STAGE_FIELDS}
    return build(Stage, values | {"job": Given(build(Job, job, "job"), str(path))}, "stage")


def _wrong(name: str, given: Given, problem: str, remedy: str = "") -> RecipeError:
    name = f"job.{name}"
    return RecipeError(problem, values={name: given.value}, origins={name: given.source}, remedy=remedy)


def _training_fields(
    job: Mapping[str, Given], recipe: Given, words: Sequence[str], path: Path, capacity: tuple[int, int]
) -> dict[str, Given]:
    """Return the job fields derived from a training recipe, unless the run file sets them.

    The launcher decides the number of nodes and writes it into the recipe that is sent.
    """
    if "argv" in job:
        raise _wrong("argv", job["argv"], "a training job has its own command", "leave out argv or recipe")
    if not isinstance(recipe.value, str):
        raise _wrong("recipe", recipe, "expected text")
    try:
        file = path.parent / expand_home(recipe.value)
    except ModelError as exc:
        raise _wrong("recipe", recipe, str(exc)) from None
    if not file.exists():
        remedy = "give the path of a recipe relative to the run file"
        raise _wrong("recipe", recipe, f"no such file: {file}", remedy)
    resolved = load(file, overrides=words)
    nodes = resolved.recipe.parallel.n_nodes if resolved.is_given("parallel.n_nodes") else capacity[0] or 1
    nodes = job["nodes"].value if "nodes" in job else nodes
    procs = job["procs_per_node"].value if "procs_per_node" in job else capacity[1] or 1
    if nodes != resolved.recipe.parallel.n_nodes:
        resolved = load(file, overrides=[*words, f"parallel.n_nodes={nodes}"])
    made = resolved.recipe
    if isinstance(nodes, int) and isinstance(procs, int):
        try:
            made.accumulation_steps(nodes * procs)  # reject degrees or a batch size that do not fit the ranks
        except RecipeError as exc:
            raise exc.with_origins(resolved.origins) from None
    values = {
        "argv": TRAIN_ARGV,
        "completion": "run_dir",
        "run_dir": made.run.dir,
        "engine": made.run.engine,
        "grace_period_s": made.fault_tolerance.grace_period_s,
        "nodes": nodes,
        "procs_per_node": procs,
        "recipe": to_toml(made, resolved.origins),
    }
    return {name: Given(value, str(file)) for name, value in values.items()}


def parse_duration(given: Given) -> int:
    """Parse a duration such as "36h", "90m" or a number of seconds.

    Raises:
        RecipeError: it is not a duration.
    """
    if match := re.fullmatch(r"(\d+)\s*([smhd]?)", str(given.value).strip()):
        return int(match[1]) * SECONDS_PER_UNIT[match[2]]
    raise _wrong("time_limit", given, "is not a duration", 'write it as "36h", "90m", "2d" or in seconds')
