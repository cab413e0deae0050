"""Commands `upload` and `download`."""

from pathlib import Path
from typing import Annotated

import typer


def upload(
    folder: Annotated[Path, typer.Argument(help="A token store, or any folder of files.")],
    url: Annotated[str, typer.Argument(help="s3://bucket/prefix of the new folder.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace other content at URL.")] = False,
) -> None:
    """Upload a folder to S3, without files that are there already; the manifest comes last.

    Rerun the same command to resume after an interruption. Credentials, region and endpoint are those of boto3.
    """
    from lt_data.display.progress_bars import progress_bar
    from lt_data.display.terminal import echo
    from lt_data.remote.upload import upload as send

    with progress_bar("upload") as progress:
        done = send(folder, url, overwrite=overwrite, progress=progress)
    echo(f"{done.url}: {len(done.sent)} files uploaded ({done.n_bytes} bytes), {len(done.kept)} were there already")


def download(
    url: Annotated[str, typer.Argument(help="s3://bucket/prefix of a store or folder.")],
    out: Annotated[Path, typer.Argument(help="New folder.")],
) -> None:
    """Download a store or another uploaded folder from S3, and verify every file.

    Rerun the same command to resume after an interruption.
    """
    from lt_data.display.progress_bars import progress_bar
    from lt_data.display.terminal import echo
    from lt_data.remote.download import download as fetch

    with progress_bar("download") as progress:
        done = fetch(url, out, progress=progress)
    echo(f"{done.path}: {done.files} files, {done.n_bytes} bytes, verified; {len(done.fetched)} files downloaded")
