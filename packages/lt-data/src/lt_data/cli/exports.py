"""Commands `export` and `import`."""

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from lt_data.cli.command_app import StoreArgument, path_text


def export(
    store: StoreArgument,
    to: Annotated[str, typer.Option(metavar="FORMAT", help="hf, megatron, smp or litespark.")],
    out: Annotated[Path, typer.Option(help="New folder.")],
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens in a row; without it whole documents, if the format allows.")
    ] = None,
    packing: Annotated[str, typer.Option(help="Packing mode of rows: concat or bfd.")] = "concat",
    last_row: Annotated[str, typer.Option(help="An incomplete last row: pad or drop.")] = "pad",
    pad_id: Annotated[
        int | None, typer.Option(help="Id of padding.", show_default="the tokenizer's PAD, else its EOS")
    ] = None,
    labels: Annotated[str, typer.Option(help="hf: masked (-100 without a label) or copy.")] = "masked",
    gz: Annotated[bool, typer.Option("--gz/--no-gz", help="smp: .json.gz or .json.")] = True,
    split: Annotated[str, typer.Option(help="hf, litespark: train, validation or test.")] = "train",
    file_bytes: Annotated[
        int | None, typer.Option(help="Target size of a file.", show_default="that of the format's own tools")
    ] = None,
) -> None:
    """Export a store in the format of another program, atomically.

    hf: for datasets.load_from_disk. megatron: one .bin and .idx. smp: JSON lines of SageMaker model parallel.
    litespark: .ds and metadata.json.
    """
    from lt_data.display.progress_bars import progress_bar
    from lt_data.display.terminal import echo
    from lt_data.exports.export import export as write
    from lt_data.exports.options import ExportOptions

    options = ExportOptions(
        to=cast(Any, to),
        seq_len=seq_len,
        packing=cast(Any, packing),
        last_row=cast(Any, last_row),
        pad_id=pad_id,
        labels=cast(Any, labels),
        gz=gz,
        split=cast(Any, split),
        file_bytes=file_bytes,
    )
    with progress_bar("export") as report:
        done = write(store, out=out, options=options, progress=report)
    samples = "documents" if seq_len is None else f"rows of {options.row_tokens} tokens"
    echo(f"{done.samples} {samples}, {done.tokens} tokens, {done.padding} of padding in {out} ({done.bytes} bytes)")
    if done.dropped_tokens:
        echo(f"{done.dropped_tokens} tokens dropped with the last row")
    if done.dropped_labels:
        echo(f"{done.dropped_labels} labels dropped: readers of hf shift the labels within a row")


def import_(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Folder or file that another program prepared.")],
    format: Annotated[str, typer.Option("--from", metavar="FORMAT", help="litespark or megatron.")],
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="TOKENIZER",
            help="Tokenizer that made the ids: folder, model of the hub, or URL.",
            parser=path_text,
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the new store.")],
    boundaries: Annotated[
        str | None,
        typer.Option(help="litespark: a document begins at each bos, after each eos, at each of rows or files."),
    ] = None,
    seq_len: Annotated[int | None, typer.Option(help="With --boundaries rows: their length minus one.")] = None,
    token_bytes: Annotated[
        int | None, typer.Option(help="litespark: bytes of a token.", show_default="from metadata.json")
    ] = None,
    pad_id: Annotated[
        int | None, typer.Option(help="litespark: a run of this id at the end of a file is padding.")
    ] = None,
    bos: Annotated[
        bool | None, typer.Option("--bos/--no-bos", help="Begin each document with BOS.", show_default=False)
    ] = None,
    eos: Annotated[
        bool | None, typer.Option("--eos/--no-eos", help="End each document with EOS.", show_default=False)
    ] = None,
    shard_tokens: Annotated[int, typer.Option(help="Target number of ids of a shard.")] = 2**27,
) -> None:
    """Import ids of Litespark or Megatron as a token store; hf and smp are sources of `prepare` (--tokens-field)."""
    from lt_data.display.progress_bars import progress_bar
    from lt_data.display.terminal import echo
    from lt_data.exports.import_tokens import import_tokens
    from lt_data.exports.options import ImportOptions

    options = ImportOptions(
        format=cast(Any, format),
        boundaries=cast(Any, boundaries),
        seq_len=seq_len,
        token_bytes=token_bytes,
        pad_id=pad_id,
        bos=bos,
        eos=eos,
    )
    with progress_bar("import") as report:
        done = import_tokens(
            path,
            options=options,
            tokenizer=tokenizer,
            out=out,
            shard_tokens=shard_tokens,
            progress=report,
        )
    echo(f"{done.manifest.documents} documents, {done.manifest.tokens} tokens in {out}")
    if done.padding:
        echo(f"{done.padding} padding positions left out")
    if done.manifest.empty_documents:
        echo(f"{done.manifest.empty_documents} empty documents left out")
