"""The commands `upload` and `download`."""

from pathlib import Path
from typing import Annotated

import typer

_Endpoint = Annotated[
    str | None, typer.Option(help="Address of another store than Amazon's.", metavar="URL", show_default=False)
]
_Connections = Annotated[int, typer.Option(help="Requests at a time.", min=1, max=256)]


def upload(
    folder: Annotated[Path, typer.Argument(help="A token store, or any folder of files.")],
    url: Annotated[str, typer.Argument(help="s3://bucket/prefix of the folder to make.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace something else that is there.")] = False,
    endpoint_url: _Endpoint = None,
    connections: _Connections = 10,
) -> None:
    """Copy a folder to S3; what is there already is not sent again, and the manifest comes last.

    Run the same command again after an interruption: it goes on where it was. Credentials are those that boto3 finds.
    """
    from lt_data.remote.s3 import S3Options
    from lt_data.remote.sending import upload as send
    from lt_data.showing.bars import stage_bars
    from lt_data.showing.terminal import say

    options = S3Options(endpoint_url=endpoint_url, connections=connections)
    with stage_bars() as bar:
        done = send(folder, url, overwrite=overwrite, options=options, comparing=bar("compare"), progress=bar("upload"))
    say(f"{folder} is at {done.url}: {len(done.sent)} files sent ({done.n_bytes} bytes), {len(done.kept)} were there")
    if done.taken_up:
        say(f"of the bytes sent, {done.taken_up} were there from an upload that was cut off")
    if done.others:
        say(f"{done.others} other objects lie below that address and were left")


def download(
    url: Annotated[str, typer.Argument(help="s3://bucket/prefix of a store or folder.")],
    out: Annotated[Path, typer.Argument(help="The folder to make.")],
    endpoint_url: _Endpoint = None,
    connections: _Connections = 10,
) -> None:
    """Bring a store, or another folder that was uploaded, from S3; every file is verified before it gets its place.

    Run the same command again after an interruption: it goes on where it was.
    """
    from lt_data.remote.fetching import download as fetch
    from lt_data.remote.s3 import S3Options
    from lt_data.showing.bars import stage_bars
    from lt_data.showing.terminal import say

    options = S3Options(endpoint_url=endpoint_url, connections=connections)
    with stage_bars() as bar:
        done = fetch(url, out, options=options, progress=bar("download"), checking=bar("verify"))
    say(f"{url} is at {done.path}: {done.files} files, {done.n_bytes} bytes, verified; {done.fetched} were fetched")
