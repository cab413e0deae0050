"""What is to be run, as frozen values that no backend has touched yet: jobs, and pipelines of them.

A `Job` is one command on `nodes` x `procs_per_node` processes, which know each other by the variables that torchrun
sets (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...). A `Stage` is a job with its place in a `Pipeline`: what it comes
after, how often it runs side by side (`array`), and which files it reads and makes, by whose content it counts as done.
One job alone is a pipeline of one stage, so that a backend has one thing to render.

Everything is checked when it is made; errors name the field as it stands in a run file. Nothing here reads a file.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lt_trainer.errors import RecipeError
from lt_trainer.fields import check_types, option

__all__ = ["Container", "Job", "Pipeline", "Resources", "Restart", "Stage", "as_table", "check_env"]

NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SECRET = re.compile(
    r"(?:^|_)(?:TOKEN|PAT|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|API_?KEY|ACCESS_KEY|ACCESS_KEY_ID"
    r"|SECRET_KEY|PRIVATE_KEY)$"
)
"""Names of variables whose values must not be kept with a launch."""
GIVEN = re.compile(r"(?<![\w$.-])([A-Za-z_][A-Za-z0-9_]*)=[\"']?(?=[^\s\"'$`;&|])")
"""A variable that gets a plain value in a line of shell; not one that is taken from another or from a command."""
OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that say who a process is; a job cannot set them."""


def _wrong(name: str, value: object, problem: str, remedy: str) -> RecipeError:
    return RecipeError(problem, values={name: value}, remedy=remedy)


def check_env(where: str, env: Mapping[str, object]) -> None:
    """Refuse variables that cannot be set, that the launcher sets itself, or that would keep a secret.

    Raises:
        RecipeError: naming `where`, the variable and what to do.
    """
    for name, value in env.items():
        if SECRET.search(name.upper()):
            problem = "looks like a secret, and what a launch sets is kept with it"
            raise _wrong(f"{where}.{name}", "...", problem, f'hand it on by name: pass_env = ["{name}"]')
        if not isinstance(value, str) or not VARIABLE.fullmatch(name) or "\0" in value or "\n" in value:
            raise _wrong(f"{where}.{name}", value, "is not an environment variable", "write NAME = 'one line of text'")
        if name in OURS:
            raise _wrong(f"{where}.{name}", value, "the launcher sets this one itself", "leave it out")


def check_lines(where: str, lines: Sequence[str]) -> None:
    """Refuse lines of shell, or words of a command, that give a secret its value.

    Raises:
        RecipeError: naming `where` and the variable, never the value.
    """
    for line in lines:
        for match in GIVEN.finditer(line):
            if SECRET.search(match[1].upper()):
                problem = "looks like a secret, and what a launch runs is kept with it"
                raise _wrong(where, f"{match[1]}=...", problem, f'hand it on by name: pass_env = ["{match[1]}"]')


def _at_least(made: object, section: str, least: float, *names: str) -> None:
    for name in names:
        if getattr(made, name) < least:
            raise _wrong(
                f"{section}.{name}", getattr(made, name), f"must be at least {least}", f"set it to {least} or more"
            )


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What one node must have; 0 and "" leave it to the target."""

    cpus_per_proc: int = option(0, "cores for each process")
    memory_gib: int = option(0, "memory of a node", unit="GiB")
    gpus_per_node: int = option(0, "GPUs of a node")
    neuron_cores_per_node: int = option(0, "Neuron cores of a node")
    exclusive: bool = option(False, "whether nobody else may use the nodes")
    partition: str = option("", "Slurm partition; of a stage: where this stage runs, whatever the profile says")
    instance_type: str = option("", "machine type on SageMaker, such as ml.p5.48xlarge")
    volume_gib: int = option(0, "disk of a node on SageMaker", unit="GiB")
    constraint: str = option("", "features that nodes must have (Slurm --constraint)")

    def __post_init__(self) -> None:
        check_types(self, "resources")
        _at_least(self, "resources", 0, "cpus_per_proc", "memory_gib", "gpus_per_node", "neuron_cores_per_node")
        _at_least(self, "resources", 0, "volume_gib")


@dataclass(frozen=True, kw_only=True)
class Container:
    """The image in which processes run; an empty image means none."""

    image: str = option("", "name of an image, or path of a .sqsh file (enroot)")
    mounts: tuple[str, ...] = option((), "host folders to see inside, each as SOURCE:TARGET[:ro]")
    workdir: str = option("", "working folder inside")

    def __post_init__(self) -> None:
        check_types(self, "container")
        if not self.image and (self.mounts or self.workdir):
            raise _wrong("container.image", "", "mounts and workdir need an image", "set container.image")
        for mount in self.mounts:
            if not 2 <= len(mount.split(":")) <= 3 or not all(part for part in mount.split(":")):
                raise _wrong(
                    "container.mounts", mount, "is not a mount", "write it as SOURCE:TARGET or SOURCE:TARGET:ro"
                )


@dataclass(frozen=True, kw_only=True)
class Restart:
    """When an attempt that did not finish is followed by another one.

    Attempts follow one another after exit code 75 and after a loss (a process killed by a signal, a node or a link that
    is gone), never after any other exit code: that would only happen again.
    """

    max_restarts: int = option(10, "attempts after the first one; 0 = none")
    max_without_progress: int = option(
        2,
        "restarts in a row without a new checkpoint since the attempt before, after which it ends; for jobs that train",
    )
    exclude_bad_nodes: bool = option(True, "leave out nodes that were lost, where the target can (Slurm)")

    def __post_init__(self) -> None:
        check_types(self, "restart")
        _at_least(self, "restart", 0, "max_restarts")
        _at_least(self, "restart", 1, "max_without_progress")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One command on some nodes. Made by `lt_launch.runfile` from a run file, or in Python."""

    name: str = option("job", "of the job: letters, digits, '.', '_' and '-', at most 63")
    argv: tuple[str, ...] = option((), "what each process runs; the word 'python' in front is the profile's python")
    nodes: int = option(1, "machines")
    procs_per_node: int = option(1, "processes on each machine, one for each device")
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables for the processes, beside those of the profile; never secrets, they are kept with the launch."""
    pass_env: tuple[str, ...] = option(
        (), "names of variables to hand on from where the launch runs; their values are never written anywhere"
    )
    cwd: str = option("", "working folder on the nodes; empty = where the launch was made")
    spawner: Literal["direct", "torchrun", "srun"] = option(
        "direct",
        "what makes the processes of a node: direct = lt's own agent (exit codes, signals and grace time survive), "
        "torchrun = one torchrun per node with static rendezvous, srun = one Slurm task for each process",
    )
    completion: Literal["exit", "run_dir"] = option(
        "exit", "what proves success besides exit code 0: run_dir = rank 0 noted in run_dir that all steps are done"
    )
    run_dir: str = option("", "the run directory of lt-trainer (run.out) of a job that trains")
    recipe: str = field(default="", repr=False)
    """The resolved recipe of a job that trains, as TOML; kept with the launch and part of a stage's content."""
    engine: str = option("", "the engine of a job that trains (gpu, neuron)")
    grace_s: float = option(120.0, "from a stop signal until processes are killed: a step and a save", unit="s")
    time_limit_s: int = option(0, "after which the target may stop the job; 0 = the target's own limit", unit="s")
    resources: Resources = field(default_factory=Resources)
    container: Container = field(default_factory=Container)
    restart: Restart = field(default_factory=Restart)

    def __post_init__(self) -> None:
        check_types(self, "job")
        object.__setattr__(self, "env", dict(self.env))
        _at_least(self, "job", 1, "nodes", "procs_per_node")
        _at_least(self, "job", 0, "grace_s", "time_limit_s")
        if not NAME.fullmatch(self.name):
            remedy = "use letters, digits, '.', '_' and '-', beginning and ending with a letter or digit, at most 63"
            raise _wrong("job.name", self.name, "is not a name that every target takes", remedy)
        if not self.argv or not self.argv[0]:
            raise _wrong("job.argv", list(self.argv), "there is nothing to run", 'set it, as in ["python", "train.py"]')
        if self.completion == "run_dir" and not self.run_dir:
            raise _wrong("job.run_dir", "", "completion = run_dir needs it", "set job.run_dir to the recipe's run.out")
        check_env("job.env", self.env)
        check_lines("job.argv", self.argv)
        for name in self.pass_env:
            if not VARIABLE.fullmatch(name):
                raise _wrong("job.pass_env", name, "is not the name of an environment variable", "give names alone")

    @property
    def world(self) -> int:
        """Processes altogether."""
        return self.nodes * self.procs_per_node

    @property
    def trains(self) -> bool:
        """Whether rank 0's note in the run directory is what counts as success."""
        return self.completion == "run_dir"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A job with its place in a pipeline."""

    job: Job
    after: tuple[str, ...] = option((), "names of the stages that must have succeeded before")
    array: int = option(
        0,
        "how often the job runs, side by side where there is room, told apart by LT_ARRAY_INDEX (0..n-1); 0 = once",
    )
    array_limit: int = option(0, "how many of the array run at a time; 0 = as many as there is room for")
    inputs: tuple[str, ...] = option((), "files and folders it reads: when their content changes it is done again")
    outputs: tuple[str, ...] = option((), "files and folders it makes: when they are gone or changed it is done again")

    def __post_init__(self) -> None:
        check_types(self, "stage")
        _at_least(self, "stage", 0, "array", "array_limit")
        if self.array and self.job.world > 1:
            problem = "a stage is either an array or a job of several processes"
            raise _wrong("stage.array", self.array, problem, "set nodes and procs_per_node to 1, or array to 0")

    @property
    def name(self) -> str:
        """The job's name."""
        return self.job.name

    @property
    def indexes(self) -> tuple[int | None, ...]:
        """The index of every element: (None,) for a stage that is no array."""
        return tuple(range(self.array)) if self.array else (None,)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Stages in an order in which each stands behind all that it comes after, and the folder of the launch."""

    name: str
    stages: tuple[Stage, ...]
    out: str = "runs/run"
    """Folder of the launch, shared by all nodes; what lt-launch keeps stands below it in `launch/`."""

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise _wrong("pipeline.name", self.name, "is not a name that every target takes", "see job.name")
        if not self.stages:
            raise _wrong("stages", [], "a pipeline needs stages", "add [[stages]]")
        before: set[str] = set()
        folders: set[str] = set()
        for stage in self.stages:
            mine = {stage.name, *(f"{stage.name}.{index}" for index in range(stage.array))}
            if mine & folders:
                problem = "two stages have this name, or one has that of an array's element"
                raise _wrong("stages.name", stage.name, problem, "give each its own")
            folders |= mine
            for wanted in stage.after:
                if wanted not in before:
                    known = ", ".join(sorted(before)) or "none"
                    remedy = f"name a stage that stands before it in the file ({known})"
                    raise _wrong(f"stages.{stage.name}.after", wanted, "no stage before it has this name", remedy)
            before.add(stage.name)

    @classmethod
    def of(cls, job: Job, *, out: str = "") -> Pipeline:
        """One job as a pipeline; its folder is `out`, else the job's run directory, else runs/NAME."""
        return cls(name=job.name, stages=(Stage(job=job),), out=out or job.run_dir or f"runs/{job.name}")

    def stage(self, name: str) -> Stage:
        """The stage of that name.

        Raises:
            RecipeError: there is none.
        """
        for stage in self.stages:
            if stage.name == name:
                return stage
        known = ", ".join(stage.name for stage in self.stages)
        raise _wrong("stage", name, "there is no such stage", f"the stages are {known}")

    @property
    def only(self) -> Job:
        """The one job of a pipeline that has one, for targets that run single jobs.

        Raises:
            RecipeError: there are several stages, or the one is an array.
        """
        first, *others = self.stages
        if others or first.array:
            problem = "this target runs one job, and this is a pipeline of several"
            names = [stage.name for stage in self.stages]
            raise _wrong("stages", names, problem, "choose one with --stage NAME, or use local, ssh or slurm")
        return first.job


def for_containers(job: Job, *, target: str, env: Mapping[str, str]) -> Job:
    """The job for a target that starts containers by itself, with a profile's variables below the job's own.

    Raises:
        RecipeError: it has `pass_env`, and such a target hands on no variable of this machine.
    """
    if job.pass_env:
        remedy = "give the container's role or secret store what it needs, or put it into job.env where it is no secret"
        raise _wrong("job.pass_env", list(job.pass_env), f"{target} hands on nothing from this machine", remedy)
    return dataclasses.replace(job, env={**env, **job.env})


def as_table(value: Any) -> Any:
    """A job, stage or pipeline as plain values for JSON, in the order of declaration."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: as_table(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): as_table(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [as_table(item) for item in value]
    return value
