"""Commands `upload` and `download`."""

from pathlib import Path
from typing import Annotated

import typer

_Endpoint = Annotated[
    str | None, typer.Option(help="Endpoint of an S3-compatible store.", metavar="URL", show_default=False)
]
_Connections = Annotated[int, typer.Option(help="Concurrent requests.", min=1, max=256)]


def upload(
    folder: Annotated[Path, typer.Argument(help="A token store, or any folder of files.")],
    url: Annotated[str, typer.Argument(help="s3://bucket/prefix of the new folder.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace other content at URL.")] = False,
    endpoint_url: _Endpoint = None,
    connections: _Connections = 10,
) -> None:
    """Upload a folder to S3, without files that are there already; the manifest comes last.

    Rerun the same command to resume after an interruption. Credentials are those of boto3.
    """
    from lt_data.display.progress_bars import sequential_progress_bars
    from lt_data.display.terminal import echo
    from lt_data.remote.s3 import S3Options
    from lt_data.remote.sending import upload as send

    options = S3Options(endpoint_url=endpoint_url, connections=connections)
    with sequential_progress_bars() as bar:
        done = send(folder, url, overwrite=overwrite, options=options, comparing=bar("compare"), progress=bar("upload"))
    echo(f"{done.url}: {len(done.sent)} files uploaded ({done.n_bytes} bytes), {len(done.kept)} were there already")
    if done.others:
        echo(f"{done.others} other objects at that address were kept")


def download(
    url: Annotated[str, typer.Argument(help="s3://bucket/prefix of a store or folder.")],
    out: Annotated[Path, typer.Argument(help="New folder.")],
    endpoint_url: _Endpoint = None,
    connections: _Connections = 10,
) -> None:
    """Download a store or another uploaded folder from S3, and verify every file.

    Rerun the same command to resume after an interruption.
    """
    from lt_data.display.progress_bars import sequential_progress_bars
    from lt_data.display.terminal import echo
    from lt_data.remote.fetching import download as fetch
    from lt_data.remote.s3 import S3Options

    options = S3Options(endpoint_url=endpoint_url, connections=connections)
    with sequential_progress_bars() as bar:
        done = fetch(url, out, options=options, progress=bar("download"), checking=bar("verify"))
    echo(f"{done.path}: {done.files} files, {done.n_bytes} bytes, verified; {done.fetched} bytes downloaded")
