"""Command line of `lt release`: make, verify, reproduce."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lt_model.command_app import CommandApp

app = CommandApp(name="release")
ReleaseFolder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a release.")]
Expect = Annotated[str, typer.Option(help="SHA-256 that the hash list must have.")]


@app.callback()
def release() -> None:
    """Publish a run with all that made it, check such a release, and repeat it."""


@app.command()
def make(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    out: Annotated[Path, typer.Option(help="Folder of the release: new or empty.")],
    licenses: Annotated[Path, typer.Option(help="Names, licenses, origins of the sources.")] = Path("licences.toml"),
    sources: Annotated[
        list[Path] | None,
        typer.Option(help="Folder in which source files are looked for by hash; repeatable.", show_default=False),
    ] = None,
    mof_class: Annotated[
        int, typer.Option(help="Class of the Model Openness Framework that must be reached; 0 for any.", min=0, max=3)
    ] = 0,
) -> None:
    """Write the release of a run: weights, data, recipe, logs, sources of lt, cards, hashes.

    All that is missing is in one list (exit code 64), and nothing is left half written.
    """
    from lt_ckpt.hash_list import HASH_LIST
    from lt_data.display.terminal import echo, echo_error
    from lt_trainer.release.bundle import hash_file, indent_lines
    from lt_trainer.release.make import make_release

    facts = make_release(
        run, out, licenses=licenses, source_folders=sources or [], mof_class=mof_class, notify=echo_error
    )
    echo(f"{out}: {facts.openness.name}")
    for reason in facts.openness.missing.get((facts.openness.class_number or 4) - 1, ()):
        echo(f"  missing for the next class: {indent_lines(reason, 4)}")
    echo(f"SHA-256 of its hash list: {hash_file(out / HASH_LIST)}")


@app.command()
def verify(
    folder: ReleaseFolder,
    expect: Expect = "",
) -> None:
    """Check hashes, weights, data, licenses and class of a release; exit code 1 for a problem."""
    from lt_data.display.terminal import echo
    from lt_trainer.release.bundle import indent_lines
    from lt_trainer.release.verify import verify_release

    result = verify_release(folder, expect=expect)
    for problem in result.problems:
        echo(f"PROBLEM {indent_lines(problem, 2)}")
    if result.openness is not None:
        echo(f"openness: {result.openness.name}")
    echo(f"{result.n_files} files, SHA-256 of the hash list: {result.list_hash}")
    echo(f"{len(result.problems)} problem(s)" if result.problems else "verified")
    if result.problems:
        raise typer.Exit(1)


@app.command()
def reproduce(
    folder: ReleaseFolder,
    out: Annotated[
        Path, typer.Option(help="Work folder, which stays; `sources` in it has those that are not in the release.")
    ] = Path("reproduction"),
    steps: Annotated[int, typer.Option(help="Steps to run; 0 for all.", min=0)] = 0,
    python: Annotated[
        Path | None,
        typer.Option(help="Interpreter of an environment with lt, instead of a new one.", show_default=False),
    ] = None,
    expect: Expect = "",
) -> None:
    """Repeat the run of a release from its sources and data, and compare the losses step by step.

    This runs what the release contains: its sources of lt and its script. Exit codes: 0 bit-equal or within the stated
    tolerance, 1 different.
    """
    from lt_data.display.terminal import echo, echo_error
    from lt_trainer.release.bundle import indent_lines
    from lt_trainer.release.reproduce import reproduce_release

    told, is_within_tolerance = reproduce_release(
        folder, out, steps=steps, python=python, expect=expect, notify=echo_error
    )
    for line in told:
        echo(indent_lines(line, 2))
    if not is_within_tolerance:
        raise typer.Exit(1)
