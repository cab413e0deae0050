"""`lt train neuron-cache`."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from lt_trainer_neuron.cache import Entry

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Look into the Neuron compiler's cache: list it, find failed graphs, take out what is in the way.",
)

Recipe = Annotated[Path | None, typer.Argument(metavar="[RUN.toml]", help="A recipe, for the cache that it uses.")]
Cache = Annotated[str, typer.Option(help="The cache's folder; else the recipe's, the environment's, the compiler's.")]
MIB = 2**20


def _scan(recipe: Path | None, cache: str) -> tuple[Path, list[Entry]]:
    from lt_trainer.recipe import load
    from lt_trainer_neuron.cache import cache_url, local_cache, scan
    from lt_trainer_neuron.environment import neuron_env

    environ = os.environ | (neuron_env(load(recipe).recipe, environ=os.environ) if recipe else {})
    folder = local_cache(cache or cache_url(environ))
    return folder, scan(folder)


def _line(entry: Entry) -> str:
    told = f"  {entry.told}" if entry.told else ""
    return f"{entry.state:<12} {entry.n_bytes / MIB:>9.1f} MiB  {entry.compiler}  {entry.path.name}{told}"


@app.command("list")
def list_entries(recipe: Recipe = None, cache: Cache = "") -> None:
    """List the graphs with their state and size."""
    folder, entries = _scan(recipe, cache)
    for entry in entries:
        typer.echo(_line(entry))
    states = ", ".join(f"{count} {state}" for state, count in sorted(Counter(e.state for e in entries).items()))
    typer.echo(f"{folder}: {states or 'empty'}, {sum(entry.n_bytes for entry in entries) / MIB:.1f} MiB")


@app.command()
def failed(recipe: Recipe = None, cache: Cache = "") -> None:
    """List the graphs that failed, and locks that were left behind; exit code 1 where there are some."""
    folder, entries = _scan(recipe, cache)
    found = [entry for entry in entries if entry.state in ("failed", "stale lock")]
    for entry in found:
        typer.echo(_line(entry))
    if not found:
        typer.echo(f"{folder}: no failed graphs, no locks left behind")
    raise typer.Exit(1 if found else 0)


@app.command()
def clean(
    recipe: Recipe = None,
    cache: Cache = "",
    other_compilers: Annotated[
        str, typer.Option(metavar="VERSION", help="Take out what other compilers than this one made, too.")
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would go.")] = False,
) -> None:
    """Take out failed graphs and those under locks that were left behind; compiled ones stay."""
    from lt_trainer_neuron.cache import CacheError, remove

    folder, entries = _scan(recipe, cache)
    if other_compilers and other_compilers not in {entry.compiler for entry in entries}:
        raise CacheError(f"{folder} has nothing of the compiler {other_compilers}; see lt train neuron-cache list")
    found = [
        entry
        for entry in entries
        if entry.state in ("failed", "stale lock") or (other_compilers and entry.compiler != other_compilers)
    ]
    for entry in found if dry_run else remove(found):
        typer.echo(_line(entry))
    typer.echo(f"{folder}: {len(found)} {'would be ' if dry_run else ''}taken out, {len(entries) - len(found)} stay")
