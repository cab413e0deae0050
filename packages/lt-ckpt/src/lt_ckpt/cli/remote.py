"""Commands `upload` and `download`."""

from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from lt_ckpt.cli.terminal import progress_bar
from lt_ckpt.terminal_text import echo


def upload(
    path: Annotated[Path, typer.Argument(help="A checkpoint, or any finished folder.")],
    url: Annotated[str, typer.Argument(help="s3://bucket/prefix of the folder to make, or hf://org/name[@branch].")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what differs there.")] = False,
    public: Annotated[bool, typer.Option("--public", help="A new hf:// repository is public, not private.")] = False,
) -> None:
    """Copy a folder to S3 or to a Hugging Face hub; what is there is not sent again."""
    from lt_ckpt.errors import CheckpointError

    if url.startswith("hf://"):
        from lt_ckpt.hub.upload import upload_to_hub

        report = upload_to_hub(path, url, overwrite=overwrite, public=public)
        moved = _describe("sent", len(report.uploaded), report.n_bytes, len(report.skipped))
        at = f", commit {report.commit}" if report.commit else ""
        echo(f"{path} uploaded to {report.address}: {moved}{at}, verified")
        return
    if public:
        raise CheckpointError(f"--public is for hf://, not for {url}; leave it out")
    transfer = _import_transfer()
    with progress_bar(f"uploading {path.name}") as progress:
        done = transfer.upload(path, url, overwrite=overwrite, progress=progress)
    echo(f"{path} uploaded to {done.url}: {_describe('sent', len(done.sent), done.n_bytes, len(done.kept))}")


def download(
    url: Annotated[str, typer.Argument(help="s3://bucket/prefix of a checkpoint, or of a folder of them.")],
    out: Annotated[Path, typer.Argument(help="The folder to make; with --latest the folder of checkpoints.")],
    latest: Annotated[bool, typer.Option("--latest", help="The newest valid checkpoint below the address.")] = False,
) -> None:
    """Download a checkpoint from S3 and verify it before it gets its name."""
    from lt_ckpt.errors import CheckpointError

    transfer = _import_transfer()
    with progress_bar("downloading") as progress:
        if latest:
            done, rejected = transfer.download_latest(url, out, progress=progress)
            for item in rejected:
                echo(f"skipped {item.url}: {item.reason}")
            if done is None:
                raise CheckpointError(f"{url}: no valid checkpoint below it")
        else:
            done = transfer.download(url, out, progress=progress)
    moved = _describe("received", len(done.fetched), done.n_bytes, done.files - len(done.fetched))
    echo(f"{url} downloaded to {done.path}: {moved}, verified")


def _import_transfer() -> ModuleType:
    from lt_ckpt.errors import CheckpointError

    try:
        from lt_ckpt.s3 import transfer
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] != "lt_data":
            raise
        raise CheckpointError("s3://: needs lt-data: pip install 'lt-ckpt[s3]'") from None
    return transfer


def _describe(word: str, n_files: int, n_bytes: int, n_kept: int) -> str:
    from lt_ckpt.summary import format_bytes

    return f"{n_files} files {word} ({format_bytes(n_bytes)}), {n_kept} already present"
