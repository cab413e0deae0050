"""From a run file to a pipeline: TOML in, checked values out.

A run file is one of three things. A *recipe* (it has none of the tables below) trains: `lt launch run recipe.toml`. A
file with `[job]` is one job; a file with `[[stages]]` a pipeline, where `[job]` holds what all stages share:

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
    recipe = "run.toml"                 # a job that trains: `lt train run` on every device
    sets = ["optimizer.lr=1e-3"]
    nodes = 2
    procs_per_node = 8
    time_limit = "36h"
    [profile.slurm]                     # facts about the target that belong to this run
    partition = "train"

Paths of recipes are relative to the run file, all others to the working folder of the job. Cost: a recipe is resolved
for each job that trains; no engine is opened and nothing heavy is imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lt_launch.errors import LaunchError
from lt_launch.job import Job, Pipeline, Stage
from lt_launch.profile import Profile, check_names
from lt_trainer.errors import RecipeError
from lt_trainer.fields import build, flatten, leaves, suggest
from lt_trainer.resolve import Given, from_toml, typed

__all__ = ["RunFile", "Wanted", "read"]

TABLES = ("job", "stages", "pipeline", "profile")
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
TRAINS = ("python", "-m", "lt_trainer", "run", "{recipe}")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the command line says beside the run file; None and empty = as in the file."""

    nodes: int | None = None
    procs_per_node: int | None = None
    name: str = ""
    out: str = ""
    env: Mapping[str, str] | None = None
    sets: Sequence[str] = ()
    """Overrides of the recipe of every job that trains."""
    stage: str = ""
    """Only this stage, without those before it."""
    room: Callable[[Profile], tuple[int, int]] | None = None
    """Nodes and processes per node that the target has, for a job that trains and says neither; 0 = not known."""


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """A run file, resolved."""

    pipeline: Pipeline
    profile: Profile
    path: Path


def read(path: str | Path, profile: Profile, wanted: Wanted | None = None) -> RunFile:
    """Read a run file.

    Args:
        path: of the file: a recipe, a job, or a pipeline.
        profile: the person's; `[profile]` of the file wins over it.
        wanted: what the command line adds.

    Raises:
        RecipeError: unreadable, unknown key, wrong type, contradiction; with field, value, source and remedy.
    """
    path, wanted = Path(path), wanted or Wanted()
    given = from_toml(path)
    if not any(name.partition(".")[0] in TABLES for name in given):
        given = {"job.recipe": Given(str(path.absolute()), str(path))}
    _refuse_unknown_tables(given)
    of_profile = {name.partition(".")[2]: value for name, value in given.items() if name.startswith("profile.")}
    check_names(of_profile)
    mine = profile.over(of_profile)
    shared = {name: value for name, value in given.items() if name.startswith("job.")}
    tables = given["stages"].value if "stages" in given else None
    header = _header(given)
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._") or "run"
    if tables is None:
        stages = [_stage(shared, {}, path, wanted, mine, wanted.name or stem)]
    else:
        stages = [
            _stage(shared, _table(table, number, path), path, wanted, mine, "") for number, table in enumerate(tables)
        ]
    pipeline = _pipeline(stages, header, wanted, stem, alone=tables is None)
    return RunFile(pipeline=pipeline, profile=mine, path=path)


def _pipeline(stages: list[Stage], header: Mapping[str, str], wanted: Wanted, stem: str, *, alone: bool) -> Pipeline:
    if wanted.stage:
        found = Pipeline(name=stem, stages=tuple(stages)).stage(wanted.stage)
        stages = [Stage(job=found.job, array=found.array, inputs=found.inputs, outputs=found.outputs)]
    name = wanted.name or header.get("name") or (stages[0].name if alone else stem)
    default = stages[0].job.run_dir if alone else ""
    return Pipeline(name=name, stages=tuple(stages), out=wanted.out or header.get("out") or default or f"runs/{name}")


def _header(given: Mapping[str, Given]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in given.items():
        if name.startswith("pipeline.") or name == "pipeline":
            key = name.partition(".")[2]
            if key not in ("name", "out") or not isinstance(value.value, str):
                remedy = "[pipeline] holds name and out, both text"
                raise RecipeError(
                    "cannot be used", values={name: value.value}, origins={name: value.source}, remedy=remedy
                )
            found[key] = value.value
    return found


def _refuse_unknown_tables(given: Mapping[str, Given]) -> None:
    for name, value in given.items():
        head = name.partition(".")[0]
        if head not in TABLES:
            near = suggest(head, TABLES)
            hint = f"did you mean [{near}]?" if near else f"a run file holds {', '.join(TABLES)}; a recipe stands alone"
            raise RecipeError("unknown table", values={name: value.value}, origins={name: value.source}, remedy=hint)


def _table(table: Any, number: int, path: Path) -> dict[str, Given]:
    if not isinstance(table, Mapping):
        raise LaunchError(f"{path}: stages must be written as [[stages]] tables")
    source = f"{path} [[stages]] {table.get('name', number + 1)}"
    return {name: Given(value, source) for name, value in flatten(table).items()}


def _stage(
    shared: Mapping[str, Given], own: Mapping[str, Given], path: Path, wanted: Wanted, profile: Profile, name: str
) -> Stage:
    """One stage from what all share and its own table, whose keys are those of a job and of a stage."""
    of_stage = {leaf.partition(".")[2] for leaf in leaves(Stage, "stage.") if not leaf.startswith("stage.job.")}
    of_job = leaves(Job, "job.")
    given = dict(shared)
    stage_values: dict[str, Given] = {}
    for key, value in own.items():
        if key in of_stage or (f"job.{key}" not in of_job and suggest(key, {*of_stage, *of_job}) in of_stage):
            stage_values[f"stage.{key}"] = value
        else:
            given[f"job.{key}"] = value
    if "job.name" not in given:
        if not name:
            raise LaunchError(f'{path}: a [[stages]] table has no name; add name = "prepare" or the like')
        given["job.name"] = Given(name, str(path))
    job = _job(given, path, wanted, profile, alone=bool(name))
    values = typed(stage_values, {k: v for k, v in leaves(Stage, "stage.").items() if not k.startswith("stage.job.")})
    sources = {key: value.source for key, value in (given | stage_values).items()}
    try:
        return Stage(job=job, **{key.partition(".")[2]: value for key, value in values.items()})
    except RecipeError as exc:
        raise exc.located(sources) from None


def _job(given: Mapping[str, Given], path: Path, wanted: Wanted, profile: Profile, *, alone: bool) -> Job:
    env = {name[8:]: value for name, value in given.items() if name.startswith("job.env.")}
    plain = {name: value for name, value in given.items() if not name.startswith("job.env") and value.value != {}}
    recipe, sets = plain.pop("job.recipe", None), plain.pop("job.sets", None)
    limit = plain.pop("job.time_limit", None)
    if limit is not None:
        plain["job.time_limit_s"] = Given(seconds(limit), limit.source)
    for name, value in (("nodes", wanted.nodes), ("procs_per_node", wanted.procs_per_node)):
        if value is not None and (recipe is not None or alone):
            plain[f"job.{name}"] = Given(value, f"--{'nproc-per-node' if name == 'procs_per_node' else name}")
    schema = {name: leaf for name, leaf in leaves(Job, "job.").items() if name != "job.recipe"}
    derived: dict[str, Any] = {}
    if recipe is not None:
        derived = _training(plain, recipe, sets, path, wanted, profile)
    elif sets is not None:
        problem, remedy = "has no effect without a recipe", "set recipe, or leave it out"
        raise RecipeError(problem, values={"job.sets": sets.value}, origins={"job.sets": sets.source}, remedy=remedy)
    values = {**{f"job.{name}": value for name, value in derived.items() if name != "recipe"}, **typed(plain, schema)}
    variables = {**{name: value.value for name, value in env.items()}, **(wanted.env or {})}
    try:
        return build(Job, values, "job.", env=variables, recipe=derived.get("recipe", ""))
    except RecipeError as exc:
        raise exc.located({name: value.source for name, value in given.items()}) from None


def _training(
    plain: Mapping[str, Given], recipe: Given, sets: Given | None, path: Path, wanted: Wanted, profile: Profile
) -> dict[str, Any]:
    """What a job that trains takes from its recipe, unless the run file says otherwise.

    The number of nodes is the launcher's: the recipe that is sent says the same.
    """
    from lt_trainer.recipe import load, to_toml

    if "job.argv" in plain:
        problem, remedy = "a job that trains has its own command", "leave argv out, or recipe"
        found = plain["job.argv"]
        raise RecipeError(problem, values={"job.argv": found.value}, origins={"job.argv": found.source}, remedy=remedy)
    if not isinstance(recipe.value, str):
        raise RecipeError("expected text", values={"job.recipe": recipe.value}, origins={"job.recipe": recipe.source})
    words = [*(list(sets.value) if sets is not None else []), *wanted.sets]
    file = path.parent / recipe.value
    if not file.exists():
        problem, remedy = f"there is no file {file}", "give the path of a recipe, from the folder of the run file"
        found = {"job.recipe": recipe.value}
        raise RecipeError(problem, values=found, origins={"job.recipe": recipe.source}, remedy=remedy)
    resolved = load(file, sets=words)
    has_nodes, has_procs = wanted.room(profile) if wanted.room is not None else (0, 0)
    nodes = resolved.recipe.parallel.n_nodes if resolved.given("parallel.n_nodes") else has_nodes or 1
    nodes = plain["job.nodes"].value if "job.nodes" in plain else nodes
    procs = plain["job.procs_per_node"].value if "job.procs_per_node" in plain else has_procs or 1
    if nodes != resolved.recipe.parallel.n_nodes:
        resolved = load(file, sets=[*words, f"parallel.n_nodes={nodes}"])
    made = resolved.recipe
    if isinstance(nodes, int) and isinstance(procs, int):
        try:
            made.accumulation(nodes * procs)  # degrees and batch fit the ranks, or it is said now
        except RecipeError as exc:
            raise exc.located(resolved.origins) from None
    return {
        "argv": TRAINS,
        "completion": "run_dir",
        "run_dir": made.run.out,
        "engine": made.run.engine,
        "grace_s": made.guard.grace_s,
        "nodes": nodes,
        "procs_per_node": procs,
        "recipe": to_toml(made, resolved.origins),
    }


def seconds(given: Given) -> int:
    """A time such as "36h", "90m" or a number of seconds.

    Raises:
        RecipeError: it is none.
    """
    text = str(given.value).strip()
    if match := re.fullmatch(r"(\d+)\s*([smhd]?)", text):
        return int(match[1]) * UNITS[match[2] or "s"]
    raise RecipeError(
        "is not a time",
        values={"job.time_limit": given.value},
        origins={"job.time_limit": given.source},
        remedy='write it as "36h", "90m", "2d" or in seconds',
    )
