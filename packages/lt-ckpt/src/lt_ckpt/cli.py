"""The `lt-ckpt` command (also `lt ckpt`): inspect, verify, export.

Only the command line and its printing live here; the work is in the modules, which are imported when a command runs.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from lt_ckpt.checkpoint import Checkpoint

app = typer.Typer(
    name="lt-ckpt",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Inspect, verify and export checkpoints.",
)
PathArgument = Annotated[
    Path, typer.Argument(help="A checkpoint, or a folder of checkpoints or a run: its newest valid one.")
]


@contextmanager
def _progress(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """Shows bytes done, rate and time left: a bar on a terminal, else a line every ten seconds."""
    if not sys.stderr.isatty():
        from lt_ckpt.summary import size

        last = time.monotonic()

        def line(done: int, total: int, unit: str) -> None:
            nonlocal last
            if time.monotonic() - last >= 10:
                last = time.monotonic()
                typer.echo(f"{title}: {size(done)} of {size(total)}", err=True)

        yield line
        return
    from rich import progress as rich_progress
    from rich.console import Console

    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn(),
        rich_progress.TransferSpeedColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    with rich_progress.Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(title, total=None)
        yield lambda done, total, _: bars.update(task, completed=done, total=total)


def _resolve(path: Path) -> "Checkpoint":
    from lt_ckpt.discover import resolve

    found, rejected = resolve(path)
    for item in rejected:
        typer.echo(f"passed over {item.path}: {item.reason}", err=True)
    return found


@app.command()
def inspect(
    path: PathArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything, with the recipe, as JSON.")] = False,
) -> None:
    """Show what a checkpoint holds."""
    import json

    from lt_ckpt.summary import summarize

    summary = summarize(_resolve(path))
    typer.echo(json.dumps(summary.to_dict(), indent=2) if as_json else "\n".join(summary.lines()))


@app.command()
def verify(
    path: Annotated[Path, typer.Argument(help="A checkpoint, or a folder of checkpoints or a run: all of them.")],
) -> None:
    """Check every byte against the hashes taken when it was written."""
    from lt_ckpt.discover import checkpoint_root, list_steps
    from lt_ckpt.errors import CheckpointError
    from lt_ckpt.integrity import verify as verify_checkpoint
    from lt_ckpt.summary import size

    bad = 0
    paths = [found for _, found in list_steps(checkpoint_root(path))] or [path]
    for folder in paths:
        with _progress(f"verifying {folder.name}") as progress:
            report = verify_checkpoint(folder, progress=progress)
        for problem in report.problems:
            typer.echo(f"broken: {problem}")
        for name in report.extra:
            typer.echo(f"extra: {folder / name} is not part of the checkpoint")
        bad += not report.ok
        if report.ok:
            typer.echo(f"ok: {folder}: {report.n_files} files, {size(report.n_bytes)}")
    if bad:
        raise CheckpointError(f"{path}: {bad} of {len(paths)} checkpoints did not verify")


@app.command()
def export(
    path: PathArgument,
    out: Annotated[Path, typer.Option("--out", help="Folder to make.")],
    dtype: Annotated[str, typer.Option("--dtype", help="Cast to f32, bf16, f16 or f64; as stored if not given.")] = "",
    max_shard_gb: Annotated[float, typer.Option("--max-shard-gb", help="Most GB of tensors per file.")] = 5.0,
) -> None:
    """Write the weights as a Hugging Face folder."""
    from lt_ckpt.dtypes import parse_float
    from lt_ckpt.export import export_hf

    checkpoint = _resolve(path)
    with _progress("exporting") as progress:
        made = export_hf(
            checkpoint,
            out,
            dtype=parse_float(dtype) if dtype else None,
            max_shard_bytes=int(max_shard_gb * 1e9),
            progress=progress,
        )
    typer.echo(f"exported step {checkpoint.step} to {made}")
