"""`lt quickstart`: the options, the order of the stages, and what each of them says."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="quickstart",
    pretty_exceptions_enable=False,
    help="Real text in, a trained Llama out, on this machine, in a few minutes.",
)


@app.command()
def quickstart(
    out: Annotated[
        Path, typer.Option(help="Folder for everything that is made; it must be new, empty or an earlier quickstart's.")
    ] = Path("quickstart"),
    source: Annotated[
        str,
        typer.Option(
            help="A folder or file of text of your own; without it, the sources of Python's standard library."
        ),
    ] = "",
    preset: Annotated[
        str, typer.Option(help="Model shape, see `lt model list`; its vocabulary is the data's.")
    ] = "tiny-2m",
    steps: Annotated[int, typer.Option(help="Training steps; 0 for the default.", min=0)] = 0,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Remove what an earlier quickstart made in the folder, and start over.")
    ] = False,
) -> None:
    """Prepare text, train a small Llama with a stop and a resume on the way, export it, check it, and compare it.

    Run again, it goes on where it ended. Fails when the resume is not exact, when transformers computes other logits,
    or when the model does not beat a bigram that has seen the same tokens.
    """
    missing = [name for name in ("torch", "transformers", "lt_trainer_gpu") if find_spec(name) is None]
    if missing:
        needs = ", ".join(missing)
        typer.echo(f"lt quickstart needs {needs}: pip install 'lt-trainer[quickstart]' lt-trainer-gpu", err=True)
        raise typer.Exit(64)
    from lt_trainer.quickstart.main import main

    main(out=out, source=source, preset=preset, steps=steps, fresh=fresh)
