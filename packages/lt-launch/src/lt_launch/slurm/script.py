"""Body of an sbatch script below its header, as bash text that passes shellcheck.

The script is short because the logic is in Python beside it (`<launch>/agent/queued.py`): record the start of the
attempt, run srun, record its end. It forwards the one signal that a batch script receives (USR1 ahead of the time
limit, TERM at a preemption), waits for srun despite interruptions, and requeues the job if that can succeed.
"""

from __future__ import annotations

import shlex

from lt_launch.job import Pipeline, Stage
from lt_launch.profile import Profile
from lt_launch.slurm.options import SlurmOptions

__all__ = ["script_body"]

HEAD = """\
# {stage} of {pipeline}, rendered by lt launch. Submit it in its own folder: sbatch {stage}.sbatch
set -u
rendered=${{SLURM_SUBMIT_DIR:?this script is for sbatch}}
launch=$(dirname "$rendered")
stage=$launch/stages/{stage}
spec=$stage/spec.json
python={python}
never={never} # nodes excluded by the profile
log() {{ printf 'lt-launch: %s\\n' "$*" >&2; }}

# Slurm's signals must not end this script; they are forwarded to srun below.
stop_signal=
step=
signals=0
# shellcheck disable=SC2317,SC2329 # called by the traps
on_signal() {{
    signals=$((signals + 1))
    if [ -n "$stop_signal" ]; then return; fi
    stop_signal=$1
    # TERM reaches all processes of the job; USR1 only this script, and srun forwards it.
    if [ "$1" = USR1 ] && [ -n "$step" ]; then kill -USR1 "$step"; fi
}}
trap 'on_signal USR1' USR1
trap 'on_signal TERM' TERM
if [ ! -f "$launch/agent/queued.py" ] || [ ! -f "$spec" ]; then
    log "$launch is not a launch directory; submit this script in its own folder"
    exit 64
fi
job=$SLURM_JOB_ID
restarts=${{SLURM_RESTART_COUNT:-0}}
index=()
if [ -n "${{SLURM_ARRAY_TASK_ID:-}}" ]; then index=(--index "$SLURM_ARRAY_TASK_ID"); fi

# Skip, stop, or the number of this attempt.
attempt=$("$python" "$launch/agent/queued.py" enter "$spec" "${{index[@]}}" --restarts "$restarts") || exit
case $attempt in
skip) log 'completed already'; exit 0 ;;
stop) exit 75 ;;
esac
folder=$stage
if [ ${{#index[@]}} -gt 0 ]; then folder=$stage.$SLURM_ARRAY_TASK_ID; fi
records=$(printf '%s/attempt-%03d' "$folder" "$attempt")
printf '%s %s %s\\n' "$job" "$restarts" "$SLURM_JOB_NODELIST" >"$records/slurm"

# Rank 0 is on the first node of the allocation, which runs this script; ranks are in allocation order.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
if [ ${{#nodes[@]}} -ne {nodes} ]; then log "expected {nodes} nodes, got $SLURM_JOB_NODELIST"; exit 64; fi
master=$(scontrol show node "${{nodes[0]}}" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
port=$("$python" - "$job" <<'EOF'
import socket, sys
first = 20000 + int(sys.argv[1]) % 20000
for port in range(first, first + 200, 2):
    try:
        with socket.socket() as probe:
            probe.bind(("", port))
    except OSError:
        continue
    print(port)
    break
EOF
)
if [ -z "$master" ] || [ -z "$port" ]; then log "no address or no free port on ${{nodes[0]}}"; exit 75; fi
"""

EFA = """
# AWS's network, if present.
if command -v fi_info >/dev/null && fi_info -p efa >/dev/null 2>&1; then
    export FI_PROVIDER=efa
fi
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-^lo,docker,veth}
"""

NEURON = """export NEURON_RT_ROOT_COMM_ID=$master:$((port + 1))
export FI_EFA_FORK_SAFE=1 FI_EFA_USE_DEVICE_RDMA=1
"""

SRUN_SUPPORTS = """
supports() { srun --help 2>/dev/null | grep -q -e "--$1"; }
"""

AUTO_RESUME = """
# SageMaker HyperPod replaces a broken node and restarts the step itself.
if {condition}; then options+=(--auto-resume=1); fi
"""

CONTAINER = """
# The image, by pyxis if srun supports it, else by enroot.
image={image}
mounts={mounts}
if [ -d /opt/sagemaker_cluster ] && [ -d /var/log/aws/clusters ]; then
    mounts=$mounts,/var/log/aws/clusters:/var/log/aws/clusters
fi
if {pyxis}; then
    options+=(--container-image="$image" --container-mounts="$launch:$launch,$mounts"{workdir})
    enroot=()
elif {enroot}; then
    enroot=(enroot start --rw --mount "$launch:$launch")
    IFS=, read -r -a mount_list <<<"$mounts"
    for mount in "${{mount_list[@]}}"; do enroot+=(--mount "$mount"); done
    enroot+=("$image")
else
    log 'the job needs an image, and neither pyxis (srun --container-image) nor enroot is installed'
    exit 64
fi
"""

STEP = """
# One agent {per}. A step restarted by Slurm is a new attempt.
# shellcheck disable=SC2016 # expanded on the nodes
run='trap "" USR1 USR2 HUP # until the agent handles them; a death by signal would count as a loss
echo "$SLURM_STEP_ID" >"$7/step.$SLURM_PROCID"
ln "$7/step.$SLURM_PROCID" "$7/step" 2>/dev/null
read -r first <"$7/step"
exec "$1" "$2" {command} "$3" --attempt "$(($4 + SLURM_STEP_ID - first))" --master-addr "$5" --master-port "$6" \\
    {rank}"${{@:8}}"'
code=75
started=$SECONDS
if [ -z "$stop_signal" ]; then
    srun "${{options[@]}}" bash -c "$run" {argv0} "$python" "$launch/agent" "$spec" "$attempt" "$master" "$port" \\
        "$records" "${{index[@]}}" &
    step=$!
    if [ "$stop_signal" = USR1 ]; then kill -USR1 "$step"; fi
    while :; do # a signal interrupts the wait, not the step
        before=$signals
        wait "$step"
        code=$?
        if [ "$before" -eq "$signals" ]; then break; fi
    done
fi
{no_step_check}"""

NO_STEP_CHECK = """\
# After the loss and return of a node srun may get no step although the job has the node: requeue helps.
if [ "$code" -ne 0 ] && [ $((SECONDS - started)) -ge {min_seconds} ] && ! [ -e "$records/step" ]; then
    log 'srun got no step on the nodes of the job'
    code=75
fi
"""

REQUEUE = """
# Record the end, and decide whether to requeue.
verdict=$("$python" "$launch/agent/queued.py" leave "$spec" --attempt "$attempt" --code "$code" --told "$stop_signal" \\
    "${index[@]}") || exit
read -r action code lost <<<"$verdict"
if [ "$action" = requeue ]; then
    bad=-
    if [ "$lost" != - ]; then
        for i in ${lost//,/ }; do printf '%s\\n' "${nodes[$i]}" >>"$stage/bad-nodes"; done
        bad=$(sinfo -h -N -p "$SLURM_JOB_PARTITION" -o '%N %t' |
            "$python" "$launch/agent/queued.py" avoid "$spec" --bad "$stage/bad-nodes" --never "$never")
    fi
    trap '' TERM # a requeue sends it to all processes of the job, including these commands
    for pause in 10 30 60 120 0; do # the controller may be temporarily unavailable
        answer=$(scontrol requeue "$job" 2>&1) && break
        log "$answer"
        case $answer in
        *ontact* | *onnection* | *ocket* | *'imed out'*) sleep "$pause" ;;
        *) # Slurm has already requeued a preempted job.
            if [ "$(scontrol -o show job "$job" | grep -c -e 'JobState=PENDING')" -eq 0 ]; then exit "$code"; fi
            break
            ;;
        esac
    done
    if [ -n "$bad" ] && [ "$bad" != - ]; then # only a pending job accepts this
        log "excluding $bad from now on"
        scontrol update JobId="$job" ExcNodeList="$bad${never:+,$never}" || true
    fi
    exit 75
fi
exit "$code"
"""


def script_body(stage: Stage, pipeline: Pipeline, profile: Profile, options: SlurmOptions) -> str:
    """Return the script below its header."""
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
    return head + network + _options(stage, options) + _container(stage, options) + _step(stage, options) + REQUEUE


def _options(stage: Stage, options: SlurmOptions) -> str:
    job = stage.job
    tasks = job.world_size if job.spawner == "srun" else job.nodes
    words = [
        f"--nodes={job.nodes}",
        f"--ntasks={tasks}",
        f"--ntasks-per-node={tasks // job.nodes}",
        "--distribution=block",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--unbuffered",
        *([f"--immediate={options.step_wait_timeout_s}"] if options.step_wait_timeout_s else []),
        *options.srun_args,
    ]
    lines = f"\noptions=({' '.join(shlex.quote(word) for word in words)})\n"
    lines += 'if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then options+=(--cpus-per-task="$SLURM_CPUS_PER_TASK"); fi\n'
    if options.auto_resume != "off" or (stage.job.container.image and options.container_runtime == "auto"):
        lines += SRUN_SUPPORTS
    if options.auto_resume == "auto":
        lines += AUTO_RESUME.format(condition="[ -d /opt/sagemaker_cluster ] && supports auto-resume")
    elif options.auto_resume == "on":
        lines += AUTO_RESUME.format(condition="supports auto-resume")
    return lines


def _container(stage: Stage, options: SlurmOptions) -> str:
    container = stage.job.container
    if not container.image:
        return ""
    cwd = stage.job.cwd
    mounts = [*container.mounts, *([f"{cwd}:{cwd}"] if cwd and not container.mounts else [])]
    workdir = f" --container-workdir={shlex.quote(container.workdir)}" if container.workdir else ""
    return CONTAINER.format(
        image=shlex.quote(container.image),
        mounts=shlex.quote(",".join(mounts)),
        workdir=workdir,
        pyxis="supports container-image"
        if options.container_runtime == "auto"
        else str(options.container_runtime == "pyxis").lower(),
        enroot="command -v enroot >/dev/null" if options.container_runtime == "auto" else "true",
    )


def _step(stage: Stage, options: SlurmOptions) -> str:
    srun = stage.job.spawner == "srun"
    image = bool(stage.job.container.image)
    text = STEP.format(
        per="per process" if srun else "per node",
        command="task" if srun else "node",
        rank="" if srun else '--node-rank "$SLURM_NODEID" ',
        argv0="lt-launch",
        no_step_check=NO_STEP_CHECK.format(min_seconds=options.step_wait_timeout_s // 2)
        if options.step_wait_timeout_s
        else "",
    )
    if image:  # enroot precedes the image's python; pyxis needs no prefix
        text = text.replace('srun "${options[@]}" bash -c', 'srun "${options[@]}" "${enroot[@]}" bash -c')
    return text
