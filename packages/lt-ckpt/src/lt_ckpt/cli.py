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


def _say(text: str) -> None:
    r"""Prints on standard output; what its encoding cannot express is written as an escape, such as `\u6771`."""
    # `typer.echo` would stop with an error there, or write UTF-8 where ASCII was asked for.
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    sys.stdout.flush()


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
                sys.stderr.write(f"{title}: {size(done)} of {size(total)}\n")

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
        sys.stderr.write(f"passed over {item.path}: {item.reason}\n")
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
    _say(json.dumps(summary.to_dict(), indent=2) if as_json else "\n".join(summary.lines()))


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
            _say(f"broken: {problem}")
        for name in report.extra:
            _say(f"extra: {folder / name} is not part of the checkpoint")
        bad += not report.ok
        if report.ok:
            _say(f"ok: {folder}: {report.n_files} files, {size(report.n_bytes)}")
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
    _say(f"exported step {checkpoint.step} to {made}")
