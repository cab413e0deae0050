"""Commands of `lt data`: thin wrappers of the library, with heavy imports inside the functions."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from lt_data.cli import analysis, exports, prepare, remote, split
from lt_data.display.terminal import echo, echo_error

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
    typer.Option("--suffix", help="Suffix of the files to read in a folder; repeatable.", show_default=False),
]
_TextField = Annotated[str, typer.Option(help="Field or column of the text.")]


@app.command("train-tokenizer")
def train_tokenizer(
    sources: _Sources,
    vocab_size: Annotated[int, typer.Option(help="Number of ids, with special tokens and 256 bytes.")],
    out: Annotated[Path, typer.Option(help="Folder of the new tokenizer.")],
    suffix: _Suffixes = None,
    text_field: _TextField = "text",
    on_bad: Annotated[str, typer.Option(help="Bad input: error, or skip (left out and counted).")] = "error",
    config: Annotated[str | None, typer.Option(help="Configuration of a hub dataset.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of a dataset, such as train[:10%].")] = None,
    revision: Annotated[str | None, typer.Option(help="Commit, branch or tag of a hub dataset.")] = None,
    streaming: Annotated[
        bool, typer.Option("--streaming", help="Read a hub dataset without storing it on disk.")
    ] = False,
) -> None:
    """Train a byte-level BPE tokenizer."""
    from lt_data.display.progress_bars import progress_bar
    from lt_data.sources.options import SUFFIXES, SourceOptions
    from lt_data.sources.reader import DocumentReader
    from lt_data.tokenizing.tokenizer import Tokenizer, check_empty_folder

    check_empty_folder(out)
    reader = DocumentReader(
        sources,
        SourceOptions(
            suffixes=suffix or SUFFIXES,
            text_field=text_field,
            on_bad=cast("OnBad", on_bad),
            config=config,
            split=split,
            revision=revision,
            streaming=streaming,
        ),
    )
    with progress_bar("read") as report:
        texts = (document.as_text() for document in reader)
        tokenizer = Tokenizer.train(
            texts,
            vocab_size=vocab_size,
            progress=lambda _done, _total, _unit: report(reader.read_bytes, reader.total_bytes, "bytes"),
        )
    tokenizer.save(out)
    note = f" ({vocab_size} requested; the text has no more merges)" if tokenizer.vocab_size < vocab_size else ""
    echo(f"tokenizer of {tokenizer.vocab_size} ids in {out}{note}")
    for reason, count in sorted(reader.skipped.items()):
        echo(f"{count} skipped: {reason}")
    for notice in reader.notices():
        echo_error(notice)


@app.command()
def pack(
    store: _Store,
    seq_len: Annotated[int, typer.Option(help="Tokens in a training row; with buckets, in the longest.")],
    mode: Annotated[str, typer.Option(help="bfd (best-fit decreasing), concat or buckets.")] = "bfd",
    min_seq_len: Annotated[
        int | None, typer.Option(help="Tokens in the shortest rows of buckets.", show_default="256")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the pack.", show_default="MODE-SEQ_LEN")] = None,
    packs: analysis.Packs = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Make it again if it exists.")] = False,
    workers: Annotated[
        int, typer.Option(help="Worker processes, for stores of more than 16.8 million documents; 1.2 GB each.")
    ] = 1,
) -> None:
    """Pack documents into training rows, as an index; tokens are not copied."""
    import lt_data
    from lt_data.packing.groups import PackMode

    opened = lt_data.TokenStore(store, packs=packs)
    index = lt_data.pack(
        opened,
        seq_len=seq_len,
        mode=cast(PackMode, mode),
        min_seq_len=min_seq_len,
        name=name,
        overwrite=overwrite,
        workers=workers,
    )
    fill = int(index.length.sum(dtype="int64")) / index.n_positions
    if index.buckets is None:
        echo(f"{index.n_rows} rows of {seq_len} tokens ({index.mode}), {fill:.4%} filled")
    else:
        rows = ", ".join(f"{rows} of {length}" for length, rows in index.buckets)
        echo(f"{index.n_rows} rows (buckets: {rows} tokens), {fill:.4%} filled")


app.command()(analysis.stats)
app.command("steps-per-epoch")(analysis.steps_per_epoch)
app.command()(analysis.inspect)
app.command()(analysis.verify)
app.command()(analysis.report)
app.command()(exports.export)
app.command("import")(exports.import_)
app.command()(prepare.prepare)
app.command()(prepare.join)
app.command()(prepare.append)
app.command()(split.split)
app.command()(remote.upload)
app.command()(remote.download)
