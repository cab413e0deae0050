"""Command line of `lt quickstart`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from lt_model.command_app import CommandApp, path_text
from lt_trainer.constants import EXIT_USER

app = CommandApp(
    name="quickstart",
    no_args_is_help=False,
    help="Train a small Llama from text on this machine in a few minutes.",
)


@app.command()
def quickstart(
    out: Annotated[Path, typer.Option(help="Output folder: new, empty or from an earlier quickstart.")] = Path(
        "quickstart"
    ),
    source: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="Folder or file with text; by default the sources of Python's standard library.",
            parser=path_text,
        ),
    ] = "",
    preset: Annotated[str, typer.Option(help="Model preset, see `lt model list`.")] = "tiny-2m",
    steps: Annotated[int, typer.Option(help="Training steps.")] = 1000,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the files of an earlier quickstart and start over.")
    ] = False,
) -> None:
    """Prepare text, train a small Llama with a stop and a resume, export it, and check the result.

    Rerunning continues an interrupted quickstart. Fails if the resume is not exact.
    """
    if missing := [name for name in ("torch", "lt_trainer_gpu") if find_spec(name) is None]:
        names = ", ".join(missing)
        typer.echo(f"lt quickstart needs {names}: pip install 'lt-trainer[quickstart]' lt-trainer-gpu", err=True)
        raise typer.Exit(EXIT_USER)
    from lt_trainer.quickstart.main import main

    main(out=out, source=source, preset=preset, steps=steps, overwrite=overwrite)
