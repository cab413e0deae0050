"""Commands `prepare`, `join` and `append`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from lt_data.cli.command_app import SourcesArgument, path_text
from lt_data.sources.options import DEFAULT_MAX_DOCUMENT_BYTES

if TYPE_CHECKING:
    from lt_data.sources.options import SourceOptions
    from lt_data.store.manifest import StoreManifest
    from lt_data.tokenizing.engine import EngineRequest
    from lt_data.tokenizing.tokenizer import SpecialTokensAs


def _option(panel: str, help_text: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=panel, **settings)


_SELECTION, _SOURCES, _JOB = "Document filter", "Sources", "Job"
_Engine = Annotated[str, typer.Option(help="auto, hf or gigatoken; auto selects the faster one if its ids are equal.")]
_Workers = Annotated[int, _option(_JOB, "Worker processes; the result is the same.")]
_UnitBytes = Annotated[
    int | None,
    _option(
        _JOB,
        "Source bytes that one process prepares at a time; a kill costs no more.",
        show_default="a 32nd of the sources, 8 MiB to 1 GiB",
    ),
]
_Suffix = Annotated[
    list[str] | None,
    _option(_SOURCES, "Suffix of the files to read in a folder; repeatable.", "--suffix", show_default=False),
]
_TextField = Annotated[str, _option(_SOURCES, "Field or column of the text.")]
_TokensField = Annotated[str | None, _option(_SOURCES, "Field or column of ids, instead of text.")]
_OnBad = Annotated[str, _option(_SOURCES, "Bad input: error, or skip (left out and counted).")]
_MaxBytes = Annotated[int, _option(_SOURCES, "Bytes of the largest document; others are bad input.")]
_Config = Annotated[str | None, _option(_SOURCES, "Configuration of a hub dataset.")]
_Split = Annotated[str | None, _option(_SOURCES, "Split of a dataset, such as train[:10%].")]
_Revision = Annotated[str | None, _option(_SOURCES, "Commit, branch or tag of a hub dataset.")]
_Streaming = Annotated[bool, _option(_SOURCES, "Read a hub dataset without storing it on disk.", "--streaming")]


def prepare(
    sources: SourcesArgument,
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="TOKENIZER",
            help="Folder with tokenizer.json, a model of the hub (org/name@revision), or a URL (s3://).",
            parser=path_text,
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the new store.")],
    bos: Annotated[bool, typer.Option(help="Begin each document with the BOS id.")] = True,
    eos: Annotated[bool, typer.Option(help="End each document with the EOS id.")] = True,
    engine: _Engine = "auto",
    special_tokens_as: Annotated[str, typer.Option(help="Encode special token strings as text or ids.")] = "text",
    shard_tokens: Annotated[int, typer.Option(help="Target number of ids of a shard.")] = 2**27,
    suffix: _Suffix = None,
    text_field: _TextField = "text",
    tokens_field: _TokensField = None,
    on_bad: _OnBad = "error",
    max_document_bytes: _MaxBytes = DEFAULT_MAX_DOCUMENT_BYTES,
    config: _Config = None,
    split: _Split = None,
    revision: _Revision = None,
    streaming: _Streaming = False,
    keep: Annotated[
        list[str] | None,
        _option(
            _SOURCES,
            "Fields or columns to keep beside each document; string, int, float or bool.",
            metavar="FIELD[:TYPE],...",
            show_default=False,
        ),
    ] = None,
    min_chars: Annotated[int | None, _option(_SELECTION, "Leave out texts of fewer characters.")] = None,
    max_chars: Annotated[int | None, _option(_SELECTION, "Leave out texts of more characters.")] = None,
    min_tokens: Annotated[
        int | None, _option(_SELECTION, "Leave out documents of fewer ids, BOS and EOS included.")
    ] = None,
    max_tokens: Annotated[
        int | None, _option(_SELECTION, "Leave out documents of more ids, BOS and EOS included.")
    ] = None,
    drop_duplicates: Annotated[
        bool, _option(_SELECTION, "Keep only the first of equal documents.", "--drop-duplicates")
    ] = False,
    map_: Annotated[
        str | None,
        _option(
            _SELECTION,
            "Function that gets each record (a dict) and returns a record, None or LeftOut.",
            "--map",
            metavar="MODULE:FUNCTION",
        ),
    ] = None,
    map_args: Annotated[str | None, _option(_SELECTION, "Its other arguments, as a JSON object.")] = None,
    workers: _Workers = 1,
    unit_bytes: _UnitBytes = None,
    ray: Annotated[str, _option(_JOB, "Run the workers on a Ray cluster: auto, local or its address.")] = "",
) -> None:
    """Read text, encode it and write a token store.

    Rerun the same command to resume after an interruption; on other machines that see OUT it helps.
    """
    import lt_data
    from lt_data import strict_json
    from lt_data.display.progress_bars import progress_bar
    from lt_data.display.terminal import echo_error
    from lt_data.store.manifest import Selection

    selection = Selection(
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
            options=_source_options(
                suffix, text_field, tokens_field, on_bad, max_document_bytes, config, split, revision, streaming
            ),
            bos=bos,
            eos=eos,
            engine=cast("EngineRequest", engine),
            special_tokens_as=cast("SpecialTokensAs", special_tokens_as),
            shard_tokens=shard_tokens,
            selection=selection,
            record_map=map_,
            map_args=None if map_args is None else strict_json.load_object(map_args, "--map-args", "give an object"),
            keep=[field for fields in keep or () for field in fields.split(",")],
            workers=workers,
            unit_bytes=unit_bytes,
            ray=ray,
            progress=report,
            notify=echo_error,
        )
    _print_summary(manifest, out)


def append(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="Folder of a token store.")],
    sources: SourcesArgument,
    engine: _Engine = "auto",
    suffix: _Suffix = None,
    text_field: _TextField = "text",
    tokens_field: _TokensField = None,
    on_bad: _OnBad = "error",
    max_document_bytes: _MaxBytes = DEFAULT_MAX_DOCUMENT_BYTES,
    config: _Config = None,
    split: _Split = None,
    revision: _Revision = None,
    streaming: _Streaming = False,
    workers: _Workers = 1,
    unit_bytes: _UnitBytes = None,
) -> None:
    """Append documents to a store as a new generation, with its tokenizer and options; older ones stay.

    Rerun the same command to resume after an interruption.
    """
    import lt_data
    from lt_data.display.progress_bars import progress_bar
    from lt_data.display.terminal import echo_error

    with progress_bar("append") as report:
        manifest = lt_data.append(
            store,
            sources,
            engine=cast("EngineRequest", engine),
            options=_source_options(
                suffix, text_field, tokens_field, on_bad, max_document_bytes, config, split, revision, streaming
            ),
            workers=workers,
            unit_bytes=unit_bytes,
            progress=report,
            notify=echo_error,
        )
    _print_summary(manifest, store)


def join(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the joined store; may contain the stores.")],
    stores: Annotated[list[Path], typer.Argument(metavar="STORE...", help="Token stores of one tokenizer, in order.")],
) -> None:
    """Put stores together without copying: OUT gets a manifest that names them."""
    import lt_data

    _print_summary(lt_data.join(out, stores), out)


def _source_options(
    suffixes: list[str] | None,
    text_field: str,
    tokens_field: str | None,
    on_bad: str,
    max_document_bytes: int,
    config: str | None,
    split: str | None,
    revision: str | None,
    streaming: bool,
) -> "SourceOptions":
    from lt_data.sources.options import SUFFIXES, OnBad, SourceOptions

    return SourceOptions(
        suffixes=suffixes or SUFFIXES,
        text_field=text_field,
        tokens_field=tokens_field,
        on_bad=cast(OnBad, on_bad),
        max_document_bytes=max_document_bytes,
        config=config,
        split=split,
        revision=revision,
        streaming=streaming,
    )


def _print_summary(manifest: "StoreManifest", folder: Path) -> None:
    from lt_data.display.terminal import echo, escape_controls

    lines = [f"{manifest.documents} documents, {manifest.tokens} tokens of {manifest.text_bytes} bytes in {folder}"]
    for reason, amount in manifest.left_out.items():
        tokens = f", {amount.tokens} tokens" if amount.tokens else ""
        lines.append(f"{amount.documents} documents left out: {reason} ({amount.text_bytes} bytes{tokens})")
    lines += [f"{count} skipped: {reason}" for reason, count in manifest.skipped.items()]
    encoding = "as text" if manifest.special_tokens_as == "text" else "as its special id"
    for string, count in manifest.special_strings.items():
        lines.append(f"special string {string} occurs {count} times in the text, encoded {encoding}")
    for line in lines:
        echo(escape_controls(line, keep=""))
