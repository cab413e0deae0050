"""`lt train neuron-cache`."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lt_model.command_app import CommandApp, path_text

if TYPE_CHECKING:
    from lt_trainer_neuron.compile_cache import CompileCacheEntry

app = CommandApp(
    help="Inspect the Neuron compiler's cache: list graphs, find failed ones, remove what blocks a run.",
)

RecipeArgument = Annotated[Path | None, typer.Argument(metavar="[RUN.toml]", help="Recipe that names the cache.")]
CacheOption = Annotated[
    str,
    typer.Option(
        metavar="FOLDER",
        help="Cache folder; by default the recipe's, the environment's or the compiler's.",
        parser=path_text,
    ),
]
BLOCKING = ("failed", "stale lock")
MIB = 2**20


def _scan_cache(recipe: Path | None, cache: str) -> tuple[Path, list[CompileCacheEntry]]:
    from lt_trainer.config.recipe import load
    from lt_trainer_neuron.compile_cache import cache_url, local_cache_folder, scan_cache
    from lt_trainer_neuron.environment import neuron_env

    environ = os.environ | (neuron_env(load(recipe).recipe, os.environ) if recipe else {})
    folder = local_cache_folder(cache or cache_url(environ))
    return folder, scan_cache(folder)


def _format_entry(entry: CompileCacheEntry) -> str:
    message = f"  {entry.error_message}" if entry.error_message else ""
    return f"{entry.state:<12} {entry.n_bytes / MIB:>9.1f} MiB  {entry.compiler}  {entry.path.name}{message}"


@app.command("list")
def list_entries(
    recipe: RecipeArgument = None,
    cache: CacheOption = "",
    failed: Annotated[
        bool, typer.Option("--failed", help="Only failed graphs and stale locks; exit code 1 if there are any.")
    ] = False,
) -> None:
    """List the graphs with their state and size."""
    from lt_data.display.terminal import echo

    folder, entries = _scan_cache(recipe, cache)
    listed = [entry for entry in entries if not failed or entry.state in BLOCKING]
    for entry in listed:
        echo(_format_entry(entry))
    states = ", ".join(f"{count} {state}" for state, count in sorted(Counter(e.state for e in listed).items()))
    echo(f"{folder}: {states or 'none'}, {sum(entry.n_bytes for entry in listed) / MIB:.1f} MiB")
    if failed and listed:
        raise typer.Exit(1)


@app.command()
def clean(
    recipe: RecipeArgument = None,
    cache: CacheOption = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed.")] = False,
) -> None:
    """Remove failed graphs and graphs under stale locks; keep compiled ones."""
    from lt_data.display.terminal import echo
    from lt_trainer_neuron.compile_cache import remove_entries

    folder, entries = _scan_cache(recipe, cache)
    matching = [entry for entry in entries if entry.state in BLOCKING]
    if not dry_run:
        remove_entries(matching)
    for entry in matching:
        echo(_format_entry(entry))
    verb = "would be removed" if dry_run else "removed"
    echo(f"{folder}: {len(matching)} {verb}, {len(entries) - len(matching)} kept")
