"""`lt launch`: send a run to a target, look at it, stop it. Heavy imports happen inside the commands."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from lt_launch.profile import Profile
    from lt_launch.runfile import RunFile

app = typer.Typer(
    name="launch",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Start, watch and finish a run on this machine, over ssh, on Slurm or on SageMaker.",
)

File = Annotated[Path, typer.Argument(metavar="RUN.toml", help="A recipe, a job or a pipeline.")]
On = Annotated[str, typer.Option("--on", help="local, ssh, slurm, sagemaker, sagemaker-local, or k8s (render only).")]
ProfileFile = Annotated[
    Path | None, typer.Option("--profile", help="Facts about your machines; else ~/.config/lt/launch.toml.")
]
Nodes = Annotated[int | None, typer.Option(help="Machines of the job that trains.", min=1)]
Procs = Annotated[int | None, typer.Option(help="Processes on each of them, one for each device.", min=1)]
Env = Annotated[
    list[str] | None, typer.Option("--env", metavar="K=V", help="A variable for every process; may be repeated.")
]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override a field of the recipe; may be repeated.")
]
Hostfile = Annotated[Path | None, typer.Option(help="For ssh: lines of 'host [slots=N] [port=P] [user=U] [addr=A]'.")]
Out = Annotated[str, typer.Option(help="Folder of the launch; else the run directory, or runs/NAME.")]
Stage = Annotated[str, typer.Option(help="Only this stage of a pipeline.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="The folder of a launch (its --out), or its name.")]


def _room(on: str, profile: Profile) -> tuple[int, int]:
    """Nodes and processes per node that a target has; 0 where only the person can know."""
    if on == "local":
        from lt_launch.local import devices

        return 1, devices()
    if on == "ssh":
        from lt_launch.hosts import slots
        from lt_launch.ssh_link import SshOptions, hosts_of

        hosts = hosts_of(profile.options("ssh", SshOptions))
        return len(hosts), slots(hosts)
    return 0, 0


def _read(
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
    from lt_launch.runfile import Wanted, read

    variables: dict[str, str] = {}
    for text in env or []:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise LaunchError(f"--env {text}: write it as NAME=VALUE")
        variables[name] = value
    mine = load_profile(profile)
    wanted = Wanted(
        nodes=nodes,
        procs_per_node=nproc_per_node,
        out=out,
        env=variables,
        sets=tuple(sets or []),
        stage=stage,
        room=lambda found: _room(on, found.with_hostfile(hostfile)),
    )
    found = read(file, mine, wanted)
    return replace(found, profile=found.profile.with_hostfile(hostfile))


@app.command()
def run(
    file: File,
    on: On = "local",
    profile: ProfileFile = None,
    nodes: Nodes = None,
    nproc_per_node: Procs = None,
    env: Env = None,
    sets: Sets = None,
    hostfile: Hostfile = None,
    out: Out = "",
    stage: Stage = "",
    detach: Annotated[bool, typer.Option("--detach", help="local and ssh: go on in the background.")] = False,
) -> None:
    """Send a run to a target. Stages that are done are skipped; a launch into the same folder goes on in it.

    Exit codes: 0 done (or submitted), 75 start it again, 64 something to mend, else the first failure's code.
    """
    from lt_launch.launching import launch

    wanted = _read(file, on, profile, nodes, nproc_per_node, env, sets, hostfile, out, stage)
    sys.exit(launch(wanted.pipeline, wanted.profile, on, detach=detach))


@app.command()
def render(
    file: File,
    on: On = "local",
    profile: ProfileFile = None,
    nodes: Nodes = None,
    nproc_per_node: Procs = None,
    env: Env = None,
    sets: Sets = None,
    hostfile: Hostfile = None,
    out: Out = "",
    stage: Stage = "",
    to: Annotated[Path | None, typer.Option(help="Write the files into this new folder instead.")] = None,
) -> None:
    """Print exactly what would be sent: files and command lines. Nothing is contacted."""
    from lt_launch.backend import backend
    from lt_launch.launching import as_text, write_rendered

    wanted = _read(file, on, profile, nodes, nproc_per_node, env, sets, hostfile, out, stage)
    rendered = backend(on).render(wanted.pipeline, wanted.profile)
    if to is None:
        typer.echo(as_text(rendered), nl=False)
    else:
        write_rendered(rendered, to)


@app.command()
def status(
    runs: Annotated[list[str] | None, typer.Argument(metavar="[RUN]...", help="Folders or names; else all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """How launches stand: state, age, step, loss, speed, time left, and why."""
    from lt_launch.status import show

    show(runs or [], as_json=as_json)


@app.command()
def logs(
    run: Run,
    stage: Annotated[str, typer.Option(help="A stage, or an element of an array (prepare.3); else the newest.")] = "",
    rank: Annotated[int, typer.Option(help="Whose output.", min=0)] = 0,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the stage has ended.")] = False,
) -> None:
    """What a process of a run has written."""
    from lt_launch.backend import backend
    from lt_launch.record import open_launch

    launch = open_launch(run)
    for line in backend(launch.backend).logs(launch, stage=stage, rank=rank, follow=follow):
        typer.echo(line)


@app.command()
def cancel(run: Run) -> None:
    """Stop a run: training saves and leaves, with its whole grace time."""
    from lt_launch.backend import backend
    from lt_launch.record import event, open_launch

    launch = open_launch(run)
    event(launch, "cancel")
    for sentence in backend(launch.backend).cancel(launch):
        typer.echo(sentence)


@app.command("list")
def list_launches(
    on: Annotated[str, typer.Option("--on", help="Ask this target instead of the list of this machine.")] = "",
    profile: ProfileFile = None,
) -> None:
    """The launches that were made on this machine, or what a target knows of yours."""
    from lt_launch.status import list_known, list_target

    if on:
        list_target(on, profile)
    else:
        list_known()


@app.command()
def nodes(on: On = "local", profile: ProfileFile = None, hostfile: Hostfile = None) -> None:
    """The machines of a target and their states."""
    from lt_launch.status import show_nodes

    show_nodes(on, profile, hostfile)


@app.command()
def doctor(
    file: Annotated[Path | None, typer.Argument(metavar="[RUN.toml]", help="Also check what this run needs.")] = None,
    on: On = "local",
    profile: ProfileFile = None,
    nodes: Nodes = None,
    nproc_per_node: Procs = None,
    hostfile: Hostfile = None,
) -> None:
    """Look for what is missing or wrong before anything is spent; exit code 64 when something is wrong."""
    from lt_launch.doctor import examine

    wanted = None
    if file is not None:
        wanted = _read(file, on, profile, nodes, nproc_per_node, None, None, hostfile, "", "")
    sys.exit(examine(on, wanted, profile, hostfile))


@app.command("sagemaker-entry")
def sagemaker_entry(
    root: Annotated[Path, typer.Option(help="What stands for /opt/ml.")] = Path("/opt/ml"),
) -> None:
    """What a SageMaker training container runs: reads the contract below /opt/ml, trains, leaves model or failure.

    Exit codes: 0 the model is there, 75 stopped and saved, else the first failure's code.
    """
    import os

    from lt_launch.sagemaker.entry import entry

    sys.exit(entry(root, os.environ, lambda text: typer.echo(f"# {text}")))


@app.command("sagemaker-algorithm")
def sagemaker_algorithm(
    name: Annotated[str, typer.Option(help="Of the algorithm.")],
    image: Annotated[str, typer.Option(help="The training image in ECR, with tag.")],
    digest: Annotated[str, typer.Option(help="Of the image, sha256:...")] = "",
    engine: Annotated[list[str] | None, typer.Option(help="gpu, neuron or both; gpu if none is given.")] = None,
    description: Annotated[str, typer.Option(help="For the console.")] = "",
) -> None:
    """Print the CreateAlgorithm request that publishes a training image, made of the recipe's schema."""
    import json

    from lt_launch.sagemaker.algorithm import algorithm

    made = algorithm(name=name, image=image, digest=digest, description=description, engines=engine or ["gpu"])
    typer.echo(json.dumps(made, indent=1))
