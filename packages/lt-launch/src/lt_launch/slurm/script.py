"""One sbatch script per stage: what an administrator reads, changes and submits by hand. Pure.

A script needs bash, Slurm and the profile's python on the nodes, and the launch directory on a shared file system;
lt-launch itself is not needed. One Slurm task is one rank. The script builds the command
`srun ... rank [enroot ...] start COMMAND` and leaves the rest to `<launch>/policy.py`: signals, exit codes, and when to
requeue.

- `rank` runs on the node, outside enroot's container: it tells the process who it is, by torchrun's variables, and
  leaves its exit code for the policy. TORCHELASTIC_RUN_ID gives each Trainium rank its cores.
- `start` runs where the command runs: working folder and set-up lines.
- enroot starts a container with the image's environment alone, so what the job needs is passed by name.
"""

from __future__ import annotations

import math
import shlex

from lt_launch.job import Pipeline, Stage
from lt_launch.profile import Profile
from lt_launch.slurm.options import SlurmOptions
from lt_launch.spec import ARRAY, INDEX, RECIPE, with_python
from lt_trainer.errors import RecipeError

EXIT_MARGIN_S = 30
"""Seconds beyond the job's grace period for exit codes and the policy."""

HEAD = """\
# {stage} of {pipeline}, by lt launch. By hand: sbatch {stage}.sbatch, in this folder.
# shellcheck disable=SC2016 # what stands in single quotes is expanded on the nodes
launch=$(dirname "${{SLURM_SUBMIT_DIR:?this script is for sbatch}}")
if [ ! -f "$launch/policy.py" ]; then echo 'lt-launch: submit this script in its own folder' >&2; exit 64; fi
"""

NETWORK = """\
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-^lo,docker,veth}
if command -v fi_info >/dev/null && fi_info -p efa >/dev/null 2>&1; then export FI_PROVIDER=efa; fi
"""

NEURON = "export FI_EFA_FORK_SAFE=1 FI_EFA_USE_DEVICE_RDMA=1\n"

CONTAINER = """\
container=(enroot start --rw --mount "$launch:$launch"{mount_options})
mounts=$launch:$launch{mounts} logs=/var/log/aws/clusters
if [ -d /opt/sagemaker_cluster ] && [ -d $logs ]; then mounts+=,$logs:$logs container+=(--mount "$logs:$logs"); fi
container+=({image})
"""
WITH_PYXIS = 'step+=(--container-image={image} --container-mounts="$mounts") container=()'

NOT_MOUNTED = "{ echo lt-launch: mount that folder into the container, or set container.workdir >&2; exit 64; }"

RANK = """\
# On each node, for each rank. "$@" is the command, with enroot before it where there is one.
rank='trap : TERM HUP; trap {ignored} USR1 USR2
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE={procs}
export GROUP_RANK=$SLURM_NODEID NODE_RANK=$SLURM_NODEID TORCHELASTIC_RUN_ID=$SLURM_JOB_ID LT_LAUNCHER_PID=$PPID{neuron}
rm -f "$LT_NOTES/$RANK"; echo "$SLURM_STEP_ID" >"$LT_NOTES/step"
{enroot}"$@"; code=$?
echo "$code $SLURMD_NODENAME" >"$LT_NOTES/$RANK"
exit "$code"'
"""
NEURON_ROOT = " NEURON_RT_ROOT_COMM_ID=$MASTER_ADDR:$((MASTER_PORT + 1))"
ENROOT_ENV = """\
if [ "$1" = enroot ]; then for name in $(compgen -e); do case $name in {names})
    set -- enroot start --env "$name" "${{@:3}}" ;; esac; done; fi
"""
"""enroot starts a container with the environment of the image: what the job needs goes in by name."""
PASSED = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM*", "LT_*", "NCCL_*", "FI_*", "NEURON_*", "OMP_*", "PYTHONUNBUFFERED", "TORCH*", "CUDA_*", "NVIDIA_*"),
)


def render_script(stage: Stage, pipeline: Pipeline, profile: Profile, options: SlurmOptions) -> str:
    """Return the script of a stage.

    Raises:
        RecipeError: its time limit leaves no time to train.
    """
    job, python = stage.job, shlex.quote(profile.python)
    text = "#!/bin/bash\n" + "".join(f"#SBATCH {line}\n" for line in _directives(stage, pipeline, options)) + "\n"
    text += HEAD.format(stage=stage.name, pipeline=pipeline.name)
    if job.world_size > 1:
        text += NETWORK + (NEURON if job.engine == "neuron" else "")
    text += _step(stage, options) + _container(stage, options) + _rank(stage, profile) + _start(stage, profile)
    container = ' "${container[@]}"' if job.container.image else ""
    return (
        f'{text}exec {python} "$launch/policy.py" run "$launch/stages/{stage.name}/spec.json" -- "${{step[@]}}" \\\n'
        f'    bash -c "$rank" rank{container} bash -c "$start" {stage.name} {_command(stage, profile)}\n'
    )


def _directives(stage: Stage, pipeline: Pipeline, options: SlurmOptions) -> list[str]:
    """Return the sbatch options by line, in groups; Slurm expands only its own % patterns in them."""
    job, resources = stage.job, stage.job.resources
    cpus, gib = resources.cpus_per_proc, resources.memory_gib
    lead_time_s = math.ceil(job.grace_period_s) + EXIT_MARGIN_S
    if job.time_limit_s and job.time_limit_s <= lead_time_s:
        raise RecipeError(
            f"leaves no time to train: the signal comes {lead_time_s} s before the limit",
            values={"job.time_limit": job.time_limit_s, "job.grace_period_s": job.grace_period_s},
            remedy="raise the time limit, or lower fault_tolerance.grace_period_s",
        )
    size = [f"--nodes={job.nodes}", f"--ntasks-per-node={job.procs_per_node}"]
    size += [f"--cpus-per-task={cpus}"] if cpus else []
    if resources.gpus_per_node and options.gpu_option:
        gres = "gpus-per-node=" if options.gpu_option == "gpus-per-node" else "gres=gpu:"
        size.append(f"--{gres}{resources.gpus_per_node}")
    size += [f"--mem={gib}G" if gib else "--mem=0"] if gib or resources.exclusive else []
    size += ["--exclusive"] if resources.exclusive else []
    place = {
        "partition": resources.partition or options.partition,
        "account": options.account,
        "constraint": resources.constraint,
        "exclude": ",".join(options.exclude),
    }
    name = f"{pipeline.name}-{stage.name}" if pipeline.name != stage.name else stage.name
    limit = f"%{stage.array_limit}" if stage.array_limit else ""
    lines = [
        f"--job-name={name} --output=../stages/{stage.name}/slurm-{'%A_%a' if stage.array else '%j'}.out",
        " ".join(size),
        " ".join(f"--{name}={value}" for name, value in place.items() if value),
        f"--array=0-{stage.array - 1}{limit}" if stage.array else "",
        f"--time={_format_time(job.time_limit_s)}" if job.time_limit_s else "",
        f"--signal=B:USR1@{lead_time_s}",
        "--requeue --open-mode=append --kill-on-invalid-dep=yes",
        *options.sbatch_args,
    ]
    return [line for line in lines if line]


def _format_time(seconds: int) -> str:
    """Format seconds as Slurm's days-hours:minutes:seconds."""
    days, rest = divmod(seconds, 86400)
    return f"{f'{days}-' if days else ''}{rest // 3600:02}:{rest % 3600 // 60:02}:{rest % 60:02}"


def _step(stage: Stage, options: SlurmOptions) -> str:
    job = stage.job
    cpus = job.resources.cpus_per_proc
    words = [
        f"--nodes={job.nodes}",
        f"--ntasks={job.world_size}",
        f"--ntasks-per-node={job.procs_per_node}",
        "--distribution=block",
        f"--cpus-per-task={cpus}" if cpus else "--cpu-bind=none",  # srun does not take it from sbatch
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--unbuffered",
        *([f"--immediate={options.step_wait_timeout_s}"] if options.step_wait_timeout_s else []),
        *options.srun_args,
    ]
    text = f"step=(srun {' '.join(shlex.quote(word) for word in words)})\n"
    supported = "srun --help 2>/dev/null | grep -q -e --auto-resume"
    if options.auto_resume != "off":  # SageMaker HyperPod replaces a broken node and restarts the step itself
        condition = f"[ -d /opt/sagemaker_cluster ] && {supported}" if options.auto_resume == "auto" else supported
        text += f"if {condition}; then step+=(--auto-resume=1); fi\n"
    return text


def _container(stage: Stage, options: SlurmOptions) -> str:
    container, cwd = stage.job.container, stage.job.cwd
    if not container.image:
        return ""
    mounts = container.mounts or ((f"{cwd}:{cwd}",) if cwd else ())
    text = CONTAINER.format(
        image=shlex.quote(container.image),
        mounts="".join(f",{shlex.quote(mount)}" for mount in mounts),
        mount_options="".join(f" --mount {_enroot_mount(mount)}" for mount in mounts),
    )
    if options.container_runtime == "enroot":
        return text
    pyxis = WITH_PYXIS.format(image=shlex.quote(container.image))
    if options.container_runtime == "pyxis":
        return f"{text}{pyxis}\n"
    return f"{text}if srun --help 2>/dev/null | grep -q -e --container-image; then {pyxis}; fi\n"


def _enroot_mount(mount: str) -> str:
    """Return a mount as pyxis writes it for enroot, which needs `rbind` among the flags."""
    source, target, *flags = mount.split(":")
    if not flags:
        return shlex.quote(mount)
    return shlex.quote(f"{source}:{target}:") + f"'x-create=auto,rbind,{flags[0]}'"


def _rank(stage: Stage, profile: Profile) -> str:
    job = stage.job
    names = "|".join(dict.fromkeys((*PASSED, *profile.env, *job.env, *job.pass_env)))
    return RANK.format(
        # Training takes these signals itself; until it can, a warning must not end one rank of many.
        ignored='""' if job.is_training else ":",
        procs=job.procs_per_node,
        neuron=NEURON_ROOT if job.engine == "neuron" else "",
        enroot=ENROOT_ENV.format(names=names) if job.container.image else "",
    )


def _start(stage: Stage, profile: Profile) -> str:
    """Return what runs beside the command: its folder and set-up lines."""
    python, workdir = profile.python, stage.job.container.workdir
    folder = shlex.quote(workdir) if workdir else '"$LT_CWD"'
    first = f"cd {folder} || " + (NOT_MOUNTED if stage.job.container.image else "exit 127")
    if "/" in python:
        first += f"; export PATH={shlex.quote(python.rpartition('/')[0])}:$PATH"
    last = 'exec "$@"'
    lines = [first, *profile.setup, last] if profile.setup else [f"{first}; {last}"]
    return f"start={shlex.quote(chr(10).join(lines))}\n"


def _command(stage: Stage, profile: Profile) -> str:
    """Return the command; the batch script fills in an element's index and the recipe's path."""
    words = {
        RECIPE: f'"$launch/stages/{stage.name}/recipe.toml"',
        INDEX: '"$SLURM_ARRAY_TASK_ID"',
        ARRAY: str(stage.array),
    }
    return " ".join(words.get(word, shlex.quote(word)) for word in with_python(stage.job.argv, profile.python))
