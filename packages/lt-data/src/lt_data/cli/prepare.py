"""Commands `prepare`, `merge`, `join` and `append`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from lt_data.sources.options import OnBad
    from lt_data.store.manifest import StoreManifest
    from lt_data.tokenizing.engine_selection import EngineRequest
    from lt_data.tokenizing.tokenizer import SpecialTokensAs

_SELECTION = "Document filter"
_SOURCES = "Sources"
_JOB = "Job"
_Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a token store at OUT.")]
_NoResume = Annotated[bool, typer.Option("--no-resume", help="Discard an interrupted run.", rich_help_panel=_JOB)]


def prepare(
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE...", help="Files, folders, fsspec URLs or datasets.")],
    tokenizer: Annotated[
        str,
        typer.Option(help="Folder with tokenizer.json, a model of the hub (org/name@revision), or a URL (s3://)."),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the new store.")],
    workers: Annotated[int, typer.Option(help="Worker processes; the result is the same.")] = 1,
    bos: Annotated[bool, typer.Option(help="Begin each document with the BOS id.")] = True,
    eos: Annotated[bool, typer.Option(help="End each document with the EOS id.")] = True,
    engine: Annotated[
        str, typer.Option(help="auto, hf or gigatoken; auto selects the faster one if its ids are equal.")
    ] = "auto",
    special_tokens_as: Annotated[str, typer.Option(help="Encode special token strings as text or ids.")] = "text",
    shard_tokens: Annotated[int, typer.Option(help="Target number of ids of a shard.")] = 2**27,
    overwrite: _Overwrite = False,
    suffix: Annotated[
        list[str] | None,
        typer.Option(
            "--suffix",
            help="Suffix of the files to read in a folder; repeatable.",
            show_default=False,
            rich_help_panel=_SOURCES,
        ),
    ] = None,
    text_field: Annotated[str, typer.Option(help="Field or column of the text.", rich_help_panel=_SOURCES)] = "text",
    tokens_field: Annotated[
        str | None, typer.Option(help="Field or column of ids, instead of text.", rich_help_panel=_SOURCES)
    ] = None,
    on_bad: Annotated[
        str,
        typer.Option(help="Bad input: error, or skip (left out and counted).", rich_help_panel=_SOURCES),
    ] = "error",
    max_document_bytes: Annotated[
        int,
        typer.Option(help="Bytes of the largest document; others are bad input.", rich_help_panel=_SOURCES),
    ] = 2**28,
    config: Annotated[
        str | None, typer.Option(help="Configuration of a hub dataset.", rich_help_panel=_SOURCES)
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Split of a dataset, such as train[:10%].", rich_help_panel=_SOURCES)
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Commit, branch or tag of a hub dataset.", rich_help_panel=_SOURCES)
    ] = None,
    streaming: Annotated[
        bool,
        typer.Option("--streaming", help="Read a hub dataset without storing it on disk.", rich_help_panel=_SOURCES),
    ] = False,
    min_chars: Annotated[
        int | None, typer.Option(help="Leave out texts of fewer characters.", rich_help_panel=_SELECTION)
    ] = None,
    max_chars: Annotated[
        int | None, typer.Option(help="Leave out texts of more characters.", rich_help_panel=_SELECTION)
    ] = None,
    min_tokens: Annotated[
        int | None,
        typer.Option(help="Leave out documents of fewer ids, BOS and EOS included.", rich_help_panel=_SELECTION),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Leave out documents of more ids, BOS and EOS included.", rich_help_panel=_SELECTION),
    ] = None,
    drop_duplicates: Annotated[
        bool,
        typer.Option("--drop-duplicates", help="Keep only the first of equal documents.", rich_help_panel=_SELECTION),
    ] = False,
    map_: Annotated[
        str | None,
        typer.Option(
            "--map",
            metavar="MODULE:FUNCTION",
            help="Function that gets each record (a dict) and returns a record, None or LeftOut.",
            rich_help_panel=_SELECTION,
        ),
    ] = None,
    map_args: Annotated[
        str | None,
        typer.Option(help="Its other arguments, as a JSON object.", rich_help_panel=_SELECTION),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD[:TYPE],...",
            help="Fields or columns to keep beside each document; string, int, float or bool.",
            show_default=False,
            rich_help_panel=_SOURCES,
        ),
    ] = None,
    part: Annotated[
        int,
        typer.Option(help="Part of the job to prepare, from 0; lt data merge joins the parts.", rich_help_panel=_JOB),
    ] = 0,
    num_parts: Annotated[
        int, typer.Option(help="Number of parts; each may be prepared on another machine.", rich_help_panel=_JOB)
    ] = 1,
    unit_bytes: Annotated[
        int | None,
        typer.Option(
            help="Prepare units of about so many source bytes and join them in OUT; the same command on other machines "
            "that see OUT helps.",
            show_default=False,
            rich_help_panel=_JOB,
        ),
    ] = None,
    ray: Annotated[
        str,
        typer.Option(
            help="With --unit-bytes: run the workers on a Ray cluster: auto, local or its address.",
            rich_help_panel=_JOB,
        ),
    ] = "",
    no_resume: _NoResume = False,
) -> None:
    """Read text, encode it and write a token store.

    Rerun the same command to resume after an interruption: it continues after the last finished shard.
    """
    import lt_data
    from lt_data import strict_json
    from lt_data.display.progress_bars import progress_bar
    from lt_data.display.terminal import echo, echo_error
    from lt_data.sources.options import SUFFIXES

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
            engine=cast("EngineRequest", engine),
            special_tokens_as=cast("SpecialTokensAs", special_tokens_as),
            workers=workers,
            shard_tokens=shard_tokens,
            selection=selection,
            record_map=map_,
            map_args=None if map_args is None else strict_json.load_object(map_args, "--map-args", "give an object"),
            keep=[field for fields in keep or () for field in fields.split(",")],
            options=lt_data.SourceOptions(
                suffixes=suffix or SUFFIXES,
                text_field=text_field,
                tokens_field=tokens_field,
                on_bad=cast("OnBad", on_bad),
                max_document_bytes=max_document_bytes,
                config=config,
                split=split,
                revision=revision,
                streaming=streaming,
            ),
            part_index=part,
            num_parts=num_parts,
            unit_bytes=unit_bytes,
            ray=ray,
            overwrite=overwrite,
            no_resume=no_resume,
            progress=report,
            notify=echo_error,
        )
    folder = lt_data.part_folder(out, part, num_parts) if num_parts > 1 else out
    for line in _summary_lines(manifest, folder):
        echo(line)


def merge(
    out: Annotated[Path, typer.Argument(help="Folder of the store; the parts are OUT.part-...")],
    units: Annotated[
        Path | None, typer.Option(help="Store that was made in units (--unit-bytes), to merge instead.")
    ] = None,
    overwrite: _Overwrite = False,
    no_resume: _NoResume = False,
) -> None:
    """Merge the parts of `prepare --part I --num-parts N`, or units, into one store; the parts are kept."""
    import lt_data
    from lt_data.display.progress_bars import progress_bar
    from lt_data.display.terminal import echo, echo_error

    with progress_bar("merge") as report:
        manifest = lt_data.merge(
            out, units=units, overwrite=overwrite, no_resume=no_resume, progress=report, notify=echo_error
        )
    for line in _summary_lines(manifest, out):
        echo(line)
    echo(f"merged from {manifest.merged_from} parts, which are no longer needed")


def append(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="Folder of a token store.")],
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE...", help="Files, folders, fsspec URLs or datasets.")],
    workers: Annotated[int, typer.Option(help="Worker processes; the result is the same.")] = 1,
    engine: Annotated[str, typer.Option(help="auto, hf or gigatoken.")] = "auto",
    suffix: Annotated[
        list[str] | None,
        typer.Option("--suffix", help="Suffix of the files to read in a folder; repeatable.", show_default=False),
    ] = None,
    text_field: Annotated[str, typer.Option(help="Field or column of the text.")] = "text",
    tokens_field: Annotated[str | None, typer.Option(help="Field or column of ids, instead of text.")] = None,
    on_bad: Annotated[str, typer.Option(help="Bad input: error, or skip (left out and counted).")] = "error",
    max_document_bytes: Annotated[int, typer.Option(help="Bytes of the largest document.")] = 2**28,
    config: Annotated[str | None, typer.Option(help="Configuration of a hub dataset.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of a dataset, such as train[:10%].")] = None,
    revision: Annotated[str | None, typer.Option(help="Commit, branch or tag of a hub dataset.")] = None,
    streaming: Annotated[
        bool, typer.Option("--streaming", help="Read a hub dataset without storing it on disk.")
    ] = False,
    no_resume: _NoResume = False,
) -> None:
    """Append documents to a store as a new generation, with its tokenizer and options; older ones stay.

    Rerun the same command to resume after an interruption.
    """
    import lt_data
    from lt_data.display.progress_bars import progress_bar
    from lt_data.display.terminal import echo, echo_error
    from lt_data.sources.options import SUFFIXES

    with progress_bar("append") as report:
        manifest = lt_data.append(
            store,
            sources,
            workers=workers,
            engine=cast("EngineRequest", engine),
            options=lt_data.SourceOptions(
                suffixes=suffix or SUFFIXES,
                text_field=text_field,
                tokens_field=tokens_field,
                on_bad=cast("OnBad", on_bad),
                max_document_bytes=max_document_bytes,
                config=config,
                split=split,
                revision=revision,
                streaming=streaming,
            ),
            no_resume=no_resume,
            progress=report,
            notify=echo_error,
        )
    for line in _summary_lines(manifest, store):
        echo(line)


def join(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the joined store; may contain the stores.")],
    stores: Annotated[list[Path], typer.Argument(metavar="STORE...", help="Token stores of one tokenizer, in order.")],
) -> None:
    """Put stores together without copying: OUT gets a manifest that names them."""
    import lt_data
    from lt_data.display.terminal import echo, echo_error

    manifest = lt_data.join(out, stores, notify=echo_error)
    for line in _summary_lines(manifest, out):
        echo(line)


def _summary_lines(manifest: "StoreManifest", folder: Path) -> list[str]:
    from lt_data.display.terminal import escape_controls

    lines = [f"{manifest.documents} documents, {manifest.tokens} tokens of {manifest.text_bytes} bytes in {folder}"]
    for reason, amount in manifest.left_out.items():
        tokens = f", {amount.tokens} tokens" if amount.tokens else ""
        lines.append(f"{amount.documents} documents left out: {reason} ({amount.text_bytes} bytes{tokens})")
    lines += [f"{count} skipped: {reason}" for reason, count in manifest.skipped.items()]
    encoding = "as text" if manifest.special_tokens_as == "text" else "as its special id"
    for string, count in manifest.special_strings.items():
        lines.append(f"special string {string} occurs {count} times in the text, encoded {encoding}")
    return [escape_controls(line, keep="") for line in lines]
