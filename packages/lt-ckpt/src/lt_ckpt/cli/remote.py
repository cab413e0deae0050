"""Commands `upload` and `download`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from lt_ckpt.cli.terminal import progress_bar
from lt_ckpt.terminal_text import echo


def upload(
    path: Annotated[Path, typer.Argument(help="A checkpoint, or any finished folder.")],
    url: Annotated[str, typer.Argument(help="s3://bucket/prefix of the folder to make, or hf://org/name[@branch].")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what differs there.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell what would be sent, and send nothing.")] = False,
    public: Annotated[bool, typer.Option("--public", help="A new hf:// repository is public, not private.")] = False,
) -> None:
    """Copy a folder to S3, or to a Hugging Face hub as one commit; what is there is not sent again."""
    from lt_ckpt.errors import CheckpointError

    if url.startswith("hf://"):
        _upload_to_hub(path, url, overwrite=overwrite, dry_run=dry_run, public=public)
        return
    if public:
        raise CheckpointError(f"--public: is for new repositories at hf://, not for {url}; leave it out")
    from lt_ckpt.s3.upload import upload

    with progress_bar(f"uploading {path.name}") as progress:
        report = upload(path, url, overwrite=overwrite, dry_run=dry_run, progress=progress)
    if dry_run:
        _echo_plan(report.url, report.uploaded, report.skipped, report.n_bytes)
        return
    moved = _format_transfer("sent", report.uploaded, report.skipped, report.n_bytes, report.seconds)
    echo(f"{path} uploaded to {report.url}: {moved}")


def _upload_to_hub(path: Path, url: str, *, overwrite: bool, dry_run: bool, public: bool) -> None:
    from lt_ckpt.hub.upload import upload_to_hub

    report = upload_to_hub(path, url, overwrite=overwrite, public=public, dry_run=dry_run)
    if dry_run:
        _echo_plan(str(report.address), report.uploaded, report.skipped, report.n_bytes)
        return
    moved = _format_transfer("sent", report.uploaded, report.skipped, report.n_bytes, 0.0)
    at = f", commit {report.commit}" if report.commit else ""
    echo(f"{path} uploaded to {report.address}: {moved}{at}, verified")


def _echo_plan(address: str, missing: Sequence[str], present: Sequence[str], n_bytes: int) -> None:
    from lt_ckpt.summary import format_bytes

    for name in missing:
        echo(f"would send {name}")
    echo(f"{address}: {len(missing)} files to send ({format_bytes(n_bytes)}), {len(present)} already present")


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
