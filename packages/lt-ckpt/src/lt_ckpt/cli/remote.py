"""The commands `upload` and `download`."""

from pathlib import Path
from typing import Annotated

import typer

from lt_ckpt.cli.terminal import progress_bar, say


def upload(
    path: Annotated[Path, typer.Argument(help="A checkpoint, or any finished folder.")],
    url: Annotated[str, typer.Argument(help="s3://bucket/prefix of the folder to make.")],
) -> None:
    """Copy a folder to S3; what is there already is not sent again, and COMMIT comes last."""
    from lt_ckpt.s3.sending import upload as send

    with progress_bar(f"uploading {path.name}") as progress:
        send(path, url, progress=progress)
    say(f"{path} uploaded to {url}")


def download(
    url: Annotated[str, typer.Argument(help="s3://bucket/prefix of a checkpoint, or of a folder of them.")],
    out: Annotated[Path, typer.Argument(help="The folder to make; with --latest the folder of checkpoints.")],
    latest: Annotated[bool, typer.Option("--latest", help="The newest good checkpoint below the address.")] = False,
) -> None:
    """Bring a checkpoint back from S3, verified before it gets its name."""
    from lt_ckpt.errors import CheckpointError
    from lt_ckpt.s3.fetching import download as fetch
    from lt_ckpt.s3.fetching import download_latest

    with progress_bar("downloading") as progress:
        if latest:
            made, rejected = download_latest(url, out, progress=progress)
            for item in rejected:
                say(f"passed over {item.url}: {item.reason}")
            if made is None:
                raise CheckpointError(f"{url}: no checkpoint below it is whole")
        else:
            made = fetch(url, out, progress=progress)
    say(f"{url} downloaded to {made}")
