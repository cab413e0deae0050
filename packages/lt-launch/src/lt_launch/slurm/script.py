"""The part of an sbatch script below its header, as text: bash that shellcheck has nothing to say about.

The script is short because what decides stands in Python beside it (`<launch>/agent/queued.py`): enter, srun, leave.
It hands on the one signal that a batch script gets (USR1 ahead of the time limit, TERM at a preemption), waits for srun
however often it is interrupted, and asks Slurm to start the job again when that is wise.
"""

from __future__ import annotations

import shlex

from lt_launch.job import Pipeline, Stage
from lt_launch.profile import Profile
from lt_launch.slurm.options import SlurmOptions

__all__ = ["body"]

HEAD = """\
# {stage} of {pipeline}, rendered by lt launch. Submit it in the folder where it stands: sbatch {stage}.sbatch
set -u
rendered=${{SLURM_SUBMIT_DIR:?this script is for sbatch}}
launch=$(dirname "$rendered")
stage=$launch/stages/{stage}
spec=$stage/spec.json
python={python}
never={never} # left out by the profile
say() {{ printf 'lt-launch: %s\\n' "$*" >&2; }}

# A signal of Slurm must not end this script at any of its lines; srun hears of it below.
told=
step=
signals=0
# shellcheck disable=SC2317,SC2329 # called by the traps
on_signal() {{
    signals=$((signals + 1))
    if [ -n "$told" ]; then return; fi
    told=$1
    # TERM comes to all processes of the job; USR1 to this script alone, and srun hands it on.
    if [ "$1" = USR1 ] && [ -n "$step" ]; then kill -USR1 "$step"; fi
}}
trap 'on_signal USR1' USR1
trap 'on_signal TERM' TERM
if [ ! -f "$launch/agent/queued.py" ] || [ ! -f "$spec" ]; then
    say "$launch is not the folder of a launch; submit this script in the folder where it stands"
    exit 64
fi
job=$SLURM_JOB_ID
restarts=${{SLURM_RESTART_COUNT:-0}}
index=()
if [ -n "${{SLURM_ARRAY_TASK_ID:-}}" ]; then index=(--index "$SLURM_ARRAY_TASK_ID"); fi

# Done already, wise to go on, and the number of this attempt.
attempt=$("$python" "$launch/agent/queued.py" enter "$spec" "${{index[@]}}" --restarts "$restarts") || exit
case $attempt in
skip) say 'done already'; exit 0 ;;
stop) exit 75 ;;
esac
folder=$stage
if [ ${{#index[@]}} -gt 0 ]; then folder=$stage.$SLURM_ARRAY_TASK_ID; fi
records=$(printf '%s/attempt-%03d' "$folder" "$attempt")
printf '%s %s %s\\n' "$job" "$restarts" "$SLURM_JOB_NODELIST" >"$records/slurm"

# Rank 0 is on the first node of the allocation, which runs this script; ranks follow the order of the allocation.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
if [ ${{#nodes[@]}} -ne {nodes} ]; then say "wanted {nodes} nodes, got $SLURM_JOB_NODELIST"; exit 64; fi
master=$(scontrol show node "${{nodes[0]}}" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
port=$("$python" - "$job" <<'EOF'
import socket, sys
first = 20000 + int(sys.argv[1]) % 20000
for port in range(first, first + 200, 2):
    try:
        with socket.socket() as free:
            free.bind(("", port))
    except OSError:
        continue
    print(port)
    break
EOF
)
if [ -z "$master" ] || [ -z "$port" ]; then say "no address or no free port on ${{nodes[0]}}"; exit 75; fi
"""

EFA = """
# AWS's network, where it is.
if command -v fi_info >/dev/null && fi_info -p efa >/dev/null 2>&1; then
    export FI_PROVIDER=efa
fi
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-^lo,docker,veth}
"""

NEURON = """export NEURON_RT_ROOT_COMM_ID=$master:$((port + 1))
export FI_EFA_FORK_SAFE=1 FI_EFA_USE_DEVICE_RDMA=1
"""

OFFERS = """
offers() { srun --help 2>/dev/null | grep -q -e "--$1"; }
"""

AUTO_RESUME = """
# SageMaker HyperPod replaces a broken node and starts the step again by itself.
if {condition}; then options+=(--auto-resume=1); fi
"""

PYXIS = """
# The image, by pyxis where srun offers it, else by enroot.
image={image}
mounts={mounts}
if [ -d /opt/sagemaker_cluster ] && [ -d /var/log/aws/clusters ]; then
    mounts=$mounts,/var/log/aws/clusters:/var/log/aws/clusters
fi
if {pyxis}; then
    options+=(--container-image="$image" --container-mounts="$launch:$launch,$mounts"{workdir})
    inside=()
elif {enroot}; then
    inside=(enroot start --rw --mount "$launch:$launch")
    IFS=, read -r -a each <<<"$mounts"
    for one in "${{each[@]}}"; do inside+=(--mount "$one"); done
    inside+=("$image")
else
    say 'an image is wanted, and there is neither pyxis (srun --container-image) nor enroot'
    exit 64
fi
"""

STEP = """
# One agent on each node{or_task}. A step that Slurm starts again gets an attempt of its own.
# shellcheck disable=SC2016 # expanded on the nodes
run='trap "" USR1 USR2 HUP # until the agent is there, which takes them; to die of one would look like a loss
echo "$SLURM_STEP_ID" >"$7/step.$SLURM_PROCID"
ln "$7/step.$SLURM_PROCID" "$7/step" 2>/dev/null
read -r first <"$7/step"
exec "$1" "$2" {command} "$3" --attempt "$(($4 + SLURM_STEP_ID - first))" --master-addr "$5" --master-port "$6" \\
    {rank}"${{@:8}}"'
code=75
began=$SECONDS
if [ -z "$told" ]; then
    srun "${{options[@]}}" bash -c "$run" {argv0} "$python" "$launch/agent" "$spec" "$attempt" "$master" "$port" \\
        "$records" "${{index[@]}}" &
    step=$!
    if [ "$told" = USR1 ]; then kill -USR1 "$step"; fi
    while :; do # a signal ends the wait, not the step
        before=$signals
        wait "$step"
        code=$?
        if [ "$before" -eq "$signals" ]; then break; fi
    done
fi
{late}"""

LATE = """\
# A node that was lost and came back at once can be the job's for Slurm and not for srun: another start helps.
if [ "$code" -ne 0 ] && [ $((SECONDS - began)) -ge {early} ] && ! [ -e "$records/step" ]; then
    say 'srun got no step on the nodes of the job'
    code=75
fi
"""

TAIL = """
# What became of it, and whether to go on.
verdict=$("$python" "$launch/agent/queued.py" leave "$spec" --attempt "$attempt" --code "$code" --told "$told" \\
    "${index[@]}") || exit
read -r action code lost <<<"$verdict"
if [ "$action" = requeue ]; then
    bad=-
    if [ "$lost" != - ]; then
        for at in ${lost//,/ }; do printf '%s\\n' "${nodes[$at]}" >>"$stage/bad-nodes"; done
        bad=$(sinfo -h -N -p "$SLURM_JOB_PARTITION" -o '%N %t' |
            "$python" "$launch/agent/queued.py" avoid "$spec" --bad "$stage/bad-nodes" --never "$never")
    fi
    trap '' TERM # which a requeue brings to all processes of the job, these commands among them
    for pause in 10 30 60 120 0; do # the controller may be away for a moment
        answer=$(scontrol requeue "$job" 2>&1) && break
        say "$answer"
        case $answer in
        *ontact* | *onnection* | *ocket* | *'imed out'*) sleep "$pause" ;;
        *) # Slurm has put a job back into the queue already that it took the nodes from.
            if [ "$(scontrol -o show job "$job" | grep -c -e 'JobState=PENDING')" -eq 0 ]; then exit "$code"; fi
            break
            ;;
        esac
    done
    if [ -n "$bad" ] && [ "$bad" != - ]; then # only a job that waits takes this
        say "leaving out $bad from now on"
        scontrol update JobId="$job" ExcNodeList="$bad${never:+,$never}" || true
    fi
    exit 75
fi
exit "$code"
"""


def body(stage: Stage, pipeline: Pipeline, profile: Profile, options: SlurmOptions) -> str:
    """The script below its header."""
    job = stage.job
    never = "$(scontrol show hostnames " + shlex.quote(",".join(options.exclude)) + " | paste -sd, -)"
    head = HEAD.format(
        stage=stage.name,
        pipeline=pipeline.name,
        python=shlex.quote(profile.python),
        never=never if options.exclude else "",
        nodes=job.nodes,
    )
    network = EFA + (NEURON if job.engine == "neuron" else "") if job.nodes > 1 or job.procs_per_node > 1 else ""
    return head + network + _options(stage, options) + _container(stage, options) + _step(stage, options) + TAIL


def _options(stage: Stage, options: SlurmOptions) -> str:
    job = stage.job
    tasks = job.world if job.spawner == "srun" else job.nodes
    words = [
        f"--nodes={job.nodes}",
        f"--ntasks={tasks}",
        f"--ntasks-per-node={tasks // job.nodes}",
        "--distribution=block",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--unbuffered",
        *([f"--immediate={options.step_wait_s}"] if options.step_wait_s else []),
        *options.srun,
    ]
    lines = f"\noptions=({' '.join(shlex.quote(word) for word in words)})\n"
    lines += 'if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then options+=(--cpus-per-task="$SLURM_CPUS_PER_TASK"); fi\n'
    if options.auto_resume != "off" or (stage.job.container.image and options.container == "auto"):
        lines += OFFERS
    if options.auto_resume == "auto":
        lines += AUTO_RESUME.format(condition="[ -d /opt/sagemaker_cluster ] && offers auto-resume")
    elif options.auto_resume == "on":
        lines += AUTO_RESUME.format(condition="offers auto-resume")
    return lines


def _container(stage: Stage, options: SlurmOptions) -> str:
    container = stage.job.container
    if not container.image:
        return ""
    here = stage.job.cwd
    mounts = [*container.mounts, *([f"{here}:{here}"] if here and not container.mounts else [])]
    workdir = f" --container-workdir={shlex.quote(container.workdir)}" if container.workdir else ""
    return PYXIS.format(
        image=shlex.quote(container.image),
        mounts=shlex.quote(",".join(mounts)),
        workdir=workdir,
        pyxis="offers container-image" if options.container == "auto" else str(options.container == "pyxis").lower(),
        enroot="command -v enroot >/dev/null" if options.container == "auto" else "true",
    )


def _step(stage: Stage, options: SlurmOptions) -> str:
    srun = stage.job.spawner == "srun"
    image = bool(stage.job.container.image)
    text = STEP.format(
        or_task=", one for each process" if srun else "",
        command="task" if srun else "node",
        rank="" if srun else '--node-rank "$SLURM_NODEID" ',
        argv0="lt-launch",
        late=LATE.format(early=options.step_wait_s // 2) if options.step_wait_s else "",
    )
    if image:  # enroot stands in front of the python that is in the image; with pyxis nothing does
        text = text.replace('srun "${options[@]}" bash -c', 'srun "${options[@]}" "${inside[@]}" bash -c')
    return text
