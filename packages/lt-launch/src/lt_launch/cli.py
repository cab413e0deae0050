"""Command line of `lt launch`. Heavy imports happen inside the commands."""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from lt_model.command_app import CommandApp, path_text

app = CommandApp(
    name="launch", help="Start, watch and finish a run on this machine, over ssh, on Slurm or on SageMaker."
)

Run = Annotated[
    str,
    typer.Argument(metavar="RUN", help="A launch: its folder (--out) or its name.", parser=path_text),
]


def _load_run_file(
    file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="A recipe, a job or a pipeline.")],
    on: Annotated[str, typer.Option("--on", help="local, ssh, slurm, sagemaker, or k8s (render only).")] = "local",
    profile: Annotated[
        Path | None, typer.Option(help="Facts about your machines; else ~/.config/lt/launch.toml.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Machines of the job that trains.", min=1)] = None,
    nproc_per_node: Annotated[
        int | None, typer.Option(help="Processes on each of them, one for each device.", min=1)
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option(metavar="K=V", help="A variable for every process; may be repeated.")
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A.B=C", help="Override a field of the recipe; may be repeated."),
    ] = None,
    hostfile: Annotated[Path | None, typer.Option(help="For ssh: lines of HOST [slots=N], in rank order.")] = None,
    out: Annotated[
        str,
        typer.Option(
            metavar="FOLDER",
            help="Folder of the launch; else the run directory, or runs/NAME.",
            parser=path_text,
        ),
    ] = "",
    stage: Annotated[str, typer.Option(help="Only this stage of a pipeline.")] = "",
) -> Any:
    """Return the run file that options of the command line override."""
    from lt_launch.errors import LaunchError
    from lt_launch.profile import load_profile
    from lt_launch.run_file import RunOverrides, read_run_file
    from lt_launch.target import get_target

    variables: dict[str, str] = {}
    for text in env or []:
        name, equals, variables[name] = text.partition("=")
        if not name or not equals:
            raise LaunchError(f"--env {text}: write it as NAME=VALUE")
    overrides = RunOverrides(
        nodes=nodes,
        procs_per_node=nproc_per_node,
        out=out,
        env=variables,
        sets=tuple(sets or []),
        stage=stage,
        hostfile=hostfile,
        target_capacity=get_target(on).capacity,
    )
    return read_run_file(file, load_profile(profile), overrides)


def _takes_run_file(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command, as its first parameters `run_file` and `on`, the arguments of `_load_run_file`."""
    shared = inspect.signature(_load_run_file).parameters
    own = list(inspect.signature(command).parameters.values())[2:]

    def run(**given: Any) -> None:
        run_file = _load_run_file(**{name: given.pop(name) for name in shared if name != "on"}, on=given["on"])
        command(run_file, given.pop("on"), **given)

    parameters = [*shared.values(), *own]
    run.__signature__ = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


@app.command()
@_takes_run_file
def run(run_file: Any, on: str) -> None:
    """Submit a run to a target. Completed stages are skipped; launching into the same folder resumes it.

    Exit codes: 0 done (or submitted), 75 start it again, 64 user error, else the exit code of the first failure.
    """
    from lt_launch.launcher import launch

    sys.exit(launch(run_file.pipeline, run_file.profile, on))


@app.command()
@_takes_run_file
def render(
    run_file: Any,
    on: str,
    output_dir: Annotated[Path | None, typer.Option(help="Write the files into this new folder instead.")] = None,
) -> None:
    """Print exactly the files and command lines that would be sent, without contacting the target."""
    from lt_ckpt.terminal_text import escape_controls
    from lt_launch.launcher import format_rendered, write_rendered
    from lt_launch.target import get_target

    rendered = get_target(on).render(run_file.pipeline, run_file.profile)
    if output_dir is None:
        text = format_rendered(rendered)
        # In a file it is what is sent, byte for byte.
        sys.stdout.write(escape_controls(text) if sys.stdout.isatty() else text)
    else:
        write_rendered(rendered, output_dir)


@app.command()
@_takes_run_file
def doctor(run_file: Any, on: str) -> None:
    """Check a target and a run before anything is spent; exit code 64 on a problem."""
    from lt_launch.doctor import run_doctor

    sys.exit(run_doctor(on, run_file))


@app.command()
def status(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]...", help="Folders or names; else all.", parser=path_text),
    ] = None,
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
    from lt_launch.launch_dir import load_launch
    from lt_launch.target import get_target

    launch = load_launch(run)
    for message in get_target(launch.target).cancel(launch):
        echo(message)


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
