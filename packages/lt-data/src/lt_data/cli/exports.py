"""The commands `export` and `import`."""

from pathlib import Path
from typing import Annotated, Any, cast

import typer

_Format = Annotated[str, typer.Option(metavar="FORMAT", help="hf, megatron, smp, litespark, litpkds or mds.")]


def export(
    store: Annotated[str, typer.Argument(metavar="STORE", help="Folder of a token store, or s3://bucket/folder.")],
    to: _Format,
    out: Annotated[Path, typer.Option(help="Folder to make.")],
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens in a row; without it whole documents, where the format takes them.")
    ] = None,
    pack: Annotated[str, typer.Option(help="How rows are filled: concat or bfd.")] = "concat",
    last_row: Annotated[str, typer.Option(help="A last row that is not full: pad or drop.")] = "pad",
    pad_id: Annotated[
        int | None, typer.Option(help="Id of padding.", show_default="the tokenizer's PAD, else its EOS")
    ] = None,
    labels: Annotated[str, typer.Option(help="hf: masked (-100 where nothing is to predict) or copy.")] = "masked",
    gz: Annotated[bool, typer.Option("--gz/--no-gz", help="smp: .json.gz or .json.")] = True,
    split: Annotated[str, typer.Option(help="hf, litespark, litpkds: train, validation or test.")] = "train",
    file_bytes: Annotated[
        int | None, typer.Option(help="About how large a file becomes.", show_default="as the format's own tools do")
    ] = None,
) -> None:
    """Write a store in the format of another program, complete or not at all.

    hf: what datasets.load_from_disk reads. megatron: one .bin and .idx. smp: JSON lines of SageMaker model parallel.
    litespark: .ds and metadata.json. litpkds: chunks of lit-gpt and TinyLlama. mds: shards of MosaicML's streaming.
    """
    from lt_data.exports.exporting import export as write
    from lt_data.exports.options import ExportOptions
    from lt_data.showing.bars import progress_bar
    from lt_data.showing.terminal import say

    options = ExportOptions(
        to=cast(Any, to),
        seq_len=seq_len,
        pack=cast(Any, pack),
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
    say(f"{done.samples} {samples}, {done.tokens} tokens, {done.padding} of padding in {out} ({done.bytes} bytes)")
    if done.dropped_tokens:
        say(f"{done.dropped_tokens} tokens left out with the last row")
    if done.lost_labels:
        say(f"{done.lost_labels} tokens are never predicted: readers of hf shift the labels within a row")


def import_(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Folder or file that another program prepared.")],
    format: Annotated[
        str, typer.Option("--from", metavar="FORMAT", help="hf, megatron, smp, litespark, litpkds, mds.")
    ],
    tokenizer: Annotated[str, typer.Option(help="The tokenizer that made the ids: folder, model of the hub, or URL.")],
    out: Annotated[Path, typer.Option(help="Folder of the store to make.")],
    borders: Annotated[
        str | None,
        typer.Option(help="litespark, litpkds: where a document begins: at each bos, after each eos, rows or files."),
    ] = None,
    seq_len: Annotated[int | None, typer.Option(help="With --borders rows: their length less one.")] = None,
    field: Annotated[
        str | None, typer.Option(help="hf, smp, mds: column of the ids.", show_default="input_ids; mds: tokens")
    ] = None,
    token_bytes: Annotated[
        int | None, typer.Option(help="litespark: bytes of a token.", show_default="as metadata.json says")
    ] = None,
    pad_id: Annotated[
        int | None, typer.Option(help="litespark, litpkds: a run of this id at the end of a file is padding.")
    ] = None,
    bos: Annotated[
        bool | None, typer.Option("--bos/--no-bos", help="Let each document begin with BOS.", show_default=False)
    ] = None,
    eos: Annotated[
        bool | None, typer.Option("--eos/--no-eos", help="Let each document end with EOS.", show_default=False)
    ] = None,
    shard_tokens: Annotated[int, typer.Option(help="About how many ids go into one shard.")] = 2**27,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a token store at OUT.")] = False,
) -> None:
    """Make a token store of ids that another program prepared; the formats are those of `export`."""
    from lt_data.exports.importing import ImportOptions, import_tokens
    from lt_data.showing.bars import progress_bar
    from lt_data.showing.terminal import say

    options = ImportOptions(
        format=cast(Any, format),
        borders=cast(Any, borders),
        seq_len=seq_len,
        field=field,
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
            overwrite=overwrite,
            progress=report,
        )
    say(f"{done.manifest.documents} documents, {done.manifest.tokens} tokens in {out}")
    if done.padding:
        say(f"{done.padding} positions were padding and are left out")
    if done.manifest.empty_documents:
        say(f"{done.manifest.empty_documents} empty documents left out")
