"""Frozen, target-independent descriptions of work: jobs, stages and pipelines.

A `Job` is one command on `nodes` x `procs_per_node` processes, which find each other by the variables that torchrun
sets (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...). A `Stage` is a job with its position in a `Pipeline`: its
predecessors (`after`), the number of its parallel elements (`array`), and the files it reads and writes, whose content
decides whether it is complete. A single job is a pipeline of one stage, so that a target renders only pipelines.

Values are checked at construction; errors name the field as in a run file. Nothing here reads a file.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from lt_model.home_folder import expand_home
from lt_trainer.config.section import PathText, Section, option
from lt_trainer.errors import RecipeError

NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
RESERVED_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
"""Variables that identify a process (rank, world size, ...); a job cannot set them."""

SECRET_NAME = re.compile(
    r"(?:PASSWORD|PASSWD|PASSPHRASE|TOKEN|SECRET|CREDENTIALS?|APIKEY)$"
    r"|(?:^|_)(?:PAT|PWD|PASS|AUTH|DSN|JWT|[A-Z0-9]+_KEY|ACCESS_KEY_ID)$"
)
PLAIN_NAME = re.compile(
    r"(?:^|_)(?:BOS|EOS|EOT|PAD|UNK|SEP|CLS|MASK)_TOKEN$|(?:^|_)(?:SORT|TEXT|ID|JSON|GROUP|PRIMARY|PUBLIC|HASH|CACHE)_KEY$"
    r"|^(?:OLD)?PWD$"
)
"""Names of the special tokens of a vocabulary and of columns, which end like secrets."""
SECRET_VALUE = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY|\bhf_[A-Za-z0-9]{20,}|\bsk-[A-Za-z0-9_-]{20,}|\bgh[pousr]_[A-Za-z0-9]{20,}"
    r"|\bgithub_pat_\w{20,}|\bAKIA[0-9A-Z]{16}\b|\bASIA[0-9A-Z]{16}\b"
)
"""Shapes of values that are secret under any name."""


def _one_line(text: str) -> str:
    if not re.fullmatch(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029]*", text):
        raise ValueError("has a line break or another control character")
    return text


def _one_word(text: str) -> str:
    if re.search(r"\s", _one_line(text)):
        raise ValueError("has a blank; write it as one word")
    return text


Line = Annotated[str, AfterValidator(_one_line)]
"""Text that becomes a line of a script or a field of a manifest, where a second line is something else."""
PathLine = Annotated[Line, AfterValidator(expand_home)]
"""Path, or an address in its place; `~` is the home folder on the machine that launches."""
Word = Annotated[str, AfterValidator(_one_word)]
"""Text that becomes an option of a command: what follows a blank would be another one."""


def _field_error(name: str, value: object, problem: str, remedy: str) -> RecipeError:
    return RecipeError(problem, values={name: value}, remedy=remedy)


def is_secret(name: str, value: object) -> bool:
    """Return True if a variable holds a secret, by its name or by the shape of its value."""
    plain = name.upper()
    named = bool(SECRET_NAME.search(plain)) and not PLAIN_NAME.search(plain)
    return named or bool(SECRET_VALUE.search(str(value)))


def check_env(source: str, env: Mapping[str, object]) -> None:
    """Reject variables that are invalid, set by the launcher itself, or would store a secret.

    Raises:
        RecipeError: naming `source`, the variable and the remedy.
    """
    for name, value in env.items():
        if is_secret(name, value):
            problem = "looks like a secret, and the environment is saved with the launch"
            raise _field_error(f"{source}.{name}", "...", problem, f'pass it by name: pass_env = ["{name}"]')
        if not isinstance(value, str) or not VARIABLE.fullmatch(name) or "\0" in value or "\n" in value:
            raise _field_error(
                f"{source}.{name}", value, "is not an environment variable", "write NAME = 'one line of text'"
            )
        if name in RESERVED_VARIABLES:
            raise _field_error(f"{source}.{name}", value, "is set by the launcher", "leave it out")


class Resources(Section, table="resources"):
    """Requirements on one node; 0 and "" use the default of the target."""

    cpus_per_proc: int = option(0, "cores per process", ge=0)
    memory_gib: int = option(0, "memory per node", unit="GiB", ge=0)
    gpus_per_node: int = option(0, "GPUs per node", ge=0)
    neuron_cores_per_node: int = option(0, "Neuron cores per node", ge=0)
    exclusive: bool = option(False, "exclusive use of the nodes")
    partition: Word = option("", "Slurm partition; overrides the profile's")
    instance_type: Word = option("", "machine type on SageMaker, such as ml.p5.48xlarge")
    volume_gib: int = option(0, "disk per node on SageMaker", unit="GiB", ge=0)
    constraint: Word = option("", "required node features (Slurm --constraint)")


class ContainerImage(Section, table="container"):
    """Container image of the processes; an empty image means none."""

    needs = (("mounts workdir", "image"),)

    image: PathLine = option("", "image name, or path of a .sqsh file (enroot)")
    mounts: tuple[PathLine, ...] = option((), "host folders to mount, each as SOURCE:TARGET[:ro]")
    workdir: Line = option("", "working folder in the container; empty = job.cwd, which must be mounted (Slurm)")

    @model_validator(mode="after")
    def _check(self) -> Self:
        for mount in self.mounts:
            if not re.fullmatch(r"[^:]+:[^:]+(:[^:]+)?", mount):
                remedy = "write it as SOURCE:TARGET or SOURCE:TARGET:ro"
                raise RecipeError("is not a mount", values={"mounts": mount}, remedy=remedy)
            self._check_in_container("mounts", mount.split(":")[1])
        self._check_in_container("workdir", self.workdir)
        return self

    def _check_in_container(self, name: str, folder: str) -> None:
        if folder.startswith("~"):
            problem = f"{folder} is a folder in the container, whose home folder is not known here"
            raise self.wrong(name, problem, "give its whole path")


class RestartPolicy(Section, table="restart"):
    """Conditions for restarting an attempt that did not complete.

    Attempts are restarted after exit code 75 and after a loss (process killed by a signal, lost node or connection),
    never after any other exit code, since the failure would repeat.
    """

    max_restarts: int = option(10, "restarts after the first attempt; 0 = none", ge=0)
    max_without_progress: int = option(
        2, "consecutive restarts without a new checkpoint before the job fails; for training jobs", ge=1
    )


class Job(Section, table="job"):
    """One command on some nodes; built by `lt_launch.run_file` from a run file, or in Python."""

    name: str = option("job", "name of the job: letters, digits, '.', '_' and '-', at most 63")
    argv: tuple[str, ...] = option((), "command of each process; a leading 'python' is the profile's python")
    nodes: int = option(1, "machines", ge=1)
    procs_per_node: int = option(1, "processes per machine, one per device", ge=1)
    env: dict[str, str] = option(
        {}, "variables of the processes in addition to the profile's; never secrets, they are saved with the launch"
    )
    pass_env: tuple[str, ...] = option(
        (), "names of variables to pass from the launching machine; their values are never stored"
    )
    cwd: PathLine = option("", "working folder on the nodes; empty = that of the launch command")
    completion: Literal["exit", "run_dir"] = option(
        "exit", "proof of success besides exit code 0: run_dir = completion recorded by rank 0 in run_dir"
    )
    run_dir: PathLine = option("", "run directory (run.dir) of a training job")
    recipe: str = Field("", repr=False, description="resolved recipe of a training job as TOML; saved with the launch")
    engine: Line = option("", "engine of a training job (gpu, neuron)")
    grace_period_s: float = option(
        120.0, "time from a stop signal until processes are killed: a step and a save", unit="s", ge=0
    )
    time_limit_s: int = option(
        0, "time after which the target may stop the job; 0 = limit of the target", unit="s", ge=0
    )
    resources: Resources = Resources()
    container: ContainerImage = ContainerImage()
    restart: RestartPolicy = RestartPolicy()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not NAME.fullmatch(self.name):
            remedy = "use letters, digits, '.', '_' and '-', starting and ending with a letter or digit, at most 63"
            raise self.wrong("name", "is not a valid name on every target", remedy)
        if not self.argv or not self.argv[0]:
            raise self.wrong("argv", "is empty", 'set it, as in ["python", "train.py"]')
        if self.completion == "run_dir" and not self.run_dir:
            raise self.wrong("run_dir", "completion = run_dir needs it", "set job.run_dir to the recipe's run.dir")
        check_env("env", self.env)
        for name in self.pass_env:
            if not VARIABLE.fullmatch(name):
                problem = "is not the name of an environment variable"
                raise _field_error("pass_env", name, problem, "give names without values")
        return self

    @property
    def world_size(self) -> int:
        """Total number of processes."""
        return self.nodes * self.procs_per_node

    @property
    def is_training(self) -> bool:
        """True if rank 0's completion record in the run directory decides success."""
        return self.completion == "run_dir"

    @property
    def uses_devices(self) -> bool:
        """True if it uses a node's devices, which jobs never share."""
        resources = self.resources
        return self.is_training or resources.gpus_per_node > 0 or resources.neuron_cores_per_node > 0


class Stage(Section, table="stage"):
    """A job with its position in a pipeline."""

    job: Job
    after: tuple[Line, ...] = option((), "names of the stages that must succeed first")
    array: int = option(
        0, "number of runs, in parallel as resources allow, with LT_ARRAY_INDEX = 0..n-1; 0 = no array", ge=0
    )
    array_limit: int = option(0, "elements of the array that run at a time; 0 = as many as fit", ge=0)
    inputs: tuple[PathLine, ...] = option(
        (), "files and folders it reads; the stage runs again when their content changes"
    )
    outputs: tuple[PathLine, ...] = option(
        (), "files and folders it makes; the stage runs again when they are missing or changed"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.array and self.job.world_size > 1:
            problem = "a stage is either an array or a job of several processes"
            raise self.wrong("array", problem, "set nodes and procs_per_node to 1, or array to 0")
        return self

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.job.name

    @property
    def array_indices(self) -> tuple[int | None, ...]:
        """Indices of the array elements; (None,) for a stage that is no array."""
        return tuple(range(self.array)) if self.array else (None,)


class Pipeline(Section):
    """Stages in topological order, and the folder of the launch."""

    name: str
    stages: tuple[Stage, ...]
    out: PathText = "runs/run"
    """Folder of the launch, shared by all nodes; lt-launch keeps its own files in `launch/` below it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not NAME.fullmatch(self.name):
            raise _field_error("pipeline.name", self.name, "is not a valid name on every target", "see job.name")
        if not self.stages:
            raise _field_error("stages", [], "a pipeline needs stages", "add [[stages]]")
        before: set[str] = set()
        folders: set[str] = set()
        for stage in self.stages:
            own_folders = {stage.name, *(f"{stage.name}.{index}" for index in range(stage.array))}
            if own_folders & folders:
                problem = "two stages, or a stage and an array element, have this name"
                raise _field_error("stages.name", stage.name, problem, "give each stage a name of its own")
            folders |= own_folders
            for dependency in stage.after:
                if dependency not in before:
                    known = ", ".join(sorted(before)) or "none"
                    remedy = f"name a stage listed before it ({known})"
                    raise _field_error(
                        f"stages.{stage.name}.after", dependency, "no stage before it has this name", remedy
                    )
            before.add(stage.name)
        return self

    @classmethod
    def from_job(cls, job: Job, *, out: str = "") -> Self:
        """Return a pipeline of one job in `out`, else in the job's run directory, else in runs/NAME."""
        return cls(name=job.name, stages=(Stage(job=job),), out=out or job.run_dir or f"runs/{job.name}")

    def stage(self, name: str) -> Stage:
        """Return the stage with that name.

        Raises:
            RecipeError: there is no such stage.
        """
        for stage in self.stages:
            if stage.name == name:
                return stage
        known = ", ".join(stage.name for stage in self.stages)
        raise _field_error("stage", name, "no such stage", f"the stages are {known}")

    @property
    def single_job(self) -> Job:
        """The only job of the pipeline, for targets that run single jobs.

        Raises:
            RecipeError: there are several stages, or the one is an array.
        """
        first, *others = self.stages
        if others or first.array:
            problem = "this target runs single jobs, not pipelines"
            names = [stage.name for stage in self.stages]
            raise _field_error("stages", names, problem, "choose one with --stage NAME, or use local, ssh or slurm")
        return first.job


def with_container_env(job: Job, *, target: str, env: Mapping[str, str]) -> Job:
    """Return the job with a profile's variables, for a target that starts containers itself.

    Raises:
        RecipeError: it has `pass_env`: such a target forwards no variables of this machine.
    """
    if job.pass_env:
        remedy = "use the container's role or secret store, or job.env for values that are not secret"
        raise _field_error(
            "job.pass_env", list(job.pass_env), f"{target} passes no variables from this machine", remedy
        )
    return job.model_copy(update={"env": {**env, **job.env}})
