"""The commands `prepare` and `merge`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from lt_data.sources.options import OnBad
    from lt_data.store.manifest import Manifest
    from lt_data.tokenizing.engines import Asked
    from lt_data.tokenizing.tokenizer import Specials

_SELECTION = "Which documents"
_SOURCES = "Sources"
_JOB = "The job"
_Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a token store at OUT.")]
_Fresh = Annotated[
    bool, typer.Option("--fresh", help="Throw away what a run left that was cut off.", rich_help_panel=_JOB)
]


def prepare(
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE...", help="Files, folders, fsspec URLs or datasets.")],
    tokenizer: Annotated[
        str,
        typer.Option(
            help="Folder that holds tokenizer.json, a model of the hub (org/name@revision), or a URL (s3://)."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the store to make.")],
    workers: Annotated[int, typer.Option(help="Processes that encode; the result is the same.")] = 1,
    bos: Annotated[bool, typer.Option(help="Begin each document with the BOS id.")] = True,
    eos: Annotated[bool, typer.Option(help="End each document with the EOS id.")] = True,
    engine: Annotated[
        str, typer.Option(help="auto, hf or gigatoken; auto takes the faster if its ids agree.")
    ] = "auto",
    specials: Annotated[str, typer.Option(help="A special token's string in a text: text, or ids.")] = "text",
    shard_tokens: Annotated[int, typer.Option(help="About how many ids go into one shard.")] = 2**27,
    overwrite: _Overwrite = False,
    suffix: Annotated[
        list[str] | None,
        typer.Option(
            "--suffix",
            help="Which files of a folder are read; may be given again.",
            show_default=False,
            rich_help_panel=_SOURCES,
        ),
    ] = None,
    text_field: Annotated[
        str, typer.Option(help="Field or column that holds the text.", rich_help_panel=_SOURCES)
    ] = "text",
    tokens_field: Annotated[
        str | None, typer.Option(help="Field or column that holds ready-made ids.", rich_help_panel=_SOURCES)
    ] = None,
    on_bad: Annotated[
        str,
        typer.Option(help="What cannot be used: error, or skip (left out and counted).", rich_help_panel=_SOURCES),
    ] = "error",
    config: Annotated[
        str | None, typer.Option(help="Configuration of a dataset of the hub.", rich_help_panel=_SOURCES)
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Split of a dataset, such as train[:10%].", rich_help_panel=_SOURCES)
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Commit, branch or tag of a dataset of the hub.", rich_help_panel=_SOURCES)
    ] = None,
    streaming: Annotated[
        bool,
        typer.Option(
            "--streaming", help="Read a dataset of the hub without keeping it on the disk.", rich_help_panel=_SOURCES
        ),
    ] = False,
    min_chars: Annotated[
        int | None, typer.Option(help="Leave out texts of fewer characters.", rich_help_panel=_SELECTION)
    ] = None,
    max_chars: Annotated[
        int | None, typer.Option(help="Leave out texts of more characters.", rich_help_panel=_SELECTION)
    ] = None,
    min_tokens: Annotated[
        int | None, typer.Option(help="Leave out documents of fewer ids (with BOS, EOS).", rich_help_panel=_SELECTION)
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Leave out documents of more ids (with BOS, EOS).", rich_help_panel=_SELECTION)
    ] = None,
    drop_duplicates: Annotated[
        bool,
        typer.Option("--drop-duplicates", help="Of equal documents take the first only.", rich_help_panel=_SELECTION),
    ] = False,
    rank: Annotated[
        int, typer.Option(help="Which part of the job, from 0; lt data merge joins them.", rich_help_panel=_JOB)
    ] = 0,
    world: Annotated[
        int, typer.Option(help="Parts of the job; each may be made on another machine.", rich_help_panel=_JOB)
    ] = 1,
    fresh: _Fresh = False,
) -> None:
    """Read text, encode it and write a token store.

    Run the same command again after it was cut off: it goes on after the last finished shard.
    """
    import lt_data
    from lt_data.showing.bars import progress_bar
    from lt_data.showing.terminal import say

    selection = lt_data.Selection(
        min_characters=min_chars,
        max_characters=max_chars,
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        drop_duplicates=drop_duplicates,
    )
    with progress_bar("prepare") as report:
        manifest = lt_data.prepare(
            sources,
            tokenizer=tokenizer,
            out=out,
            bos=bos,
            eos=eos,
            engine=cast("Asked", engine),
            specials=cast("Specials", specials),
            workers=workers,
            shard_tokens=shard_tokens,
            selection=selection,
            suffixes=suffix,
            text_field=text_field,
            tokens_field=tokens_field,
            on_bad=cast("OnBad", on_bad),
            config=config,
            split=split,
            revision=revision,
            streaming=streaming,
            rank=rank,
            world=world,
            overwrite=overwrite,
            fresh=fresh,
            progress=report,
            notice=_note,
        )
    where = lt_data.part_folder(out, rank, world) if world > 1 else out
    for line in _summary(manifest, where):
        say(line)


def merge(
    out: Annotated[Path, typer.Argument(help="The store that the parts OUT.part-... were made for.")],
    overwrite: _Overwrite = False,
    fresh: _Fresh = False,
) -> None:
    """Join the parts that `prepare --rank I --world N` made into one store; the parts stay."""
    import lt_data
    from lt_data.showing.bars import progress_bar
    from lt_data.showing.terminal import say

    with progress_bar("merge") as report:
        manifest = lt_data.merge(out, overwrite=overwrite, fresh=fresh, progress=report, notice=_note)
    for line in _summary(manifest, out):
        say(line)
    say(f"merged from {manifest.merged_from} parts, which are not needed any more")


def _note(message: str) -> None:
    sys.stderr.write(f"{message}\n")


def _summary(manifest: "Manifest", where: Path) -> list[str]:
    lines = [f"{manifest.documents} documents, {manifest.tokens} tokens of {manifest.text_bytes} bytes in {where}"]
    for reason, amount in manifest.left_out.items():
        tokens = f", {amount.tokens} tokens" if amount.tokens else ""
        lines.append(f"{amount.documents} documents left out: {reason} ({amount.text_bytes} bytes{tokens})")
    for reason, records in manifest.skipped.items():
        lines.append(f"{records} records skipped: {reason}")
    kept = "it was kept as text" if manifest.specials == "text" else "it became the special id"
    for string, count in manifest.special_strings.items():
        lines.append(f"special string {string} stands {count} times in the text; {kept}")
    return lines
