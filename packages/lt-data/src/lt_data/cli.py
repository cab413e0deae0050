"""The commands of `lt data`: thin wrappers of the library. Heavy modules are imported inside the functions."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from lt_data import cli_exports, cli_prepare, cli_remote
from lt_data.terminal import say as _say

if TYPE_CHECKING:
    from lt_data.summary import Stats

app = typer.Typer(
    name="data",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Text to token stores, packs and a deterministic stream of training rows.",
)

_Sources = Annotated[list[str], typer.Argument(metavar="SOURCE...", help="Files, folders or fsspec URLs.")]
_Store = Annotated[Path, typer.Argument(metavar="STORE", help="Folder of a token store.")]
_Suffixes = Annotated[
    list[str] | None,
    typer.Option("--suffix", help="Which files of a folder are read; may be given again.", show_default=False),
]
_TextField = Annotated[str, typer.Option(help="Field of a .jsonl line that holds the text.")]


@app.command("train-tokenizer")
def train_tokenizer(
    sources: _Sources,
    vocab_size: Annotated[int, typer.Option(help="Ids, special tokens and the 256 bytes included.")],
    out: Annotated[Path, typer.Option(help="Folder to write the tokenizer to.")],
    suffix: _Suffixes = None,
    text_field: _TextField = "text",
) -> None:
    """Train a byte-level BPE tokenizer."""
    from lt_data.bars import progress_bar
    from lt_data.sources.reader import DocumentReader
    from lt_data.tokenizer import check_new_folder, train_bpe

    check_new_folder(out)
    reader = DocumentReader(sources, suffixes=suffix, text_field=text_field)
    with progress_bar("read") as report:
        texts = (document.as_text() for document in reader)
        tokenizer = train_bpe(
            texts,
            vocab_size=vocab_size,
            progress=lambda _done, _total, _unit: report(reader.read_bytes, reader.total_bytes, "bytes"),
        )
    tokenizer.save(out)
    _say(f"tokenizer of {tokenizer.vocab_size} ids in {out}")


@app.command()
def pack(
    store: _Store,
    seq_len: Annotated[int, typer.Option(help="Tokens in a training row.")],
    mode: Annotated[str, typer.Option(help="bfd (best-fit decreasing) or concat.")] = "bfd",
    name: Annotated[str | None, typer.Option(help="Name of the pack.", show_default="MODE-SEQ_LEN")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Make it again.")] = False,
) -> None:
    """Decide which documents stand in which training row; tokens are not copied."""
    import lt_data
    from lt_data.packing import Mode

    index = lt_data.pack(
        lt_data.TokenStore.open(store), seq_len=seq_len, mode=cast(Mode, mode), name=name, overwrite=overwrite
    )
    fill = int(index.length.sum(dtype="int64")) / (index.n_rows * seq_len)
    _say(f"{index.n_rows} rows of {seq_len} tokens ({index.mode}), {fill:.4%} filled")


@app.command()
def stats(
    store: _Store,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Documents, tokens, lengths, and the fill and padding of each pack."""
    import lt_data

    found = lt_data.stats(lt_data.TokenStore.open(store))
    _say(json.dumps(found.to_dict(), indent=2) if as_json else _table(found))


@app.command()
def verify(store: _Store) -> None:
    """Read everything and compare it with the hashes in the manifest."""
    import lt_data
    from lt_data.bars import progress_bar
    from lt_data.packing import verify_packs

    opened = lt_data.TokenStore.open(store)
    with progress_bar("verify") as report:
        opened.verify(progress=report)
    packs = verify_packs(opened)
    _say(f"{store}: {opened.n_documents} documents, {opened.n_tokens} tokens, {packs} packs: all as written")


@app.command()
def inspect(
    run: Annotated[Path, typer.Option(help="Run directory.")],
    step: Annotated[int, typer.Option(help="Which step, from 1.")],
    store: Annotated[
        Path | None, typer.Option(help="The run's token store, where it is not found under the name in its recipe.")
    ] = None,
    row: Annotated[int | None, typer.Option(help="Only this row of the batch, from 0.")] = None,
    rows: Annotated[str | None, typer.Option(metavar="A:B", help="Only the rows A to B - 1 of the batch.")] = None,
    text: Annotated[bool, typer.Option("--text", help="Print the whole text.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with the whole text.")] = False,
) -> None:
    """Show the documents that a step of a training run read."""
    from shutil import get_terminal_size

    from lt_data.inspection_text import parse_rows, step_lines
    from lt_data.run_files import inspect_step

    report = inspect_step(run, step, store=store, rows=parse_rows(row, rows))
    if as_json:
        _say(json.dumps(report.to_dict(), indent=2))
    else:
        _say("\n".join(step_lines(report, columns=get_terminal_size((120, 24)).columns, whole_text=text)))


app.command()(cli_exports.export)
app.command("import")(cli_exports.import_)
app.command()(cli_prepare.prepare)
app.command()(cli_prepare.merge)
app.command()(cli_remote.upload)
app.command()(cli_remote.download)


def _table(found: "Stats") -> str:
    facts: list[tuple[str, Any]] = [
        ("documents", found.documents),
        ("tokens", found.tokens),
        ("text bytes", found.text_bytes),
        ("bytes per token", f"{found.bytes_per_token:.3f}"),
        ("vocabulary", found.vocab_size),
        ("document length", f"{found.shortest} to {found.longest}, median {found.median:.0f}, mean {found.mean:.1f}"),
        ("empty documents", found.empty_documents),
        *((f"special string {string}", count) for string, count in found.special_strings.items()),
        ("fingerprint", found.fingerprint),
    ]
    lines = [f"{name:<20} {value}" for name, value in facts]
    lines += ["", f"{'length in tokens':<20} {'documents':>12} {'tokens':>16}"]
    lines += [f"{f'{bin.least} to {bin.most}':<20} {bin.documents:>12} {bin.tokens:>16}" for bin in found.lengths]
    if found.packs:
        columns = f"{'rows':>10} {'fill':>9} {'padding':>12} {'labels':>14} {'cut':>9} {'needlessly':>10}"
        lines += ["", f"{'pack':<20} {columns}"]
    for pack in found.packs:
        lines.append(
            f"{pack.name:<20} {pack.rows:>10} {pack.fill:>9.4%} {pack.padding:>12} {pack.valid_tokens:>14} "
            f"{pack.cut_documents:>9} {pack.needlessly_cut:>10}" + ("" if pack.current else "  (of another store)")
        )
    return "\n".join(lines)
