"""Commands `upload` and `download`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from lt_ckpt.cli.terminal import progress_bar
from lt_ckpt.terminal_text import echo


def upload(
    path: Annotated[Path, typer.Argument(help="A checkpoint, or any finished folder.")],
    url: Annotated[str, typer.Argument(help="s3://bucket/prefix of the folder to make.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a different folder there.")] = False,
) -> None:
    """Copy a folder to S3; objects already there are not sent again, and COMMIT comes last."""
    from lt_ckpt.s3.upload import upload

    with progress_bar(f"uploading {path.name}") as progress:
        report = upload(path, url, overwrite=overwrite, progress=progress)
    moved = _format_transfer("sent", report.uploaded, report.skipped, report.n_bytes, report.seconds)
    echo(f"{path} uploaded to {report.url}: {moved}")


def download(
    url: Annotated[str, typer.Argument(help="s3://bucket/prefix of a checkpoint, or of a folder of them.")],
    out: Annotated[Path, typer.Argument(help="The folder to make; with --latest the folder of checkpoints.")],
    latest: Annotated[bool, typer.Option("--latest", help="The newest valid checkpoint below the address.")] = False,
) -> None:
    """Download a checkpoint from S3 and verify it before it gets its name."""
    from lt_ckpt.errors import CheckpointError
    from lt_ckpt.s3.download import download, download_latest

    with progress_bar("downloading") as progress:
        if latest:
            report, rejected = download_latest(url, out, progress=progress)
            for item in rejected:
                echo(f"skipped {item.url}: {item.reason}")
            if report is None:
                raise CheckpointError(f"{url}: no valid checkpoint below it")
        else:
            report = download(url, out, progress=progress)
    moved = _format_transfer("received", report.downloaded, report.skipped, report.n_bytes, report.seconds)
    echo(f"{report.url} downloaded to {report.path}: {moved}, verified")


def _format_transfer(word: str, moved: Sequence[str], skipped: Sequence[str], n_bytes: int, seconds: float) -> str:
    """Format the number of moved files and their rate, and the number already present."""
    from lt_ckpt.summary import format_bytes

    rate = f" at {format_bytes(round(n_bytes / seconds))}/s" if n_bytes and seconds else ""
    present = f", {len(skipped)} already present" if skipped else ""
    return f"{len(moved)} files {word} ({format_bytes(n_bytes)}{rate}){present}"
