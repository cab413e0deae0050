"""`lt train`.

Run a recipe, show it resolved, or sample from what was trained. Heavy imports happen inside the commands.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

if TYPE_CHECKING:
    from lt_trainer.recipe import Resolved

ADDED = "lt.commands.train"
"""Entry points that add commands to `lt train`; each names a typer app with one command."""


class TrainGroup(TyperGroup):
    """`lt train`: the commands below, and those that engines add under the entry point `lt.commands.train`."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Our own commands, then the added ones by name, without importing them."""
        own = super().list_commands(ctx)
        return own + sorted(entry.name for entry in entry_points(group=ADDED) if entry.name not in own)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command of ours, or an added one, imported now."""
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        for entry in entry_points(group=ADDED):
            if entry.name == cmd_name:
                added = get_command(entry.load())
                added.name = cmd_name
                return added
        return None


app = typer.Typer(
    cls=TrainGroup,
    name="train",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train a recipe, show it, or sample from a trained model.",
)

RecipeFile = Annotated[Path, typer.Argument(metavar="RUN.toml", help="The recipe.")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Override one field of the recipe; may be given several times."),
]
Hyperparameters = Annotated[
    Path | None,
    typer.Option(help="A flat JSON object of upper-case hyperparameters (SageMaker's hyperparameters.json)."),
]


def _load(recipe: Path, sets: list[str] | None, hyperparameters: Path | None) -> Resolved:
    from lt_trainer.hyperparameters import read
    from lt_trainer.recipe import load

    return load(recipe, hyperparameters=read(hyperparameters) if hyperparameters else None, sets=sets or [])


@app.command()
def run(
    recipe: RecipeFile,
    sets: Sets = None,
    hyperparameters: Hyperparameters = None,
    stop_at_step: Annotated[
        int,
        typer.Option(
            help="Stop after this step exactly as SIGTERM would, saved and with exit code 75; 0 for never.", min=0
        ),
    ] = 0,
    shadow_steps: Annotated[
        int,
        typer.Option(
            help="Steps to run after a stop's save, written to shadow.jsonl, to compare with the resumed run.", min=0
        ),
    ] = 0,
) -> None:
    """Train, alone or as one rank under torchrun; goes on from the newest valid checkpoint of the run directory.

    Exit codes: 0 all steps done, 75 stopped and saved (start it again), 64 something to mend in what was given, 70 our
    mistake.
    """
    from lt_trainer.stop import StopSignals

    stop = StopSignals()
    stop.take()  # for good: until this process is gone there is nothing that a signal may cut short
    from lt_trainer.run import run as train

    resolved = _load(recipe, sets, hyperparameters)
    sys.exit(train(resolved, stop=stop, stop_at_step=stop_at_step, shadow_steps=shadow_steps))


@app.command()
def check(
    recipe: RecipeFile,
    sets: Sets = None,
    hyperparameters: Hyperparameters = None,
) -> None:
    """Try a whole start without starting: data, devices, one step, one save that is read back; print what was checked.

    Writes only into a scratch folder beside run.out and removes it. Alone or as one rank under torchrun. Exit codes as
    of `run`.
    """
    from lt_trainer.check import check as try_out

    try_out(_load(recipe, sets, hyperparameters))


@app.command()
def torchrun(
    recipe: RecipeFile,
    nproc_per_node: Annotated[int, typer.Option(help="Ranks on this machine.", min=1)],
    sets: Sets = None,
    hyperparameters: Hyperparameters = None,
    check: Annotated[bool, typer.Option("--check", help="Check the start on all ranks instead of training.")] = False,
    options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- OPTION...]", help="More options of torchrun, such as --nnodes=2; else --standalone."
        ),
    ] = None,
) -> None:
    """Train on all ranks of this machine under torchrun, with the recipe's grace time and our exit codes."""
    from lt_trainer.torchrun import start

    arguments = ["check" if check else "run", str(recipe)]
    arguments += [text for value in sets or [] for text in ("--set", value)]
    arguments += ["--hyperparameters", str(hyperparameters)] if hyperparameters else []
    resolved = _load(recipe, sets, hyperparameters)  # a mistake in it is told once, not by every rank
    sys.exit(start(resolved.recipe, nproc_per_node, options or [], arguments))


@app.command()
def show(
    recipe: RecipeFile,
    sets: Sets = None,
    hyperparameters: Hyperparameters = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print values and origins as JSON.")] = False,
) -> None:
    """Print the resolved recipe, each value with its origin."""
    from lt_trainer.recipe import to_dict, to_toml

    resolved = _load(recipe, sets, hyperparameters)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "recipe": to_dict(resolved.recipe),
                    "origins": dict(resolved.origins),
                    "unchecked": list(resolved.unchecked),
                },
                indent=1,
            )
        )
        return
    typer.echo(to_toml(resolved.recipe, resolved.origins), nl=False)
    for section in resolved.unchecked:
        typer.echo(f"# [{section}] is not checked here: its engine is not installed; the node that trains checks it")


@app.command()
def plan(
    recipe: RecipeFile,
    devices: Annotated[int, typer.Option(help="Devices of a node.", min=1)],
    device: Annotated[
        str, typer.Option(help="Kind of device: h100, h200, a100, l40s, trn1, ... (an unknown one lists all).")
    ],
    nodes: Annotated[int, typer.Option(help="Nodes; 0: as the recipe's parallel.n_nodes.", min=0)] = 0,
    mfu: Annotated[float, typer.Option(help="Measured MFU, such as 0.42; 0: assume one, and say which.")] = 0.0,
    sets: Sets = None,
    hyperparameters: Hyperparameters = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Tell memory by part, time and energy of a run before it is started; needs no device and no torch.

    What does not fit is told with the nearest layout that does. Exit codes: 0 it fits, 1 it does not, 64 something to
    mend in the recipe.
    """
    from lt_trainer.planning.answer import plan_of

    made = plan_of(
        _load(recipe, sets, hyperparameters), device=device, devices=devices, nodes=nodes or None, mfu=mfu or None
    )
    typer.echo(json.dumps(made.values(), indent=1) if as_json else made.page(), nl=as_json)
    raise typer.Exit(0 if made.fits else 1)


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, of a run that goes on or is over.")],
    interval: Annotated[float, typer.Option(help="Seconds between looks.", min=0.1)] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show what is there and leave.")] = False,
) -> None:
    """Show in the terminal what a run does, from its files; Ctrl-C ends the view, not the run."""
    from contextlib import suppress

    from lt_trainer.watch.showing import watch as show_run

    with suppress(KeyboardInterrupt):
        show_run(run, interval_s=interval, once=once)


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run directories; several are compared on the same axes.")
    ],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    png: Annotated[Path | None, typer.Option(help="Folder for the charts as PNG.", show_default=False)] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that are there.")] = False,
) -> None:
    """Write one HTML page about runs: curves, events, data, model, recipe; it needs no network to be read."""
    from lt_trainer.report.writing import write_report

    for path in write_report(runs, out, png=png, overwrite=overwrite):
        typer.echo(path)


@app.command()
def bench(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RUN.toml]", help="The recipe; its data is not read.")
    ] = None,
    preset: Annotated[
        str, typer.Option(help="A preset in place of a recipe: one row a device, at most 4096 long.")
    ] = "",
    steps: Annotated[int, typer.Option(help="Timed steps.", min=1)] = 20,
    warmup: Annotated[int, typer.Option(help="Steps before them, the first one included.", min=1)] = 3,
    sets: Sets = None,
    hyperparameters: Hyperparameters = None,
) -> None:
    """Measure training steps on random ids: one JSON with speed, MFU, HFU, memory, and how each was made.

    Alone or as one rank under torchrun. Nothing is written but the JSON.
    """
    from lt_trainer.bench import bench_recipe, measure
    from lt_trainer.hyperparameters import read

    resolved = bench_recipe(
        str(recipe) if recipe else None,
        preset,
        sets=sets or [],
        hyperparameters=read(hyperparameters) if hyperparameters else None,
    )
    report = measure(resolved, steps=steps, warmup=warmup)
    if report is not None:
        typer.echo(json.dumps(report, indent=1))


@app.command()
def sample(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CKPT",
            help="A checkpoint, a run directory (its newest checkpoint) or an exported Hugging Face folder.",
        ),
    ],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.", min=1)] = 100,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.", min=0.0)] = 0.8,
    top_k: Annotated[int, typer.Option(help="Choose among the k likeliest tokens; 0 for all.", min=0)] = 50,
    top_p: Annotated[
        float,
        typer.Option(help="Choose among the likeliest tokens that together have this probability.", min=0.0, max=1.0),
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the choice.")] = 0,
    samples: Annotated[int, typer.Option(help="How many continuations.", min=1)] = 1,
) -> None:
    """Generate text from a trained model."""
    try:
        from lt_trainer.sample import load
        from lt_trainer.sample import sample as continuation
    except ModuleNotFoundError as exc:
        if exc.name != "torch":
            raise
        typer.echo("lt train sample needs torch: pip install 'lt-trainer[torch]'", err=True)
        raise typer.Exit(64) from exc
    loaded = load(checkpoint)
    for i in range(samples):
        text = continuation(
            loaded,
            prompt,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed + i,
        )
        typer.echo(prompt + text)
