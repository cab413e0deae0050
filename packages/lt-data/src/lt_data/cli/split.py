"""Command `split`."""

from pathlib import Path
from typing import Annotated

import typer


def split(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="Folder of a token store; it is not changed.")],
    holdout: Annotated[str, typer.Option(metavar="SHARE", help="Share of documents to hold out, such as 0.1%.")],
    train: Annotated[Path, typer.Option(help="Folder of the new store of the other documents.")],
    validation: Annotated[Path, typer.Option(help="Folder of the new store of the held-out documents.")],
) -> None:
    """Hold out documents of a store for validation, by the hash of each document."""
    import lt_data
    from lt_data.display.progress_bars import progress_bar
    from lt_data.display.terminal import echo, echo_error

    with progress_bar("split") as report:
        manifests = lt_data.split(
            lt_data.TokenStore(store),
            holdout=holdout,
            train=train,
            validation=validation,
            progress=report,
            notify=echo_error,
        )
    for manifest, folder in zip(manifests, (train, validation), strict=True):
        echo(f"{manifest.documents} documents, {manifest.tokens} tokens in {folder}")
