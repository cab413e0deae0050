"""Printing, progress and model arguments shared by the commands."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lt_ckpt.terminal_text import echo_error, escape_controls

if TYPE_CHECKING:
    from lt_ckpt.source import Source

ModelArgument = Annotated[
    str, typer.Argument(help="A model in any format: a folder, a file, a run, or hf://org/name@revision.")
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="A config.json, for formats without a model configuration.")
]
DtypeOption = Annotated[str, typer.Option("--dtype", help="Cast to f32, bf16, f16 or f64; as stored if not given.")]

MAX_SHARD_GB = 1e6
"""Largest file that can be asked for, in GB; more than any file system holds in one."""

OverflowOption = Annotated[
    bool, typer.Option("--allow-overflow", help="Let values beyond the range of --dtype become infinite.")
]

FLAGS = {
    **{name: f"--{name}" for name in ("tp", "pp", "tag", "layout", "xser")},
    "virtual_pp": "--virtual-pp",
    "kv_size_multiplier": "--kv-size-multiplier",
    "qkv_linear": "--qkv-linear",
    "coalesce_qkv": "--coalesce-qkv",
    "head_order": "--head-order",
    "max_shard_bytes": "--max-shard-gb",
}
"""Option of the library → flag."""


@contextmanager
def name_flags() -> Iterator[None]:
    """Name options as on the command line in the errors of a block."""
    from lt_ckpt.errors import CheckpointError, OptionError

    try:
        yield
    except OptionError as exc:
        raise CheckpointError(exc.message(FLAGS)) from exc


def parse_shard_bytes(max_shard_gb: float) -> int:
    """Return the bytes of `--max-shard-gb`; raise a CheckpointError if they are not a positive number."""
    from lt_ckpt.errors import CheckpointError

    if not 1e-9 <= max_shard_gb <= MAX_SHARD_GB:
        raise CheckpointError(
            f"--max-shard-gb {max_shard_gb}: must be a number above 0 and at most {MAX_SHARD_GB:g}, for example 5"
        )
    return round(max_shard_gb * 1e9)


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """Show bytes done, rate and time left: a bar on a terminal, else a line every ten seconds.

    A title may name a file: it becomes one line that changes no terminal.
    """
    title = escape_controls(title, keep="")
    if not sys.stderr.isatty():
        from lt_ckpt.summary import format_bytes

        start = last = time.monotonic()

        def line(done: int, total: int, unit: str) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= 10:
                last = now
                rate = format_bytes(round(done / (now - start)))
                sys.stderr.write(f"{title}: {format_bytes(done)} of {format_bytes(total)}, {rate}/s\n")

        yield line
        return
    from rich import progress as rich_progress
    from rich.console import Console

    columns = (
        rich_progress.TextColumn("{task.description}", markup=False),
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn(),
        rich_progress.TransferSpeedColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    with rich_progress.Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(title, total=None)
        yield lambda done, total, _: bars.update(task, completed=done, total=total)


def open_with_optimizer(path: str, config: Path | None) -> "Source":
    """Open a model like `open_model`, with its optimizer's state if it has one."""
    from lt_ckpt.formats import HUB, detect_format

    is_nxd = not path.startswith(HUB) and detect_format(Path(path)) == "nxd"
    return open_model(path, config, **({"optimizer": None} if is_nxd else {}))


def open_model(path: str, config: Path | None, **nxd: Any) -> "Source":
    """Open a model in any format; a hub model is downloaded with a progress bar.

    Newer checkpoints of a run that are damaged are named on standard error.
    """
    from lt_ckpt.formats import HUB, open_source

    if not path.startswith(HUB):
        source = open_source(path, config=config, **nxd)
        for sentence in source.fallbacks:
            echo_error(sentence)
        return source
    with progress_bar(f"downloading {path}") as progress:
        return open_source(path, config=config, progress=progress, **nxd)
