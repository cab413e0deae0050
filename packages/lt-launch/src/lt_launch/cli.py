"""Command line of `lt launch`. Heavy imports happen inside the commands."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from lt_launch.profile import Profile
    from lt_launch.run_file import RunFile

app = typer.Typer(
    name="launch",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Start, watch and finish a run on this machine, over ssh, on Slurm or on SageMaker.",
)

RunFileArgument = Annotated[Path, typer.Argument(metavar="RUN.toml", help="A recipe, a job or a pipeline.")]
TargetOption = Annotated[str, typer.Option("--on", help="local, ssh, slurm, sagemaker, or k8s (render only).")]
ProfileFile = Annotated[
    Path | None, typer.Option("--profile", help="Facts about your machines; else ~/.config/lt/launch.toml.")
]
Nodes = Annotated[int | None, typer.Option(help="Machines of the job that trains.", min=1)]
ProcsPerNode = Annotated[int | None, typer.Option(help="Processes on each of them, one for each device.", min=1)]
Env = Annotated[
    list[str] | None, typer.Option("--env", metavar="K=V", help="A variable for every process; may be repeated.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override a field of the recipe; may be repeated.")
]
Hostfile = Annotated[Path | None, typer.Option(help="For ssh: lines of 'host [slots=N] [port=P] [user=U] [addr=A]'.")]
Out = Annotated[str, typer.Option(help="Folder of the launch; else the run directory, or runs/NAME.")]
Stage = Annotated[str, typer.Option(help="Only this stage of a pipeline.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A launch: its folder (--out), its name, or a job's id.")]


def _target_capacity(on: str, profile: Profile) -> tuple[int, int]:
    """Return the nodes and processes per node of a target; 0 where unknown."""
    if on == "local":
        from lt_launch.devices import count_devices

        return 1, count_devices()
    if on == "ssh":
        from lt_launch.hosts import slots_per_host
        from lt_launch.ssh import SshOptions, resolve_hosts

        hosts = resolve_hosts(profile.options("ssh", SshOptions))
        return len(hosts), slots_per_host(hosts)
    return 0, 0


def _load_run_file(
    file: Path,
    on: str,
    profile: Path | None,
    nodes: int | None,
    nproc_per_node: int | None,
    env: list[str] | None,
    sets: list[str] | None,
    hostfile: Path | None,
    out: str,
    stage: str,
) -> RunFile:
    from lt_launch.errors import LaunchError
    from lt_launch.profile import load_profile
    from lt_launch.run_file import RunOverrides, read_run_file

    variables: dict[str, str] = {}
    for text in env or []:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise LaunchError(f"--env {text}: write it as NAME=VALUE")
        variables[name] = value
    user_profile = load_profile(profile)
    overrides = RunOverrides(
        nodes=nodes,
        procs_per_node=nproc_per_node,
        out=out,
        env=variables,
        sets=tuple(sets or []),
        stage=stage,
        target_capacity=lambda run_file: _target_capacity(on, run_file.with_hostfile(hostfile)),
    )
    run_file = read_run_file(file, user_profile, overrides)
    return replace(run_file, profile=run_file.profile.with_hostfile(hostfile))


@app.command()
def run(
    file: RunFileArgument,
    on: TargetOption = "local",
    profile: ProfileFile = None,
    nodes: Nodes = None,
    nproc_per_node: ProcsPerNode = None,
    env: Env = None,
    sets: Overrides = None,
    hostfile: Hostfile = None,
    out: Out = "",
    stage: Stage = "",
    detach: Annotated[bool, typer.Option("--detach", help="local and ssh: run in the background.")] = False,
) -> None:
    """Submit a run to a target. Completed stages are skipped; launching into the same folder resumes it.

    Exit codes: 0 done (or submitted), 75 start it again, 64 user error, else the exit code of the first failure.
    """
    from lt_launch.launcher import launch

    run_file = _load_run_file(file, on, profile, nodes, nproc_per_node, env, sets, hostfile, out, stage)
    sys.exit(launch(run_file.pipeline, run_file.profile, on, detach=detach))


@app.command()
def render(
    file: RunFileArgument,
    on: TargetOption = "local",
    profile: ProfileFile = None,
    nodes: Nodes = None,
    nproc_per_node: ProcsPerNode = None,
    env: Env = None,
    sets: Overrides = None,
    hostfile: Hostfile = None,
    out: Out = "",
    stage: Stage = "",
    output_dir: Annotated[Path | None, typer.Option(help="Write the files into this new folder instead.")] = None,
) -> None:
    """Print exactly the files and command lines that would be sent, without contacting the target."""
    from lt_launch.launcher import format_rendered, write_rendered
    from lt_launch.target import get_target

    run_file = _load_run_file(file, on, profile, nodes, nproc_per_node, env, sets, hostfile, out, stage)
    rendered = get_target(on).render(run_file.pipeline, run_file.profile)
    if output_dir is None:
        text = format_rendered(rendered)
        if sys.stdout.isatty():  # in a file it is what is sent, byte for byte
            from lt_ckpt.terminal_text import escape_controls

            text = escape_controls(text)
        sys.stdout.write(text)
    else:
        write_rendered(rendered, output_dir)


@app.command()
def status(
    runs: Annotated[list[str] | None, typer.Argument(metavar="[RUN]...", help="Folders or names; else all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the state, age, step, loss, speed, remaining time and failure reason of launches."""
    from lt_launch.status import show_status

    show_status(runs or [], as_json=as_json)


@app.command()
def logs(
    run: Run,
    stage: Annotated[str, typer.Option(help="A stage, or an element of an array (prepare.3); else the newest.")] = "",
    rank: Annotated[int, typer.Option(help="Rank whose output is printed.", min=0)] = 0,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Continue until the stage has ended.")] = False,
) -> None:
    """Print the output of one process of a run."""
    from lt_launch.job_output import format_lines
    from lt_launch.launch_dir import load_launch
    from lt_launch.target import get_target

    launch = load_launch(run)
    for line in get_target(launch.target).logs(launch, stage=stage, rank=rank, follow=follow):
        sys.stdout.write(format_lines(line, sys.stdout))
        sys.stdout.flush()


@app.command()
def cancel(run: Run) -> None:
    """Cancel a run; training saves a checkpoint within its grace period."""
    from lt_ckpt.terminal_text import echo
    from lt_launch.launch_dir import load_launch, log_event
    from lt_launch.target import get_target

    launch = load_launch(run)
    log_event(launch, "cancel_requested")
    for message in get_target(launch.target).cancel(launch):
        echo(message)


@app.command("list")
def list_launches(
    on: Annotated[str, typer.Option("--on", help="Ask this target instead of the list of this machine.")] = "",
    profile: ProfileFile = None,
) -> None:
    """List the launches made on this machine, or your jobs on a target."""
    from lt_launch.status import show_launches, show_target_jobs

    if on:
        show_target_jobs(on, profile)
    else:
        show_launches()


@app.command()
def nodes(on: TargetOption = "local", profile: ProfileFile = None, hostfile: Hostfile = None) -> None:
    """List the machines of a target and their states."""
    from lt_launch.status import show_nodes

    show_nodes(on, profile, hostfile)


@app.command()
def doctor(
    file: Annotated[Path | None, typer.Argument(metavar="[RUN.toml]", help="Also check what this run needs.")] = None,
    on: TargetOption = "local",
    profile: ProfileFile = None,
    nodes: Nodes = None,
    nproc_per_node: ProcsPerNode = None,
    hostfile: Hostfile = None,
) -> None:
    """Check a target and a run before anything is spent; exit code 64 on a problem."""
    from lt_launch.doctor import run_doctor

    run_file = None
    if file is not None:
        run_file = _load_run_file(file, on, profile, nodes, nproc_per_node, None, None, hostfile, "", "")
    sys.exit(run_doctor(on, run_file, profile, hostfile))


@app.command("sagemaker-entrypoint")
def sagemaker_entrypoint(
    root: Annotated[Path, typer.Option(help="Folder used as /opt/ml.")] = Path("/opt/ml"),
) -> None:
    """Run the entry point of a SageMaker training container.

    It reads the contract below /opt/ml, trains, and writes the model or the failure file.

    Exit codes: 0 model exported, 75 stopped and saved, else the exit code of the first failure.
    """
    import os

    from lt_ckpt.terminal_text import escape_controls
    from lt_launch.sagemaker.entrypoint import run_entrypoint

    sys.exit(run_entrypoint(root, os.environ, lambda text: typer.echo(escape_controls(f"# {text}", keep=""))))


@app.command("sagemaker-algorithm")
def sagemaker_algorithm(
    name: Annotated[str, typer.Option(help="Name of the algorithm.")],
    image: Annotated[str, typer.Option(help="The training image in ECR, with tag.")],
    digest: Annotated[str, typer.Option(help="Digest of the image, sha256:...")] = "",
    engine: Annotated[list[str] | None, typer.Option(help="gpu, neuron or both; gpu if none is given.")] = None,
    description: Annotated[str, typer.Option(help="Description shown in the console.")] = "",
) -> None:
    """Print the CreateAlgorithm request of a training image, built from the recipe's schema."""
    import json

    from lt_launch.sagemaker.algorithm import create_algorithm_request

    request = create_algorithm_request(
        name=name, image=image, digest=digest, description=description, engines=engine or ["gpu"]
    )
    typer.echo(json.dumps(request, indent=1))
