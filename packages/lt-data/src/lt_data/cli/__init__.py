"""Commands of `lt data`: thin wrappers of the library, with heavy imports inside the functions."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from lt_data.cli import analysis, exports, prepare, remote, split
from lt_data.cli.command_app import CommandApp, SourcesArgument
from lt_data.display.terminal import echo, echo_error

if TYPE_CHECKING:
    from lt_data.sources.options import OnBad
    from lt_data.tokenizing.tokenizer import SplitRule

app = CommandApp(name="data", help="Text to token stores, packs and a deterministic stream of training rows.")

_Suffixes = Annotated[
    list[str] | None,
    typer.Option("--suffix", help="Suffix of the files to read in a folder; repeatable.", show_default=False),
]
_TextField = Annotated[str, typer.Option(help="Field or column of the text.")]


@app.command("train-tokenizer")
def train_tokenizer(
    sources: SourcesArgument,
    vocab_size: Annotated[int, typer.Option(help="Number of ids, with special tokens and 256 bytes.")],
    out: Annotated[Path, typer.Option(help="Folder of the new tokenizer.")],
    split_rule: Annotated[
        str, typer.Option("--split-rule", help="How text is divided into words: llama3, or qwen2 for such models.")
    ] = "llama3",
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
            split=cast("SplitRule", split_rule),
            progress=lambda _done, _total, _unit: report(reader.read_bytes, reader.total_bytes, "bytes"),
        )
    tokenizer.save(out)
    note = f" ({vocab_size} requested; the text has no more merges)" if tokenizer.vocab_size < vocab_size else ""
    echo(f"tokenizer of {tokenizer.vocab_size} ids in {out}{note}")
    for reason, count in sorted(reader.skipped.items()):
        echo(f"{count} skipped: {reason}")
    for notice in reader.notices():
        echo_error(notice)


app.command()(analysis.pack)
app.command()(analysis.stats)
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
