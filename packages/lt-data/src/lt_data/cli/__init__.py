"""The commands of `lt data`: thin wrappers of the library. Heavy modules are imported inside the functions."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from lt_data.cli import exports, look, prepare, remote
from lt_data.showing.terminal import say as _say

if TYPE_CHECKING:
    from lt_data.sources.options import OnBad

app = typer.Typer(
    name="data",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Text to token stores, packs and a deterministic stream of training rows.",
)

_Sources = Annotated[list[str], typer.Argument(metavar="SOURCE...", help="Files, folders, fsspec URLs or datasets.")]
_Store = Annotated[Path, typer.Argument(metavar="STORE", help="Folder of a token store.")]
_Suffixes = Annotated[
    list[str] | None,
    typer.Option("--suffix", help="Which files of a folder are read; may be given again.", show_default=False),
]
_TextField = Annotated[str, typer.Option(help="Field or column that holds the text.")]


@app.command("train-tokenizer")
def train_tokenizer(
    sources: _Sources,
    vocab_size: Annotated[int, typer.Option(help="Ids, special tokens and the 256 bytes included.")],
    out: Annotated[Path, typer.Option(help="Folder to write the tokenizer to.")],
    suffix: _Suffixes = None,
    text_field: _TextField = "text",
    on_bad: Annotated[str, typer.Option(help="What cannot be used: error, or skip (left out and counted).")] = "error",
    config: Annotated[str | None, typer.Option(help="Configuration of a dataset of the hub.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of a dataset, such as train[:10%].")] = None,
    revision: Annotated[str | None, typer.Option(help="Commit, branch or tag of a dataset of the hub.")] = None,
    streaming: Annotated[
        bool, typer.Option("--streaming", help="Read a dataset of the hub without keeping it on the disk.")
    ] = False,
) -> None:
    """Train a byte-level BPE tokenizer."""
    from lt_data.showing.bars import progress_bar
    from lt_data.sources.reader import DocumentReader
    from lt_data.tokenizing.tokenizer import check_new_folder, train_bpe

    check_new_folder(out)
    reader = DocumentReader(
        sources,
        suffixes=suffix,
        text_field=text_field,
        on_bad=cast("OnBad", on_bad),
        config=config,
        split=split,
        revision=revision,
        streaming=streaming,
    )
    with progress_bar("read") as report:
        texts = (document.as_text() for document in reader)
        tokenizer = train_bpe(
            texts,
            vocab_size=vocab_size,
            progress=lambda _done, _total, _unit: report(reader.read_bytes, reader.total_bytes, "bytes"),
        )
    tokenizer.save(out)
    fewer = (
        f" ({vocab_size} were asked for: the text has no more to merge)" if tokenizer.vocab_size < vocab_size else ""
    )
    _say(f"tokenizer of {tokenizer.vocab_size} ids in {out}{fewer}")
    for reason, count in sorted(reader.skipped.items()):
        _say(f"left out: {count} of {reason!r}, first {reader.examples[reason]}")


@app.command()
def pack(
    store: _Store,
    seq_len: Annotated[int, typer.Option(help="Tokens in a training row; with buckets, in the longest.")],
    mode: Annotated[str, typer.Option(help="bfd (best-fit decreasing), concat or buckets.")] = "bfd",
    shortest: Annotated[
        int | None, typer.Option(help="Tokens in the shortest rows of buckets.", show_default="256")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the pack.", show_default="MODE-SEQ_LEN")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Make it again.")] = False,
) -> None:
    """Decide which documents stand in which training row; tokens are not copied."""
    import lt_data
    from lt_data.packing.packs import Mode

    opened = lt_data.TokenStore.open(store)
    index = lt_data.pack(
        opened, seq_len=seq_len, mode=cast(Mode, mode), shortest=shortest, name=name, overwrite=overwrite
    )
    fill = int(index.length.sum(dtype="int64")) / index.positions
    if index.buckets is None:
        _say(f"{index.n_rows} rows of {seq_len} tokens ({index.mode}), {fill:.4%} filled")
    else:
        rows = ", ".join(f"{rows} of {length}" for length, rows in index.buckets)
        _say(f"{index.n_rows} rows (buckets: {rows} tokens), {fill:.4%} filled")


app.command()(look.stats)
app.command("steps-per-epoch")(look.steps_per_epoch)
app.command()(look.inspect)
app.command()(look.verify)
app.command()(look.report)
app.command()(exports.export)
app.command("import")(exports.import_)
app.command()(prepare.prepare)
app.command()(prepare.merge)
app.command()(remote.upload)
app.command()(remote.download)
