"""Printing, progress and model arguments shared by the commands."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lt_ckpt.terminal_text import echo_error, escape_controls
from lt_model.command_app import path_text

if TYPE_CHECKING:
    from lt_ckpt.source import Source

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A model in any format: a folder, a file, a run, or hf://org/name@revision.",
        parser=path_text,
    ),
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="A config.json, for formats without a model configuration.")
]
DtypeOption = Annotated[str, typer.Option("--dtype", help="Cast to f32, bf16, f16 or f64; as stored if not given.")]

ShardOption = Annotated[
    float, typer.Option("--max-shard-gb", help="Maximum GB of tensors per file (hf).", min=1e-9, max=1e6)
]
MasterOption = Annotated[
    bool, typer.Option("--master-weights", help="From NxD or lt: the optimizer's fp32 master weights as the weights.")
]
OverflowOption = Annotated[
    bool, typer.Option("--allow-overflow", help="Let values beyond the range of --dtype become infinite.")
]


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """Show bytes done, rate and time left on a terminal.

    A title may name a file: it becomes one line that changes no terminal.
    """
    from rich import progress as rich_progress
    from rich.console import Console

    columns = (
        rich_progress.TextColumn("{task.description}", markup=False),
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn(),
        rich_progress.TransferSpeedColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with rich_progress.Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        task = bars.add_task(escape_controls(title, keep=""), total=None)
        yield lambda done, total, _: bars.update(task, completed=done, total=total)


def open_model(path: str, config: Path | None, *, verify: bool = True, **nxd: Any) -> "Source":
    """Open a model in any format, with a progress bar while a hub model is downloaded or a run's newest one verified.

    Newer checkpoints of a run that are damaged are named on standard error.
    """
    from lt_ckpt.formats import open_source

    with progress_bar(f"opening {path}") as progress:
        source = open_source(path, config=config, verify=verify, progress=progress, **nxd)
    for sentence in source.fallbacks:
        echo_error(sentence)
    return source
