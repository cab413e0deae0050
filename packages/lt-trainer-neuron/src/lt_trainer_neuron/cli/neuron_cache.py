"""`lt train neuron-cache`."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from lt_trainer_neuron.compile_cache import CompileCacheEntry

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Inspect the Neuron compiler's cache: list graphs, find failed ones, remove what blocks a run.",
)

RecipeArgument = Annotated[Path | None, typer.Argument(metavar="[RUN.toml]", help="Recipe that names the cache.")]
CacheOption = Annotated[
    str, typer.Option(help="Cache folder; by default the recipe's, the environment's or the compiler's.")
]
MIB = 2**20


def _scan_cache(recipe: Path | None, cache: str) -> tuple[Path, list[CompileCacheEntry]]:
    from lt_trainer.config.recipe import load
    from lt_trainer_neuron.compile_cache import cache_url, local_cache_folder, scan_cache
    from lt_trainer_neuron.environment import neuron_env

    environ = os.environ | (neuron_env(load(recipe).recipe, environ=os.environ) if recipe else {})
    folder = local_cache_folder(cache or cache_url(environ))
    return folder, scan_cache(folder)


def _format_entry(entry: CompileCacheEntry) -> str:
    message = f"  {entry.error_message}" if entry.error_message else ""
    return f"{entry.state:<12} {entry.n_bytes / MIB:>9.1f} MiB  {entry.compiler}  {entry.path.name}{message}"


@app.command("list")
def list_entries(recipe: RecipeArgument = None, cache: CacheOption = "") -> None:
    """List the graphs with their state and size."""
    from lt_data.display.terminal import echo

    folder, entries = _scan_cache(recipe, cache)
    for entry in entries:
        echo(_format_entry(entry))
    states = ", ".join(f"{count} {state}" for state, count in sorted(Counter(e.state for e in entries).items()))
    echo(f"{folder}: {states or 'empty'}, {sum(entry.n_bytes for entry in entries) / MIB:.1f} MiB")


@app.command()
def list_failed(recipe: RecipeArgument = None, cache: CacheOption = "") -> None:
    """List failed graphs and stale locks; exit code 1 if there are any."""
    from lt_data.display.terminal import echo

    folder, entries = _scan_cache(recipe, cache)
    matching = [entry for entry in entries if entry.state in ("failed", "stale lock")]
    for entry in matching:
        echo(_format_entry(entry))
    if not matching:
        echo(f"{folder}: no failed graphs, no stale locks")
    raise typer.Exit(1 if matching else 0)


@app.command()
def clean(
    recipe: RecipeArgument = None,
    cache: CacheOption = "",
    other_compilers: Annotated[
        str, typer.Option(metavar="VERSION", help="Also remove graphs of other compiler versions than this one.")
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed.")] = False,
) -> None:
    """Remove failed graphs and graphs under stale locks; keep compiled ones."""
    from lt_data.display.terminal import echo
    from lt_trainer_neuron.compile_cache import CompileCacheError, remove_entries

    folder, entries = _scan_cache(recipe, cache)
    if other_compilers and other_compilers not in {entry.compiler for entry in entries}:
        raise CompileCacheError(
            f"{folder} has no graphs of compiler {other_compilers}; list the versions with lt train neuron-cache list"
        )
    matching = [
        entry
        for entry in entries
        if entry.state in ("failed", "stale lock") or (other_compilers and entry.compiler != other_compilers)
    ]
    for entry in matching if dry_run else remove_entries(matching):
        echo(_format_entry(entry))
    verb = "would be removed" if dry_run else "removed"
    echo(f"{folder}: {len(matching)} {verb}, {len(entries) - len(matching)} kept")
