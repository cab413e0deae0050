"""`lt train precompile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lt_model.command_app import CommandApp

app = CommandApp(no_args_is_help=False)


@app.command()
def precompile(
    recipe: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The recipe.")],
    nproc_per_node: Annotated[int, typer.Option(help="Ranks on this machine; 0: the recipe's cores.", min=0)] = 0,
    steps: Annotated[int, typer.Option(help="Steps to trace; graphs of the first ones differ.", min=2)] = 3,
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override one field.")] = None,
    hyperparameters: Annotated[Path | None, typer.Option(help="A flat JSON object of hyperparameters.")] = None,
    torchrun_options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- OPTION...]", help="Options of torchrun, such as --nnodes=16; else --standalone."),
    ] = None,
) -> None:
    """Compile all graphs of a recipe ahead of training and record their compile key."""
    from lt_data.display.terminal import echo
    from lt_trainer.config.hyperparameters import read_hyperparameters
    from lt_trainer.config.recipe import complete, engine_options, load
    from lt_trainer_neuron.options import NeuronOptions
    from lt_trainer_neuron.precompile import precompile as compile_graphs

    given = read_hyperparameters(hyperparameters) if hyperparameters else None
    resolved = complete(load(recipe, overrides=sets or [], hyperparameters=given, reads_data=False))
    data = resolved.recipe.data
    arguments = [str(recipe), "--steps", str(steps)]
    arguments += ["--validate"] if data.validation or data.validation_sets else []
    evaluation = resolved.recipe.evaluation
    arguments += ["--evaluate"] if evaluation.tasks or evaluation.stores else []
    arguments += [text for value in sets or [] for text in ("--set", value)]
    arguments += ["--hyperparameters", str(hyperparameters)] if hyperparameters else []
    ranks = nproc_per_node or engine_options(resolved.recipe, "neuron", NeuronOptions).num_neuroncores
    key = compile_graphs(
        resolved, nproc_per_node=ranks, torchrun_options=torchrun_options or [], extraction_arguments=arguments
    )
    echo(f"all graphs are compiled; compile key: {key}")
