"""The commands `upload` and `download`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from lt_ckpt.cli.terminal import progress_bar, say


def upload(
    path: Annotated[Path, typer.Argument(help="A checkpoint, or any finished folder.")],
    url: Annotated[str, typer.Argument(help="s3://bucket/prefix of the folder to make.")],
    replace: Annotated[bool, typer.Option("--replace", help="Let something else that stands there give way.")] = False,
) -> None:
    """Copy a folder to S3; what is there already is not sent again, and COMMIT comes last."""
    from lt_ckpt.s3.sending import upload as send

    with progress_bar(f"uploading {path.name}") as progress:
        done = send(path, url, replace=replace, progress=progress)
    say(f"{path} uploaded to {done.url}: {_moved('sent', done.sent, done.kept, done.n_bytes, done.seconds)}")


def download(
    url: Annotated[str, typer.Argument(help="s3://bucket/prefix of a checkpoint, or of a folder of them.")],
    out: Annotated[Path, typer.Argument(help="The folder to make; with --latest the folder of checkpoints.")],
    latest: Annotated[bool, typer.Option("--latest", help="The newest good checkpoint below the address.")] = False,
) -> None:
    """Bring a checkpoint back from S3, verified before it gets its name."""
    from lt_ckpt.errors import CheckpointError
    from lt_ckpt.s3.fetching import bring, bring_latest

    with progress_bar("downloading") as progress:
        if latest:
            done, rejected = bring_latest(url, out, progress=progress)
            for item in rejected:
                say(f"passed over {item.url}: {item.reason}")
            if done is None:
                raise CheckpointError(f"{url}: no checkpoint below it is whole")
        else:
            done = bring(url, out, progress=progress)
    moved = _moved("fetched", done.fetched, done.kept, done.n_bytes, done.seconds)
    say(f"{done.url} downloaded to {done.path}: {moved}, verified")


def _moved(word: str, moved: Sequence[str], kept: Sequence[str], n_bytes: int, seconds: float) -> str:
    """Says how many files went how fast, and how many were there already."""
    from lt_ckpt.summary import size

    rate = f" at {size(round(n_bytes / seconds))}/s" if n_bytes and seconds else ""
    there = f", {len(kept)} there already" if kept else ""
    return f"{len(moved)} files {word} ({size(n_bytes)}{rate}){there}"
